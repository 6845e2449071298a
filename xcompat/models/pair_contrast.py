"""The contrast of texts with what they search: images, or passages and mined negatives."""

from __future__ import annotations

from torch import Tensor

from xcompat.losses import clip_contrastive_loss
from xcompat.outputs import Batch, CompatOutput


def pair_contrast(output: CompatOutput, batch: Batch, scale: Tensor | float) -> Tensor:
    """Return the contrastive loss of texts with what they search.

    Args:
        output: embeddings of both.
        batch: with ``passage_ids`` and perhaps ``negative_ids``, if passages are searched.
        scale: factor on cosines.

    Returns:
        Scalar.
    """
    mined = output.negative_embeds, batch.get("negative_ids")
    return clip_contrastive_loss(output["text_embeds"], output.searched, scale, batch.get("passage_ids"), *mined)
