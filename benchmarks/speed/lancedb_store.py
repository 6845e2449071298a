"""A migration and a search in LanceDB by xcompat's store against the bare client's own writes and queries.

    python benchmarks/speed/lancedb_store.py [--rows 50000] [--dim 512] [--batch 10000] [--rounds 5]

The table lies on the disk that runs/ is on. The map is linear and solved. Both sides write the same vectors into an empty
column, in the same blocks, by one `merge_insert` each. Ours also reads the old vectors, maps and hashes them, keeps its records,
and reads the table once more to see that nothing is left. A table made of the mapped vectors is what LanceDB writes fastest, and
nothing a service could go on with. A query goes through `Store.search` and `table.search`, over all vectors, without index.
"""

from __future__ import annotations

import tempfile
import time
from datetime import timedelta
from itertools import count
from typing import Any

import lancedb
import numpy as np
import pyarrow as pa
import torch
from measuring import KEPT, ROUNDS, Row, interleaved, main, medians, timed
from numpy.typing import NDArray

import xcompat.stores
from xcompat import Fingerprint, RidgeConfig, RidgeModel
from xcompat.models.config import describe_old
from xcompat.stores import migration
from xcompat.stores.mapping import Mapping

OLD = Fingerprint.from_string("old")
QUERIES, TOP_K = 20, 10


def ridge(dim: int) -> Mapping:
    """Return a linear map, solved from random pairs."""
    model = RidgeModel(RidgeConfig(old=describe_old(OLD, dim), embedding_dim=dim, direction="old_to_new"))
    new, old = torch.nn.functional.normalize(torch.randn(2, 2000, dim, generator=torch.Generator().manual_seed(0)), dim=2)
    return Mapping(model.fit([(new, old)]).eval())


def fixed_size(vectors_ND: NDArray[np.float32]) -> Any:  # noqa: ANN401
    """Return vectors as Arrow's lists of one length."""
    return pa.FixedSizeListArray.from_arrays(pa.array(vectors_ND.reshape(-1)), vectors_ND.shape[1])


def measure(rows: int = 50_000, dim: int = 512, batch: int = 10_000, rounds: int = ROUNDS) -> list[Row]:
    """Measure filling a new column, and searching one."""
    mapping, names = ridge(dim), count()
    vectors = np.random.default_rng(0).standard_normal((rows, dim), np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    mapped = np.concatenate([mapping(block) for block in np.array_split(vectors, max(rows // batch, 1))])
    KEPT.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=KEPT.resolve()) as folder:
        database = lancedb.connect(folder, read_consistency_interval=timedelta(0))

        def fresh() -> tuple[str, Any]:
            """Make a table."""
            name = f"items{next(names)}"
            made = {"id": np.arange(rows), "price": np.arange(rows) % 10, "vector": fixed_size(vectors)}
            return name, database.create_table(name, pa.table(made))

        def ours() -> float:
            name, _ = fresh()
            store = xcompat.stores.open(f"lancedb://{folder}?table={name}")
            store.name_model("vector", OLD)
            started = time.perf_counter()
            migration.start(store, mapping, batch=batch)
            return time.perf_counter() - started

        def merged() -> float:
            _, table = fresh()
            started = time.perf_counter()
            table.add_columns([pa.field("vector_new", pa.list_(pa.float32(), dim))])
            for first in range(0, rows, batch):
                block = slice(first, first + batch)
                given = pa.table({"id": np.arange(rows)[block], "vector_new": fixed_size(mapped[block])})
                table.merge_insert("id").when_matched_update_all().execute(given)
            return time.perf_counter() - started

        def added() -> float:
            started = time.perf_counter()
            made = pa.table({"id": np.arange(rows), "vector": fixed_size(mapped)})
            database.create_table(f"items{next(names)}", made)
            return time.perf_counter() - started

        took = interleaved({"ours": ours, "merged": merged, "added": added}, rounds)
        name, table = fresh()
        asked = searches(f"lancedb://{folder}?table={name}", table, vectors[:QUERIES] + 0.05, rounds)
    what, note = f"migration in LanceDB, {rows:,} x {dim}, blocks of {batch:,}", f"{rows / took['ours']:,.0f} rows a second"
    return [
        timed(what, "merge_insert of the mapped vectors", ">= 0.8", took["ours"], took["merged"], note),
        timed(what, "create_table of the mapped vectors", "", took["ours"], took["added"]),
        timed(f"a search in LanceDB, {rows:,} x {dim}", "table.search", "<= 1.05", asked["ours"], asked["bare"]),
    ]


def searches(uri: str, table: Any, queries_QD: NDArray[np.float32], rounds: int) -> dict[str, float]:  # noqa: ANN401
    """Time one query after the other on both sides, which find the same."""
    store = xcompat.stores.open(uri)

    def bare() -> list[list[int]]:
        return [
            table.search(query_D, vector_column_name="vector")
            .distance_type("cosine")
            .limit(TOP_K)
            .select(["id", "_distance"])
            .to_arrow()["id"]
            .to_pylist()
            for query_D in queries_QD
        ]

    def ours() -> list[list[int]]:
        return [[int(hit.id) for hit in store.search(query_D, TOP_K)[0]] for query_D in queries_QD]

    assert ours() == bare()
    return {name: seconds / len(queries_QD) for name, seconds in medians({"ours": ours, "bare": bare}, rounds).items()}


if __name__ == "__main__":
    main(measure)
