"""Qdrant collections migrated in place: names, kills at every request, services that write meanwhile, and what is refused."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from schedule import mostly_nightly
from store_places import OLD, QdrantPlace, QdrantVectorsPlace, qdrant_place, qdrant_server_place
from test_stores import kill_when_empty, run_verb, said

import xcompat.stores
from xcompat import XcompatError
from xcompat.methods import RidgeModel
from xcompat.stores import Store, migration
from xcompat.stores.mapping import Mapping

qdrant_client = pytest.importorskip("qdrant_client")
from qdrant_client import models  # noqa: E402
from qdrant_server import Server, served  # noqa: E402

pytestmark = pytest.mark.usefixtures("few_searches")
N, OLD_DIM, NEW_DIM = 60, 8, 12
COSINE = models.Distance.COSINE
WRITES = ("update_vectors", "create_vector_name", "update_collection", "delete_vector_name")
"""Requests that change something."""


@pytest.fixture(scope="module")
def mapping(model: RidgeModel) -> Mapping:
    return Mapping(model)


@pytest.fixture
def shop(vectors: np.ndarray) -> Iterator[Server]:
    """A server with two named vectors and prices in ``items_v1``, without an alias."""
    with served() as server:
        fill(server, vectors)
        yield server


def fill(server: Server, vectors: np.ndarray, **settings: Any) -> None:
    client = server.client
    title = models.VectorParams(size=3, distance=models.Distance.DOT)
    image = models.VectorParams(size=OLD_DIM, distance=COSINE, **settings)
    client.delete_collection("items_v1")
    qdrant_client.QdrantClient(port=server.port, check_compatibility=False).create_collection(
        "items_v1", {"image": image, "title": title}, metadata={"owner": "shop"}
    )
    client.upsert(
        "items_v1", [point(row, image=vector.tolist(), title=[row, 0.5, -1.0]) for row, vector in enumerate(vectors[:N])]
    )


def point(item: int, **named: Any) -> models.PointStruct:
    return models.PointStruct(id=item, vector=named, payload={"price": item % 10})


def address(server: Server, **options: str) -> str:
    given = {"vector": "image", "in_place": "true", **options}
    return f"qdrant://127.0.0.1:{server.port}/items_v1?" + "&".join(f"{key}={value}" for key, value in given.items() if value)


def opened(server: Server, **options: str) -> Store:
    store = xcompat.stores.open(address(server, **options))
    store.name_model(store.space, OLD)
    return store


def held(server: Server) -> dict[Any, Any]:
    """Return what services put beside the vector that is migrated."""
    points = server.client.scroll("items_v1", limit=1000, with_vectors=["title"])[0]
    return {each.id: (each.payload, each.vector) for each in points}


def names(server: Server) -> list[str]:
    return sorted(server.client.get_collection("items_v1").config.params.vectors)


def metadata(server: Server) -> set[str]:
    return set(server.client.get_collection("items_v1").config.metadata)


def test_the_commands_migrate_a_vector_beside_the_old_one(
    shop: Server, vectors: np.ndarray, model: RidgeModel, tmp_path: Path
) -> None:
    """Both are searched by their names until finish; after start, the address need not say that it is in place."""
    model.save_pretrained(tmp_path / "map")
    before, mapping, uri, plain = held(shop), Mapping(model), address(shop), address(shop, in_place="")
    opened(shop)
    using = ["--model", str(tmp_path / "map")]
    assert "your services must change image to the new name (using=)" in said("migrate", "plan", uri, *using)
    assert f"{N} rows written" in said("migrate", "start", uri, *using, "--into", "image_l14")
    assert names(shop) == ["image", "image_l14", "title", "xcompat_state"] and held(shop) == before
    found = json.loads(said("migrate", "status", address(shop, in_place="", vector=""), "--json"))
    assert (found["space"], found["into"], found["state"], found["missing"]) == ("image", "image_l14", "filling", 0)
    found = json.loads(said("migrate", "verify", plain, *using, "--json"))
    assert found["passed"] and found["overlap"] is not None
    for name, queries in (("image", vectors), ("image_l14", mapping(vectors))):
        assert shop.client.query_points("items_v1", queries[7].tolist(), using=name).points[0].id == 7
    for is_last in (False, True):
        line = said("migrate", "switch", plain, *using)
        assert "image_l14 in" in line and "has the new vectors, image the old ones" in line
        assert "your services must use the name image_l14 now: image is not renamed" in line
        store = xcompat.stores.open(address(shop, vector="image_l14"))
        assert store.describe()["spaces"] == {"image": NEW_DIM, "image_before": OLD_DIM}
        assert store.find(mapping(vectors[7:8]), model, 1)[0][0].id == "7"
        if not is_last:
            assert "image has the old vectors again" in said("migrate", "rollback", plain)
            assert xcompat.stores.open(plain).find(vectors[7:8], OLD, 1)[0][0].id == "7"
    assert "confirm with --yes" in said("migrate", "finish", plain, code=1) and "image" in names(shop)
    line = said("migrate", "finish", plain, "--yes")
    assert "deleted image from qdrant://" in line and line.endswith("name image_l14 in its address from now on")
    assert names(shop) == ["image_l14", "title"] and held(shop) == before and metadata(shop) == {"owner", "xcompat_model"}
    assert store.find(mapping(vectors[7:8]), model, 1)[0][0].id == "7", "a store that was open before finish"
    assert xcompat.stores.open(address(shop, vector="image_l14")).describe()["fingerprint"] == mapping.target[0].digest
    with pytest.raises(XcompatError, match="'image' is not one of them; did you mean 'image_l14'"):
        xcompat.stores.open(plain)


@pytest.mark.parametrize("kind", mostly_nightly(["folder", "server"], "folder".__eq__))
def test_every_request_can_be_the_last_before_a_kill(
    vectors: np.ndarray, mapping: Mapping, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The same command is run again, and nothing of ours is left in the end; those after it are killed at their first request."""
    for at in itertools.count():
        left = iter(range(at))
        with (
            qdrant_place(tmp_path / str(at), QdrantVectorsPlace)
            if kind == "folder"
            else qdrant_server_place(QdrantVectorsPlace) as place
        ):
            place.fill(vectors[:5])
            place.open().name_model("embedding", OLD)
            for verb in ("start", "verify", "switch", "rollback", "switch", "finish"):
                try:
                    with monkeypatch.context() as patched:
                        store: Any = place.open()
                        for name in WRITES:
                            patched.setattr(store.client, name, kill_when_empty(getattr(store.client, name), left))
                        run_verb(verb, store, mapping)
                except KeyboardInterrupt:
                    run_verb(verb, place.open(), mapping)
            assert place.open().describe()["spaces"] == {"embedding_new": NEW_DIM}
            np.testing.assert_allclose(list(place.vectors("embedding_new").values()), mapping(vectors[:5]), atol=1e-5)
            with place.client() as client:
                assert set(client.get_collection("items").config.metadata) == {"xcompat_model"}
            assert place.names() == ["items = items_v1", "items_v1", "embedding_new"]
            place.close()
        if next(left, None) is not None:  # it was not killed
            break
    assert at > 20


def test_what_services_write_meanwhile_is_missing_and_then_filled(shop: Server, vectors: np.ndarray, mapping: Mapping) -> None:
    store, client = opened(shop), shop.client
    migration.start(store, mapping)
    changed = {100: vectors[1], 3: vectors[2], 4: vectors[3], 5: vectors[4]}
    client.upsert("items_v1", [point(item, image=changed[item].tolist(), title=[0, 0, 1]) for item in (100, 3)])
    client.update_vectors("items_v1", [models.PointVectors(id=4, vector={"image": changed[4].tolist()})])
    whole = client.retrieve("items_v1", [5], with_vectors=True)[0]
    client.upsert("items_v1", [models.PointStruct(id=5, vector={**whole.vector, "image": changed[5].tolist()}, payload={})])
    client.upsert("items_v1", [point(6, image=vectors[6].tolist())])  # unchanged, but without the new vector
    client.overwrite_payload("items_v1", {"price": 99}, [7])
    client.delete("items_v1", [8])
    checked = migration.verify(store, mapping, queries=N)
    assert checked.passed and (checked.rows, checked.missing, checked.wrong) == (N, 5, 0) and checked.compared == N - 5
    assert migration.status(store)[1] == 5
    migration.switch(store, mapping)
    found = {each.id: each.vector["image_new"] for each in client.scroll("items_v1", limit=1000, with_vectors=True)[0]}
    expected = {**dict(enumerate(vectors[:N])), **changed}
    del expected[8]
    assert found.keys() == expected.keys()
    np.testing.assert_allclose(np.array([found[item] for item in expected]), mapping(np.stack([*expected.values()])), atol=1e-5)
    new = mapping(vectors[50:52])
    client.upsert("items_v1", [point(3, image_new=new[0].tolist())])
    client.update_vectors("items_v1", [models.PointVectors(id=4, vector={"image_new": new[1].tolist()})])
    assert migration.status(store)[1] == 0, "services' new vectors are newer than mapped ones"
    client.upsert("items_v1", [point(9, image=vectors[52].tolist())])  # by a service that has still the old name
    assert migration.status(store)[1] == 1
    assert migration.rollback(store)[1] == 1, "the old vector of 3 is gone, and that of 4 is the one before"
    migration.switch(store, mapping)
    found = {each.id: each.vector["image_new"] for each in client.scroll("items_v1", limit=1000, with_vectors=True)[0]}
    np.testing.assert_allclose([found[3], found[4], found[9]], [*new, mapping(vectors[52:53])[0]], atol=1e-5)


def test_points_deleted_before_they_are_written_do_not_stop_the_others(
    shop: Server, vectors: np.ndarray, mapping: Mapping, monkeypatch: pytest.MonkeyPatch
) -> None:
    store: Any = opened(shop)
    write, steps = store.client.update_vectors, iter(range(100))

    def disturbed(*args: Any, **options: Any) -> Any:
        if next(steps) == 0:
            shop.client.delete("items_v1", [2, 40])
            shop.client.upsert("items_v1", [point(3, title=[0, 0, 1])])
        return write(*args, **options)

    monkeypatch.setattr(store.client, "update_vectors", disturbed)
    assert migration.start(store, mapping).written == N - 2
    assert migration.verify(store, mapping).passed and store.count("image_new") == N - 3 == store.count("image")


def test_settings_are_those_of_the_old_vector(shop: Server, vectors: np.ndarray, mapping: Mapping) -> None:
    graph = models.HnswConfigDiff(m=8, ef_construct=64)
    small = models.ScalarQuantization(scalar=models.ScalarQuantizationConfig(type=models.ScalarType.INT8, quantile=0.99))
    shop.vectors["items_v1", "image"] = json.loads(
        models.VectorParamsDiff(hnsw_config=graph, quantization_config=small, on_disk=True).model_dump_json(exclude_none=True)
    )
    store: Any = opened(shop)
    migration.start(store, mapping, dtype="float16")
    made = store.client.get_collection("items_v1").config.params.vectors
    assert made["image_new"] == made["image"].model_copy(update={"size": NEW_DIM, "datatype": models.Datatype.FLOAT16})
    assert (made["xcompat_state"].datatype, made["xcompat_state"].hnsw_config.m) == (models.Datatype.UINT8, 0)
    assert migration.verify(store, mapping).passed


def test_another_vector_is_searched_meanwhile_but_not_migrated(shop: Server, vectors: np.ndarray, mapping: Mapping) -> None:
    store = opened(shop)
    migration.start(store, mapping)
    other = xcompat.stores.open(address(shop, vector="title", in_place=""))
    assert other.describe()["spaces"] == {"title": 3} and other.search(np.eye(3)[:1], 1)[0][0].id == str(N - 1)
    begun = store.record(migration.RECORD)
    assert begun is not None and other.record(migration.RECORD) is None
    with pytest.raises(XcompatError, match="has no migration"):
        migration.rollback(other)
    with pytest.raises(XcompatError, match="the vector image of .* is already being migrated in place; run .* with vector=image"):
        other.set_record(migration.RECORD, {**begun, "space": "title"})
    assert store.record(migration.RECORD) == begun


def test_what_cannot_be_migrated_in_place_is_refused_in_one_line(shop: Server, vectors: np.ndarray, mapping: Mapping) -> None:
    def refused(match: str, into: str | None = None, **options: str) -> None:
        before = shop.client.get_collection("items_v1").config, held(shop)
        with pytest.raises(XcompatError, match=match) as refusal:
            migration.start(opened(shop, **options), mapping, into)
        assert "\n" not in str(refusal.value)
        after = shop.client.get_collection("items_v1").config, held(shop)
        after[0].metadata.pop("xcompat_model", None)
        before[0].metadata.pop("xcompat_model", None)
        assert before == after

    refused("in_place=yes is unknown; use in_place=true, or remove it", in_place="yes")
    refused("create an alias .*, or migrate in place with in_place=true", in_place="")
    refused("already has a vector 'title'; choose another name", into="title")
    refused("already has a vector 'image_before'; choose another name", into="image_before")
    shop.version = "1.17.3"
    refused("is Qdrant 1.17.3, which cannot add vectors to collections; use 1.18 or later, or remove in_place=")
    shop.version = "1.20.0"
    shop.made["items_v1"]["sharding_method"] = "custom"
    refused("has custom shard keys")
    del shop.made["items_v1"]["sharding_method"]
    state = models.DenseVectorConfig(size=2, distance=COSINE)
    shop.client.create_vector_name("items_v1", "xcompat_state", models.DenseVectorNameConfig(dense=state))
    refused("already has a vector 'xcompat_state'; choose another name or delete it")


def test_unnamed_vectors_and_other_migrations_need_a_second_collection(
    vectors: np.ndarray, mapping: Mapping, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served() as server:
        QdrantPlace("", server.client).fill(vectors)
        uri = f"qdrant://127.0.0.1:{server.port}/items"
        with pytest.raises(XcompatError, match="has an unnamed vector, .*; remove in_place= to migrate into a second collection"):
            xcompat.stores.open(f"{uri}?in_place=true")
        store = xcompat.stores.open(uri)
        store.name_model(store.space, OLD)
        migration.start(store, mapping, "items_v2")
        for _ in range(2):
            with pytest.raises(XcompatError, match="already being migrated into a second collection; remove in_place="):
                xcompat.stores.open(f"{uri}?in_place=true")
            if migration.status(store)[0].state == "filling":
                migration.switch(store, mapping)
