"""Pixels and tokens exactly as a model wants them, and the rule by which its texts are padded."""

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
    """Preprocessing of one encoder; each library implements it, the rest of the project sees only this.

    Args:
        image_size: height and width the image tower takes, in pixels; 0 and 0 when there is no image tower.
        mean: per-channel mean subtracted from pixels in [0, 1].
        std: per-channel standard deviation the pixels are divided by.
        interpolation: name of the resampling filter, such as ``"bicubic"``.
        max_length: most tokens the text tower takes; 0 when there is no text tower.
        pad_to_max_length: True when the model reads the padding (SigLIP), so that trimming it changes embeddings.
        masks_padding: True when the model has to be told what is padding. Not so under a causal mask with pooling at the end
            token (CLIP), where no token sees what follows it; without a mask attention takes a faster path.
        pad_token_id: the token that fills up a batch.
        count_truncated: texts so far that were longer than ``max_length`` and lost their end.
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
        """Refuse images and padded texts of a size that no model takes."""
        check_image_size({"image_size": self.image_size})
        if self.pad_to_max_length and self.max_length > MOST_TOKENS:
            raise XcompatError(f"texts would be padded to {self.max_length:,} tokens; download the model again")

    def __call__(
        self, images: Image | Sequence[Image] | None = None, text: str | Sequence[str] | None = None, return_tensors: str = "pt"
    ) -> BatchFeature:
        """Preprocess images, texts or both as a processor of transformers does: ``model(**processor(images=..., text=...))``.

        Args:
            images: one, or B of them.
            text: one, or B of them.
            return_tensors: ``pt``; models here are torch's.

        Returns:
            ``pixel_values`` (B, C, H, W) float32 of images, and of texts what :meth:`pad` returns.

        Raises:
            XcompatError: there is neither, or other tensors are asked for.
        """
        if images is None and text is None:
            raise XcompatError("there is nothing to preprocess; give images, text, or both")
        if return_tensors != "pt":
            raise XcompatError(f"return_tensors is {return_tensors!r}; models of this library take pt, torch's")
        batch: dict[str, Tensor] = {}
        if images is not None:
            batch["pixel_values"] = self.images(images)
        if text is not None:
            batch |= self.texts(text)
        return BatchFeature(batch)

    def images(self, images: Image | Sequence[Image]) -> Tensor:
        """Preprocess for evaluation, as the model's own authors do.

        Args:
            images: one, or B of them. Each is turned upright as its EXIF orientation says.

        Returns:
            (B, C, H, W) float32: ``pixel_values``, as ``embed_images`` takes them.
        """
        self.require_images()
        return self.pixels([turn_upright(image) for image in ([images] if isinstance(images, Image) else images)])

    def require_images(self) -> None:
        """Refuse images where there is no image tower.

        Raises:
            XcompatError: there is none.
        """
        if self.image_size == (0, 0):
            raise XcompatError(
                "a text encoder has no image tower; to embed images, use an image-text model such as CLIP or SigLIP"
            )

    @abstractmethod
    def pixels(self, images: list[Image]) -> Tensor:
        """Make what :meth:`images` returns of B images."""

    @abstractmethod
    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """Return token ids per text, truncated to ``max_length`` and not padded."""

    @abstractmethod
    def save_pretrained(self, folder: str | Path) -> None:
        """Write the files from which :func:`xcompat.encoders.load_processor` makes an equal processor."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return what belongs into a fingerprint: everything that changes pixels or tokens."""

    def describe_all(self) -> dict[str, Any]:
        """Return :meth:`describe` and the orientation of pictures.

        The orientation is not part of a fingerprint: a model's embedding space does not depend on it, and photos without the tag
        give the same embeddings. Caches of pictures are keyed by it.
        """
        return self.describe() | ({"orientation": ORIENTATION} if self.image_size != (0, 0) else {})

    def for_queries(self) -> Processor:
        """Return the processor of queries: itself, unless the model puts another prompt before queries than before passages."""
        return self

    def to_pixels(self, pixels_BCHW: Tensor) -> Tensor:
        """Normalise augmented images that already have the right size.

        Args:
            pixels_BCHW: uint8 RGB of ``image_size``.

        Returns:
            float32 of the same shape, as the image tower takes it.
        """
        mean = torch.tensor(self.mean).view(-1, 1, 1)
        std = torch.tensor(self.std).view(-1, 1, 1)
        return pixels_BCHW.to(torch.float32).div_(255).sub_(mean).div_(std)

    def pad(self, token_ids: Sequence[Sequence[int]]) -> dict[str, Tensor]:
        """Stack token lists into one batch.

        Args:
            token_ids: B lists from :meth:`tokenize`.

        Returns:
            ``input_ids`` (B, L) int64 and, where the model masks its padding, ``attention_mask`` (B, L) int64; L is the
            longest list, or ``max_length`` when the model wants a fixed length.
        """
        lengths_B = np.array([len(ids) for ids in token_ids])
        length = self.max_length if self.pad_to_max_length else max(lengths_B.max(), 1)  # a text may be without any token
        holds_BL = np.arange(length) < lengths_B[:, None]
        ids_BL = np.full(holds_BL.shape, self.pad_token_id, dtype=np.int64)
        ids_BL[holds_BL] = np.fromiter(chain.from_iterable(token_ids), np.int64, lengths_B.sum())
        input_ids, attention_mask = torch.from_numpy(ids_BL), torch.from_numpy(holds_BL.astype(np.int64))
        return {"input_ids": input_ids, "attention_mask": attention_mask} if self.masks_padding else {"input_ids": input_ids}

    def texts(self, texts: str | Sequence[str]) -> dict[str, Tensor]:
        """Tokenise and pad a batch of texts.

        Args:
            texts: one string, or B of them.

        Returns:
            What :meth:`pad` returns.
        """
        return self.pad(self.tokenize([replace_surrogates(text) for text in ([texts] if isinstance(texts, str) else texts)]))
