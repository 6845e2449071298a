"""Image preprocessing variants, and a search for the variant behind stored embeddings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from PIL.Image import Image
from torch import Tensor
from torchvision.transforms import InterpolationMode, v2

from xcompat.encoders.processor import Processor

NORMALISED: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "CLIP's mean and deviation": ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
    "ImageNet's mean and deviation": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "mean and deviation 0.5": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    "pixels from 0 to 1": ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
}
BETTER = 1e-4
"""Smallest improvement that counts, because some variants are equal on square images."""
SHAPES = {"squashed": None, "cropped": 1.0, "cropped to 7/8": 0.875}
"""Kept share of the resized shorter side; None for squashing."""
FILTERS = ("bicubic", "bilinear", "nearest")
BACKENDS = ("PIL", "torchvision")


@dataclass(frozen=True)
class Preparation:
    """A preprocessing variant, from image to pixels.

    Args:
        size: height and width in pixels.
        normalised: a name in :data:`NORMALISED`, or a phrase for the model's own.
        mean: pixel mean per channel, between 0 and 1.
        std: standard deviation per channel.
        shape: a name in :data:`SHAPES`.
        filter: interpolation, from :data:`FILTERS`.
        backend: library to use for resizing, from :data:`BACKENDS`.
    """

    size: tuple[int, int]
    normalised: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    shape: str = "squashed"
    filter: str = "bicubic"
    backend: str = "PIL"

    def __call__(self, images: Sequence[Image]) -> Tensor:
        """Preprocess RGB images: (B, 3, H, W) float32."""
        kept, (height, width) = SHAPES[self.shape], self.size
        edge: object = [height, width] if kept is None else round(min(self.size) / kept)
        steps = [v2.Resize(edge, interpolation=InterpolationMode(self.filter), antialias=True), v2.CenterCrop([height, width])]
        first, last = (steps, [v2.PILToTensor()]) if self.backend == "PIL" else ([v2.PILToTensor()], steps)
        prepare = v2.Compose([*first, *last, v2.ToDtype(torch.float32, scale=True), v2.Normalize(self.mean, self.std)])
        return torch.stack([prepare(image) for image in images])

    def unlike(self, other: Preparation) -> str:
        """Describe the differences from another variant.

        Example:
            >>> own = Preparation((8, 8), "own", (0.0,) * 3, (1.0,) * 3)
            >>> replace(own, filter="bilinear", shape="cropped").unlike(own)
            'cropped, not squashed; bilinear, not bicubic'
        """
        pairs = ((getattr(self, name), getattr(other, name)) for name in ("normalised", "shape", "filter", "backend"))
        return "; ".join(f"{mine}, not {theirs}" for mine, theirs in pairs if mine != theirs)


def own_preparation(processor: Processor, images: Sequence[Image]) -> Preparation:
    """Return the variant closest to a model's processor on some RGB images."""
    pixels = processor.images(images)
    known = (name for name, values in NORMALISED.items() if np.allclose(values, (processor.mean, processor.std), atol=5e-3))
    plain = Preparation(processor.image_size, next(known, "the model's own normalisation"), processor.mean, processor.std)
    ways = [plain]
    for others in FACTORS[1:]:
        ways = [way for each in ways for way in others(each)]
    return min(ways, key=lambda way: float((way(images) - pixels).abs().mean()))


FACTORS: tuple[Callable[[Preparation], list[Preparation]], ...] = (
    lambda way: [replace(way, normalised=name, mean=mean, std=std) for name, (mean, std) in NORMALISED.items()],
    lambda way: [replace(way, shape=shape) for shape in SHAPES],
    lambda way: [replace(way, filter=name) for name in FILTERS],
    lambda way: [replace(way, backend=backend) for backend in BACKENDS],
)
"""All choices of one factor each, largest effect first."""


def nearest_preparation(own: Preparation, agreement: Callable[[Preparation], float]) -> Preparation:
    """Find the variant that matches stored embeddings best, changing one factor at a time.

    Args:
        own: the model's own variant, the start.
        agreement: a variant's score; higher is better.
    """
    best, value = own, agreement(own)
    seen = {own: value}
    while True:
        before = best
        for others in FACTORS:
            for way in others(best):
                if way not in seen and (found := seen.setdefault(way, agreement(way))) > value + BETTER:
                    best, value = way, found
        if best == before:
            return best
