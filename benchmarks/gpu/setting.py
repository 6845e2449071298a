"""What all measurements on a GPU share: their sizes, one line of the table, and how a run is timed and its operations counted."""

from __future__ import annotations

import io
import statistics
import tarfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
import torch
from PIL import Image
from torch.utils.flop_counter import FlopCounterMode

from xcompat.data import PairSource, load_pairs
from xcompat.encoders.base import Encoder
from xcompat.encoders.processor import Processor
from xcompat.encoders.scratch import ScratchSource, encoder_from_scratch

TEXT = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
VISION = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
VISION |= {"image_size": 224, "patch_size": 14}
TOY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
TOKENS = (6, 20)  # of captions, begin and end among them
WORDS = ["a", "the", "two", "red", "blue", "old", "new", "shoe", "dog", "house", "tree", "photo", "of", "on", "in", "with"]
DISTINCT = 256  # JPEG files that differ
OLD_DIM, ROUNDS = 512, 5


class Size(NamedTuple):
    """The sizes of all measurements.

    Args:
        clip: the model's configuration.
        texts: captions that are embedded.
        photos: JPEG files that are embedded.
        cached: most texts whose embeddings lie on the disk for φ.
        projected: texts in a batch of φ.
        pairs: in a batch of the pair stage.
        mini_batch: pairs embedded at a time.
        product: rows of the matrix product.
        seconds: how long a training is timed.
        warm: steps before that, which use up what a dataloader made ahead.
        ranked: items that are ranked for as many queries.
        indexed: vectors in a faiss index.
        factory: its description.
    """

    clip: dict[str, Any]
    texts: int
    photos: int
    cached: int
    projected: int
    pairs: int
    mini_batch: int
    product: int
    seconds: float
    warm: int
    ranked: int
    indexed: int
    factory: str

    @property
    def edges(self) -> tuple[int, int]:
        """Height and width of the images in pixels."""
        edge = self.clip["vision_config"]["image_size"]
        return edge, edge


FULL = Size(
    {"model_type": "clip", "projection_dim": 768, "text_config": TEXT, "vision_config": VISION},
    65536, 16384, 2_000_000, 8192, 1024, 128, 8192, 30.0, 8, 50_000,
    500_000, "IVF1024,Flat",
)  # fmt: skip
SMALL = Size(
    {"model_type": "clip", "projection_dim": 16, "text_config": TOY, "vision_config": TOY | {"image_size": 32, "patch_size": 8}},
    64, 8, 64, 16, 8, 4, 64, 0.2, 1, 200,
    1000, "IVF16,Flat",
)  # fmt: skip


class Figure(NamedTuple):
    """One line of the table.

    Args:
        what: what ran.
        rate: samples a second; None where it did not run to its end.
        flops: floating-point operations a second; None where they were not counted.
        memory: bytes on the card at the highest; 0 without one.
        asked: what is asked of it; empty where nothing is.
        met: whether that was reached; None where it was not judged.
        note: what else one must know, such as why it did not run.
    """

    what: str
    rate: float | None = None
    flops: float | None = None
    memory: int = 0
    asked: str = ""
    met: bool | None = None
    note: str = ""


def wait_for(device: torch.device) -> None:
    """Wait until the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def peak_since(device: torch.device) -> int:
    """Return the most bytes that were allocated on the card since its count was reset; 0 without one."""
    return int(torch.cuda.max_memory_allocated()) if device.type == "cuda" else 0


def seconds_of(run: Callable[[], object], device: torch.device, rounds: int = ROUNDS) -> float:
    """Return the median time of several runs, each from an idle device to an idle device."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(rounds):
        wait_for(device)
        started = time.perf_counter()
        run()
        wait_for(device)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def operations(run: Callable[[], object]) -> int:
    """Count the floating-point operations of a run."""
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def measured(what: str, run: Callable[[], object], samples: int, device: torch.device) -> Figure:
    """Count the operations of one run, then take the median time of several."""
    run()
    counted = operations(run)
    took = seconds_of(run, device)
    return Figure(what, samples / took, counted / took, peak_since(device))


def build_encoder(size: Size) -> tuple[Encoder, Processor]:
    """Build the encoder with random weights, and a tokenizer that makes one token of every word."""
    return encoder_from_scratch(ScratchSource(model=size.clip, vocab_size=512), [" ".join(WORDS)] * 8)


def write_shard(file: Path, rows: Iterable[dict[str, bytes]]) -> None:
    """Write a webdataset shard.

    Args:
        file: the shard.
        rows: content of each sample by ending.
    """
    with tarfile.open(file, "w") as tar:
        for number, row in enumerate(rows):
            for ending, content in row.items():
                member = tarfile.TarInfo(f"{number:06d}.{ending}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


def photos_on_disk(folder: Path, count: int, captions: bool) -> datasets.Dataset:
    """Write JPEG files of the web's usual size into a shard, and read each as often as it takes for a count.

    Args:
        folder: where the shard goes.
        count: rows of the data set.
        captions: whether each photo has one.
    """
    generator = np.random.default_rng(0)
    distinct = min(DISTINCT, count)
    photos = ({"jpg": make_jpeg(generator)} for _ in range(distinct))
    texts = (" ".join(generator.choice(WORDS, TOKENS[1] - 2)).encode() for _ in range(distinct))
    rows = (photo | {"txt": text} for photo, text in zip(photos, texts, strict=True)) if captions else photos
    write_shard(folder / "photos.tar", rows)
    pairs = load_pairs(PairSource(path=f"{folder}/photos.tar", captions=captions))
    return pairs.select(np.arange(count) % distinct)


def make_jpeg(generator: np.random.Generator, size: tuple[int, int] = (500, 375)) -> bytes:
    """Return a JPEG file of a size."""
    coarse = Image.fromarray(generator.integers(0, 255, (24, 32, 3), dtype=np.uint8))
    coarse.resize(size, Image.Resampling.BICUBIC).save(buffer := io.BytesIO(), "JPEG", quality=85)
    return buffer.getvalue()
