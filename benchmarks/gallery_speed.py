"""What a gallery costs beside the faiss index inside it: searching, adding, opening.

    python benchmarks/gallery_speed.py [--rows 1000000] [--dim 512] [--queries 256] [--rounds 5]

Both sides do the same work in interleaved rounds. Adding: faiss normalises, adds and writes its index; the gallery also checks
every embedding, stores ids and metadata, computes checksums and flushes to the disk. Searching: faiss returns row numbers, the
gallery ids and metadata.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import faiss
import numpy as np
from rich.console import Console
from rich.table import Table

from xcompat import Fingerprint
from xcompat.retrieval import Gallery

MODEL = Fingerprint.from_string("benchmark")
TOP_K = 10
BLOCK = 100_000
OPENING = """
import sys, time
started = time.perf_counter()
from xcompat.retrieval import Gallery
len(Gallery.open(sys.argv[1]))
print(time.perf_counter() - started)
"""


def seconds(run: Callable[[], object]) -> float:
    """Return how long something takes."""
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("rows", 1_000_000), ("dim", 512), ("queries", 256), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    generator = np.random.default_rng(0)
    embeds = generator.standard_normal((options.rows, options.dim), dtype=np.float32)
    queries = generator.standard_normal((options.queries, options.dim), dtype=np.float32)
    ids = [f"photos/{row:09d}.jpg" for row in range(options.rows)]
    folder = Path(tempfile.mkdtemp(dir=Path.cwd()))
    try:
        measure(folder, embeds, queries, ids, options.rounds)
    finally:
        shutil.rmtree(folder)


def measure(folder: Path, embeds: np.ndarray, queries: np.ndarray, ids: list[str], rounds: int) -> None:
    """Measure in a folder of its own."""
    table = Table(
        "", "faiss alone", "gallery", "faiss / gallery", title=f"{len(embeds):,} x {embeds.shape[1]}, {os.cpu_count()} cores"
    )

    def add_to_faiss() -> None:
        index = faiss.IndexFlatIP(embeds.shape[1])
        for start in range(0, len(embeds), BLOCK):
            block = embeds[start : start + BLOCK].copy()
            faiss.normalize_L2(block)
            index.add(block)
        faiss.write_index(index, str(folder / "own.faiss"))
        os.sync()

    def add_to_gallery() -> None:
        shutil.rmtree(folder / "gallery", ignore_errors=True)
        gallery = Gallery.create(folder / "gallery", MODEL, dim=embeds.shape[1])
        for start in range(0, len(embeds), BLOCK):
            gallery.add(embeds[start : start + BLOCK], ids[start : start + BLOCK])
        gallery.commit()
        os.sync()

    pairs = [(seconds(add_to_faiss), seconds(add_to_gallery)) for _ in range(rounds)]
    row(table, "add and write, s", pairs)
    index, gallery = faiss.read_index(str(folder / "own.faiss")), Gallery.open(folder / "gallery")
    unit = queries / np.linalg.norm(queries, axis=1, keepdims=True)
    gallery.search(queries[:1], MODEL)
    searched = [
        (seconds(lambda: index.search(unit, TOP_K)), seconds(lambda: gallery.search(queries, MODEL, TOP_K)))
        for _ in range(rounds)
    ]
    row(table, f"search {len(queries)} queries, s", searched)
    opened = [float(subprocess.check_output([sys.executable, "-c", OPENING, str(gallery.path)])) for _ in range(rounds)]
    table.add_row("open in a fresh process, imports counted, s", "", f"{statistics.median(opened):.2f}", "")
    Console().print(table)


def row(table: Table, name: str, pairs: list[tuple[float, float]]) -> None:
    """Add the medians of both sides."""
    alone, ours = (statistics.median(each) for each in zip(*pairs, strict=True))
    table.add_row(name, f"{alone:.2f}", f"{ours:.2f}", f"{alone / ours:.2f}")


if __name__ == "__main__":
    main()
