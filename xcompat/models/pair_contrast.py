"""Contrastive loss between texts and searched items."""

from __future__ import annotations

from torch import Tensor

from xcompat.losses import clip_contrastive_loss
from xcompat.outputs import Batch, CompatOutput


def pair_contrast(output: CompatOutput, batch: Batch, scale: Tensor | float) -> Tensor:
    """Return the contrastive loss between texts and searched items (images, or passages and mined negatives), a scalar.

    Args:
        output: both sides' embeddings.
        batch: for passages with ``passage_ids`` and optionally ``negative_ids``.
        scale: factor on cosines.
    """
    mined = output.negative_embeds, batch.get("negative_ids")
    return clip_contrastive_loss(output["text_embeds"], output.searched_embeds, scale, batch.get("passage_ids"), *mined)
