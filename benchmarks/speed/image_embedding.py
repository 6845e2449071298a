"""Embedding images from JPEG shards into a cache, against the encoder's own forward on tensors that are in memory already.

    python benchmarks/speed/image_embedding.py [--images 128] [--rounds 5]

CLIP B/32's image tower with random weights. The photos are the first of Tiny-ImageNet's validation shard, as they are (64 pixels)
and enlarged to 500 by 375, the size of most photos on the web, and written as JPEG again. Ours reads, decodes, resizes, embeds
and writes the cache; the other side embeds prepared tensors, with the same weights laid out for the same products.
"""

from __future__ import annotations

import io
import tarfile
import tempfile
from itertools import count
from pathlib import Path

import datasets
import numpy as np
import torch
from measuring import ROUNDS, Row, main, medians, timed

from xcompat.data import PairSource, load_pairs, open_image
from xcompat.embeddings.embed import embed_images, images_per_batch
from xcompat.encoders.onednn import packed_linears
from xcompat.encoders.scratch import ScratchSource, encoder_from_scratch
from xcompat.models.embedder import Embedder

SHARD = Path(__file__).resolve().parents[3] / "shared" / "data" / "tiny-imagenet" / "val-0000.tar.gz"
LARGE = (500, 375)
WHAT, AGAINST = "image embedding from JPEG shards", "the forward alone on tensors in memory"


def clip_b32() -> Embedder:
    """Build CLIP B/32's image tower."""
    encoder, processor = encoder_from_scratch(ScratchSource(model={"model_type": "clip_vision_model"}))
    encoder = encoder.requires_grad_(False).eval()
    return Embedder(encoder, processor, encoder.fingerprint(processor), encoder.embedding_dim)


def enlarged(photos: datasets.Dataset, folder: Path) -> datasets.Dataset:
    """Write photos in the size of the web into a shard, and read that."""
    with tarfile.open(folder / "large.tar", "w") as tar:
        for number, record in enumerate(photos):
            buffer = io.BytesIO()
            open_image(record["image"]).resize(LARGE).save(buffer, "JPEG", quality=85)
            member = tarfile.TarInfo(f"{number:06d}.jpg")
            member.size = buffer.tell()
            buffer.seek(0)
            tar.addfile(member, buffer)
    return load_pairs(PairSource(path=str(folder / "large.tar"), captions=False))


def compared(embedder: Embedder, photos: datasets.Dataset, folder: Path, rounds: int, what: str) -> Row:
    """Measure both sides on one set of photos."""
    batch = images_per_batch(embedder.processor, embedder.device)
    pixels = torch.cat([embedder.processor.images([open_image(record["image"])]) for record in photos])
    numbers = count()

    def ours() -> np.ndarray:
        return embed_images(embedder, photos, folder / f"{what}-{next(numbers)}", "benchmark")[:]

    def theirs() -> np.ndarray:
        with packed_linears(embedder.model):
            return torch.cat([embedder.embed({"pixel_values": part}) for part in pixels.split(batch)]).numpy()

    np.testing.assert_allclose(ours(), theirs(), atol=1e-3)  # caches are float16
    took = medians({"ours": ours, "theirs": theirs}, rounds)
    rate = f"{len(photos) / took['ours']:.0f} images/s"
    return timed(f"{WHAT}, {what}", AGAINST, ">= 0.95", took["ours"], took["theirs"], rate)


def measure(images: int = 128, rounds: int = ROUNDS, shard: Path = SHARD) -> list[Row]:
    """Measure small and large photos."""
    if not shard.exists():
        return [Row(WHAT, AGAINST, None, ">= 0.95", "not run: ../shared/data/tiny-imagenet is not there")]
    embedder = clip_b32()
    small = load_pairs(PairSource(path=str(shard), captions=False, limit=images))
    with tempfile.TemporaryDirectory() as folder:
        large = enlarged(small, Path(folder))
        return [
            compared(embedder, small, Path(folder), rounds, "64 pixels"),
            compared(embedder, large, Path(folder), rounds, f"{LARGE[0]} by {LARGE[1]} pixels"),
        ]


if __name__ == "__main__":
    main(measure)
