"""Embedding images on a CPU a few at a time, in memory that is used again, against 64 at a time in memory that is new every time.

    python benchmarks/speed/freed_memory.py [--images 64] [--rounds 5]

Image towers with random weights, pixels of 224 by 224. What a C library was told holds for the rest of a process, so that each
side has a process of its own; they take turns.
"""

from __future__ import annotations

import functools
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np
import torch
from measuring import ROUNDS, Row, interleaved, main, timed

from xcompat.core.threads import keep_freed_memory
from xcompat.embeddings.embed import IMAGES_PER_BATCH, images_per_batch
from xcompat.encoders.onednn import packed_linears
from xcompat.encoders.scratch import ScratchSource, encoder_from_scratch
from xcompat.models.embedder import Embedder

TOWERS = {"CLIP B/32": "clip_vision_model", "ResNet-50": "resnet"}
EDGE = 224


@functools.cache
def embedder_of(tower: str) -> Embedder:
    """Build a tower."""
    torch.manual_seed(0)
    encoder, processor = encoder_from_scratch(ScratchSource(model={"model_type": TOWERS[tower]}))
    encoder = encoder.requires_grad_(False).eval()
    return Embedder(encoder, processor, encoder.fingerprint(processor), encoder.embedding_dim)


def embed(tower: str, images: int, ours: bool) -> tuple[float, np.ndarray]:
    """Embed images: seconds, and (N, D)."""
    if ours:
        keep_freed_memory()
    embedder = embedder_of(tower)
    size = images_per_batch(embedder.processor, embedder.device) if ours else IMAGES_PER_BATCH
    pixels_NCHW = torch.randn(images, 3, EDGE, EDGE, generator=torch.Generator().manual_seed(0))
    with packed_linears(embedder.model):
        started = time.perf_counter()
        embeds_ND = torch.cat([embedder.embed({"pixel_values": part}) for part in pixels_NCHW.split(size)]).numpy()
        return time.perf_counter() - started, embeds_ND


def measure(images: int = 64, rounds: int = ROUNDS) -> list[Row]:
    """Measure both towers."""
    few = images_per_batch(embedder_of("ResNet-50").processor, torch.device("cpu"))
    rows = []
    clean = get_context("forkserver")
    with ProcessPoolExecutor(1, clean) as mine, ProcessPoolExecutor(1, clean) as other:
        for tower in TOWERS:
            call = {
                "ours": lambda tower=tower: mine.submit(embed, tower, images, True).result(),
                "theirs": lambda tower=tower: other.submit(embed, tower, images, False).result(),
            }
            np.testing.assert_allclose(*(embeds_ND for _, embeds_ND in (run() for run in call.values())), atol=1e-4)
            took = interleaved({side: lambda run=run: run()[0] for side, run in call.items()}, rounds)
            what = f"{tower} embeds {images} images of {EDGE} pixels, {few} at a time in memory that is kept"
            rows.append(timed(what, f"{IMAGES_PER_BATCH} at a time, memory left alone", "", took["ours"], took["theirs"]))
    return rows


if __name__ == "__main__":
    main(measure)
