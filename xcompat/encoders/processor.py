"""Image and text preprocessing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL.Image import Image
from torch import Tensor
from transformers import BatchFeature

from xcompat.core.errors import XcompatError
from xcompat.core.orientation import ORIENTATION, turn_upright
from xcompat.core.surrogates import replace_surrogates
from xcompat.encoders.build_limits import MOST_TOKENS, check_image_size


@dataclass
class Processor(ABC):
    """An encoder's preprocessing, with a subclass per library.

    Args:
        image_size: input height and width in pixels; (0, 0) without image tower.
        mean: per-channel mean to subtract from pixels in [0, 1].
        std: per-channel standard deviation to divide by.
        interpolation: resampling filter, e.g. ``"bicubic"``.
        max_length: maximum tokens per text; 0 without text tower.
        pad_to_max_length: whether the model reads the padding (SigLIP).
        masks_padding: whether the model needs an attention mask. Causal towers (CLIP) do not, and are faster without.
        pad_token_id: padding token.
        count_truncated: number of truncated texts so far.
    """

    image_size: tuple[int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str
    max_length: int
    pad_to_max_length: bool
    masks_padding: bool
    pad_token_id: int
    count_truncated: int = 0

    def __post_init__(self) -> None:
        """Raise if images or padded texts would be unreasonably large."""
        check_image_size({"image_size": self.image_size})
        if self.pad_to_max_length and self.max_length > MOST_TOKENS:
            raise XcompatError(f"texts would be padded to {self.max_length:,} tokens; download the model again")

    def __call__(
        self, images: Image | Sequence[Image] | None = None, text: str | Sequence[str] | None = None, return_tensors: str = "pt"
    ) -> BatchFeature:
        """Preprocess images, texts or both as in transformers: ``model(**processor(images=..., text=...))``.

        Args:
            images: an image, or B images.
            text: a text, or B texts.
            return_tensors: must be ``pt``.

        Returns:
            ``pixel_values`` (B, C, H, W) float32, and the output of :meth:`pad`.
        """
        if images is None and text is None:
            raise XcompatError("nothing to preprocess; pass images, text, or both")
        if return_tensors != "pt":
            raise XcompatError(f"return_tensors is {return_tensors!r}; use 'pt', the only supported type")
        batch: dict[str, Tensor] = {}
        if images is not None:
            batch["pixel_values"] = self.images(images)
        if text is not None:
            batch |= self.texts(text)
        return BatchFeature(batch)

    def images(self, images: Image | Sequence[Image]) -> Tensor:
        """Return ``pixel_values`` (B, C, H, W) float32 for an image or B images, turned upright by their EXIF orientation."""
        self.require_images()
        return self.pixels([turn_upright(image) for image in ([images] if isinstance(images, Image) else images)])

    def require_images(self) -> None:
        """Raise if there is no image tower."""
        if self.image_size == (0, 0):
            raise XcompatError("a text encoder has no image tower; to embed images, choose an image-text model (CLIP, SigLIP)")

    @abstractmethod
    def pixels(self, images: list[Image]) -> Tensor:
        """Preprocess B upright images for :meth:`images`."""

    @abstractmethod
    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """Return token ids per text, truncated to ``max_length``, without padding."""

    @abstractmethod
    def save_pretrained(self, folder: str | Path) -> None:
        """Write the files for :func:`xcompat.encoders.load_processor`."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return all settings that change pixels or tokens, to use in fingerprints."""

    def describe_all(self) -> dict[str, object]:
        """Return :meth:`describe` and the image orientation, to use in cache keys.

        The orientation is not part of fingerprints, because the embedding space does not depend on it.
        """
        return self.describe() | ({"orientation": ORIENTATION} if self.image_size != (0, 0) else {})

    def for_queries(self) -> Processor:
        """Return the query processor: itself, unless queries and passages have different prompts."""
        return self

    def to_pixels(self, pixels_BCHW: Tensor) -> Tensor:
        """Normalise augmented uint8 RGB images in the right size."""
        mean, std = (torch.tensor(each, device=pixels_BCHW.device).view(-1, 1, 1) for each in (self.mean, self.std))
        return pixels_BCHW.to(torch.float32).div_(255).sub_(mean).div_(std)

    def pad(self, token_ids: Sequence[Sequence[int]]) -> dict[str, Tensor]:
        """Stack B token lists from :meth:`tokenize` into a batch.

        Returns:
            ``input_ids`` (B, L) int64, and ``attention_mask`` (B, L) int64 if needed. L is the longest list, or ``max_length``.
        """
        lengths_B = np.array([len(ids) for ids in token_ids])
        length = self.max_length if self.pad_to_max_length else max(lengths_B.max(), 1)  # a text can have no tokens
        holds_BL = np.arange(length) < lengths_B[:, None]
        ids_BL = np.full(holds_BL.shape, self.pad_token_id, dtype=np.int64)
        ids_BL[holds_BL] = np.fromiter(chain.from_iterable(token_ids), np.int64, lengths_B.sum())
        input_ids, attention_mask = torch.from_numpy(ids_BL), torch.from_numpy(holds_BL.astype(np.int64))
        return {"input_ids": input_ids, "attention_mask": attention_mask} if self.masks_padding else {"input_ids": input_ids}

    def texts(self, texts: str | Sequence[str]) -> dict[str, Tensor]:
        """Tokenise and pad a text or B texts."""
        return self.pad(self.tokenize([replace_surrogates(text) for text in ([texts] if isinstance(texts, str) else texts)]))
