"""Contrast against a bank of embeddings that never change."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def bank_contrast_loss(
    mapped_Bd: Tensor,
    own_Bd: Tensor,
    bank_Kd: Tensor,
    scale: float,
    labels_B: Tensor | None = None,
    bank_labels_K: Tensor | None = None,
    index_B: Tensor | None = None,
    rows_K: Tensor | None = None,
) -> Tensor:
    """Supervised contrast of queries against stored embeddings (Khosla et al. 2020, Eqn. 2, with keys that are data).

    L = −mean_i mean_{j in P(i)} log softmax_j(s·cos(x_i, o_j)). P(i) are the bank's rows of the sample's class without its
    own; where there are none, and without labels, it is the own old embedding, which then joins the softmax.

    Args:
        mapped_Bd: queries in the space of the bank, L2-normalised.
        own_Bd: the stored embeddings of the same samples, L2-normalised.
        bank_Kd: stored embeddings, L2-normalised; rows of NaN are left out.
        scale: s, factor on cosines.
        labels_B: (B,) int64; None without labels.
        bank_labels_K: (K,) int64.
        index_B: (B,) int64, which row of the whole bank a sample's own is.
        rows_K: (K,) int64, which row of the whole bank each row is.

    Returns:
        Scalar, in nats: the mean over the batch.

    Example:
        >>> bank = torch.eye(2)
        >>> near = bank_contrast_loss(bank, bank, bank, 20.0)
        >>> bool(near < bank_contrast_loss(bank.flip(0), bank, bank, 20.0))
        True
    """
    readable_K = bank_Kd[:, 0].isfinite()
    with torch.autocast(mapped_Bd.device.type, enabled=False):
        mapped_Bd, own_Bd = mapped_Bd.float(), own_Bd.float()
        scores_BK = (scale * mapped_Bd @ bank_Kd.nan_to_num().float().T).masked_fill(~readable_K, -torch.inf)
        own_B1 = scale * (mapped_Bd * own_Bd).sum(dim=-1, keepdim=True)
    if index_B is not None and rows_K is not None:
        scores_BK = scores_BK.masked_fill(index_B[:, None] == rows_K, -torch.inf)
    positive_BK = torch.zeros_like(scores_BK, dtype=torch.bool)
    if labels_B is not None and bank_labels_K is not None:
        positive_BK = (labels_B[:, None] == bank_labels_K) & scores_BK.isfinite()
    alone_B1 = ~positive_BK.any(dim=1, keepdim=True)
    logits = torch.cat([own_B1.masked_fill(~alone_B1, -torch.inf), scores_BK], dim=1)
    positive = torch.cat([alone_B1, positive_BK], dim=1)
    likelihoods = F.log_softmax(logits, dim=1).masked_fill(~positive, 0.0)
    return -(likelihoods.sum(dim=1) / positive.sum(dim=1)).mean()
