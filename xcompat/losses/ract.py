"""RACT: contrast against the old gallery and against what the gallery will hold when it has been refreshed."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from xcompat.distributed import gather_with_grad
from xcompat.errors import XcompatError


def ract_loss(new_BD: Tensor, old_BD: Tensor, labels_B: Tensor, temperature: float, topk_negatives: int | None = None) -> Tensor:
    """Regression-alleviating compatible training (Zhang et al. 2022; "Contrast" in bt2.txt §4.3).

    L = mean_i −log(p_i / (p_i + Σ_k exp(cos(new_i, old_k)/τ) + Σ_k exp(cos(new_i, new_k)/τ))) with p_i = exp(cos(new_i, old_i)/τ)
    and k over the samples of other classes: the own old embedding beats the old and the new embeddings of other classes, so that
    a gallery that is refreshed little by little brings no new errors. Other samples of the own class are neither positives nor
    negatives. As printed in bt2.txt the second sum has slipped out of the logarithm and the anchor out of both; this is the
    loss of the authors' public code.

    Negatives are those of the global batch, with gradients, where that code has none through the new negatives of other ranks.

    Args:
        new_BD: new embeddings of this rank, of any length, the same B on every rank.
        old_BD: old embeddings of the same samples, of any length.
        labels_B: (B,) int64.
        temperature: τ; the public code takes .05 (and .01).
        topk_negatives: keep only the hardest this many old and this many new negatives of each anchor; None for all.

    Returns:
        Scalar, in nats; 0 when all samples are of one class. Its mean over the ranks is that of the global batch.

    Raises:
        XcompatError: the shapes differ.

    Example:
        >>> ract_loss(torch.eye(2), torch.eye(2), torch.tensor([7, 7]), 0.05).item()
        0.0
    """
    if new_BD.shape != old_BD.shape:
        raise XcompatError(
            f"new and old embeddings must have one shape, got {tuple(new_BD.shape)} and {tuple(old_BD.shape)}; of expanded "
            "features give the old dimensions only"
        )
    dtype = torch.promote_types(torch.promote_types(new_BD.dtype, old_BD.dtype), torch.float32)
    new_BD, old_BD = F.normalize(new_BD.to(dtype), dim=-1), F.normalize(old_BD.to(dtype), dim=-1)
    all_new_GD, all_old_GD, all_labels_G = gather_with_grad(new_BD), gather_with_grad(old_BD), gather_with_grad(labels_B)
    same_BG = labels_B[:, None] == all_labels_G
    logits = [(new_BD * old_BD).sum(dim=-1, keepdim=True)]
    for others_GD in (all_old_GD, all_new_GD):
        with torch.autocast(new_BD.device.type, enabled=False):  # bf16 cosines would be rounded to 1/256, times 1/τ
            negatives_BG = (new_BD @ others_GD.T).masked_fill(same_BG, -torch.inf)
        hardest = len(others_GD) if topk_negatives is None else min(topk_negatives, len(others_GD))
        logits.append(negatives_BG if hardest == len(others_GD) else negatives_BG.topk(hardest, dim=1).values)
    return F.cross_entropy(torch.cat(logits, dim=1) / temperature, torch.zeros_like(labels_B))
