"""Training augmentation: the changes of XBT §4.1 and SimCLR, with configurable strengths."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, model_validator

if TYPE_CHECKING:
    import torch
    from PIL import Image
    from torch import Tensor

    from xcompat.encoders.processor import Processor

_DRAWING = Lock()
"""Lock of torch's generator, which all threads share, while it is seeded for one image."""


class Augmentation(BaseModel):
    """Strengths of random image changes. Defaults enable the kinds of XBT §4.1, which gives no strengths.

    Args:
        min_scale: smallest area share of the random crop (largest 1).
        min_ratio: smallest width/height ratio of the crop; the largest is its inverse.
        horizontal_flip: probability of mirroring; off by default, as it changes text and characters.
        brightness: largest relative change.
        contrast: largest relative change.
        saturation: largest relative change.
        hue: largest change, as a share of the colour circle.
        colour_probability: probability of any change of brightness, contrast, saturation and hue.
        grayscale: probability of a grey image.
        blur: probability of a Gaussian blur with sigma 0.1 to 2 pixels, as in SimCLR.
        solarize: probability of inverted tones above the middle.
        sharpness: largest relative change, up or down.
        translation: largest shift, as a share of the side.
        rotation: largest angle in degrees.
        fill: grey value (0 to 255) of uncovered corners.

    Example:
        >>> Augmentation.none().is_none, Augmentation().is_none
        (True, False)
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    min_scale: float = Field(default=0.5, gt=0, le=1)
    min_ratio: float = Field(default=0.75, gt=0, le=1)
    horizontal_flip: float = Field(default=0.0, ge=0, le=1)
    brightness: float = Field(default=0.2, ge=0, le=1)
    contrast: float = Field(default=0.2, ge=0, le=1)
    saturation: float = Field(default=0.0, ge=0, le=1)
    hue: float = Field(default=0.0, ge=0, le=0.5)
    colour_probability: float = Field(default=1.0, ge=0, le=1)
    grayscale: float = Field(default=0.0, ge=0, le=1)
    blur: float = Field(default=0.0, ge=0, le=1)
    solarize: float = Field(default=0.0, ge=0, le=1)
    sharpness: float = Field(default=0.5, ge=0, le=1)
    translation: float = Field(default=0.05, ge=0, le=1)
    rotation: float = Field(default=10.0, ge=0, le=180)
    fill: int = Field(default=255, ge=0, le=255)

    @classmethod
    def none(cls) -> Augmentation:
        """Return the augmentation that changes nothing."""
        return cls(min_scale=1, min_ratio=1, brightness=0, contrast=0, sharpness=0, translation=0, rotation=0)

    @property
    def is_none(self) -> bool:
        """Whether nothing changes."""
        return self.model_copy(update={"fill": 255}) == Augmentation.none()

    @property
    def colours(self) -> dict[str, float]:
        """Nonzero strengths of colour jitter."""
        kinds = ("brightness", "contrast", "saturation", "hue")
        return {name: strength for name in kinds if (strength := getattr(self, name))}

    @model_validator(mode="after")
    def _colours_to_change(self) -> Augmentation:
        if self.colour_probability < 1 and not self.colours:
            raise ValueError(
                "colour_probability has no effect: brightness, contrast, saturation and hue are 0; remove colour_probability"
            )
        return self


def build_transform(
    augmentation: Augmentation,
    image_size: tuple[int, int],
    interpolation: str = "bicubic",
    scale: tuple[float, float] | None = None,
) -> Callable[[Image.Image], Tensor]:
    """Return a function from an RGB image to its augmented version in the model's size.

    All randomness comes from torch's generator.

    Args:
        augmentation: the strengths.
        image_size: height and width in pixels.
        interpolation: resampling filter of the crop, e.g. ``bicubic``.
        scale: smallest and largest area share of the crop; None to use the augmentation's.

    Returns:
        A function from an RGB PIL image to a uint8 tensor (3, H, W). The processor rescales and normalises it.

    Example:
        >>> from PIL import Image
        >>> transform = build_transform(Augmentation(), (32, 32))
        >>> tuple(transform(Image.new("RGB", (60, 80))).shape)
        (3, 32, 32)
    """
    from torchvision.transforms import InterpolationMode, v2

    size, a, filtering = list(image_size), augmentation, InterpolationMode(interpolation)
    steps: list[torch.nn.Module] = []
    if scale is not None or a.min_scale < 1 or a.min_ratio < 1:
        ratio = (a.min_ratio, 1 / a.min_ratio)
        steps.append(v2.RandomResizedCrop(size, scale=scale or (a.min_scale, 1.0), ratio=ratio, interpolation=filtering))
    else:
        steps.append(v2.Resize(size, interpolation=filtering))
    if a.horizontal_flip:
        steps.append(v2.RandomHorizontalFlip(a.horizontal_flip))
    if a.translation or a.rotation:
        shift = (a.translation, a.translation)
        steps.append(v2.RandomAffine(a.rotation, translate=shift, interpolation=InterpolationMode.BILINEAR, fill=float(a.fill)))
    if a.colours:
        jitter = v2.ColorJitter(**a.colours)
        steps.append(jitter if a.colour_probability == 1 else v2.RandomApply([jitter], a.colour_probability))
    if a.grayscale:
        steps.append(v2.RandomGrayscale(a.grayscale))
    if a.blur:
        kernel = [side // 20 * 2 + 1 for side in reversed(size)]  # odd, a tenth of the side, as in SimCLR
        steps.append(v2.RandomApply([v2.GaussianBlur(kernel, sigma=(0.1, 2.0))], a.blur))
    if a.solarize:
        steps.append(v2.RandomSolarize(threshold=128, p=a.solarize))
    if a.sharpness:
        changes = [v2.RandomAdjustSharpness(1 + a.sharpness, p=0.5), v2.RandomAdjustSharpness(1 - a.sharpness, p=0.5)]
        steps.append(v2.RandomChoice(changes))
    steps.append(v2.PILToTensor())  # last: PIL is 1.4 times faster than tensors for one image on one thread
    return v2.Compose(steps)


def augment_with_seed(transform: Callable[[Image.Image], Tensor], image: Image.Image, seed: int) -> Tensor:
    """Augment an image with a seed, identically in any thread and process. Torch's generator is restored.

    Args:
        transform: from :func:`build_transform`.
        image: RGB image.
        seed: random seed.

    Returns:
        (3, H, W) uint8.
    """
    import torch

    with _DRAWING, torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return transform(image)


class View(NamedTuple):
    """An augmented view of a data set: the same crop, flip and colours for every model and process.

    Args:
        augmentation: the strengths.
        seed: random seed.
        number: index of the view, from 0.
    """

    augmentation: Augmentation
    seed: int
    number: int

    def digest(self, images: str) -> str:
        """Identify this view of the images with the given digest."""
        strengths = self.augmentation.model_dump(exclude_defaults=True)
        return hashlib.sha256(json.dumps([images, strengths, self.seed, self.number]).encode()).hexdigest()

    def build_draw(self, processor: Processor) -> Callable[[Image.Image, str], Tensor]:
        """Return a function to draw this view of an image at a model's size.

        Args:
            processor: the model's processor. It affects the resampling, not the draws.

        Returns:
            A function from an RGB image and its id to (3, H, W) uint8.
        """
        transform = build_transform(self.augmentation, processor.image_size, processor.interpolation)

        def draw(image: Image.Image, name: str) -> Tensor:
            key = hashlib.blake2b(json.dumps([self.seed, self.number, name]).encode(), digest_size=8).digest()
            return augment_with_seed(transform, image, int.from_bytes(key) >> 1)

        return draw
