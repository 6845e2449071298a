"""Milvus: what is copied, aliases, half-done renames, what is refused; test_stores.py has the rest."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import refuses
from schedule import mostly_nightly
from store_places import OLD, MilvusPlace, milvus_place

import xcompat.stores
from xcompat.methods import RidgeModel
from xcompat.stores import Store, migration
from xcompat.stores.mapping import Mapping

pymilvus = pytest.importorskip("pymilvus")
server_manager_instance = pytest.importorskip("milvus_lite.server_manager").server_manager_instance
pytestmark = pytest.mark.usefixtures("few_searches")
N, OLD_DIM, NEW_DIM = 60, 8, 12


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
    refuses("only writes float32", migration.start, store, Mapping(model), dtype="float16")
    milvus.client.create_alias("items", "items_before")
    refuses("already has a collection 'items_before'", migration.start, store, Mapping(model))
    milvus.client.drop_alias("items_before")
    assert milvus.everything() == before
    milvus.client.create_partition("items", "second")
    refuses("would lose the partitions _default, second", migration.start, store, Mapping(model))
    assert store.record(migration.RECORD) is None
