"""How long 200 searches take that visitors of a page begin at once, against the same searches in a loop without a page.

    python benchmarks/speed/serve.py [--searches 200] [--items 100000] [--dim 512]

The page runs in a process of its own, as `xcompat serve` is typed; the visitors are threads of this one, on the same cores. Each
asks a text of its own of an old and of a new model, and gets 10 hits of each as HTML. The models are tiny, so that what the page
adds is seen; the gallery is flat, and its vectors are random. All have to be answered, and what they find is what the loop finds.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from html import unescape
from pathlib import Path
from typing import NamedTuple

import httpx
import numpy as np
from measuring import ROUNDS, Row, main, medians, timed

from xcompat import XbtModel
from xcompat.encoders.standins import save_stand_in
from xcompat.models.embedder import load_embedder
from xcompat.retrieval import Gallery
from xcompat.retrieval.ranking_comparison import DEPTH, find

WORDS = ("red", "green", "wide", "old", "running", "leather", "shoe", "boot", "hat", "scarf")


class Answer(NamedTuple):
    """What a visitor got, and after how many seconds."""

    page: str
    seconds: float


def make(folder: Path, items: int, dim: int) -> tuple[Path, Path, Path]:
    """Make an old model, a new one, and a gallery of the old one."""
    old, new, gallery = folder / "old", folder / "new", folder / "gallery"
    save_stand_in(old, "clip", dim, seed=1)
    embedder = load_embedder(str(old))
    XbtModel.from_encoder(save_stand_in(folder / "encoder", "clip", dim, seed=2), old=embedder.describe_old()).export(new)
    made = Gallery.create(gallery, embedder)
    vectors = np.random.default_rng(0).standard_normal((items, dim), np.float32)
    made.add(vectors, [f"item {number}" for number in range(items)], [{"caption": f"thing number {row}"} for row in range(items)])
    made.commit()
    return old, new, gallery


@contextmanager
def served(old: Path, new: Path, gallery: Path) -> Iterator[str]:
    """Run the page, and give its address."""
    command = ["serve", gallery, "--old", old, "--model", new, "--port", "0", "--no-browser"]
    process = subprocess.Popen([sys.executable, "-m", "xcompat", *map(str, command)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield next(word for line in process.stdout for word in line.split() if word.startswith("http://"))
    finally:
        process.terminate()
        process.wait()


def visit(client: httpx.Client, text: str) -> Answer:
    """Search as the page's own scripts do."""
    started = time.perf_counter()
    while (answer := client.post("/api/search", json={"kind": "text", "text": text, "k": 10})).status_code == 503:
        time.sleep(1)
    answer.raise_for_status()
    return Answer(answer.text, time.perf_counter() - started)


def measure(searches: int = 200, items: int = 100_000, dim: int = 512, rounds: int = ROUNDS) -> list[Row]:
    """Measure both sides in turn."""
    draw = np.random.default_rng(1)
    texts = [" ".join(draw.choice(WORDS, 4)) + f" {number}" for number in range(searches)]
    with tempfile.TemporaryDirectory() as folder:
        old, new, gallery = make(Path(folder), items, dim)
        sides, opened = [load_embedder(str(each)) for each in (old, new)], Gallery.open(gallery)
        waited: list[float] = []

        def loop() -> list[list[str]]:
            return [[hit.id for side in sides for hit in find(opened, side, text, DEPTH, None)[:10]] for text in texts]

        every = httpx.Limits(max_connections=None, keepalive_expiry=1)  # the server keeps them for 5 s, and the loop takes longer
        with (
            served(old, new, gallery) as address,
            httpx.Client(base_url=address, timeout=None, limits=every) as client,
            ThreadPoolExecutor(searches) as visitors,
        ):

            def page() -> list[str]:
                answers = list(visitors.map(partial(visit, client), texts))
                waited.extend(answer.seconds for answer in answers)
                return [answer.page for answer in answers]

            for found, shown in zip(loop(), page(), strict=True):
                assert [part.split('"')[0] for part in unescape(shown).split('data-item="')[1:]] == found
            waited.clear()
            took = medians({"ours": page, "theirs": loop}, rounds)
    p50, p95 = np.percentile(waited, (50, 95))
    note = f"all answered, half within {p50:.1f} s, 95 % within {p95:.1f} s"
    what = f"{searches} searches at once on a page, old and new query, {items:,} x {dim}"
    return [timed(what, "the same in a loop, no page", "", took["ours"], took["theirs"], note)]


if __name__ == "__main__":
    main(measure)
