"""Losses between what a frozen classifier makes of an embedding and of the one it is to stand for."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from xcompat.losses.classification import LOGITS_AT_ONCE


def classifier_kl_loss(mapped_BD: Tensor, target_BD: Tensor, weight_CD: Tensor, scale: float, *, reverse: bool = False) -> Tensor:
    """KL(p_target ‖ p_mapped) of the classes that a frozen classifier sees in both (fct.txt Appendix E; Wang et al. 2020).

    p = softmax(s·cos(W, x)): cached embeddings are unit vectors, and a classifier's own logits would need their lengths. Logits
    are made for a few samples at a time, and again in the backward pass, so that 100,000 classes fit.

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
    first_BD, second_BD = (mapped_BD, target_BD) if reverse else (target_BD, mapped_BD)
    block = functools.partial(_divergence, rows_CD=rows_CD, scale=scale)
    at_once = max(1, LOGITS_AT_ONCE // max(1, len(rows_CD)))
    if len(mapped_BD) <= at_once:
        return block(first_BD, second_BD) / len(mapped_BD)
    pairs = zip(first_BD.split(at_once), second_BD.split(at_once), strict=True)
    parts = [checkpoint(block, *pair, use_reentrant=False, preserve_rng_state=False) for pair in pairs]
    return torch.stack(parts).sum() / len(mapped_BD)


def _divergence(first_BD: Tensor, second_BD: Tensor, rows_CD: Tensor, scale: float) -> Tensor:
    """Return the sum of KL(p_first ‖ p_second) over the rows."""
    with torch.autocast(first_BD.device.type, enabled=False):  # bf16 logits would be rounded to 1/16 at scale 14
        first_BC, second_BC = (
            F.log_softmax(scale * F.normalize(embeds_BD.float(), dim=-1) @ rows_CD.T, dim=-1)
            for embeds_BD in (first_BD, second_BD)
        )
        return F.kl_div(second_BC, first_BC, log_target=True, reduction="sum")
