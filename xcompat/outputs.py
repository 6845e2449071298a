"""Inputs and outputs of every model's forward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor
from transformers.utils.generic import ModelOutput

Batch = Mapping[str, Tensor]
"""Columns of B samples by name, from a collator."""
PASSAGES = (
    "passage_input_ids",
    "passage_attention_mask",
    "passage_ids",
    "negative_input_ids",
    "negative_attention_mask",
    "negative_ids",
)
"""Batch columns of searched texts, which replace ``pixel_values``."""


@dataclass(frozen=True)
class Views:
    """Further views of each training image that a method needs.

    Args:
        second: whether to augment the image twice.
        crops: number of small crops (multi-crop; Caron et al. 2020, §3.2).
        crop_size: their side, in pixels.
        crop_scale: minimum and maximum share of the image's area in a crop.
    """

    second: bool = False
    crops: int = 0
    crop_size: int = 0
    crop_scale: tuple[float, float] = (0, 0)


@dataclass
class CompatOutput(ModelOutput):
    """Loss and embeddings of a batch.

    Args:
        loss: scalar, or None if not computed.
        image_embeds: (B, d) image embeddings that the loss compares, L2-normalised. None without images. A map that gets images
            instead of embeddings returns its encoder's embeddings.
        text_embeds: (B, d) the same for texts. None without texts.
        passage_embeds: (B, d) the same for passages, which replace images in text search. None without passages.
        negative_embeds: (B, d) the same for passages mined as negatives. None without them.
        features: (B, D) image embeddings before normalisation, if the loss reads them.
        logits_per_image: (B, T) scaled cosines of every image with every text, on request, e.g. for zero-shot use. Else None.
    """

    loss: Tensor | None = None
    image_embeds: Tensor | None = None
    text_embeds: Tensor | None = None
    passage_embeds: Tensor | None = None
    negative_embeds: Tensor | None = None
    features: Tensor | None = None
    logits_per_image: Tensor | None = None

    @property
    def searched_embeds(self) -> Tensor:
        """Embeddings of the searched items: passages or images."""
        embeds = self.passage_embeds if self.passage_embeds is not None else self.image_embeds
        assert embeds is not None
        return embeds
