"""Mapping a stored gallery to a newer model against the bare network on tensors in memory, and how much memory it takes.

    python benchmarks/gallery_upgrade.py [--rows 200000] [--rounds 3] [--map fct]

FCT's transformation h of 128 to 128 dimensions with random weights, or a solved linear map of that size. The gallery's side reads
stored embeddings, maps them, writes and checks new segments and commits; the bare side is the map alone, in the same batches, on
200,000 embeddings at most. Memory is what the process holds of its own (RssAnon), without pages of mapped files, which the system
takes back when it needs them. Ten million embeddings: --rows 10000000 --rounds 1 --map ridge (15 GB of disk).
"""

from __future__ import annotations

import argparse
import re
import shutil
import statistics
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import torch
from rich.console import Console

from xcompat import FctConfig, FctModel, Fingerprint, RidgeConfig, RidgeModel
from xcompat.models.config import describe_old
from xcompat.retrieval import Gallery

OLD = Fingerprint.from_string("old")
DIM, BATCH = 128, 8192
IN_MEMORY = 200_000


def own_memory() -> float:
    """Return the megabytes that belong to this process alone."""
    found = re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())
    return int(found.group(1)) / 1024 if found else 0.0


class Peak(threading.Thread):
    """Looks at the memory a hundred times a second while it lives."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.before = self.highest = own_memory()
        self.over = threading.Event()

    def run(self) -> None:
        """Look until it is over."""
        while not self.over.wait(0.01):
            self.highest = max(self.highest, own_memory())


def fct(_: np.random.Generator) -> FctModel:
    """Return h with random weights."""
    return FctModel(FctConfig(old=describe_old(OLD, DIM), embedding_dim=DIM))


def ridge(generator: np.random.Generator) -> RidgeModel:
    """Return a linear map of galleries, solved from random pairs."""
    model = RidgeModel(RidgeConfig(old=describe_old(OLD, DIM), embedding_dim=DIM, direction="old_to_new"))
    new, old = torch.from_numpy(generator.standard_normal((2, 1000, DIM), dtype=np.float32))
    return model.fit([(new, old)])


MAPS = {"fct": fct, "ridge": ridge}


def main() -> None:
    """Measure both sides in turn and print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--map", choices=MAPS, default="fct")
    options = parser.parse_args()
    generator = np.random.default_rng(0)
    model = MAPS[options.map](generator).eval()
    folder = Path(tempfile.mkdtemp(dir=Path.cwd()))
    console = Console(highlight=False)
    try:
        gallery = Gallery.create(folder / "gallery", OLD, dim=DIM)
        for start in range(0, options.rows, 100_000):
            count = min(100_000, options.rows - start)
            gallery.add(generator.standard_normal((count, DIM), dtype=np.float32), [str(start + row) for row in range(count)])
        first = gallery.commit()
        embeds = torch.from_numpy(generator.standard_normal((min(options.rows, IN_MEMORY), DIM), dtype=np.float32))
        bare, ours, memory = [], [], []
        for _ in range(options.rounds):
            started = time.perf_counter()
            with torch.inference_mode():
                for block in embeds.split(BATCH):
                    model.upgrade(block)
            bare.append(len(embeds) / (time.perf_counter() - started))
            gallery.rollback(first)
            peak = Peak()
            peak.start()
            started = time.perf_counter()
            gallery.upgrade(model, batch_size=BATCH)
            ours.append(options.rows / (time.perf_counter() - started))
            peak.over.set()
            memory.append(peak.highest - peak.before)
        rates = [statistics.median(each) for each in (bare, ours)]
        console.print(
            f"{options.rows:,} x {DIM}: {options.map} alone {rates[0]:,.0f}/s, gallery {rates[1]:,.0f}/s, "
            f"ratio {rates[1] / rates[0]:.2f}"
        )
        console.print(f"memory of its own beyond the start: {max(memory):,.0f} MB")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
