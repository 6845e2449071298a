"""What JPEG's draft mode would change: decoding at half the edge where that is enough, against decoding in full as xcompat does.

    python benchmarks/speed/draft_decoding.py [--images 200] [--rounds 5]

Speed: photos of Tiny-ImageNet enlarged to 1,000 by 750, as large as draft mode needs them for 224 pixels. What it changes: the
photos as they are, at 64 pixels, for MobileNet V1 x0.5 at 32, so that what is left out is what a camera saw.
"""

from __future__ import annotations

import io
import tarfile
from functools import partial
from pathlib import Path

import numpy as np
from measuring import ROUNDS, Row, main, medians, timed
from PIL import Image

from xcompat.core.progress import silence_libraries
from xcompat.encoders import EncoderSource
from xcompat.models.embedder import load_embedder

SHARED = Path(__file__).resolve().parents[3] / "shared"
SHARD = SHARED / "data" / "tiny-imagenet" / "val-0000.tar.gz"
MODEL = SHARED / "models" / "mobilenet_v1_0.5_160"
LARGE, EDGE, SMALL_EDGE = (1000, 750), 224, 32
WHAT, AGAINST = "JPEG decoded in full", "decoded in draft mode"


def decoded(jpegs: list[bytes], edge: int | None) -> list[Image.Image]:
    """Decode, in draft mode for an edge."""
    images = []
    for jpeg in jpegs:
        image = Image.open(io.BytesIO(jpeg))
        if edge is not None:
            image.draft("RGB", (edge, edge))
        images.append(image.convert("RGB"))
    return images


def measure(images: int = 200, rounds: int = ROUNDS, shard: Path = SHARD, model: Path = MODEL) -> list[Row]:
    """Measure both."""
    if not (shard.exists() and model.exists()):
        return [Row(WHAT, AGAINST, None, "", "not run: ../shared/data/tiny-imagenet or ../shared/models is not there")]
    silence_libraries()
    with tarfile.open(shard) as tar:
        members = (member for member in tar if member.name.lower().endswith((".jpg", ".jpeg")))
        jpegs = [tar.extractfile(member).read() for member, _ in zip(members, range(images), strict=False)]
    large = []
    for image in decoded(jpegs, None):
        image.resize(LARGE).save(buffer := io.BytesIO(), "JPEG", quality=85)
        large.append(buffer.getvalue())
    assert decoded(large[:1], EDGE)[0].size == (LARGE[0] // 2, LARGE[1] // 2)
    took = medians({"full": partial(decoded, large, None), "draft": partial(decoded, large, EDGE)}, rounds)

    embedder = load_embedder(EncoderSource(name=str(model), image_size=SMALL_EDGE))
    full_ND, draft_ND = (
        embedder.embed({"pixel_values": embedder.processor.images(decoded(jpegs, edge))}).numpy() for edge in (None, SMALL_EDGE)
    )
    cosines_N = np.einsum("nd,nd->n", full_ND, draft_ND)
    changed = f"cosine to the same photo's embedding: median {np.median(cosines_N):.3f}, least {cosines_N.min():.3f}"
    return [
        timed(f"{WHAT}, {images} of {LARGE[0]:,} by {LARGE[1]}", AGAINST, "", took["full"], took["draft"]),
        Row(f"embeddings of {images} photos of 64 pixels at {SMALL_EDGE}, {WHAT}", AGAINST, None, "", changed),
    ]


if __name__ == "__main__":
    main(measure)
