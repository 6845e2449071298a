"""How cost grows with a gallery, with classes, with a corpus and with processes: each size beside a tenth of it.

    python benchmarks/speed/scaling.py [--gallery 1000000] [--classes 100000] [--texts 1000000] [--plot curves.png]

A gallery of 128 dimensions, flat and in memory-mapped files: one query, and adding; --gallery 10000000 takes 12 GB
of disk. Classes: one training step of a softmax over embeddings of 128 dimensions, batches of 128. A corpus: reading it without
duplicates, in a process of its own. Processes: embedding texts by two of one thread each, beside one. The ratio is how many times
as long it takes; for ten times the work 10 is proportional.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from measuring import KEPT, ROUNDS, Row, in_fresh_process, main, medians, peak_memory
from torch import Tensor

from xcompat import Fingerprint
from xcompat.data import CorpusSource, load_texts
from xcompat.embeddings.embed import embed_texts
from xcompat.encoders.standins import save_stand_in
from xcompat.losses import ClassificationHead
from xcompat.models.embedder import load_embedder
from xcompat.retrieval import Gallery

MODEL = Fingerprint.from_string("benchmark")
DIM, BATCH, BLOCK, FEWEST = 128, 128, 100_000, {"gallery": 10_000, "classes": 100, "texts": 10_000}
TEXTS_EMBEDDED = 4096


def sizes(fewest: int, most: int) -> list[int]:
    """Return powers of ten times the fewest, up to the most."""
    found = [fewest]
    while found[-1] * 10 <= most:
        found.append(found[-1] * 10)
    return found


class Curve(NamedTuple):
    """The duration of a piece of work at several sizes.

    Args:
        what: it grows.
        unit: of the sizes.
        took: seconds by size.
        notes: what else one must know, by size.
    """

    what: str
    unit: str
    took: dict[int, float]
    notes: dict[int, str]

    def rows(self) -> list[Row]:
        """Compare each size with a tenth of it."""
        rows = []
        for size, seconds in self.took.items():
            ratio = seconds / self.took[size // 10] if size // 10 in self.took else None
            what = f"{self.what}: {size:,} {self.unit}"
            rows.append(Row(what, "a tenth of it", ratio, "", f"{seconds:.3g} s{self.notes[size]}"))
        return rows


def draw(curves: list[Curve], file: Path) -> None:
    """Draw all curves on logarithmic axes, where proportional growth is a straight line at the slope of the dashed ones."""
    figure, axes = plt.subplots(1, len(curves), figsize=(4 * len(curves), 3.2), layout="constrained")
    for axis, curve in zip(axes, curves, strict=True):
        at, seconds = list(curve.took), list(curve.took.values())
        axis.loglog(at, seconds, marker="o")
        axis.loglog(at, [seconds[-1] * size / at[-1] for size in at], linestyle="--", color="grey", linewidth=1)
        first = next(iter(curve.notes.values()))
        axis.set(title=curve.what, xlabel=curve.unit, ylabel=f"seconds{first.split(';')[0]}")
    figure.savefig(file, dpi=120)
    plt.close(figure)


def fill_galleries(most: int, rounds: int, folder: Path) -> Curve:
    """Fill galleries and search them."""
    generator = np.random.default_rng(0)
    query = generator.standard_normal((1, DIM), dtype=np.float32)
    searched, notes = {}, {}
    for size in sizes(FEWEST["gallery"], most):
        path = folder / f"gallery-{size}"
        gallery, started = Gallery.create(path, MODEL, dim=DIM), time.perf_counter()
        for start in range(0, size, BLOCK):
            count = min(BLOCK, size - start)
            gallery.add(generator.standard_normal((count, DIM), dtype=np.float32), [str(start + row) for row in range(count)])
        gallery.commit()
        added = time.perf_counter() - started
        opened = Gallery.open(path)
        opened.search(query, MODEL, 10)
        searched[size] = medians({"search": lambda opened=opened: opened.search(query, MODEL, 10)}, rounds)["search"]
        notes[size] = f" a query; added at {size / added:,.0f}/s"
        shutil.rmtree(path)
    return Curve("gallery", "embeddings", searched, notes)


def step(head: ClassificationHead, optimiser: torch.optim.Optimizer, embeds_BD: Tensor, labels_B: Tensor) -> None:
    """Train one step."""
    optimiser.zero_grad()
    head(embeds_BD, labels_B).backward()
    optimiser.step()


def widen_heads(most: int, rounds: int) -> Curve:
    """Train a head of more and more classes."""
    took, notes = {}, {}
    for size in sizes(FEWEST["classes"], most):
        head = ClassificationHead(DIM, size)
        embeds_BD = torch.randn(BATCH, DIM, requires_grad=True)
        run = partial(step, head, torch.optim.AdamW(head.parameters()), embeds_BD, torch.randint(size, (BATCH,)))
        run()
        took[size] = medians({"step": run}, rounds)["step"]
        weights = sum(parameter.numel() for parameter in head.parameters())
        notes[size] = f" a step; weights, gradients and moments {16 * weights / 2**20:,.0f} MiB"
    return Curve("softmax", "classes", took, notes)


def read_corpus(file: str) -> tuple[float, int]:
    """Return the seconds and the bytes of memory of a first reading."""
    took: list[float] = []

    def read() -> None:
        started = time.perf_counter()
        load_texts([CorpusSource(path=file)])
        took.append(time.perf_counter() - started)

    memory = peak_memory(read)
    return took[0], memory


def read_corpora(most: int, folder: Path) -> Curve:
    """Read corpora of distinct texts."""
    took, notes = {}, {}
    os.environ["HF_DATASETS_CACHE"] = str(folder / "datasets")  # of the processes that read
    for size in sizes(FEWEST["texts"], most):
        file = folder / f"{size}.txt"
        file.write_text("\n".join(f"a photo of thing number {number} in a room" for number in range(size)), encoding="utf-8")
        took[size], memory = in_fresh_process(read_corpus, str(file))
        notes[size] = f", once; {memory / 2**20:,.0f} MiB of memory"
    return Curve("corpus", "texts", took, notes)


def embed_share(rank: int, ranks: int, model: str, folder: str) -> None:
    """Embed this process's shards, and print the time of all processes."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks)}
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    embedder = load_embedder(model)
    texts = [f"thing {number}" for number in range(TEXTS_EMBEDDED)]
    dist.barrier()
    started = time.perf_counter()
    embed_texts(embedder, texts, f"{folder}/cache", "benchmark", shard_rows=256)
    if rank == 0:
        Path(folder, "seconds").write_text(str(time.perf_counter() - started))
    dist.destroy_process_group()


def share_texts(rounds: int, folder: Path) -> list[Row]:
    """Embed by one process and by two, in turn."""
    # fifteen processes would import for five seconds each what is measured in a fifth of one
    mp.get_context("forkserver").set_forkserver_preload(["xcompat.embeddings.embed", "xcompat.models.embedder"])
    model = save_stand_in(folder / "clip", "clip", 64)
    seconds: dict[int, list[float]] = {1: [], 2: []}
    for number in range(rounds):
        for ranks, took in seconds.items():
            place = folder / f"{number}-{ranks}"
            place.mkdir()
            mp.start_processes(embed_share, (ranks, model, str(place)), nprocs=ranks, start_method="forkserver")
            took.append(float((place / "seconds").read_text()))
    one, two = (float(np.median(took)) for took in seconds.values())
    detail = f"{two:.3g} s, {one:.3g} s; half is proportional"
    return [Row("embedding by 2 processes of one thread", "1 process of one thread", two / one, "", detail)]


def measure(
    gallery: int = 1_000_000,
    classes: int = 100_000,
    texts: int = 1_000_000,
    rounds: int = ROUNDS,
    plot: Path | None = None,
) -> list[Row]:
    """Measure all four."""
    KEPT.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=KEPT) as folder:
        there = Path(folder).resolve()
        curves = [fill_galleries(gallery, rounds, there), widen_heads(classes, rounds), read_corpora(texts, there)]
        shared = share_texts(rounds, there)
    if plot is not None:
        draw(curves, plot)
    return [*(row for curve in curves for row in curve.rows()), *shared]


if __name__ == "__main__":
    main(measure)
