"""Chroma and Milvus: what is copied, half-done renames, aliases, servers, what is refused; test_stores.py has the rest."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import warm
from conftest import refuses
from schedule import mostly_nightly
from store_places import OLD, ChromaPlace, MilvusPlace, chroma_place, milvus_place, solve_map
from store_servers import Connect, chroma_server

import xcompat.stores
from xcompat import XcompatError
from xcompat.methods import RidgeModel
from xcompat.stores import Store, migration
from xcompat.stores.mapping import Mapping

chromadb = pytest.importorskip("chromadb")
pytestmark = pytest.mark.usefixtures("few_searches")
N, OLD_DIM, NEW_DIM = 60, 8, 12


@pytest.fixture
def chroma(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ChromaPlace]:
    with chroma_place(request, tmp_path) as found:
        assert isinstance(found, ChromaPlace)
        yield found
        found.close()


@pytest.fixture
def store(chroma: ChromaPlace, vectors: np.ndarray) -> Store:
    return filled(chroma, vectors)


def filled(chroma: ChromaPlace, vectors: np.ndarray) -> Store:
    chroma.fill(vectors)
    found = chroma.open()
    found.name_model("items", OLD)
    return found


def test_chroma_copies_all_beside_the_vector(chroma: ChromaPlace, vectors: np.ndarray, model: RidgeModel) -> None:
    """Also of rows that lose a key of their metadata meanwhile, and of collections that were made the old way."""
    options = {"metadata": {"hnsw:space": "ip", "hnsw:M": 7, "shop": "ours"}, "embedding_function": None}
    items = chroma.client.create_collection("items", **options)
    items.add(["a", "b", "c"], vectors[:3], [{"price": 1, "tags": ["x", "y"]}, None, {"price": 3}], ["one", None, None])
    items.add(["d"], vectors[3:4], uris=["file:///d.png"])
    store = chroma.open()
    store.name_model("items", OLD)
    assert store.metric == "ip" and items.metadata == chroma.collection().metadata
    migration.start(store, Mapping(model))
    migration.verify(store, Mapping(model))
    items.update(["a"], metadatas=[{"price": None}])
    migration.switch(store, Mapping(model))
    new, old = chroma.collection(), chroma.collection("items_before")
    assert new.metadata == old.metadata and new.configuration_json["hnsw"] == old.configuration_json["hnsw"]
    rows, copies = (rest_of_rows(one) for one in (old, new))
    assert all(metadata.pop("xcompat_state") for metadata, _, _ in copies.values())
    assert copies == rows and rows["a"] == ({"tags": ["x", "y"]}, "one", None)


def rest_of_rows(collection: Any) -> dict[str, tuple[dict[str, Any], str | None, str | None]]:
    found = collection.get(include=["metadatas", "documents", "uris"])
    metadatas = [each or {} for each in found["metadatas"]]
    return dict(zip(found["ids"], zip(metadatas, found["documents"], found["uris"], strict=True), strict=True))


@pytest.mark.parametrize("then", ["switch", "rollback"])
@pytest.mark.parametrize("killed", ["switch", "rollback"])
def test_a_kill_between_the_two_renames_is_mended_by_either_verb(
    store: Store, chroma: ChromaPlace, model: RidgeModel, monkeypatch: pytest.MonkeyPatch, killed: str, then: str
) -> None:
    before, mapping = chroma.vectors("items"), Mapping(model)
    calls = {"switch": lambda one: migration.switch(one, mapping), "rollback": migration.rollback}
    migration.start(store, mapping)
    migration.verify(store, mapping)
    new = chroma.vectors("items_new")
    if killed == "rollback":
        migration.switch(store, mapping)
    renamed, rename = [], chromadb.Collection.modify

    def once(collection: Any, **changes: Any) -> None:
        if renamed:
            raise KeyboardInterrupt
        renamed.append(changes)
        rename(collection, **changes)

    monkeypatch.setattr(chromadb.Collection, "modify", once)
    with pytest.raises(KeyboardInterrupt):
        calls[killed](store)
    monkeypatch.undo()
    assert sorted(one.name for one in chroma.client.list_collections()) == ["items_before", "items_new", "xcompat_records"]
    if (killed, then) == ("rollback", "switch"):
        refuses("is being rolled back; run rollback", calls[then], chroma.open())
        return
    calls[then](chroma.open())
    expected = {"switch": (new, "items_before"), "rollback": (before, "items_new")}[then]
    np.testing.assert_array_equal(list(chroma.vectors("items").values()), list(expected[0].values()))
    assert expected[1] in chroma.open().spaces()


def test_second_migrations_make_own_marks(store: Store, chroma: ChromaPlace, model: RidgeModel, vectors: np.ndarray) -> None:
    migration.start(store, Mapping(model))
    migration.verify(store, Mapping(model))
    migration.switch(store, Mapping(model))
    migration.finish(store)
    store = chroma.open()
    second = solve_map(np.stack(list(chroma.vectors("items").values())), vectors, Mapping(model).target[0])
    migration.start(store, Mapping(second))
    migration.verify(store, Mapping(second))
    chroma.delete("3")
    migration.switch(store, Mapping(second))
    assert store.count() == N - 1 and migration.rollback(chroma.open())[1] == 0
    assert chroma.open().describe()["dim"] == NEW_DIM


def test_rows_are_read_while_others_delete(store: Store, vectors: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chroma looks for the ids first and for what they hold afterwards, and gives nothing where one is gone then."""
    documents = [text for rows in store.rows(7, content="#document") for text in rows.contents or []]
    prices = [price for rows in store.rows(7, content="price") for price in rows.contents or []]
    assert documents == [f"item {row}" for row in range(N)] and prices == [row % 10 for row in range(N)]
    hits = store.search(vectors[:1], N, {"price": {"$lt": 2}, "#document": {"$contains": "item 4"}})[0]
    assert {hit.id for hit in hits} == {"40", "41"}
    get, asked = chromadb.Collection.get, iter(range(10_000))

    def gone(collection: Any, **given: Any) -> Any:
        if next(asked) % 2 == 0:
            raise chromadb.errors.InternalError("Error executing plan: Internal error: Error finding id")
        return get(collection, **given)

    monkeypatch.setattr(chromadb.Collection, "get", gone)
    assert [item for rows in store.rows(7) for item in rows.ids] == [str(row) for row in range(N)]


def test_what_does_not_fit_is_refused_in_one_line(store: Store, chroma: ChromaPlace, model: RidgeModel, tmp_path: Path) -> None:
    before = chroma.everything()
    folder = chroma.address
    for uri, said in [
        (folder, "has no collection; add"),
        (f"{folder}?collection=itens", "there is no collection 'itens'; did you mean 'items'"),
        (f"{folder}?collection=items&metric=ip", "has no option 'metric'"),
        (f"chroma://{tmp_path}/nothing?collection=items", "is not a Chroma folder"),
        ("chroma://127.0.0.1:9/?collection=items", "Could not connect to a Chroma server"),
        ("chroma://me:secret@127.0.0.1:9/?collection=items", "CHROMA_CLIENT_AUTH_CREDENTIALS"),
    ]:
        assert "secret" not in refuses(said, xcompat.stores.open, uri)
    assert not (tmp_path / "nothing").exists()
    refuses("Chroma only stores float32", migration.start, store, Mapping(model), dtype="float16")
    refuses("Got: x", migration.start, store, Mapping(model), "x")
    refuses("is not a Chroma filter", store.search, np.ones((1, OLD_DIM)), filter="price < 3")
    chroma.client.create_collection("items_new", embedding_function=None)
    refuses("already has a collection 'items_new'", migration.start, store, Mapping(model))
    chroma.client.delete_collection("items_new")
    assert chroma.everything() == before


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Connect]:
    with chroma_server(tmp_path_factory.mktemp("server")) as connect:
        yield connect


@pytest.fixture
def served(server: Connect) -> Iterator[ChromaPlace]:
    found = server()
    assert isinstance(found, ChromaPlace)
    found.clear()
    yield found
    found.close()
    found.client.close()


def test_a_server_is_migrated_while_others_write(served: ChromaPlace, vectors: np.ndarray, model: RidgeModel) -> None:
    store = filled(served, vectors)
    migration.start(store, Mapping(model), batch=16)
    migration.verify(store, Mapping(model))
    served.put("3", vectors[4])
    served.put("1000", vectors[5])
    served.delete("7")
    assert migration.status(served.open())[1] == 2
    migration.switch(store, Mapping(model))
    new, old = served.vectors("items"), served.vectors("items_before")
    assert new.keys() == old.keys() == {*map(str, range(N)), "1000"} - {"7"}
    np.testing.assert_allclose(np.stack([new[item] for item in old]), Mapping(model)(np.stack(list(old.values()))), atol=1e-5)


def test_leases_hold_for_every_spelling(served: ChromaPlace, vectors: np.ndarray, model: RidgeModel, tmp_path: Path) -> None:
    store = filled(served, vectors)
    spelled = served.uri().replace("127.0.0.1", "localhost").replace("/?", "?")
    with store.migration_lease(), pytest.raises(XcompatError, match="is being migrated by another process"):
        migration.start(xcompat.stores.open(spelled), Mapping(model))
    code = f"import os, xcompat.stores as s; s.open({spelled!r}).migration_lease().__enter__(); os._exit(9)"
    assert warm.run("-c", code, folder=tmp_path).returncode == 9
    migration.start(store, Mapping(model))
    assert migration.status(store)[1] == 0


pymilvus = pytest.importorskip("pymilvus")
server_manager_instance = pytest.importorskip("milvus_lite.server_manager").server_manager_instance


@pytest.fixture
def milvus(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MilvusPlace]:
    with milvus_place(request, tmp_path) as found:
        assert isinstance(found, MilvusPlace)
        yield found
        found.close()


def opened(milvus: MilvusPlace, collection: str = "items") -> Store:
    milvus.opened.append(xcompat.stores.open(f"{milvus.address}?collection={collection}&field=vector"))
    milvus.opened[-1].name_model(collection, OLD)
    return milvus.opened[-1]


def made(milvus: MilvusPlace, key: dict[str, Any], **options: Any) -> None:
    """Make a collection of many kinds of fields."""
    kind = pymilvus.DataType
    schema, index = milvus.client.create_schema(enable_dynamic_field=True, **options), milvus.client.prepare_index_params()
    schema.add_field("id", is_primary=True, **key)
    for name, datatype, more in [
        ("vector", kind.FLOAT_VECTOR, {"dim": OLD_DIM}),
        ("other", kind.FLOAT_VECTOR, {"dim": 3}),
        ("words", kind.SPARSE_FLOAT_VECTOR, {}),
        ("price", kind.INT32, {"nullable": True}),
        ("stock", kind.INT64, {"default_value": 7}),
        ("sizes", kind.ARRAY, {"element_type": kind.INT64, "max_capacity": 5}),
        ("about", kind.JSON, {}),
    ]:
        schema.add_field(name, datatype, **more)
    index.add_index("vector", "HNSW", metric_type="IP", params={"M": 8, "efConstruction": 64})
    index.add_index("other", "FLAT", metric_type="L2")
    index.add_index("words", "SPARSE_INVERTED_INDEX", metric_type="IP")
    index.add_index("price", "INVERTED")
    milvus.client.create_collection("items", schema=schema, index_params=index, consistency_level="Strong")


def row_of(number: int, vector: np.ndarray) -> dict[str, Any]:
    some = {"other": [number, 1.0, 2.0], "words": {1: 0.5, number + 2: 0.25}, "price": number % 3 or None}
    return {"vector": vector, **some, "sizes": [number, 4], "about": {"name": f"é {number}"}, "dynamic": number}


def rest(milvus: MilvusPlace, name: str) -> dict[Any, Any]:
    """Return what a collection holds beside the vectors, by id."""
    rows = milvus.client.query(name, filter="", limit=1000, output_fields=["*"])
    return {row["id"]: {key: row[key] for key in row if key not in ("vector", "xcompat_state")} for row in rows}


@pytest.mark.parametrize("kind", mostly_nightly(["text", "number", "automatic"], "text".__eq__))
def test_milvus_copies_all_beside_the_vector(milvus: MilvusPlace, vectors: np.ndarray, model: RidgeModel, kind: str) -> None:
    varchar = {"datatype": pymilvus.DataType.VARCHAR, "max_length": 99}
    made(milvus, varchar if kind == "text" else {"datatype": pymilvus.DataType.INT64}, auto_id=kind == "automatic")
    rows = [row_of(number, vector) for number, vector in enumerate(vectors)]
    ids = {"text": [{"id": f'é"{row}'} for row in range(N)], "number": [{"id": 3 * row} for row in range(N)]}.get(kind, [{}] * N)
    milvus.client.insert("items", [{**row, **key} for row, key in zip(rows, ids, strict=True)])
    store = opened(milvus)
    assert store.metric == "ip"
    read = list(store.rows(7))
    assert next(store.rows(7, after=read[2].ids[-1])).ids == read[3].ids
    migration.start(store, Mapping(model), batch=16)
    migration.verify(store, Mapping(model))
    first = next(iter(rest(milvus, "items")))
    milvus.client.delete("items", ids=[first])
    migration.switch(store, Mapping(model))
    assert rest(milvus, "items") == rest(milvus, "items_before") and len(rest(milvus, "items")) == N - 1
    new, old = (milvus.client.describe_collection(name) for name in ("items", "items_before"))
    fields = [{field["name"]: str(field).replace(str(NEW_DIM), str(OLD_DIM)) for field in one["fields"]} for one in (new, old)]
    assert "xcompat_state" in fields[0].pop("xcompat_state") and fields[0] == fields[1]

    def indexes(name: str) -> list[list[Any]]:
        found = [milvus.client.describe_index(name, index) for index in milvus.client.list_indexes(name)]
        return [[one[key] for key in ("index_type", "metric_type", "field_name", "index_name")] for one in found]

    assert indexes("items") == indexes("items_before")
    own_id = {"text": {"id": "new"}, "number": {"id": 999}, "automatic": {}}[kind]
    inserted = milvus.client.insert("items", [row_of(99, np.ones(NEW_DIM, np.float32)) | own_id])
    assert inserted["insert_count"] == 1
    assert migration.rollback(store)[1] == 1


def half_written(folder: Path) -> int:
    """End the Milvus Lite of a folder and cut its indexes in half, as a kill in the middle of a write does; count them."""
    server_manager_instance.release_server(str(folder / "milvus.db"))
    indexes = list((folder / "milvus.db").rglob("*.idx"))
    for index in indexes:
        index.write_bytes(index.read_bytes()[: index.stat().st_size // 2])
    return len(indexes)


@pytest.mark.parametrize("name", ["items", "an_alias"])
def test_an_index_that_a_killed_process_left_in_half_is_made_anew(tmp_path: Path, vectors: np.ndarray, name: str) -> None:
    with closing(pymilvus.MilvusClient(str(tmp_path / "milvus.db"))) as client:
        milvus = MilvusPlace(f"milvus://{tmp_path / 'milvus.db'}", client)
        milvus.fill(vectors)
        client.flush("items")
        client.create_alias("items", "an_alias")
    assert half_written(tmp_path) == 1
    with closing(pymilvus.MilvusClient(str(tmp_path / "milvus.db"))) as client, pytest.raises(pymilvus.MilvusException):
        client.load_collection("items")  # else Milvus Lite has learned it, and our mending can go
    store = xcompat.stores.open(f"milvus://{tmp_path / 'milvus.db'}?collection={name}&field=vector")
    assert [hits[0].id for hits in store.search(vectors, top_k=1)] == [str(row) for row in range(N)]
    store.close()


def test_an_alias_is_switched_at_once_and_back(milvus: MilvusPlace, vectors: np.ndarray, model: RidgeModel) -> None:
    milvus.fill(vectors)
    milvus.client.rename_collection("items", "items_v1")
    milvus.client.load_collection("items_v1")
    milvus.client.create_alias("items_v1", "items")
    store, mapping = opened(milvus), Mapping(model)
    migration.start(store, mapping, "items_v2")
    migration.verify(store, mapping)
    milvus.put("3", vectors[4])
    for _ in range(2):
        migration.switch(store, mapping)
        assert milvus.client.describe_alias("items")["collection_name"] == "items_v2"
        assert milvus.client.describe_alias("items_before")["collection_name"] == "items_v1"
        np.testing.assert_allclose(milvus.vectors("items")["3"], mapping(vectors[4:5])[0], atol=1e-5)
        assert store.describe()["fingerprint"] == mapping.target[0].digest
        migration.rollback(store)
        assert milvus.client.describe_alias("items")["collection_name"] == "items_v1"
        assert set(milvus.client.list_collections()) == {"items_v1", "items_v2", "xcompat_records"}
        assert store.describe()["fingerprint"] == OLD.digest
    migration.switch(store, mapping)
    migration.finish(store)
    assert milvus.client.list_aliases("items_v2")["aliases"] == ["items"]
    assert set(milvus.client.list_collections()) == {"items_v2", "xcompat_records"}


@pytest.mark.parametrize("verb", mostly_nightly(["switch", "rollback"], "switch".__eq__))
def test_a_kill_between_the_two_renames_is_mended_by_the_next_call(
    milvus: MilvusPlace, vectors: np.ndarray, model: RidgeModel, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    milvus.fill(vectors)
    store, mapping = opened(milvus), Mapping(model)
    migration.start(store, mapping)
    migration.verify(store, mapping)
    expected = milvus.vectors("items_new" if verb == "switch" else "items")
    if verb == "rollback":
        migration.switch(store, mapping)
    renamed, rename = [], pymilvus.MilvusClient.rename_collection

    def once(*given: Any) -> None:
        if renamed:
            raise KeyboardInterrupt
        renamed.append(given)
        rename(*given)

    calls = {"switch": lambda one: migration.switch(one, mapping), "rollback": migration.rollback}
    monkeypatch.setattr(pymilvus.MilvusClient, "rename_collection", once)
    with pytest.raises(KeyboardInterrupt):
        calls[verb](store)
    monkeypatch.undo()
    assert set(milvus.client.list_collections()) == {"items_before", "items_new", "xcompat_records"}
    calls[verb](milvus.open())
    found = milvus.vectors("items")
    assert found.keys() == expected.keys()
    np.testing.assert_array_equal(np.stack([found[item] for item in expected]), np.stack(list(expected.values())))


def test_misfits_are_refused_in_one_line(milvus: MilvusPlace, vectors: np.ndarray, model: RidgeModel, tmp_path: Path) -> None:
    milvus.fill(vectors)
    store = opened(milvus)
    before, file = milvus.everything(), milvus.address
    for uri, said in [
        (file, "has no collection; add"),
        (f"{file}?collection=itens", "there is no collection 'itens'; did you mean 'items'"),
        (f"{file}?collection=items&field=vektor", "'vektor' is not a float vector field; did you mean 'vector'"),
        (f"milvus://{tmp_path}/nothing.db?collection=items", "is not a Milvus Lite file"),
    ]:
        refuses(said, xcompat.stores.open, uri)
    assert not (tmp_path / "nothing.db").exists()
    for filter_ in ("price <", "no such thing"):
        refuses("field=vector: ", store.search, vectors[:1], filter=filter_)
    refuses("only copies float32", migration.start, store, Mapping(model), dtype="float16")
    milvus.client.create_alias("items", "items_before")
    refuses("already has a collection 'items_before'", migration.start, store, Mapping(model))
    milvus.client.drop_alias("items_before")
    assert milvus.everything() == before
    milvus.client.create_partition("items", "second")
    refuses("would lose the partitions _default, second", migration.start, store, Mapping(model))
    assert store.record(migration.RECORD) is None
