"""What re-ranking 20 hits costs beside model and search, and how fast its cache is.

    python benchmarks/speed/reranking.py --rows 10000000 --dim 64

Fills a cache with random embeddings in a temporary folder (0.3 kB per row of 64 dimensions), and measures it from another
connection. Rows are written in the order of their hashes, which is faster than random order. Prints Markdown: medians and 95th
percentiles of single queries. Exits with code 1 if a look-up takes over 0.2 ms, or opening over 0.5 s.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from rich.console import Console

from xcompat.core.fingerprint import Fingerprint
from xcompat.models.embedder import Embedder
from xcompat.retrieval import Gallery
from xcompat.retrieval.new_embeddings import NewEmbeddings, _hash
from xcompat.retrieval.reranking import Reranker

CANDIDATES, ITEMS, REPEATS, WRITTEN_AT_ONCE = 20, 2000, 1000, 100_000
BOUNDS = 0.2, 500.0
"""Longest look-up and opening, in milliseconds."""
OLD, NEW = Fingerprint.from_string("old"), Fingerprint.from_string("new")
console = Console(soft_wrap=True, markup=False, highlight=False)


class Cached(Reranker):
    """A re-ranking whose embeddings are all in the cache, so that no model is needed."""

    def __init__(self, dim: int) -> None:
        self.width, embedder = dim, Embedder.__new__(Embedder)
        vars(embedder)["model"] = None
        super().__init__(embedder, candidates=CANDIDATES, budget=0)

    fingerprint = NEW

    @property
    def dim(self) -> int:
        """Dimension of the embeddings."""
        return self.width

    def _read_stored(self, *_: object) -> dict[str, np.ndarray]:
        return {}

    def _own_view(self, embeds_ND: np.ndarray) -> np.ndarray:
        return np.asarray(embeds_ND / np.linalg.norm(embeds_ND, axis=1, keepdims=True))


def milliseconds(work: Callable[[int], object]) -> tuple[float, float]:
    """Measure some work many times; return median and 95th percentile."""
    seconds = []
    for number in range(REPEATS):
        started = time.perf_counter()
        work(number)
        seconds.append(time.perf_counter() - started)
    return 1000 * float(np.median(seconds)), 1000 * float(np.percentile(seconds, 95))


def fill(folder: Path, rows: int, dim: int) -> float:
    """Write a cache of random rows; return the rows per second."""
    kept, random = NewEmbeddings(folder, NEW, dim), np.random.default_rng(0)
    order, started = sorted(range(rows), key=lambda row: _hash(str(row))), time.perf_counter()
    for start in range(0, rows, WRITTEN_AT_ONCE):
        part = order[start : start + WRITTEN_AT_ONCE]
        embeds = random.normal(size=(len(part), dim)).astype(np.float32)
        kept.put({str(row): embed for row, embed in zip(part, embeds, strict=True)}, 0)
    kept.close()
    return rows / (time.perf_counter() - started)


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000, help="Embeddings in the cache.")
    parser.add_argument("--dim", type=int, default=512, help="Dimensions.")
    options = parser.parse_args()
    rows, dim = options.rows, options.dim
    random = np.random.default_rng(1)
    with tempfile.TemporaryDirectory() as folder:
        gallery = Gallery.create(Path(folder) / "gallery", OLD, dim=dim)
        gallery.add(random.normal(size=(ITEMS, dim)), [str(row) for row in range(ITEMS)])
        gallery.commit()
        rate = fill(gallery.path, rows, dim)
        wanted = [[str(row) for row in random.integers(0, rows, CANDIDATES)] for _ in range(REPEATS)]
        queries_QD = random.normal(size=(REPEATS, 1, dim)).astype(np.float32)
        opening = milliseconds(lambda _: NewEmbeddings(gallery.path, NEW, dim).close())
        kept, rerank = NewEmbeddings(gallery.path, NEW, dim), Cached(dim)
        hits = [gallery.search(query, OLD, CANDIDATES) for query in queries_QD]
        rerank.order(queries_QD[0], hits[0], gallery)
        measured = {
            "open the cache": opening,
            f"look up {CANDIDATES} ids": milliseconds(lambda number: kept.get(wanted[number], 0)),
            f"look up and order {CANDIDATES} candidates": milliseconds(
                lambda number: rerank.order(queries_QD[number], hits[number], gallery)
            ),
        }
    console.print(f"| {rows:,} embeddings of {dim} dimensions | median, ms | 95th percentile, ms |\n|---|---:|---:|")
    for what, (median, high) in measured.items():
        console.print(f"| {what} | {median:.2f} | {high:.2f} |")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("numpy", "xxhash"))
    about = f"{platform.machine()}, Python {platform.python_version()}, {versions}"
    console.print(f"\n{rate:,.0f} embeddings written a second in the order of their hashes; {about}")
    look_up, limits = measured[f"look up {CANDIDATES} ids"][0], BOUNDS
    sys.exit(look_up > limits[0] or opening[0] > limits[1])


if __name__ == "__main__":
    main()
