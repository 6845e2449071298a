"""Losses between what a frozen classifier makes of an embedding and of the one it is to stand for."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def classifier_kl_loss(mapped_BD: Tensor, target_BD: Tensor, weight_CD: Tensor, scale: float, *, reverse: bool = False) -> Tensor:
    """KL(p_target ‖ p_mapped) of the classes that a frozen classifier sees in both (fct.txt Appendix E; Wang et al. 2020).

    p = softmax(s·cos(W, x)): cached embeddings are unit vectors, and a classifier's own logits would need their lengths.

    Args:
        mapped_BD: mapped embeddings, of any length.
        target_BD: the embeddings they are to stand for.
        weight_CD: rows of the classifier, or prototypes; rows of NaN are left out.
        scale: s.
        reverse: whether to take KL(p_mapped ‖ p_target).

    Returns:
        Scalar, in nats: the mean over the batch.

    Example:
        >>> classifier_kl_loss(torch.eye(2), torch.eye(2), torch.eye(2), 10.0).item()
        0.0
    """
    rows_CD = F.normalize(weight_CD[weight_CD[:, 0].isfinite()].float(), dim=-1)
    with torch.autocast(mapped_BD.device.type, enabled=False):  # bf16 logits would be rounded to 1/16 at scale 14
        mapped_BC, target_BC = (
            F.log_softmax(scale * F.normalize(embeds_BD.float(), dim=-1) @ rows_CD.T, dim=-1)
            for embeds_BD in (mapped_BD, target_BD)
        )
    first, second = (mapped_BC, target_BC) if reverse else (target_BC, mapped_BC)
    return F.kl_div(second, first, log_target=True, reduction="batchmean")
