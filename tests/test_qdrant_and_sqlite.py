"""Qdrant and SQLite: what is copied, settings, keys, filters, lost connections, what is refused; test_stores.py has the rest."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import pytest
from conftest import refuses
from store_places import OLD, QdrantPlace, SqlitePlace, solve_map, sqlite_place
from test_stores import filled

import xcompat.stores
from xcompat import RidgeModel, XcompatError
from xcompat.retrieval.versions import identity
from xcompat.stores import Store, migration
from xcompat.stores.base import LostConnectionError
from xcompat.stores.mapping import Mapping

qdrant_client = pytest.importorskip("qdrant_client")
from qdrant_client import models  # noqa: E402
from qdrant_server import Server, served  # noqa: E402

pytestmark = pytest.mark.usefixtures("few_searches")
N, OLD_DIM, NEW_DIM = 60, 8, 12


@pytest.fixture(scope="module")
def mapping(model: RidgeModel) -> Mapping:
    return Mapping(model)


@pytest.fixture
def server() -> Iterator[Server]:
    with served() as found:
        yield found


@pytest.fixture
def shop(server: Server, vectors: np.ndarray) -> Server:
    """A server with the vectors in ``items_v1``, behind the alias ``items``."""
    QdrantPlace("", server.client).fill(vectors)
    return server


def address(server: Server, name: str = "items", **options: str) -> str:
    more = "&".join(f"{key}={value}" for key, value in options.items())
    return f"qdrant://127.0.0.1:{server.port}/{name}" + "?" * bool(more) + more


def alias(client: Any, collection: str = "items_v1", name: str = "items") -> None:
    made = models.CreateAlias(collection_name=collection, alias_name=name)
    client.update_collection_aliases([models.CreateAliasOperation(create_alias=made)])


def opened(uri: str) -> Store:
    store = xcompat.stores.open(uri)
    store.name_model(store.space, OLD)
    return store


def filled_with_all_kinds(client: Any, vectors: np.ndarray) -> list[str | int]:
    """Make a collection of named, sparse and multiple vectors, numbers and UUIDs, and points without the searched vector."""
    client.create_collection(
        "items_v1",
        {
            "image": models.VectorParams(size=OLD_DIM, distance=models.Distance.COSINE),
            "title": models.VectorParams(size=3, distance=models.Distance.DOT),
            "tokens": models.VectorParams(
                size=2,
                distance=models.Distance.DOT,
                multivector_config=models.MultiVectorConfig(comparator=models.MultiVectorComparator.MAX_SIM),
            ),
        },
        sparse_vectors_config={"words": models.SparseVectorParams()},
        metadata={"owner": "shop"},
    )
    ids: list[str | int] = [row if row % 2 else str(UUID(int=row)) for row in range(N)]
    points = []
    for row, item in enumerate(ids):
        known: dict[str, Any] = {"image": vectors[row].tolist(), "title": [row, 0.5, -1.0]}
        known |= {"tokens": [[row, 1.0]] * (1 + row % 3)} if row % 5 else {}
        known |= {"words": models.SparseVector(indices=[1, row + 2], values=[0.5, 2.0])} if row % 3 else {}
        if row in (7, 8):
            del known["image"]
        points.append(models.PointStruct(id=item, vector=known, payload={"row": row, "tags": {"b": None, "a": [1]}}))
    client.upsert("items_v1", points)
    alias(client)
    return ids


def held(client: Any, name: str) -> dict[Any, Any]:
    """Return payloads and vectors of a collection, but for the one that is mapped."""
    points, _ = client.scroll(name, limit=1000, with_vectors=True)
    return {point.id: (point.payload, {key: v for key, v in point.vector.items() if key != "image"}) for point in points}


def test_whatever_stands_beside_the_vector_is_copied_as_it_is(server: Server, vectors: np.ndarray, mapping: Mapping) -> None:
    ids = filled_with_all_kinds(server.client, vectors)
    store = opened(address(server, vector="image"))
    assert store.count() == N and store.count("items") == N - 2
    [rows] = store.rows(1000, content="row")
    assert sorted(rows.ids) == sorted(str(item) for row, item in enumerate(ids) if row not in (7, 8))
    assert [ids.index(int(name) if name.isdigit() else name) for name in rows.ids] == rows.contents
    before = held(server.client, "items_v1")
    migration.start(store, mapping, "items_v2", batch=7)
    migration.verify(store, mapping)
    server.client.delete_vectors("items", ["image"], [1])
    server.client.set_payload("items", {"price": 3}, [7])  # a point without the searched vector
    server.client.update_vectors("items", [models.PointVectors(id=3, vector={"title": [9.0, 9.0, 9.0]})])
    after = held(server.client, "items_v1")
    assert before != after
    migration.switch(store, mapping)
    copied = held(server.client, "items")
    assert {item: (payload.pop("xcompat_state") and payload, rest) for item, (payload, rest) in copied.items()} == after
    store = xcompat.stores.open(address(server, vector="image"))
    assert store.count() == N and store.count("items") == N - 3
    assert store.search(mapping(vectors[9:10]), 1)[0][0].id == "9"
    migration.finish(store)
    assert held(server.client, "items") == after
    kept = server.client.get_collection("items_v2").config.metadata
    assert kept["owner"] == "shop" and kept.keys() == {"owner", "xcompat_model"}


def test_new_collection_settings(server: Server, vectors: np.ndarray, mapping: Mapping, monkeypatch: pytest.MonkeyPatch) -> None:
    client = qdrant_client.QdrantClient(port=server.port, check_compatibility=False)
    client.create_collection(
        "items_v1",
        models.VectorParams(
            size=OLD_DIM, distance=models.Distance.COSINE, on_disk=True, hnsw_config=models.HnswConfigDiff(ef_construct=64)
        ),
        shard_number=3,
        replication_factor=2,
        write_consistency_factor=2,
        on_disk_payload=True,
        hnsw_config=models.HnswConfigDiff(m=8),
        optimizers_config=models.OptimizersConfigDiff(indexing_threshold=500),
        wal_config=models.WalConfigDiff(wal_capacity_mb=16),
        quantization_config=models.ScalarQuantization(
            scalar=models.ScalarQuantizationConfig(type=models.ScalarType.INT8, quantile=0.99)
        ),
        strict_mode_config=models.StrictModeConfig(enabled=True, max_query_limit=5000),
    )
    client.create_payload_index("items_v1", "price", models.PayloadSchemaType.INTEGER)
    client.create_payload_index("items_v1", "text", models.TextIndexParams(type=models.TextIndexType.TEXT, min_token_len=2))
    client.upload_collection("items_v1", vectors, ids=range(N), wait=True)
    alias(client)
    waited: list[float] = []
    monkeypatch.setattr("xcompat.stores.qdrant_store.time.sleep", waited.append)
    store = opened(address(server))
    migration.start(store, mapping, "items_v2", dtype="float16")
    server.statuses = ["green", "yellow", "yellow", "green"]
    assert store.index_like("items_v2") == ["price", "text"] and waited == [1, 1]
    old, new = (client.get_collection(name) for name in ("items_v1", "items_v2"))
    assert old.payload_schema == new.payload_schema and len(new.payload_schema) == 2
    assert new.config.params.vectors.size == NEW_DIM and new.config.params.vectors.datatype == models.Datatype.FLOAT16
    new.config.params.vectors.size, new.config.params.vectors.datatype = OLD_DIM, None
    old.config.metadata = new.config.metadata = None
    assert old.config == new.config


def test_a_second_migration_counts_by_its_own_copies(shop: Server, vectors: np.ndarray, mapping: Mapping) -> None:
    """What the first one wrote into payloads means nothing to the second one."""
    second = Mapping(solve_map(mapping(vectors), vectors, mapping.target[0]))
    store = opened(address(shop))
    for number, made in ((2, mapping), (3, second)):
        migration.start(store, made, f"items_v{number}")
        assert migration.verify(store, made, queries=9).passed
        migration.switch(store, made)
        assert migration.status(store)[1] == 0 and migration.rollback(store)[1] == 0
        assert migration.status(store)[1] == 0
        migration.switch(store, made)
        migration.finish(store)
    assert store.spaces().keys() == {"items"} and store.count() == N
    assert [found.name for found in shop.client.get_collections().collections] == ["items_v3"]


@pytest.mark.parametrize("call", ["delete_payload", "update_collection", "delete_collection"])
def test_a_killed_finish_leaves_nothing(shop: Server, mapping: Mapping, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    store = opened(address(shop))
    migration.start(store, mapping, "items_v2")
    migration.switch(store, mapping)
    drop = store.drop_space

    def killed(name: str) -> None:
        original = getattr(store.client, call)  # type: ignore[attr-defined]

        def last(*given: Any, **named: Any) -> None:
            original(*given, **named)
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(store.client, call, last)  # type: ignore[attr-defined]
            drop(name)

    monkeypatch.setattr(store, "drop_space", killed)
    with pytest.raises(KeyboardInterrupt):
        migration.finish(store)
    migration.finish(opened(address(shop)))
    assert [found.name for found in shop.client.get_collections().collections] == ["items_v2"]
    assert {point.id: point.payload for point in shop.client.scroll("items_v2", limit=N)[0]} == {
        row: {"price": row % 10} for row in range(N)
    }


def test_a_search_asks_once_with_filters_of_any_form(shop: Server, vectors: np.ndarray) -> None:
    store = xcompat.stores.open(address(shop))
    spoken = json.loads(QdrantPlace.cheap)
    forms = QdrantPlace.cheap, spoken, models.Filter(**spoken)
    found = [[hit.id for hit in store.search(vectors[:1], N, form)[0]] for form in forms]
    assert found[0] == found[1] == found[2] and len(found[0]) == 18
    mistakes = {"price < 3": "'price < 3'", '{"mast": []}': "mast", '{"must": [{"key": "price", "rank": 3}]}': "must.*rank"}
    for wrong, place in mistakes.items():
        refuses(rf"^qdrant://.*: filter {place}: .{{,99}}; see Qdrant's conditions$", store.search, vectors[:1], 3, wrong)
    shop.answers = 1
    assert [each[0].id for each in store.search(vectors[:5], 1)] == list("01234")
    assert shop.answers == 0


@pytest.mark.filterwarnings("ignore:Batch upload failed")
def test_a_lost_connection_is_a_clear_stop_that_continues(shop: Server, mapping: Mapping) -> None:
    store = opened(address(shop))
    shop.answers = 64
    with pytest.raises(LostConnectionError, match="does not answer .* finished work is kept") as refusal:
        migration.start(store, mapping, "items_v2", batch=10)
    assert "\n" not in str(refusal.value)
    shop.answers = 10**9
    store = xcompat.stores.open(address(shop))
    assert migration.status(store)[1] in range(1, N)
    migration.start(store, mapping)
    assert migration.status(store)[1] == 0 and migration.verify(store, mapping, 9).passed


@pytest.mark.filterwarnings("ignore:Api key is used")
def test_keys_open_a_server_and_are_never_printed(
    vectors: np.ndarray, mapping: Mapping, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    said = []
    with served(key="wr1te-me", reader="r3ad-me") as server:
        QdrantPlace("", server.client).fill(vectors)
        for given in ({}, {"api_key": "gue55ed"}):
            with pytest.raises(XcompatError, match="Forbidden") as refusal:
                xcompat.stores.open(address(server, **given))
            said.append(str(refusal.value))
        store = opened(address(server, api_key="wr1te-me"))
        monkeypatch.setenv("QDRANT_API_KEY", "r3ad-me")
        reader = xcompat.stores.open(address(server))
        assert reader.find(vectors[:1], OLD, 1)[0][0].id == "0"
        before = server.client.get_collection("items_v1").config
        with pytest.raises(XcompatError, match="the key does not allow that") as refusal:
            migration.start(reader, mapping)
        said.append(str(refusal.value))
        assert server.client.get_collection("items_v1").config == before and len(server.engine.collections) == 1
        said += [str(store.uri), repr(store.describe()), str(reader.uri)]
    assert not any(key in text for key in ("wr1te", "r3ad", "gue55ed") for text in [*said, *capfd.readouterr()])


@pytest.mark.filterwarnings("ignore:Api key is used")
def test_what_cannot_be_opened_is_refused_in_one_line(server: Server, vectors: np.ndarray, tmp_path: Path) -> None:
    filled_with_all_kinds(server.client, vectors)
    server.client.create_collection("city", models.VectorParams(size=2, distance=models.Distance.MANHATTAN))
    server.client.create_collection("plain", models.VectorParams(size=2, distance=models.Distance.COSINE))
    qdrant_client.QdrantClient(path=str(tmp_path / "folder")).close()
    refused = [
        (address(server, "itms"), "no collection 'itms'; did you mean 'items'"),
        (address(server), "vectors: image, title; choose one with vector="),
        (address(server, vector="imge"), "'imge' is not one of them; did you mean 'image'"),
        (address(server, vector="tokens"), "'tokens' is not one of them"),
        (address(server, vector="words"), "'words' is not one of them"),
        (address(server, "plain", vector="words"), "vectors: an unnamed one; 'words' is not one of them; remove vector="),
        (address(server, "city"), "has Manhattan distance; only"),
        (address(server, vector="image", metric="ip"), "has Cosine distance .metric=cosine.; remove metric="),
        (address(server, collection="items"), "has no option 'collection'"),
        (f"qdrant://127.0.0.1:{server.port}", "has no collection; use"),
        (f"qdrant://127.0.0.1:{server.port}/a/b", "has no collection; use"),
        ("qdrant://me:secret@127.0.0.1:1/items", "Qdrant has no users"),
        ("qdrant://127.0.0.1:1/items?api_key=secret", "does not answer"),
        ("qdrant://127.0.0.1:port/items", "port"),
        (f"qdrant://{tmp_path}/nowhere/items", "is not a folder of Qdrant's local mode"),
        (f"qdrant://{tmp_path}/folder/items", "there is no collection 'items'"),
    ]
    for uri, said in refused:
        assert "secret" not in refuses(said, xcompat.stores.open, uri)
    assert not (tmp_path / "nowhere").exists()
    with served(version="1.13.4") as old, pytest.raises(XcompatError, match="is Qdrant 1.13.4, .* use 1.16 or later"):
        xcompat.stores.open(address(old))


def test_collections_of_others_are_only_searched(shop: Server, vectors: np.ndarray, mapping: Mapping) -> None:
    store = opened(address(shop, "items_v1"))
    assert store.find(vectors[:1], OLD, 1)[0][0].id == "0" and store.describe()["spaces"] == {"items_v1": OLD_DIM}
    before = shop.client.get_collection("items_v1").config
    for verb in (migration.plan, migration.start):
        refuses("create an alias .*, and use it in your services and in the address", verb, store, mapping)
    assert shop.client.get_collection("items_v1").config == before and len(shop.engine.collections) == 1
    shop.client.create_collection("theirs", models.VectorParams(size=NEW_DIM, distance=models.Distance.COSINE))
    store = opened(address(shop))
    refuses("already has a collection or alias 'theirs'; choose another name", migration.start, store, mapping, "theirs")
    begun = migration.Migration(space="items", into="theirs", model=identity(mapping.model).digest)
    store.set_record(migration.RECORD, begun.model_dump())  # as if it was killed before it was refused
    migration.rollback(store)
    assert shop.client.collection_exists("theirs") and store.record(migration.RECORD) is None


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SqlitePlace]:
    with sqlite_place(request, tmp_path) as found:
        assert isinstance(found, SqlitePlace)
        yield found
        found.close()


def asked(place: SqlitePlace, statement: str, *values: Any) -> list[Any]:
    return list(place.connection.execute(statement, values))


def test_everything_beside_the_vector_is_copied(place: SqlitePlace, vectors: np.ndarray, model: RidgeModel) -> None:
    """Other vectors, partitions, text keys, and the options of the table."""
    columns = "id text primary key, shop text partition key, seen boolean, +about text, q int8[4], b bit[8], image float[2]"
    place.connection.execute(
        f"CREATE VIRTUAL TABLE items USING vec0({columns}, e float[{OLD_DIM}] distance_metric=l2, chunk_size=16)"
    )
    for row, vector in enumerate(vectors):
        values = f"i{row}", f"s{row % 3}", row % 2, None, b"\1\2\3\4", b"\7", np.ones(2, np.float32).tobytes(), vector.tobytes()
        asked(place, "INSERT INTO items VALUES (?, ?, ?, ?, vec_int8(?), vec_bit(?), ?, ?)", *values)
    refuses(r"the table needs a column of float vectors, but it has image, e; choose one with column=", place.open)
    store = xcompat.stores.open(f"{place.uri()}&column=e")
    place.opened.append(store)
    store.name_model("items", OLD)
    migration.start(store, Mapping(model))
    migration.switch(store, Mapping(model))
    kept = "SELECT id, shop, seen, about, q, b, image FROM items{} ORDER BY id"
    assert asked(place, kept.format("")) == asked(place, kept.format("_before")) and len(asked(place, kept.format(""))) == N
    made = {item: np.frombuffer(vector, np.float32) for item, vector in asked(place, "SELECT id, e FROM items")}
    np.testing.assert_allclose([made[f"i{row}"] for row in range(N)], Mapping(model)(vectors), atol=1e-5)
    assert store.find(Mapping(model)(vectors[7:8]), model, 1)[0][0].id == "i7"
    assert "chunk_size=16" in asked(place, "SELECT sql FROM sqlite_schema WHERE name = 'items'")[0][0]


def test_triggers_and_views_follow_the_switch(place: SqlitePlace, vectors: np.ndarray, model: RidgeModel) -> None:
    """As LangChain makes them: a table of texts, whose trigger fills the table of vectors."""
    place.connection.execute(
        "CREATE TABLE docs (rowid INTEGER PRIMARY KEY, body TEXT, e BLOB);"
        f"CREATE VIRTUAL TABLE items USING vec0(e float[{OLD_DIM}]);"
        "CREATE TRIGGER fill AFTER INSERT ON docs BEGIN INSERT INTO items(rowid, e) VALUES (new.rowid, new.e); END;"
        "CREATE VIEW found AS SELECT body FROM docs JOIN items ON items.rowid = docs.rowid"
    )
    for row, vector in enumerate(vectors):
        asked(place, "INSERT INTO docs VALUES (?, ?, ?)", row, f"text {row}", vector.tobytes())
    store = place.open()
    assert next(store.rows(3, content="docs.body")).contents == ["text 0", "text 1", "text 2"]
    assert store.read_fields(["7"], ["docs.body"]) == {"7": {"docs.body": "text 7"}}
    store.name_model("items", OLD)
    migration.start(store, Mapping(model), batch=25)
    migration.switch(store, Mapping(model))
    new = Mapping(model)(vectors[:1])
    asked(place, "INSERT INTO docs VALUES (?, ?, ?)", 99, "text 99", new.tobytes())
    assert asked(place, "SELECT count(*) FROM found") == [(N + 1,)]
    assert migration.rollback(store)[1] == 1
    assert asked(place, "SELECT count(*) FROM found") == [(N,)]


def test_filters_are_any_condition(place: SqlitePlace, vectors: np.ndarray) -> None:
    """sqlite-vec itself finds fewer hits with OR, and refuses columns with a plus sign."""
    place.fill(vectors)
    place.note("4", "red")
    store = place.open()
    for condition, expected in [
        ("price = 1 OR price = 7", {row for row in range(N) if row % 10 in (1, 7)}),
        ("about = 'red'", {4}),
        ("id IN (SELECT value FROM json_each('[3, 5]'))", {3, 5}),
    ]:
        assert {int(hit.id) for hit in store.search(vectors[:1], N, condition)[0]} == expected
    refuses(r"sqlite:///.*no such column: prise", store.search, vectors[:1], 3, "prise < 3")


def test_zero_vectors_do_not_displace_hits(place: SqlitePlace, vectors: np.ndarray) -> None:
    """Their cosine is no number, by which sqlite-vec cannot sort."""
    place.fill(np.where(np.arange(N)[:, None] % 2, vectors, np.float32(0)))
    hits = place.open().search(vectors[1:2], 5, "price < 9")[0]
    scores = vectors[1] @ vectors.T
    expected = [row for row in np.argsort(-scores) if row % 2 and row % 10 < 9][:5]
    assert [int(hit.id) for hit in hits] == expected


@pytest.mark.parametrize(
    ("uri", "why"),
    [
        ("sqlite://items.db?table=items", "is not an absolute path; use sqlite:///FILE"),
        ("sqlite:///nowhere.db?table=items", "file /nowhere.db does not exist"),
        ("{}?table=itms", "there is no vec0 table 'itms'; did you mean 'items'?"),
        ("{}?table=docs", "there is no vec0 table 'docs'; known: items, manhattan"),
        ("{}?table=manhattan", "manhattan compares by l1, but maps need cosine or l2"),
        ("{}?table=items&metric=ip", "has no option 'metric'"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(place: SqlitePlace, vectors: np.ndarray, uri: str, why: str) -> None:
    place.fill(vectors)
    place.connection.execute("CREATE TABLE docs (body); CREATE VIRTUAL TABLE manhattan USING vec0(e float[4] distance_metric=L1)")
    assert why in refuses("", xcompat.stores.open, uri.format(f"sqlite://{place.file}"))


def test_unchanged_files_are_compared_once_in_full_precision(
    place: SqlitePlace, vectors: np.ndarray, model: RidgeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = filled(place, vectors)
    with pytest.raises(XcompatError, match="sqlite-vec stores vectors to search as float32; remove --dtype"):
        migration.start(store, Mapping(model), dtype="float16")
    migration.start(store, Mapping(model))
    monkeypatch.setattr(store, "_blocks", None)
    assert store.count("items", "items_new") == 0 and not list(store.rows(10, None, "items_new"))
    place.put("3", vectors[5])
    monkeypatch.undo()
    assert store.count("items", "items_new") == 1 and [rows.ids for rows in store.rows(10, None, "items_new")] == [["3"]]


def test_an_installed_package_adds_a_store(place: SqlitePlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place.fill(np.eye(OLD_DIM, dtype=np.float32))
    (tmp_path / "mydb-1.dist-info").mkdir()
    (tmp_path / "mydb-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: mydb\nVersion: 1\n")
    names = "[xcompat.stores]\nmydb = my_database:open_store\nbroken = no_database:open_store\n"
    (tmp_path / "mydb-1.dist-info" / "entry_points.txt").write_text(names)
    code = 'from xcompat.stores import sqlite\n\ndef open_store(uri):\n    return sqlite.open_store("sqlite" + uri[4:])\n'
    (tmp_path / "my_database.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    store = xcompat.stores.open(place.uri().replace("sqlite:", "mydb:"))
    assert store.count() == OLD_DIM
    store.close()
    refuses("no_database:open_store fails: .*; update or remove its package", xcompat.stores.open, "broken:///items")
    refuses("nodb is not a kind of store", xcompat.stores.open, "nodb:///items")
