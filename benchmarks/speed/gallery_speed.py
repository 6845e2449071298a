"""What a gallery costs beside the faiss index inside it: searching and adding, and opening beside importing PyTorch.

    python benchmarks/speed/gallery_speed.py [--items 1000000] [--dim 512] [--queries 256] [--added 300000] [--rounds 11]

Both sides do the same work. Searching: faiss returns row numbers, the gallery ids and metadata. Adding, of the first 300,000:
faiss normalises, adds and writes its index; the gallery also checks every embedding, stores ids and metadata, computes checksums
and flushes to the disk.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import faiss
import numpy as np
from measuring import KEPT, Row, interleaved, main, medians, timed

from xcompat import Fingerprint
from xcompat.retrieval import Gallery

MODEL = Fingerprint.from_string("benchmark")
TOP_K = 10
BLOCK = 100_000
ROUNDS = 11  # a disk's speed is another from one second to the next, and a search may take five hundredths longer at most
OPENING = "import sys; from xcompat.retrieval import Gallery; print(len(Gallery.open(sys.argv[1])))"


def add_to_faiss(path: Path, embeds_ND: np.ndarray) -> None:
    """Normalise, add and write."""
    index = faiss.IndexFlatIP(embeds_ND.shape[1])
    for start in range(0, len(embeds_ND), BLOCK):
        block = embeds_ND[start : start + BLOCK].copy()
        faiss.normalize_L2(block)
        index.add(block)
    faiss.write_index(index, str(path))
    os.sync()


def add_to_gallery(path: Path, embeds_ND: np.ndarray, ids: list[str]) -> None:
    """Add in as many calls, and commit."""
    gallery = Gallery.create(path, MODEL, dim=embeds_ND.shape[1])
    for start in range(0, len(embeds_ND), BLOCK):
        gallery.add(embeds_ND[start : start + BLOCK], ids[start : start + BLOCK])
    gallery.commit()
    os.sync()


def adding(embeds_ND: np.ndarray, ids: list[str], folder: Path, rounds: int) -> dict[str, float]:
    """Time both, each into a folder of its own, which is removed when the time has been taken."""

    def seconds(add: Callable[[Path], None]) -> float:
        with tempfile.TemporaryDirectory(dir=folder) as place:
            started = time.perf_counter()
            add(Path(place) / "added")
            return time.perf_counter() - started

    sides = {"ours": lambda path: add_to_gallery(path, embeds_ND, ids), "faiss": lambda path: add_to_faiss(path, embeds_ND)}
    return interleaved({name: partial(seconds, add) for name, add in sides.items()}, rounds)


def searching(alone: Path, ours: Path, ids: list[str], queries_QD: np.ndarray, rounds: int) -> dict[str, float]:
    """Time both searches, which find the same."""
    index, gallery = faiss.read_index(str(alone)), Gallery.open(ours)
    unit_QD = queries_QD / np.linalg.norm(queries_QD, axis=1, keepdims=True)
    scores_QK, rows_QK = index.search(unit_QD, TOP_K)
    found = gallery.search(queries_QD, MODEL, TOP_K)
    np.testing.assert_allclose([[hit.score for hit in hits] for hits in found], scores_QK, atol=1e-5)
    same_QK = np.array([[hit.id for hit in hits] for hits in found]) == np.array(ids)[rows_QK]
    assert same_QK.mean() > 0.999, "scores that all but tie may change places, no others"
    sides = {"faiss": lambda: index.search(unit_QD, TOP_K), "ours": lambda: gallery.search(queries_QD, MODEL, TOP_K)}
    return medians(sides, rounds)


def opening(gallery: Path, items: int, rounds: int) -> dict[str, float]:
    """Time fresh processes."""
    commands = {"ours": [sys.executable, "-c", OPENING, str(gallery)], "torch": [sys.executable, "-c", "import torch"]}
    run = {name: partial(subprocess.check_output, command) for name, command in commands.items()}
    assert int(run["ours"]()) == items
    return medians(run, rounds)


def measure(items: int = 1_000_000, dim: int = 512, queries: int = 256, added: int = 300_000, rounds: int = ROUNDS) -> list[Row]:
    """Measure a gallery of one version, flat index."""
    generator = np.random.default_rng(0)
    embeds_ND = generator.standard_normal((items, dim), dtype=np.float32)
    queries_QD = generator.standard_normal((queries, dim), dtype=np.float32)
    ids = [f"photos/{row:09d}.jpg" for row in range(items)]
    KEPT.mkdir(parents=True, exist_ok=True)  # on the disk that galleries lie on, not in a temporary one of memory
    with tempfile.TemporaryDirectory(dir=KEPT) as temporary:
        alone, ours = Path(temporary) / "own.faiss", Path(temporary) / "gallery"
        add_to_faiss(alone, embeds_ND)
        add_to_gallery(ours, embeds_ND, ids)
        searched = searching(alone, ours, ids, queries_QD, rounds)
        opened = opening(ours, items, rounds)
        few_ND = embeds_ND[:added]
        wrote = adding(few_ND, ids[:added], Path(temporary), rounds)
    size = f"{items:,} x {dim}, flat"
    return [
        timed(f"gallery search, {queries} queries, {size}", "faiss alone", ">= 0.95", searched["ours"], searched["faiss"]),
        timed(f"gallery add and commit, {len(few_ND):,} x {dim}, flat", "faiss alone", ">= 0.8", wrote["ours"], wrote["faiss"]),
        timed(f"gallery opened in a fresh process, {size}", 'python -c "import torch"', "", opened["ours"], opened["torch"]),
    ]


if __name__ == "__main__":
    main(measure)
