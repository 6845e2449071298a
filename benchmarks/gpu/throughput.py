"""What one GPU reaches in each part of XBT, and whether that is what was asked: `make gpu`.

    python benchmarks/gpu/throughput.py [--tiny] [--page docs/results/gpu.md]

Samples a second, TFLOP/s and their share of a bfloat16 matrix product measured in the same run, and the memory at its highest:

- the pair stage with 1,024 pairs by the Trainer,
- φ in batches of 8,192 from an embedding cache on the disk (its logits in float32 as with `training.tf32: false`, and in TF32),
- image embedding, from tensors, and from JPEG files into a cache,
- building and searching a faiss index, on the CPU and on GPUs,
- exact rankings of 50,000 items for as many queries,
- the pair stage under FSDP2 in one process of `accelerate launch`,
- training steps of recipes/vision/oca_tiny_imagenet.yaml,
- queries whose first 20 hits are re-ranked,
- text embedding, from tokens on the card, and from strings into a cache, and compiled image embedding.

Models of the other parts have CLIP L/14's size and random weights, on which speed does not depend.

Each line goes into the page as soon as it is measured, so a run that is stopped keeps what it had; a part that fails is a
line too. It is built to end within nine minutes on an H100. With --tiny every part runs at toy size, on a CPU too, and is
written only where --page says; that it runs is all that this shows. Not run on a GPU yet: none was at hand.
"""

from __future__ import annotations

import datetime
import gc
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import typer
from embedding_parts import (
    embedder_of,
    faiss_sides,
    images,
    images_compiled,
    photos,
    product,
    ranking,
    reranking,
    strings,
    tokens,
)
from recipe_part import recipe_stage
from rich.console import Console
from setting import FULL, SMALL, Figure, Size
from training_parts import pair_stage, projection, sharded

from xcompat.core.files import atomic_path
from xcompat.core.progress import console as progress
from xcompat.core.progress import silence_libraries
from xcompat.core.provenance import provenance

PAGE = Path(__file__).resolve().parents[2] / "docs" / "results" / "gpu.md"
SECTION = re.compile(r"(<!-- gpu -->\n).*(<!-- /gpu -->)", re.DOTALL)
COLUMNS = ("what", "samples/s", "TFLOP/s", "of the product", "GiB", "asked", "")
LIMIT = 510.0
"""Seconds after which nothing is begun: with what ends a part, all takes less than nine minutes."""
NO_GPU = "benchmarks/gpu/throughput.py needs a GPU and finds none; with --tiny every part runs at toy size on a CPU"


class Part(NamedTuple):
    """Lines that are measured together.

    Args:
        what: their name, where they are not measured.
        seconds: how long they take at most, in general.
        run: yields them; it is given the lines so far.
    """

    what: str
    seconds: float
    run: Callable[[list[Figure]], Iterable[Figure]]


class Measuring:
    """All parts in their order, one after the other.

    Args:
        size: of everything.
        device: where.
    """

    def __init__(self, size: Size, device: torch.device) -> None:
        self.size, self.device = size, device
        self.started = time.perf_counter()

    @property
    def elapsed(self) -> float:
        """Seconds since the beginning."""
        return time.perf_counter() - self.started

    def parts(self) -> list[Part]:
        """Return the parts: first what is asked for, last what is not."""
        size, device = self.size, self.device
        return [
            Part("matrix product", 20, lambda _: [product(size, device)]),
            Part("pair stage", 110, lambda done: [pair_stage(size, device, done[0])]),
            Part("φ from a cache", 120, lambda _: projection(size, device)),
            Part("image embedding", 60, self._images),
            Part("faiss", 60, lambda _: faiss_sides(size, device)),
            Part("ranking", 30, lambda _: [ranking(size, device)]),
            Part("pair stage, FSDP2 on one GPU", 100, self._sharded),
            Part("oca_tiny_imagenet", 50, lambda _: [recipe_stage(size, device)]),
            Part("re-ranking", 40, self._reranking),
            Part("text embedding", 60, self._texts),
            *([Part("image embedding, compiled", 120, self._compiled)] if device.type == "cuda" else []),
        ]

    def _images(self, done: list[Figure]) -> Iterator[Figure]:
        embedder = embedder_of(self.size, self.device)
        yield (forward := images(embedder, self.device))
        yield photos(embedder, forward, self.size, self.device)

    def _texts(self, done: list[Figure]) -> Iterator[Figure]:
        embedder = embedder_of(self.size, self.device)
        yield tokens(embedder, self.size, self.device)
        yield strings(embedder, self.size, self.device)

    def _reranking(self, done: list[Figure]) -> list[Figure]:
        return [reranking(embedder_of(self.size, self.device), self.size, self.device)]

    def _compiled(self, done: list[Figure]) -> Iterator[Figure]:
        eager = next(figure for figure in done if figure.what.startswith("image embedding, from tensors"))
        yield images_compiled(embedder_of(self.size, self.device), eager, self.device)

    def _sharded(self, done: list[Figure]) -> Iterator[Figure]:
        plain = next((figure for figure in done if figure.what.startswith("pair stage") and figure.rate), None)
        yield sharded(self.size, self.device, plain, LIMIT - self.elapsed)

    def figures(self) -> Iterator[Figure]:
        """Yield each line as it is measured; a part that fails is a line, and ends no other."""
        done: list[Figure] = []
        for part in self.parts():
            if self.elapsed + part.seconds > LIMIT:
                yield Figure(part.what, note=f"not run: {self.elapsed / 60:.1f} minutes were over, and it takes up to two")
                continue
            try:
                for figure in part.run(done):
                    done.append(figure)
                    yield figure
            except Exception as error:  # whatever stops one part, the others are measured
                yield Figure(part.what, note=f"FAILED: {type(error).__name__}: {' '.join(str(error).split())[:200]}")
                if not done:
                    return  # without the product nothing has a share of it
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()


def cells(figure: Figure, peak: Figure, judged: bool) -> list[str]:
    """Return a line as text, a column each of :data:`COLUMNS`.

    Args:
        figure: the line.
        peak: that of the matrix product.
        judged: whether the size is the one for which something is asked.
    """
    rate = f"{figure.rate:,.0f}" if figure.rate else ""
    flops = f"{figure.flops / 1e12:,.2f}" if figure.flops else ""
    share = f"{figure.flops / peak.flops:.0%}" if figure.flops and peak.flops else ""
    memory = f"{figure.memory / 2**30:.1f}" if figure.memory else ""
    verdict = {True: "met", False: "NOT MET", None: ""}[figure.met] if judged else "not judged"
    asked = f"{figure.asked}: {verdict}" if figure.asked else ""
    return [figure.what, rate, flops, share, memory, asked, figure.note]


def section(figures: list[Figure], size: Size, seconds: float, under_way: bool) -> str:
    """Return what goes between the markers of the page."""
    about = provenance()
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items() if name != "xcompat")
    judged = size is FULL
    lines = [
        f"Written by `make gpu` on {datetime.date.today()}, revision {about['git_revision'] or 'no checkout'}: "
        f"{about['machine']['device']}; {seconds / 60:.1f} minutes{', under way or stopped' if under_way else ''}.",
        f"Versions: {versions}, CUDA {torch.version.cuda if torch.cuda.is_available() else 'none'}.",
        *([] if judged else ["Toy size: the numbers mean nothing."]),
        "",
        f"| {' | '.join(COLUMNS)} |",
        "|---|---:|---:|---:|---:|---|---|",
        *(f"| {' | '.join(text.replace('|', '/') for text in cells(figure, figures[0], judged))} |" for figure in figures),
    ]
    return "\n".join(lines) + "\n"


def write(page: Path, text: str) -> None:
    """Put a text between the markers of a page, which is made with nothing else where there is none."""
    before = page.read_text(encoding="utf-8") if page.exists() else "<!-- gpu -->\n<!-- /gpu -->\n"
    with atomic_path(page) as temporary:
        temporary.write_text(SECTION.sub(lambda found: f"{found[1]}{text}{found[2]}", before), encoding="utf-8")


def main(tiny: bool = False, page: Path | None = None) -> None:
    """Measure everything, print each line and write it into the page; the exit code is 1 if a part failed."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not tiny:
        raise SystemExit(NO_GPU)
    size = SMALL if tiny else FULL
    page = page or (None if tiny else PAGE)
    silence_libraries()
    progress.quiet = True
    measuring, figures, console = Measuring(size, device), list[Figure](), Console(soft_wrap=True, highlight=False)
    console.print("toy size" if tiny else f"into {page}", markup=False)
    for figure in measuring.figures():
        figures.append(figure)
        console.print("  ".join(filter(None, cells(figure, figures[0], size is FULL))), markup=False)
        if page is not None:
            write(page, section(figures, size, measuring.elapsed, under_way=True))
    if page is not None:
        write(page, section(figures, size, measuring.elapsed, under_way=False))
    sys.exit(any(figure.note.startswith("FAILED") for figure in figures))


if __name__ == "__main__":
    typer.run(main)
