"""What every model's forward reads and returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor
from transformers.utils.generic import ModelOutput

Batch = Mapping[str, Tensor]
"""Columns of B samples by name, as a collator makes them."""


@dataclass(frozen=True)
class Views:
    """What a method wants to see of each image of a batch beside one augmented view.

    Args:
        second: whether the image is augmented twice.
        crops: how many small crops are cut out of it, besides (multi-crop; Caron et al. 2020, §3.2).
        crop_size: their side, in pixels.
        crop_scale: smallest and largest share of the image's area that they show.
    """

    second: bool = False
    crops: int = 0
    crop_size: int = 0
    crop_scale: tuple[float, float] = (0, 0)


@dataclass
class CompatOutput(ModelOutput):
    """Loss and embeddings of one batch.

    Args:
        loss: scalar; None where none was computed.
        image_embeds: (B, d) what the loss compares for the images, L2-normalised; None without images. Of a map that is given
            images in place of embeddings, what its encoder makes of them.
        text_embeds: (B, d) the same for the texts; None without texts.
        passage_embeds: (B, d) the same for passages, which stand where images do when texts search texts; None without passages.
        negative_embeds: (B, d) the same for passages that were mined as negatives; None without them.
        features: (B, D) embeddings of the images before normalisation, where the loss reads them.
        logits_per_image: (B, T) scaled cosines of every image with every text; None unless asked for, as in zero-shot use.
    """

    loss: Tensor | None = None
    image_embeds: Tensor | None = None
    text_embeds: Tensor | None = None
    passage_embeds: Tensor | None = None
    negative_embeds: Tensor | None = None
    features: Tensor | None = None
    logits_per_image: Tensor | None = None

    @property
    def searched(self) -> Tensor:
        """Return the embeddings of what texts search: passages, or images."""
        embeds = self.passage_embeds if self.passage_embeds is not None else self.image_embeds
        assert embeds is not None
        return embeds
