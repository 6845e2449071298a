"""A migration in Chroma and Milvus Lite against the client's own bulk write of the same rows; a search likewise.

    python benchmarks/speed/chroma_milvus_stores.py [--items 10000] [--dim 384]

Rows that were read are mapped and written; the bare client is given the mapped vectors and the same metadata in memory, in
batches of the same size. A whole migration also reads them, and once more until nothing is lacking. A query goes through
`store.search`, and through the client's own.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import chromadb
import numpy as np
import torch
from chromadb.config import Settings
from measuring import Row, interleaved, main, medians, timed
from pymilvus import DataType, MilvusClient

import xcompat.stores
from xcompat import Fingerprint
from xcompat.methods import RidgeModel
from xcompat.models import describe_old
from xcompat.stores import migration
from xcompat.stores.mapping import Mapping

OLD = Fingerprint.from_string("old")
BATCH, QUERIES = 4_000, 200


class Chroma:
    """A folder."""

    def __init__(self, folder: Path) -> None:
        self.uri = f"chroma://{folder}?collection=items"
        self.client = chromadb.PersistentClient(folder, Settings(anonymized_telemetry=False))

    def write(self, name: str, vectors_ND: np.ndarray) -> None:
        """Make a collection, as fast as the client can."""
        made = self.client.create_collection(name, configuration={"hnsw": {"space": "cosine"}}, embedding_function=None)
        for start in range(0, len(vectors_ND), BATCH):
            numbers = range(start, min(start + BATCH, len(vectors_ND)))
            made.add([str(row) for row in numbers], vectors_ND[start : start + BATCH], [{"price": row % 10} for row in numbers])

    def asking(self, name: str) -> Callable[[np.ndarray], list[str]]:
        """Return the client's own search."""
        made = self.client.get_collection(name, embedding_function=None)
        return lambda query_D: made.query(query_embeddings=query_D[None], n_results=10, include=["distances"])["ids"][0]

    def drop(self, *names: str) -> None:
        """Delete collections."""
        for name in names:
            self.client.delete_collection(name)


class Milvus:
    """A file of Milvus Lite."""

    def __init__(self, folder: Path) -> None:
        self.uri = f"milvus://{folder / 'milvus.db'}?collection=items"
        self.client = MilvusClient(str(folder / "milvus.db"))

    def write(self, name: str, vectors_ND: np.ndarray) -> None:
        """Make a collection, as fast as the client can."""
        schema, index = self.client.create_schema(), self.client.prepare_index_params()
        schema.add_field("id", DataType.INT64, is_primary=True)
        schema.add_field("price", DataType.INT64)
        schema.add_field("vector", DataType.FLOAT_VECTOR, dim=vectors_ND.shape[1])
        index.add_index("vector", "HNSW", metric_type="COSINE", params={"M": 16, "efConstruction": 100})
        self.client.create_collection(name, schema=schema, index_params=index, consistency_level="Strong")
        for start in range(0, len(vectors_ND), BATCH):
            piece = enumerate(vectors_ND[start : start + BATCH], start)
            self.client.insert(name, [{"id": row, "price": row % 10, "vector": vector} for row, vector in piece])
        self.client.flush(name)

    def asking(self, name: str) -> Callable[[np.ndarray], list[str]]:
        """Return the client's own search."""
        asked: dict[str, Any] = {"anns_field": "vector", "limit": 10, "output_fields": ["id"]}
        return lambda query_D: [str(hit["id"]) for hit in self.client.search(name, data=[query_D], **asked)[0]]

    def drop(self, *names: str) -> None:
        """Delete collections."""
        for name in names:
            self.client.drop_collection(name)


def compare(name: str, side: Chroma | Milvus, mapping: Mapping, old_ND: np.ndarray, rounds: int) -> list[Row]:
    """Measure one database."""
    side.write("items", old_ND)
    mapped_ND = mapping(old_ND)
    with closing(xcompat.stores.open(side.uri)) as store:
        store.name_model("items", OLD)

        read = list(store.rows(BATCH))

        def ours() -> float:
            started = time.perf_counter()
            assert migration.start(store, mapping, batch=BATCH).written == len(old_ND)
            took = time.perf_counter() - started
            migration.rollback(store)
            return took

        def written() -> float:
            store.add_space("written", mapped_ND.shape[1], mapping.target[0])
            started = time.perf_counter()
            for block in read:
                store.write("written", block._replace(vectors_ND=mapping(block.vectors_ND)))
            store.index_like("written")
            took = time.perf_counter() - started
            store.drop_space("written")
            return took

        def bare() -> float:
            started = time.perf_counter()
            side.write("bare", mapped_ND)
            took = time.perf_counter() - started
            side.drop("bare")
            return took

        took = interleaved({"ours": ours, "written": written, "bare": bare}, rounds)
        ask, queries_QD = side.asking("items"), old_ND[:QUERIES]
        assert [store.search(query_D)[0][0].id for query_D in queries_QD] == [ask(query_D)[0] for query_D in queries_QD]
        asked = medians(
            {"ours": lambda: [store.search(query) for query in queries_QD], "bare": lambda: [ask(query) for query in queries_QD]},
            5 * rounds,
        )
    rows, per_query = f"{len(old_ND):,} rows of {old_ND.shape[1]} dimensions", f"{len(queries_QD)} queries, one by one"
    return [
        timed(f"rows mapped and written, {name}", "the client writes them", ">= 0.8", took["written"], took["bare"], rows),
        timed(
            f"migrate start, {name}",
            "the client writes them",
            "",
            took["ours"],
            took["bare"],
            "including reads and checks for changes",
        ),
        timed(f"store.search, {name}", "the client's search", "<= 1.05", asked["ours"], asked["bare"], per_query),
    ]


def measure(items: int = 10_000, dim: int = 384, rounds: int = 3) -> list[Row]:
    """Measure both."""
    draw = np.random.default_rng(0)
    old_ND = draw.standard_normal((items, dim)).astype(np.float32)
    old_ND /= np.linalg.norm(old_ND, axis=1, keepdims=True)
    config = RidgeModel.config_class(old=describe_old(OLD, dim), embedding_dim=dim, direction="old_to_new")
    given = torch.from_numpy(old_ND[:2000])
    mapping = Mapping(RidgeModel(config).fit([(given.flip(1), given)]).eval())
    with tempfile.TemporaryDirectory() as folder:
        made = {"Chroma": Chroma(Path(folder)), "Milvus Lite": Milvus(Path(folder))}
        rows = [row for name, side in made.items() for row in compare(name, side, mapping, old_ND, rounds)]
        for side in made.values():
            side.client.close()
    return rows


if __name__ == "__main__":
    main(measure)
