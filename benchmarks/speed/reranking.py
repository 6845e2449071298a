"""What re-ranking 20 hits costs beside model and search, and how fast its cache is.

    python benchmarks/speed/reranking.py --rows 10000000 --dim 64

Fills a cache with random embeddings in a temporary folder (0.3 kB per row of 64 dimensions), and measures it from another
connection. Rows are written in the order of their hashes, which is faster than random order. Prints Markdown: medians and 95th
percentiles of single queries. Then compares re-ranked searches with plain ones, and the embedding of a batch's candidates with
the bare model (CLIP B/32 with random weights). Exits with code 1 if a bound is missed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import datasets as hf
import numpy as np
from measuring import medians
from rich.console import Console
from text_embedding import CAPTIONS, clip_b32, read_captions

from xcompat.core.fingerprint import Fingerprint
from xcompat.data.schema import ID, METADATA, TEXT
from xcompat.embeddings.embed import embed_in_memory
from xcompat.models.embedder import Embedder
from xcompat.retrieval import Gallery
from xcompat.retrieval.new_embeddings import NewEmbeddings, _hash
from xcompat.retrieval.originals import Texts
from xcompat.retrieval.reranking import Reranker

CANDIDATES, REPEATS, WRITTEN_AT_ONCE = 20, 1000, 100_000
BATCH, ROUNDS = 16, 5
"""Queries whose candidates are embedded together, and rounds of this measurement."""
OPENING, LOOK_UP, ORDER = "open the cache", f"look up {CANDIDATES} ids", f"look up and order {CANDIDATES} candidates"
BOUNDS = {OPENING: 500.0, LOOK_UP: 0.2, ORDER: 1.0}
"""Largest medians, in milliseconds."""
SLOWEST_SEARCH, SLOWEST_MODEL = 1.1, 0.9
"""Largest time of a re-ranked search, as a multiple of a plain one; smallest share of the bare model's rate."""
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


def compare_searches(gallery: Gallery, rerank: Reranker, queries_QD: np.ndarray) -> tuple[float, float]:
    """Return medians of a plain search with k dot products, and of a re-ranked search with a warm cache, in milliseconds."""
    new_kD, seconds = np.ones((CANDIDATES, queries_QD.shape[-1]), np.float32), np.empty((2, len(queries_QD)))
    for number, query in enumerate(queries_QD):
        started = time.perf_counter()
        gallery.search(query, OLD, CANDIDATES)
        new_kD @ query[0]
        middle = time.perf_counter()
        gallery.search(query, OLD, CANDIDATES, rerank=rerank)
        seconds[:, number] = middle - started, time.perf_counter() - middle
    plain, reranked = 1000 * np.median(seconds, axis=1)
    return float(plain), float(reranked)


def compare_embedding(gallery: Gallery, queries_QD: np.ndarray) -> tuple[float, float]:
    """Return the texts per second of the bare model, and of re-ranking a batch of queries."""
    embedder = clip_b32()
    hits = gallery.search(queries_QD, OLD, CANDIDATES)
    ids = sorted({hit.id for found in hits for hit in found})
    texts = read_captions(CAPTIONS, len(ids), embedder)
    originals = Texts(hf.Dataset.from_dict({ID: ids, TEXT: texts, METADATA: [None] * len(ids)}))
    new_QD = np.random.default_rng(3).normal(size=(len(hits), embedder.dim))
    rerank = Reranker(embedder, originals, CANDIDATES, keep=False)
    seconds = medians(
        {"bare": lambda: embed_in_memory(embedder, texts), "re-ranked": lambda: rerank.order(new_QD, hits, gallery)}, ROUNDS
    )
    assert rerank.counts.missing == 0
    return len(ids) / seconds["bare"], len(ids) / seconds["re-ranked"]


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000, help="Embeddings in the cache.")
    parser.add_argument("--dim", type=int, default=512, help="Dimensions.")
    parser.add_argument("--items", type=int, default=100_000, help="Items in the searched gallery.")
    options = parser.parse_args()
    rows, dim, items = options.rows, options.dim, min(options.items, options.rows)
    random = np.random.default_rng(1)
    with tempfile.TemporaryDirectory() as folder:
        gallery = Gallery.create(Path(folder) / "gallery", OLD, dim=dim)
        gallery.add(random.normal(size=(items, dim)), [str(row) for row in range(items)])
        gallery.commit()
        rate = fill(gallery.path, rows, dim)
        wanted = [[str(row) for row in random.integers(0, rows, CANDIDATES)] for _ in range(REPEATS)]
        queries_QD = random.normal(size=(REPEATS, 1, dim)).astype(np.float32)
        opening = milliseconds(lambda _: NewEmbeddings(gallery.path, NEW, dim).close())
        kept, rerank = NewEmbeddings(gallery.path, NEW, dim), Cached(dim)
        hits = [gallery.search(query, OLD, CANDIDATES) for query in queries_QD]
        rerank.order(queries_QD[0], hits[0], gallery)
        measured = {
            OPENING: opening,
            LOOK_UP: milliseconds(lambda number: kept.get(wanted[number], 0)),
            ORDER: milliseconds(lambda number: rerank.order(queries_QD[number], hits[number], gallery)),
        }
        plain, reranked = compare_searches(gallery, rerank, queries_QD[: REPEATS // 5])
        bare, together = compare_embedding(gallery, queries_QD[:BATCH, 0])
        assert rerank.counts.missing == 0
    console.print(f"| {rows:,} embeddings of {dim} dimensions | median, ms | 95th percentile, ms |\n|---|---:|---:|")
    for what, (median, high) in measured.items():
        console.print(f"| {what} | {median:.2f} | {high:.2f} |")
    console.print(
        f"\nSearch of {items:,} items: {plain:.2f} ms, with re-ranking {reranked:.2f} ms ({reranked / plain:.2f} times). "
        f"Candidates of {BATCH} queries: {together:,.0f} texts embedded a second, bare model {bare:,.0f} ({together / bare:.2f})."
    )
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("numpy", "xxhash", "torch"))
    about = f"{platform.machine()}, Python {platform.python_version()}, SQLite {sqlite3.sqlite_version}, {versions}"
    console.print(f"\n{rate:,.0f} embeddings written a second in the order of their hashes; {about}")
    missed = [what for what, bound in BOUNDS.items() if measured[what][0] > bound]
    missed += ["search"] * (reranked > SLOWEST_SEARCH * plain) + ["embedding"] * (together < SLOWEST_MODEL * bare)
    sys.exit(f"missed bounds: {', '.join(missed)}" if missed else 0)


if __name__ == "__main__":
    main()
