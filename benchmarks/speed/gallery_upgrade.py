"""Mapping a stored gallery to a newer model against the bare network on tensors in memory, and how much memory it takes.

    python benchmarks/speed/gallery_upgrade.py [--items 50000] [--rounds 5] [--map fct] [--workers 0]

FCT's transformation h of 128 to 128 dimensions with random weights, or a solved linear map of that size. The gallery's side reads
stored embeddings, maps them, writes and checks new segments and commits; the bare side is the map alone, in the same batches, on
200,000 embeddings at most. Memory is what the process holds of its own (RssAnon), without pages of mapped files, which the system
takes back when it needs them. With workers, actors of Ray of one thread each map instead, which start before they are timed, and
the bare side has as many threads. Ten million embeddings: --items 10000000 --rounds 1 --map ridge (15 GB of disk).
"""

from __future__ import annotations

import contextlib
import re
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from measuring import KEPT, ROUNDS, Row, main, medians, timed
from torch import Tensor

from xcompat import FctConfig, FctModel, Fingerprint, RidgeConfig, RidgeModel
from xcompat.core.parallel import Executor, run_locally
from xcompat.core.progress import silence_libraries
from xcompat.engines.workers import Workers
from xcompat.models import CompatModel
from xcompat.models.config import describe_old
from xcompat.models.embedder import load_checkpoint
from xcompat.retrieval import Gallery

OLD = Fingerprint.from_string("old")
DIM, BATCH = 128, 8192
IN_MEMORY, BLOCK = 200_000, 100_000


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


def fct() -> FctModel:
    """Return h with random weights."""
    return FctModel(FctConfig(old=describe_old(OLD, DIM), embedding_dim=DIM))


def ridge() -> RidgeModel:
    """Return a linear map of galleries, solved from random pairs."""
    model = RidgeModel(RidgeConfig(old=describe_old(OLD, DIM), embedding_dim=DIM, direction="old_to_new"))
    new, old = torch.randn(2, 1000, DIM, generator=torch.Generator().manual_seed(0))
    return model.fit([(new, old)])


@torch.inference_mode()
def alone(model: CompatModel, embeds_ND: Tensor) -> Tensor:
    """Map what is in memory."""
    return torch.cat([model.upgrade(block_BD) for block_BD in embeds_ND.split(BATCH)])


@contextlib.contextmanager
def spread_over(workers: int, name: str, model: CompatModel) -> Iterator[Executor]:
    """Yield what spreads blocks over so many actors of Ray; over none, what maps them here."""
    with Workers("ray" if workers else None, workers or None).pool(name, model) as pool:
        yield pool or run_locally


def measure(
    items: int = 50_000,
    rounds: int = ROUNDS,
    map: Literal["fct", "ridge"] = "fct",  # noqa: A002
    workers: int = 0,
) -> list[Row]:
    """Measure an upgrade of a whole gallery."""
    silence_libraries()
    generator = np.random.default_rng(0)
    memory: list[float] = []
    KEPT.mkdir(parents=True, exist_ok=True)  # on the disk that galleries lie on, not in a temporary one of memory
    with contextlib.ExitStack() as ends:
        folder = ends.enter_context(tempfile.TemporaryDirectory(dir=KEPT))
        name = str(Path(folder).resolve() / "map")
        {"fct": fct, "ridge": ridge}[map]().eval().save_pretrained(name)
        model = load_checkpoint(name)
        spread = ends.enter_context(spread_over(workers, name, model))
        if workers:
            torch.set_num_threads(workers)
        gallery = Gallery.create(Path(folder) / "gallery", OLD, dim=DIM)
        embeds_ND = torch.empty(0, DIM)
        for start in range(0, items, BLOCK):
            block_BD = generator.standard_normal((min(BLOCK, items - start), DIM), dtype=np.float32)
            gallery.add(block_BD, [str(start + row) for row in range(len(block_BD))])
            if len(embeds_ND) < IN_MEMORY:
                embeds_ND = torch.cat([embeds_ND, torch.nn.functional.normalize(torch.from_numpy(block_BD))])
        first = gallery.commit()

        def upgrade() -> None:
            gallery.rollback(first)
            peak = Peak()
            peak.start()
            gallery.upgrade(model, batch_size=BATCH, spread=spread)
            peak.over.set()
            memory.append(peak.highest - peak.before)

        upgrade()
        check(gallery, alone(model, embeds_ND))
        took = medians({"ours": upgrade, "alone": lambda: alone(model, embeds_ND)}, rounds)
    share, note = items / len(embeds_ND), f"{items / took['ours']:,.0f} rows/s; {max(memory):,.0f} MB of its own"
    what = f"gallery upgrade, {items:,} x {DIM}" + (f", {workers} workers of Ray" if workers else "")
    return [timed(what, f"{map} alone, in memory", ">= 0.8", took["ours"], share * took["alone"], note)]


def check(gallery: Gallery, mapped_ND: Tensor) -> None:
    """Assert that the gallery holds what the map alone makes: each of some mapped rows finds itself."""
    rows = range(0, len(mapped_ND), len(mapped_ND) // 50)
    found = gallery.search(mapped_ND[rows].numpy(), gallery.versions[0], top_k=1)
    assert [hits[0].id for hits in found] == [str(row) for row in rows]
    np.testing.assert_allclose([hits[0].score for hits in found], 1, atol=1e-5)


if __name__ == "__main__":
    main(measure)
