"""What re-ranking 20 hits costs beside model and search, and how fast its cache is.

    python benchmarks/speed/reranking.py --rows 1000000

Fills a cache with random embeddings of 512 dimensions in a temporary folder (2.3 kB per row), and measures it from another
connection. Prints Markdown: medians and 95th percentiles of single queries.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from rich.console import Console

from xcompat.core.fingerprint import Fingerprint
from xcompat.models.embedder import Embedder
from xcompat.retrieval import Gallery
from xcompat.retrieval.new_embeddings import NewEmbeddings
from xcompat.retrieval.reranking import Reranker

DIM, CANDIDATES, ITEMS, REPEATS, WRITTEN_AT_ONCE = 512, 20, 2000, 300, 10_000
OLD, NEW = Fingerprint.from_string("old"), Fingerprint.from_string("new")
console = Console(soft_wrap=True, markup=False, highlight=False)


class Cached(Reranker):
    """A re-ranking whose embeddings are all in the cache, so that no model is needed."""

    def __init__(self) -> None:
        super().__init__(Embedder.__new__(Embedder), candidates=CANDIDATES, budget=0)

    fingerprint = NEW
    dim = DIM

    def _stored(self, *_: object) -> dict[str, np.ndarray]:
        return {}

    def _own_view(self, embeds_ND: np.ndarray) -> np.ndarray:
        return np.asarray(embeds_ND / np.linalg.norm(embeds_ND, axis=1, keepdims=True))


def milliseconds(work: Callable[[int], object]) -> str:
    """Measure some work many times; return median and 95th percentile."""
    seconds = []
    for number in range(REPEATS):
        started = time.perf_counter()
        work(number)
        seconds.append(time.perf_counter() - started)
    return f"{1000 * np.median(seconds):.2f} | {1000 * np.percentile(seconds, 95):.2f}"


def fill(folder: Path, rows: int) -> float:
    """Write a cache of random rows; return the rows per second."""
    kept, random, started = NewEmbeddings(folder, NEW, DIM), np.random.default_rng(0), time.perf_counter()
    for start in range(0, rows, WRITTEN_AT_ONCE):
        embeds = random.normal(size=(min(WRITTEN_AT_ONCE, rows - start), DIM)).astype(np.float32)
        kept.put({str(start + row): embed for row, embed in enumerate(embeds)}, 0)
    kept.close()
    return rows / (time.perf_counter() - started)


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000, help="Embeddings in the cache.")
    rows = parser.parse_args().rows
    random = np.random.default_rng(1)
    with tempfile.TemporaryDirectory() as folder:
        gallery = Gallery.create(Path(folder) / "gallery", OLD, dim=DIM)
        gallery.add(random.normal(size=(ITEMS, DIM)), [str(row) for row in range(ITEMS)])
        gallery.commit()
        rate = fill(gallery.path, rows)
        wanted = [[str(row) for row in random.integers(0, rows, CANDIDATES)] for _ in range(REPEATS)]
        queries_QD = random.normal(size=(REPEATS, 1, DIM)).astype(np.float32)
        opening = milliseconds(lambda _: NewEmbeddings(gallery.path, NEW, DIM).close())
        kept, rerank = NewEmbeddings(gallery.path, NEW, DIM), Cached()
        hits = [gallery.search(query, OLD, CANDIDATES) for query in queries_QD]
        rerank.order(queries_QD[0], hits[0], gallery)
        console.print(f"| {rows:,} embeddings of {DIM} dimensions | median, ms | 95th percentile, ms |\n|---|---:|---:|")
        console.print(f"| open the cache | {opening} |")
        console.print(f"| look up {CANDIDATES} ids | {milliseconds(lambda number: kept.get(wanted[number], 0))} |")
        again = milliseconds(lambda number: rerank.order(queries_QD[number], hits[number], gallery))
        console.print(f"| look up and order {CANDIDATES} candidates | {again} |")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("numpy", "xxhash"))
    console.print(
        f"\n{rate:,.0f} embeddings written a second; {platform.machine()}, Python {platform.python_version()}, {versions}"
    )


if __name__ == "__main__":
    main()
