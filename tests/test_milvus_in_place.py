"""Milvus collections migrated in place: names, kills at every request, services that write meanwhile, and what is refused."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import refuses
from schedule import mostly_nightly
from store_places import OLD, MilvusFieldsPlace, map_of_galleries, milvus_server_place, short_sleep
from test_stores import kill_when_empty, run_verb, said

import xcompat.stores
from xcompat.methods import RidgeModel
from xcompat.stores import Store, migration
from xcompat.stores.mapping import Mapping

pymilvus = pytest.importorskip("pymilvus")
from milvus_server import Server  # noqa: E402

pytestmark = pytest.mark.usefixtures("few_searches")
N, OLD_DIM, NEW_DIM = 60, 8, 12
KIND = pymilvus.DataType
SCHEMA = ("add_collection_field", "create_index", "release_collection", "load_collection", "drop_collection_field")
WRITES = (*SCHEMA, "insert", "upsert", "delete", "create_collection")
"""Requests that change something, and those that change more than rows."""
LOAD = {"replica_number": 3, "resource_groups": ["fast", "fast", "slow"]}
"""How the stand-in loads collections."""


@pytest.fixture(scope="module")
def mapping(model: RidgeModel) -> Mapping:
    return Mapping(model)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    server = Server(tmp_path / "milvus.db")
    monkeypatch.setattr("xcompat.stores.milvus.connect", server.connect)
    monkeypatch.setattr("time.sleep", short_sleep)
    return server


@pytest.fixture
def shop(server: Server, vectors: np.ndarray) -> Iterator[Any]:
    """A client of a server with two vector fields and a partition key in ``items_v1``, and its alias ``items``."""
    client = server.connect()
    made(client)
    client.insert("items_v1", [row_of(number, vector) for number, vector in enumerate(vectors)])
    client.create_alias("items_v1", "items")
    yield client
    client.close()


def made(client: Any, *more: str) -> None:
    """Make a collection, with more texts that every row needs."""
    schema, index = client.create_schema(), client.prepare_index_params()
    schema.add_field("sku", KIND.VARCHAR, max_length=20, is_primary=True)
    schema.add_field("image", KIND.FLOAT_VECTOR, dim=OLD_DIM)
    schema.add_field("title", KIND.FLOAT_VECTOR, dim=3)
    schema.add_field("price", KIND.INT64, nullable=True)
    schema.add_field("shop", KIND.VARCHAR, max_length=20, is_partition_key=True)
    for name in more:
        schema.add_field(name, KIND.VARCHAR, max_length=20)
    index.add_index("image", "HNSW", metric_type="IP", params={"M": 8, "efConstruction": 64})
    index.add_index("title", "FLAT", metric_type="L2")
    client.create_collection("items_v1", schema=schema, index_params=index, consistency_level="Strong")


def row_of(number: int, vector: np.ndarray, **more: Any) -> dict[str, Any]:
    rest = {"title": [number, 0.5, -1.0], "price": number % 10, "shop": f"shop {number % 3}"}
    return {"sku": f"é{number}", "image": vector, **rest, **more}


def address(**options: str) -> str:
    given = {"collection": "items", "field": "image", "in_place": "true", **options}
    return "milvus://stand-in:19530?" + "&".join(f"{key}={value}" for key, value in given.items() if value)


def opened(**options: str) -> Store:
    store = xcompat.stores.open(address(**options))
    store.name_model(store.space, OLD)
    return store


def held(client: Any, *without: str) -> dict[str, Any]:
    """Return what services put there, but for some fields."""
    rows = client.query("items_v1", "", ["*"], limit=1000)
    return {row["sku"]: {key: value for key, value in row.items() if key not in without} for row in rows}


def field(client: Any, name: str) -> dict[str, np.ndarray]:
    rows = client.query("items_v1", "", ["sku", name], limit=1000)
    return {row["sku"]: np.array(row[name], np.float32) for row in rows if row[name] is not None}


def names(client: Any) -> list[str]:
    return [one["name"] for one in client.describe_collection("items_v1")["fields"]]


def test_the_commands_migrate_a_field_beside_the_old_one(
    server: Server, shop: Any, vectors: np.ndarray, model: RidgeModel, tmp_path: Path
) -> None:
    """Both are searched by their names until finish; after start, the address need not say that it is in place."""
    model.save_pretrained(tmp_path / "map")
    before, first, mapping, plain = held(shop), names(shop), Mapping(model), address(in_place="")
    opened()
    using = ["--model", str(tmp_path / "map")]
    planned = said("migrate", "plan", address(), *using)
    assert "your services must change image to the new name (anns_field=)" in planned and "after start" not in planned
    assert "start first reloads items: until Milvus has loaded it again, searches fail" in planned
    assert "until finish, services must also write image, which is required" in planned
    assert names(shop) == first and "time to live" not in planned
    assert f"{N} rows written" in said("migrate", "start", address(), *using, "--into", "image_l14")
    assert server.reloads == [LOAD]
    assert names(shop) == [*first, "xcompat_state", "image_l14"]
    new = shop.describe_index("items_v1", "image_l14")
    assert (new["index_type"], new["metric_type"], new["field_name"]) == ("HNSW", "IP", "image_l14")
    assert held(shop, "image_l14", "xcompat_state") == before
    found = json.loads(said("migrate", "status", address(in_place="", field=""), "--json"))
    assert (found["space"], found["into"], found["state"], found["missing"]) == ("image", "image_l14", "filling", 0)
    found = json.loads(said("migrate", "verify", plain, *using, "--json"))
    assert found["passed"] and found["overlap"] is not None
    for is_last in (False, True):
        line = said("migrate", "switch", plain, *using)
        assert "image_l14 in" in line and "has the new vectors, image the old ones" in line
        assert "your services must use the name image_l14 now: image is not renamed" in line
        store = xcompat.stores.open(address(field="image_l14"))
        assert store.describe()["spaces"] == {"image": NEW_DIM, "image_before": OLD_DIM}
        assert store.find(mapping(vectors[7:8]), model, 1, filter="price == 7")[0][0].id == "é7"
        if not is_last:
            assert "image has the old vectors again" in said("migrate", "rollback", plain)
            assert xcompat.stores.open(plain).find(vectors[7:8], OLD, 1)[0][0].id == "é7"
    assert "confirm with --yes" in said("migrate", "finish", plain, code=1) and "image" in names(shop)
    line = said("migrate", "finish", plain, "--yes")
    assert "deleted image from milvus://" in line and line.endswith("name image_l14 in its address from now on")
    assert set(names(shop)) == {*first, "image_l14"} - {"image"}
    assert held(shop, "image_l14") == {item: {k: v for k, v in row.items() if k != "image"} for item, row in before.items()}
    assert store.find(mapping(vectors[7:8]), model, 1)[0][0].id == "é7", "a store that was open before finish"
    for options in ({"in_place": ""}, {}):
        assert xcompat.stores.open(address(field="image_l14", **options)).describe()["fingerprint"] == mapping.target[0].digest
    refuses("'image' is not a float vector field; did you mean 'image_l14'", xcompat.stores.open, plain)


@pytest.mark.parametrize("requests", mostly_nightly([SCHEMA, WRITES], SCHEMA.__eq__), ids=["schema", "all"])
def test_every_request_can_be_the_last_before_a_kill(
    vectors: np.ndarray, mapping: Mapping, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, requests: tuple[str, ...]
) -> None:
    """The same command is run again, and nothing of ours is left in the end; those after it are killed at their first request."""
    verbs = ("start", "verify", "switch", "rollback", "switch", "finish") if requests == WRITES else ("start", "switch", "finish")
    with milvus_server_place(tmp_path) as place:
        assert isinstance(place, MilvusFieldsPlace)
        for at in itertools.count():
            left = iter(range(at))
            place.clear()
            place.fill(vectors[:5])
            place.open().name_model("vector", OLD)
            for verb in verbs:
                try:
                    with monkeypatch.context() as patched:
                        store: Any = place.open()
                        for name in requests:
                            patched.setattr(store.client, name, kill_when_empty(getattr(store.client, name), left))
                        run_verb(verb, store, mapping)
                except KeyboardInterrupt:
                    run_verb(verb, place.open(), mapping)
            assert place.open().describe()["spaces"] == {"vector_new": NEW_DIM}
            np.testing.assert_allclose(list(place.vectors("vector_new").values()), mapping(vectors[:5]), atol=1e-5)
            assert place.names() == ["items", "xcompat_records", "vector_new"]
            records = place.client.query("xcompat_records", "key != ''", ["key"])
            assert [row["key"] for row in records] == ["items/model/items/vector_new"]
            if next(left, None) is not None:  # it was not killed
                break
        assert at >= (30 if requests == WRITES else 7)


def test_what_services_write_meanwhile_is_missing_and_then_filled(shop: Any, vectors: np.ndarray, mapping: Mapping) -> None:
    store = opened()
    migration.start(store, mapping)
    changed = {100: vectors[1], 3: vectors[2], 4: vectors[3]}
    shop.upsert("items_v1", [row_of(number, vector) for number, vector in changed.items() if number != 4])
    shop.upsert("items_v1", [{"sku": "é4", "image": changed[4]}], partial_update=True)
    shop.upsert("items_v1", [row_of(6, vectors[6])])  # unchanged, but without the new vector
    shop.upsert("items_v1", [{"sku": "é7", "price": 99}], partial_update=True)
    shop.delete("items_v1", ids=["é8"])
    checked = migration.verify(store, mapping, queries=N)
    assert checked.passed and (checked.rows, checked.missing, checked.wrong) == (N, 4, 0) and checked.compared == N - 4
    assert migration.status(store)[1] == 4
    migration.switch(store, mapping)
    expected = {**dict(enumerate(vectors[:N])), **changed}
    del expected[8]
    found = field(shop, "image_new")
    assert found.keys() == {f"é{number}" for number in expected}
    wanted = mapping(np.stack([*expected.values()]))
    np.testing.assert_allclose(np.stack([found[f"é{number}"] for number in expected]), wanted, atol=1e-5)
    assert held(shop)["é7"]["price"] == 99
    new = mapping(vectors[50:53])
    shop.upsert("items_v1", [row_of(3, vectors[2], image_new=new[0])])
    shop.upsert("items_v1", [{"sku": "é4", "image_new": new[1]}], partial_update=True)
    shop.upsert("items_v1", [{"sku": "é5", "image": vectors[55], "image_new": new[2]}], partial_update=True)
    assert migration.status(store)[1] == 0, "services' new vectors are newer than mapped ones"
    shop.upsert("items_v1", [row_of(9, vectors[52])])  # by a service that has still the old name
    assert migration.status(store)[1] == 1
    found = field(shop, "image_new")
    np.testing.assert_allclose([found["é3"], found["é4"], found["é5"]], new, atol=1e-6)
    assert migration.rollback(store)[1] == 3, "nobody knows whether the old vectors of 3, 4 and 5 are of the same inputs"
    assert migration.status(store)[1] == 4
    migration.switch(store, mapping)
    found = field(shop, "image_new")
    olds = np.stack([vectors[2], changed[4], vectors[55], vectors[52]])
    np.testing.assert_allclose([found[item] for item in ("é3", "é4", "é5", "é9")], mapping(olds), atol=1e-5)
    shop.upsert("items_v1", [{"sku": "é6", "image_new": None}], partial_update=True)
    assert migration.status(store)[1] == 1, "a removed vector is missing"


def test_a_partial_update_sends_the_key_and_the_new_fields_alone(
    shop: Any, vectors: np.ndarray, mapping: Mapping, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So services' changes between the reading and the writing of a row are kept, also that they delete it."""
    store: Any = opened()
    write, sent = store.client.upsert, []

    def disturbed(name: str, data: Any, **options: Any) -> Any:
        if options.get("partial_update") and not sent:
            sent.append({key for row in data for key in row})
            shop.delete("items_v1", ids=["é2", "é40"])
            shop.upsert("items_v1", [{"sku": "é5", "price": 77, "shop": "moved"}], partial_update=True)
        return write(name, data, **options)

    monkeypatch.setattr(store.client, "upsert", disturbed)
    assert migration.start(store, mapping).written == N - 2
    assert sent == [{"sku", "image_new", "xcompat_state"}]
    assert (held(shop)["é5"]["price"], held(shop)["é5"]["shop"]) == (77, "moved") and not {"é2", "é40"} & held(shop).keys()
    assert migration.verify(store, mapping).passed and store.count("image_new") == N - 2 == store.count("image")


def test_another_field_is_searched_meanwhile_but_not_migrated(shop: Any, mapping: Mapping) -> None:
    store = opened()
    migration.start(store, mapping)
    other = xcompat.stores.open(address(field="title", in_place=""))
    assert other.describe()["spaces"] == {"title": 3} and other.search(np.eye(3)[:1], 1)[0][0].id == "é1"
    assert other.describe()["fingerprint"] is None, "the recorded model is that of the other field"
    begun = store.record(migration.RECORD)
    assert begun is not None and other.record(migration.RECORD) is None
    refuses("has no migration", migration.rollback, other)
    said = "the field image of .* is already being migrated in place; run .* with field=image"
    refuses(said, other.set_record, migration.RECORD, {**begun, "space": "title"})
    assert store.record(migration.RECORD) == begun


def test_rows_without_a_vector_stay_without_one(server: Server, vectors: np.ndarray) -> None:
    """After a migration in place, the field is optional. A copy would lose such rows."""
    client, mapping = server.connect(), Mapping(map_of_galleries(vectors, OLD_DIM))
    made(client, "about")
    client.insert("items_v1", [row_of(number, vector, about="a shoe") for number, vector in enumerate(vectors)])
    for old, new in (("image", "image_b"), ("image_b", "image_c")):
        store = opened(collection="items_v1", field=old)
        migration.start(store, mapping, new)
        assert migration.verify(store, mapping).passed
        migration.switch(store, mapping)
        migration.finish(store)
        client.upsert("items_v1", [{**row_of(50, vectors[0], about="new"), new: None}])
        store = opened(collection="items_v1", field=new)
        assert (store.count(), store.count(store.space), store.ids_without_vector(3)) == (N, N - 1, ["é50"])
        assert len(field(client, new)) == N - 1
    plain = opened(collection="items_v1", field="image_c", in_place="")
    assert (plain.count(), plain.count(plain.space), plain.ids_without_vector(3)) == (N, N - 1, ["é50"])
    refuses("a copy would lose 1 rows without a vector; delete them, or use in_place=true", migration.start, plain, mapping)
    client.close()


def test_what_cannot_be_migrated_in_place_is_refused_in_one_line(
    server: Server, shop: Any, mapping: Mapping, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = held(shop), names(shop)

    def refused(match: str, into: str | None = None, dtype: str = "float32", **options: str) -> None:
        refuses(match, lambda: migration.start(opened(**options), mapping, into, dtype=dtype))
        assert (held(shop), names(shop)) == before and opened(in_place="").record(migration.RECORD) is None

    refused("in_place=yes is unknown; use in_place=true, or remove it", in_place="yes")
    refused("already has a field 'title'; choose another name or delete it", into="title")
    refused("only writes float32 vectors into Milvus; remove --dtype", dtype="float16")
    server.version = "v3.0.0"
    refused("is Milvus v3.0.0, but in_place= needs 3.0.1 or later; update Milvus, or remove in_place= to migrate into a second")
    server.version = "v3.1.0-dev"
    described = shop.describe_collection("items_v1")
    optional = [{**one, "nullable": not one.get("is_primary")} for one in described["fields"]]
    for change, match in [
        ({"auto_id": True}, r"cannot be migrated in place: an update could change its ids \(auto_id\); remove in_place="),
        ({"functions": ["bm25"]}, "xcompat does not update rows with functions or structs"),
        ({"fields": optional}, "all its fields are optional, so an update could recreate a deleted row"),
    ]:
        with monkeypatch.context() as patched:
            patched.setattr(type(shop), "describe_collection", lambda *_, change=change: {**described, **change})
            refuses(match, lambda: migration.start(opened(), mapping))
    with monkeypatch.context() as patched:
        patched.setattr(type(shop), "list_partitions", lambda *_: ["_default", "second"])
        patched.setattr(
            type(shop),
            "describe_collection",
            lambda *_: {**described, "fields": [{**one, "is_partition_key": False} for one in described["fields"]]},
        )
        refuses("would move rows between the partitions _default, second", lambda: migration.start(opened(), mapping))
    migration.start(opened(in_place=""), mapping, "items_copy")
    refuses("is already being migrated into a second collection; remove in_place=", opened)


def test_a_killed_reload_is_ended_with_the_same_replicas(
    server: Server, shop: Any, mapping: Mapping, monkeypatch: pytest.MonkeyPatch
) -> None:
    for verb in ("start", "rollback"):
        store: Any = opened()
        monkeypatch.setattr(store.client, "release_collection", kill_when_empty(store.client.release_collection, iter(())))
        with pytest.raises(KeyboardInterrupt):
            migration.start(store, mapping)
        assert not server.reloads
        if verb == "start":
            migration.start(opened(), mapping)
            assert migration.verify(opened(), mapping).passed
        migration.rollback(opened())
        assert server.reloads == [LOAD] and opened().record(migration.RECORD) is None
        shop.search("items_v1", [[1.0] * OLD_DIM], anns_field="image")
        server.reloads.clear()


@pytest.mark.parametrize("verb", [migration.start, migration.rollback])
def test_a_collection_released_while_its_new_field_has_no_index_is_loaded_again(
    shop: Any, mapping: Mapping, monkeypatch: pytest.MonkeyPatch, verb: Any
) -> None:
    store: Any = opened()
    add_field = store.client.add_collection_field
    monkeypatch.setattr(store.client, "add_collection_field", kill_when_empty(add_field, iter(range(1))))
    with pytest.raises(KeyboardInterrupt):
        migration.start(store, mapping)
    shop.release_collection("items_v1")
    verb(opened(), *([mapping] if verb is migration.start else []))
    shop.search("items_v1", [[1.0] * OLD_DIM], anns_field="image")


def test_a_collection_that_cannot_be_loaded_again_is_named_until_it_can(server: Server, shop: Any, mapping: Mapping) -> None:
    before, server.fails_to_load = names(shop), True
    said = "insufficient memory; searches fail until it is loaded: run `xcompat migrate rollback`"
    refuses(said, migration.start, opened(), mapping)
    assert names(shop) == before
    server.fails_to_load = False
    migration.rollback(opened())
    assert server.reloads[-1] == LOAD and opened().record(migration.RECORD) is None
    shop.search("items_v1", [[1.0] * OLD_DIM], anns_field="image")


@pytest.mark.parametrize("requests", mostly_nightly([SCHEMA, WRITES], SCHEMA.__eq__), ids=["schema", "all"])
def test_a_killed_rollback_can_be_followed_by_start(
    server: Server, shop: Any, vectors: np.ndarray, mapping: Mapping, monkeypatch: pytest.MonkeyPatch, requests: tuple[str, ...]
) -> None:
    """No row keeps the state of a vector that was dropped with its field."""
    for at in itertools.count():
        store, left = opened(), iter(range(at))
        migration.start(store, mapping)
        assert migration.verify(store, mapping).passed
        killed = False
        with monkeypatch.context() as patched:
            for name in requests:
                patched.setattr(store.client, name, kill_when_empty(getattr(store.client, name), left))
            try:
                migration.rollback(store)
            except KeyboardInterrupt:
                killed = True
        migration.start(opened(), mapping)
        assert migration.verify(opened(), mapping).passed and len(field(shop, "image_new")) == N
        migration.rollback(opened())
        if not killed:
            break
    assert at >= 2


def test_a_collection_made_by_a_migration_is_migrated_in_place(shop: Any, mapping: Mapping, vectors: np.ndarray) -> None:
    """Its states of the earlier migration are dropped, and stores that were open before do not mix the two kinds."""
    plain, store = opened(in_place=""), opened()
    migration.start(plain, mapping, "items_copy")
    refuses("already being migrated into a second collection; remove in_place=", migration.start, store, mapping)
    migration.switch(plain, mapping)
    migration.finish(plain)
    plain = xcompat.stores.open(address(in_place=""))
    plain.name_model(plain.space, OLD)
    store = opened()
    again = Mapping(map_of_galleries(vectors @ np.eye(OLD_DIM, NEW_DIM, dtype=np.float32), OLD_DIM))
    migration.start(store, again, "image_c")
    refuses("is being migrated in place; open it again", migration.status, plain)
    assert plain.spaces().keys() == {"items"}, "it is searched as before"
    assert migration.verify(store, again).passed
    migration.switch(store, again)
    migration.finish(store)
    fields = [one["name"] for one in shop.describe_collection("items")["fields"]]
    assert "image_c" in fields and not {"image", "xcompat_state"} & set(fields)


def test_plan_names_what_breaks_searches_of_services(server: Server, mapping: Mapping) -> None:
    """Milvus asks for the field as soon as there are two, and counts the time to live from the last write."""
    client, index = server.connect(), pymilvus.MilvusClient.prepare_index_params()
    schema = client.create_schema()
    schema.add_field("sku", KIND.VARCHAR, max_length=20, is_primary=True)
    schema.add_field("image", KIND.FLOAT_VECTOR, dim=OLD_DIM)
    index.add_index("image", "FLAT", metric_type="IP")
    client.create_collection("items", schema=schema, index_params=index, consistency_level="Strong")
    client.insert("items", [{"sku": str(row), "image": np.eye(OLD_DIM)[row]} for row in range(OLD_DIM)])
    client.alter_collection_properties("items", {"collection.ttl.seconds": 10**6})
    notes = migration.plan(opened(), mapping).notes
    assert notes[0] == "after start, searches without anns_field=image fail: set it in your services first"
    assert "their time to live begins again" in notes[-1]
    client.search("items", [[1.0] * OLD_DIM])
    migration.start(opened(), mapping)
    with pytest.raises(pymilvus.MilvusException, match="multiple anns_fields exist"):
        client.search("items", [[1.0] * OLD_DIM])
    client.close()


def test_a_switch_costs_a_search_one_record(shop: Any, vectors: np.ndarray, mapping: Mapping) -> None:
    """An open store reads the record of the searched field again, and nothing else."""
    store, other = opened(), opened()
    store.search(vectors[:1])
    asked: list[str] = []
    for name in ("get", "query", "has_collection"):
        call = getattr(store.client, name)
        setattr(
            store.client, name, lambda *args, call=call, name=name, **options: (asked.append(name), call(*args, **options))[1]
        )
    store.search(vectors[:1])
    assert asked == ["has_collection", "get"]
    migration.start(other, mapping)
    migration.switch(other, mapping)
    assert store.search(mapping(vectors[7:8]), 1)[0][0].id == "é7"


def test_a_collection_that_is_not_loaded_again_is_not_migrated(
    shop: Any, mapping: Mapping, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of ours stays behind."""
    store: Any = opened()
    before = held(shop), names(shop)
    monkeypatch.setattr(store, "_reload", lambda: None)
    refuses("Milvus did not load image_new; check its log, then run start again", migration.start, store, mapping)
    assert (held(shop), names(shop)) == before and opened().record(migration.RECORD) is None


def test_milvus_lite_is_refused(tmp_path: Path, vectors: np.ndarray, mapping: Mapping) -> None:
    client = pymilvus.MilvusClient(str(tmp_path / "milvus.db"))
    client.create_collection("items_v1", OLD_DIM)
    client.insert("items_v1", [{"id": row, "vector": vector} for row, vector in enumerate(vectors[:5])])
    store = xcompat.stores.open(f"milvus://{tmp_path}/milvus.db?collection=items_v1&in_place=true")
    store.name_model("vector", OLD)
    refuses(
        "Milvus Lite cannot add vector fields; remove in_place= to migrate into a second collection",
        migration.plan,
        store,
        mapping,
    )
    store.close()
    client.close()
