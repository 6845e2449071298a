"""Chroma: what is copied, half-done renames, servers, what is refused; test_stores.py has the rest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import warm
from conftest import refuses
from store_places import OLD, ChromaPlace, chroma_place, solve_map
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
