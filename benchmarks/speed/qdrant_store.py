"""Qdrant: a migration against the client's own upload, and a search against the bare client.

    python benchmarks/speed/qdrant_store.py [--items 5000] [--dim 256]

Not run: no server at hand. The client's local mode does both sides, in a folder; it is slow by nature, so that ratios alone say
something. A migration reads each point, maps its vector by a solved line, writes the point into another collection with what is
copied beside it, and reads all again, for what others changed meanwhile; the upload writes the same new points and nothing else,
which is also what is measured of a migration by itself. Searches are of one query each, in turn.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measuring import Row, main, medians, timed
from numpy.typing import NDArray

import xcompat.stores
from xcompat import Fingerprint, RidgeConfig, RidgeModel
from xcompat.models.config import describe_old
from xcompat.stores import migration
from xcompat.stores.mapping import Mapping

OLD = Fingerprint.from_string("old")
TOP_K, QUERIES, ROUNDS = 10, 200, 3


def unit(count: int, dim: int, seed: int = 0) -> NDArray[np.float32]:
    """Return rows of length 1."""
    rows_ND = np.random.default_rng(seed).standard_normal((count, dim), np.float32)
    return rows_ND / np.linalg.norm(rows_ND, axis=1, keepdims=True)


def upload(client: Any, name: str, vectors_ND: NDArray[np.float32]) -> None:  # noqa: ANN401
    """Write points as the client is documented to."""
    from qdrant_client import models

    client.create_collection(name, models.VectorParams(size=vectors_ND.shape[1], distance=models.Distance.COSINE))
    points = (
        models.PointStruct(id=row, vector=vector_D.tolist(), payload={"price": row % 10})
        for row, vector_D in enumerate(vectors_ND)
    )
    client.upload_points(name, points, wait=True)


def in_folder(folder: Path, vectors_ND: NDArray[np.float32]) -> Any:  # noqa: ANN401
    """Fill a folder of the local mode, and open its alias as a store."""
    from qdrant_client import QdrantClient, models

    client = QdrantClient(path=str(folder))
    upload(client, "items_v1", vectors_ND)
    alias = models.CreateAlias(collection_name="items_v1", alias_name="items")
    client.update_collection_aliases([models.CreateAliasOperation(create_alias=alias)])
    client.close()
    store = xcompat.stores.open(f"qdrant://{folder}/items")
    store.name_model("items", OLD)
    return store


def measure(items: int = 5_000, dim: int = 256) -> list[Row]:
    """Measure both."""
    with tempfile.TemporaryDirectory() as folder:
        vectors_ND = unit(items, dim)
        store = in_folder(Path(folder), vectors_ND)
        rows = [*filling(store, vectors_ND), searching(store, dim)]
        store.close()
    return rows


def filling(store: Any, vectors_ND: NDArray[np.float32]) -> list[Row]:  # noqa: ANN401
    """Fill a collection by a migration, by what of it writes, and by an upload of the same points."""
    (items, dim), client = vectors_ND.shape, store.client
    model = RidgeModel(RidgeConfig(old=describe_old(OLD, dim), embedding_dim=dim, direction="old_to_new"))
    pairs = torch.from_numpy(unit(4 * dim, dim, 1)), torch.from_numpy(unit(4 * dim, dim, 2))
    mapping = Mapping(model.fit([pairs]).eval())
    mapped_ND = mapping(vectors_ND)

    def ours() -> None:
        if store.record(migration.RECORD) is not None:
            migration.rollback(store)
        migration.start(store, mapping, "items_v2")

    mapped = next(store.rows(items))._replace(vectors_ND=mapped_ND)

    def written() -> None:
        client.delete_collection("written")
        store.add_space("written", dim, OLD)
        store.write("written", mapped)

    def bare() -> None:
        client.delete_collection("bare")
        upload(client, "bare", mapped_ND)

    sides = {"ours": ours, "written": written, "bare": bare}
    for side in sides.values():
        side()
    names = ("items_v2", "written", "bare")
    held = [[point.vector for point in client.scroll(name, limit=items, with_vectors=True)[0]] for name in names]
    for found in held[:2]:
        np.testing.assert_allclose(found, held[2], atol=1e-5)
    took = medians(sides, ROUNDS)
    rates = {side: f"{items / seconds:,.0f} rows a second" for side, seconds in took.items()}
    size, against = f"{items:,} x {dim}, Qdrant's local mode", "the client's upload of the new points"
    return [
        Row(f"Store.write, {size}", against, took["bare"] / took["written"], ">= 0.8", f"{rates['written']}, {rates['bare']}"),
        Row(f"migrate start, {size}", against, took["bare"] / took["ours"], "", f"{rates['ours']}, {rates['bare']}"),
    ]


def searching(store: Any, dim: int) -> Row:  # noqa: ANN401
    """Search by the store and by the bare client, query by query in turn."""
    asked: Iterator[NDArray[np.float32]] = iter(unit(2 * QUERIES + 2, dim, 3))

    def ours(query_D: NDArray[np.float32] | None = None) -> list[str]:
        return [hit.id for hit in store.search(next(asked) if query_D is None else query_D, TOP_K)[0]]

    def bare(query_D: NDArray[np.float32] | None = None) -> list[str]:
        query = (next(asked) if query_D is None else query_D).tolist()
        return [str(hit.id) for hit in store.client.query_points("items", query, limit=TOP_K, with_payload=False).points]

    one = next(asked)
    assert ours(one) == bare(one)
    took = medians({"ours": ours, "bare": bare}, QUERIES)
    what = f"Store.search, a query on {store.count():,} x {dim}, Qdrant's local mode"
    return timed(what, "the bare client", "<= 1.05", took["ours"], took["bare"])


if __name__ == "__main__":
    main(measure)
