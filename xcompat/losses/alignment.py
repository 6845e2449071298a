"""Losses that pull a new embedding to one target: an old embedding, a prototype, or a classifier's prediction."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional as F

from xcompat.core.errors import XcompatError
from xcompat.losses.classification import (
    ABSENT,
    LOGITS_AT_ONCE,
    cross_entropy_to,
    in_blocks,
    loss_dtype,
    mean_of_known,
    rows_of_labels,
)


def angular_alignment_loss(embeds_BD: Tensor, targets_BD: Tensor) -> Tensor:
    """Return the angular distance L_∠ = mean(1 − cos(x, target)) (OCA Eqn. 5; the cosine losses of BT²).

    The paper's minus sign before the sum would open the angle.

    Args:
        embeds_BD: new embeddings, of any length.
        targets_BD: each embedding's target, of any length.

    Returns:
        Scalar in [0, 2]: the mean over the batch; the paper has the sum.

    Raises:
        XcompatError: the shapes differ.

    Example:
        >>> angular_alignment_loss(torch.tensor([[3.0, 0.0]]), torch.tensor([[0.0, 1.0]])).item()
        1.0
    """
    _require_one_shape(embeds_BD, targets_BD)
    return _one_minus_cosine(embeds_BD, targets_BD).mean()


def l2_alignment_loss(new_BD: Tensor, old_BD: Tensor, known_B: Tensor | None = None) -> Tensor:
    """Return the mean Euclidean distance to the old embedding of the same sample, not squared (MixBCT Eqn. 8).

    Args:
        new_BD: new embeddings, L2-normalised if the old ones are.
        old_BD: the same samples' old embeddings.
        known_B: bool, the samples that count; None for all.

    Returns:
        Scalar: the mean over the samples that count, 0 without any. If both sides are equal, the gradient is 0.

    Raises:
        XcompatError: the shapes differ.

    Example:
        >>> l2_alignment_loss(torch.tensor([[3.0, 4.0]]), torch.zeros(1, 2)).item()
        5.0
    """
    _require_one_shape(new_BD, old_BD)
    apart_BD = (new_BD - old_BD).to(loss_dtype(new_BD, old_BD))
    if known_B is None:
        return torch.linalg.vector_norm(apart_BD, dim=-1).mean()
    return mean_of_known(torch.linalg.vector_norm(apart_BD.masked_fill(~known_B[:, None], 0.0), dim=-1), known_B)


def ace_loss(
    embeds_Bd: Tensor,
    old_weights_Cd: Tensor,
    labels_B: Tensor,
    ce_weight: float = 10.0,
    angle_weight: float = 5.0,
    scale: float | None = None,
) -> Tensor:
    """Return the aligned compatible embeddings loss: λ1·CE(W_old, h) + λ2·L_∠(h, W_old[y]) (OCA Eqn. 3).

    The paper's logits are dot products between raw features and class means of raw old features (Eqn. 4); its public code
    normalises the features. With unit embeddings, set a scale, because class means are shorter than 1 and the softmax would be
    nearly flat. L_∠ has the sign that closes the angle, and both terms are means, not sums.

    Args:
        embeds_Bd: h_bct, the first d dimensions of the new features.
        old_weights_Cd: frozen class prototypes of any length; NaN for classes without a prototype.
        labels_B: (B,) int64; samples contribute nothing if their class has no prototype.
        ce_weight: λ1.
        angle_weight: λ2.
        scale: factor on cosines in the cross-entropy; None to use dot products.

    Returns:
        Scalar, 0 if no sample's class has a prototype; averaged over ranks as in :func:`cross_entropy_to`.

    Raises:
        XcompatError: embeddings and prototypes have different dimensions.

    Example:
        >>> bool(ace_loss(torch.eye(3), torch.eye(3), torch.arange(3), scale=100.0) < 1e-6)
        True
    """
    cross_entropy = cross_entropy_to(old_weights_Cd, embeds_Bd, labels_B, scale)
    row_B, known_B = rows_of_labels(old_weights_Cd, labels_B)
    angles_B = _one_minus_cosine(embeds_Bd, old_weights_Cd[row_B].nan_to_num(nan=0.0))
    return ce_weight * cross_entropy + angle_weight * mean_of_known(angles_B, known_B)


def classifier_kl_loss(
    mapped_BD: Tensor, target_BD: Tensor, weight_CD: Tensor, scale: float | None, *, reverse: bool = False
) -> Tensor:
    """Return KL(p_target ‖ p_mapped) between a frozen classifier's predictions for both (FCT Appendix E; Wang et al. 2020).

    p = softmax(s·cos(W, x)), because unit vectors have no lengths, or softmax(W·x), the classifier's own predictions. Logits are
    computed for a few samples at a time, and again in the backward pass, so that 100,000 classes fit.

    Args:
        mapped_BD: mapped embeddings, of any length.
        target_BD: their target embeddings.
        weight_CD: classifier rows or prototypes; NaN rows are ignored.
        scale: s; None to use dot products instead of cosines.
        reverse: whether to use KL(p_mapped ‖ p_target).

    Returns:
        Scalar, in nats: the mean over the batch.

    Example:
        >>> classifier_kl_loss(torch.eye(2), torch.eye(2), torch.eye(2), 10.0).item()
        0.0
    """
    absent_C = ~weight_CD[:, 0].isfinite()  # masked instead of left out, as a GPU would be waited for to count them
    rows_CD = weight_CD.masked_fill(absent_C[:, None], 0.0).float()
    rows_CD = rows_CD if scale is None else F.normalize(rows_CD, dim=-1)
    first_BD, second_BD = (mapped_BD, target_BD) if reverse else (target_BD, mapped_BD)
    block = functools.partial(_divergence, rows_CD=rows_CD, absent_C=absent_C, scale=scale)
    rows = max(1, LOGITS_AT_ONCE // max(1, len(rows_CD)))
    return torch.stack(in_blocks(block, rows, first_BD, second_BD)).sum() / len(mapped_BD)


def _divergence(first_BD: Tensor, second_BD: Tensor, rows_CD: Tensor, absent_C: Tensor, scale: float | None) -> Tensor:
    """Sum KL(p_first ‖ p_second) over the rows."""
    with torch.autocast(first_BD.device.type, enabled=False):  # bf16 logits would be rounded to 1/16 at scale 14
        first_BC, second_BC = (
            F.log_softmax(
                ((x_BD if scale is None else scale * F.normalize(x_BD, dim=-1)) @ rows_CD.T).masked_fill(absent_C, ABSENT), dim=-1
            )
            for x_BD in (first_BD.float(), second_BD.float())
        )
        return F.kl_div(second_BC, first_BC, log_target=True, reduction="sum")


def _one_minus_cosine(a_BD: Tensor, b_BD: Tensor) -> Tensor:
    dtype = loss_dtype(a_BD, b_BD)
    return 1 - F.cosine_similarity(a_BD.to(dtype), b_BD.to(dtype), dim=-1)


def _require_one_shape(new_BD: Tensor, old_BD: Tensor) -> None:
    if new_BD.shape != old_BD.shape:
        raise XcompatError(
            f"new and old embeddings must have the same shape, got {tuple(new_BD.shape)} and {tuple(old_BD.shape)}; if the new "
            "model adds dimensions, pass only the first ones, up to the old number"
        )
