"""What every model's forward returns."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from transformers.utils.generic import ModelOutput


@dataclass
class CompatOutput(ModelOutput):
    """Loss and embeddings of one batch.

    Args:
        loss: scalar; None when ``return_loss`` is off.
        image_embeds: (B, d) what the loss compared for the images, L2-normalised; None without images.
        text_embeds: (B, d) the same for the texts; None without texts.
        logits_per_image: (B, T) scaled cosines of every image with every text; None unless asked for, as in zero-shot use.
    """

    loss: Tensor | None = None
    image_embeds: Tensor | None = None
    text_embeds: Tensor | None = None
    logits_per_image: Tensor | None = None
