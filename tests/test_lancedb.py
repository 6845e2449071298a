"""LanceDB: which columns and addresses it takes, its indexes, half precision, other writers, object stores."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lancedb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import Run, refuses
from lancedb.index import BTree, HnswSq, IvfPq
from store_places import OLD, LancePlace, fixed_size, map_of_galleries, solve_map

import xcompat.stores
from xcompat import XcompatError
from xcompat.stores import migration
from xcompat.stores.base import LostConnectionError
from xcompat.stores.lancedb import LanceStore
from xcompat.stores.mapping import Mapping

pytestmark = pytest.mark.usefixtures("few_searches")
N, OLD_DIM = 600, 16


@pytest.fixture
def mapping(vectors: np.ndarray) -> Mapping:
    return Mapping(map_of_galleries(vectors, OLD_DIM))


@pytest.fixture
def place(tmp_path: Path, vectors: np.ndarray) -> LancePlace:
    found = LancePlace(tmp_path)
    found.fill(vectors)
    found.open().name_model("embedding", OLD)
    return found


def test_an_address_that_names_nothing_usable_is_refused(tmp_path: Path, vectors: np.ndarray) -> None:
    rows = {"id": range(3), "half": [0.5] * 3, "loose": [[1.0, 2.0]] * 3, "double": fixed_size(vectors[:3].astype(np.float64))}
    lancedb.connect(tmp_path).create_table("odd", pa.table(rows))
    for uri, said in [
        ("lancedb://here?table=odd", "is not an absolute path; use lancedb:///FOLDER"),
        (f"lancedb://{tmp_path}/none?table=odd", "folder .*none does not exist"),
        (f"lancedb://{tmp_path}", "has no table; add"),
        (f"lancedb://{tmp_path}?table=od", "there is no table 'od'; did you mean 'odd'"),
        (
            f"lancedb://{tmp_path}?table=odd",
            "needs a column of fixed-size float32 or float16 vectors, but it has none; choose another",
        ),
        (f"lancedb://{tmp_path}?table=odd&column=loose", "'loose' is not a column of fixed-size float32"),
        (f"lancedb://{tmp_path}?table=odd&colum=half", "has no option 'colum'; did you mean 'column'"),
        ("lancedb+db://cloud?table=odd&api_key=secret", "lancedb[+]db://cloud[?]table=odd: LanceDB Cloud cannot"),
    ]:
        refuses(said.replace("?", "[?]").replace("[[?]]", "[?]"), xcompat.stores.open, uri)
    assert not (tmp_path / "none").exists()


def keyless(folder: Path, vectors: np.ndarray, ids: dict[str, list[object]]) -> LanceStore:
    """Make a table as in LanceDB's quickstart, whose rows have no ids or repeat them."""
    rows = {"vector": fixed_size(vectors), "price": np.arange(len(vectors), dtype=np.float64), **ids}
    lancedb.connect(folder).create_table("items", pa.table(rows))
    store = xcompat.stores.open(f"lancedb://{folder}?table=items")
    store.name_model("vector", OLD)
    assert isinstance(store, LanceStore)
    return store


def prices(folder: Path, column: str = "vector") -> dict[float, np.ndarray]:
    found = lancedb.connect(folder).open_table("items").to_arrow().to_pylist()
    return {row["price"]: np.array(row[column], np.float32) for row in found}


@pytest.mark.parametrize("ids", [{}, {"item": ["a", "b"] * 20}, {"id": [*range(39), None]}], ids=["none", "repeated", "missing"])
def test_rows_get_ids_until_finish(tmp_path: Path, vectors: np.ndarray, mapping: Mapping, ids: dict[str, list[object]]) -> None:
    """Plan names the step. Rows that services insert meanwhile get an id too, and searches never show these ids."""
    store = keyless(tmp_path, vectors[:40], ids)
    names = store.table.schema.names
    assert "start adds the column xcompat_id with unique ids, and finish drops it" in migration.plan(store, mapping).notes[0]
    assert store.table.schema.names == names
    migration.start(store, mapping, batch=16)
    client = lancedb.connect(tmp_path).open_table("items")
    client.add(pa.table({"vector": fixed_size(vectors[40:43]), "price": [40.0, 41.0, 42.0]}))
    client.update(where="price = 7", values={"vector": vectors[50].tolist()})
    assert migration.status(store)[1] == 4 and migration.verify(store, mapping).passed
    migration.switch(store, mapping)
    client.add(pa.table({"vector": fixed_size(vectors[43:44]), "price": [43.0]}))
    known = {hit.id for hit in store.search(vectors[:2], 5)[0]}
    assert known and not any("-" in str(item) for item in known)
    migration.finish(store)
    assert sorted(store.table.schema.names) == sorted(names)
    found = prices(tmp_path)
    expected = mapping(vectors[[*range(7), 50, *range(8, 43)]])
    np.testing.assert_allclose([found[row] for row in range(43)], expected, atol=1e-5)


@pytest.mark.parametrize("verb", ["switch", "rollback"])
def test_a_kill_leaves_no_ids(
    tmp_path: Path, vectors: np.ndarray, mapping: Mapping, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    """Each change of the table is in turn the last one. Then all commands run again, or a rollback ends the migration."""
    for at in range(99):
        folder = tmp_path / str(at)
        store, left = keyless(folder, vectors[:10], {}), iter(range(at))
        change = store._do

        def stopping(*args: Any, change: Any = change, left: Iterator[int] = left, **options: Any) -> Any:
            if next(left, None) is None:
                raise KeyboardInterrupt
            return change(*args, **options)

        monkeypatch.setattr(store, "_do", stopping)
        try:
            migration.start(store, mapping)
            migration.switch(store, mapping)
            migration.finish(store)
        except KeyboardInterrupt:
            store = xcompat.stores.open(f"lancedb://{folder}?table=items")  # type: ignore[assignment]
            if (store.record(migration.RECORD) or {"state": "switched"})["state"] != "filling":
                continue  # tests/test_stores.py kills the rest
            if verb == "rollback":
                migration.rollback(store)
                assert store.table.schema.names == ["vector", "price"]
                continue
            migration.start(store, mapping)
            migration.switch(store, mapping)
            migration.finish(store)
            assert store.table.schema.names == ["price", "vector"]
            np.testing.assert_allclose(prices(folder)[3.0], mapping(vectors[3:4])[0], atol=1e-5)
        else:
            break
    assert at > 4


def test_half_precision(place: LancePlace, mapping: Mapping, vectors: np.ndarray) -> None:
    store = place.open()
    migration.start(store, mapping, dtype="float16")
    assert place.table.schema.field("embedding_new").type.value_type == pa.float16()
    assert migration.verify(store, mapping).passed
    migration.switch(store, mapping)
    assert place.open().find(mapping(vectors[:1]), mapping.model, 1)[0][0].id == "0"


@pytest.mark.parametrize("config", [IvfPq(distance_type="dot", num_sub_vectors=4), HnswSq(distance_type="l2", m=12)])
def test_new_columns_keep_the_indexes(place: LancePlace, mapping: Mapping, vectors: np.ndarray, config: IvfPq | HnswSq) -> None:
    place.table.create_index("embedding", config=config)
    place.table.create_index("id", config=BTree())
    store = place.open()
    assert store.metric == {"dot": "ip", "l2": "l2"}[config.distance_type]
    store.name_model("embedding", OLD)
    migration.start(store, mapping, batch=100)
    migration.verify(store, mapping)
    assert store.index_like("embedding_new") == ["embedding_new_idx"]
    known = {tuple(index.columns): index for index in place.table.list_indices()}
    old, new = known["embedding",], known["embedding_new",]
    assert old.index_type == new.index_type and old.index_details["metric_type"] == new.index_details["metric_type"]
    assert old.index_details.get("compression") == new.index_details.get("compression")
    assert old.index_details.get("hnsw") == new.index_details.get("hnsw")
    assert [index.num_unindexed_rows for index in known.values()] == [0, 0, 0]
    migration.switch(store, mapping)
    migration.finish(store)
    assert sorted(index.columns for index in place.table.list_indices()) == [["embedding"], ["id"]]


def test_a_second_migration_builds_the_index_too(place: LancePlace, mapping: Mapping, vectors: np.ndarray) -> None:
    """That of the first one is called by the name that the column has only while it is filled."""
    place.table.create_index("embedding", config=HnswSq(distance_type="cosine"))
    for each in (mapping, Mapping(solve_map(mapping(vectors), vectors, mapping.target[0]))):
        store = place.open()
        migration.start(store, each)
        migration.verify(store, each)
        assert len(store.index_like("embedding_new")) == 1
        migration.switch(store, each)
        migration.finish(store)
        assert [index.columns for index in place.table.list_indices()] == [["embedding"]]


def test_a_switch_is_one_version(place: LancePlace, mapping: Mapping) -> None:
    store = place.open()
    migration.start(store, mapping)
    before = place.table.version
    store.switch("embedding_new")
    assert place.table.version == before + 1


def test_concurrent_writes_of_another_client_are_kept(place: LancePlace, mapping: Mapping, vectors: np.ndarray) -> None:
    """Both write the same rows in blocks; every price and every vector that was written is there at the end."""

    def serve() -> None:
        for start in range(0, N, 20):
            rows = np.arange(start, start + 20)
            table = {"id": rows, "price": rows + 1000, "embedding": fixed_size(-vectors[rows])}
            place.table.merge_insert("id").when_matched_update_all().execute(pa.table(table))

    service = threading.Thread(target=serve)
    store = place.open()
    service.start()
    migration.start(store, mapping, batch=50)
    migration.verify(store, mapping)
    service.join()
    migration.switch(store, mapping)
    rows = place.table.to_arrow().sort_by("id")
    assert rows["price"].to_pylist() == list(range(1000, 1000 + N))
    found = np.stack(rows["embedding"].to_pylist())
    np.testing.assert_allclose(found, mapping(-vectors), atol=1e-5)


@pytest.mark.parametrize("begun", [False, True])
def test_killed_records_stop_nobody(place: LancePlace, mapping: Mapping, monkeypatch: pytest.MonkeyPatch, begun: bool) -> None:
    """Their table is half made, not dropped yet, or half dropped, when nothing but an empty version can be left of it."""
    store, records = place.open(), place.folder / "items_xcompat.lance"
    (records / "data").mkdir(parents=True)
    migration.start(store, mapping, batch=100)
    migration.verify(store, mapping)
    migration.switch(store, mapping)

    def killed(_: str) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(store.database, "drop_table", killed)  # type: ignore[attr-defined]
        with pytest.raises(KeyboardInterrupt):
            migration.finish(store)
    (manifest,) = records.rglob("*.manifest")
    if begun:
        manifest.unlink()
    store = place.open()
    refuses("has no migration", migration.finish, store)
    assert place.database.list_tables().tables == ["items"] and store.spaces().keys() == {"embedding"}


def test_an_object_store_is_leased_and_names_no_secret(place: LancePlace, mapping: Mapping) -> None:
    uri = place.uri().replace("lancedb:", "lancedb+file-object-store:")
    store = xcompat.stores.open(uri)
    with store.migration_lease(), pytest.raises(XcompatError, match="is being migrated by another process"):
        migration.start(xcompat.stores.open(uri), mapping)
    migration.start(store, mapping, batch=100)
    migration.verify(store, mapping)
    migration.switch(store, mapping)
    migration.finish(store)
    assert place.database.list_tables().tables == ["items"] and store.describe()["fingerprint"] == mapping.target[0].digest

    nowhere = "endpoint=http://127.0.0.1:1&allow_http=true&region=x&client_max_retries=0"
    with pytest.raises(LostConnectionError, match="does not answer .* finished work is kept") as raised:
        xcompat.stores.open(f"lancedb+s3://bucket/db?table=items&aws_access_key_id=me&aws_secret_access_key=hidden&{nowhere}")
    assert "hidden" not in str(raised.value) and str(raised.value).startswith("lancedb+s3://bucket/db?table=items ")
    refuses("table=items: .*No field named prize", place.open().search, np.ones((1, OLD_DIM)), filter="prize < 3")


def test_a_map_is_fitted_to_a_database(place: LancePlace, vectors: np.ndarray, tmp_path: Path, run_xcompat: Run) -> None:
    new = vectors[::-1] @ np.linalg.qr(np.random.default_rng(1).standard_normal((OLD_DIM, OLD_DIM)))[0]
    ids = [str(row) for row in reversed(range(N))]
    pq.write_table(pa.table({"id": ids, "embedding": fixed_size(new.astype(np.float32))}), tmp_path / "new.parquet")
    mapping = ("map", "--old", place.uri(), "--new", tmp_path / "new.parquet", "--out", tmp_path / "forward")
    run_xcompat.output(*mapping, "--direction", "old_to_new")
    out = run_xcompat.output("migrate", "plan", place.uri(), "--model", tmp_path / "forward")
    assert "600" in out and "finds 100 % in the mapped gallery" in out, "the map knows the recorded model"
    assert "different --direction" in run_xcompat.refusal(*mapping)
    found = xcompat.fit_map(old=place.uri(), new=tmp_path / "new.parquet")
    assert found.is_safe and found.model.config.old["fingerprint"] == OLD.digest
    np.testing.assert_allclose(found.to_space(new[::-1]), vectors, atol=1e-3)
    for uri, said in (
        ("lancedb:///nowhere?table=items", "nowhere"),
        ("mysql://me:secret@db/shop", "mysql is not a kind of store"),
    ):
        err = run_xcompat.refusal("map", "--old", uri, "--new", tmp_path / "new.parquet")
        assert said in err and "secret" not in err
