"""Contrastive losses between paired batches, and against stored embeddings."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from xcompat.core.distributed import is_distributed, mean_over_ranks, rank
from xcompat.core.errors import XcompatError
from xcompat.losses.classification import loss_dtype, mean_of_known
from xcompat.losses.gathering import gather_with_grad


def clip_contrastive_loss(
    a_BD: Tensor,
    b_BD: Tensor,
    scale: Tensor | float,
    items_B: Tensor | None = None,
    mined_BD: Tensor | None = None,
    mined_items_B: Tensor | None = None,
) -> Tensor:
    """Return symmetric InfoNCE over the global batch (Radford et al. 2021; L_c in XBT Eqns. 3 and 5).

    Each rank compares its rows and columns with the whole batch. Embeddings are gathered with gradients, so data-parallel
    training gives the same loss and gradient as a single process. Every rank returns the global value.

    Args:
        a_BD: this rank's L2-normalised embeddings, (B, D), the same B on every rank.
        b_BD: their partners, (B, D).
        scale: factor on the cosine similarities (CLIP's exponentiated logit scale).
        items_B: (B,) int64, equal for ``b_BD`` rows that belong to the same item, which are not negatives of each other's
            partners. None if all items differ.
        mined_BD: additional negatives for ``a_BD``, from all ranks.
        mined_items_B: (B,) int64 items of these rows; rows with a query's item are not its negatives.

    Returns:
        Scalar, in nats.

    Raises:
        ValueError: the shapes differ.

    Example:
        >>> a = torch.eye(4)
        >>> bool(clip_contrastive_loss(a, a, 100.0) < 1e-6)
        True
    """
    _require_one_shape("paired embeddings", a_BD, b_BD)
    all_a_GD, all_b_GD = gather_with_grad(a_BD), gather_with_grad(b_BD)
    owners_B = _owners(a_BD)
    with torch.autocast(a_BD.device.type, enabled=False):  # bf16 logits would be rounded to 1/16 at scale 14
        a_to_b_BG, b_to_a_BG = scale * a_BD @ all_b_GD.T, scale * b_BD @ all_a_GD.T
        if items_B is not None:
            twice_BG = (items_B[:, None] == gather_with_grad(items_B)).scatter(1, owners_B[:, None], False)
            a_to_b_BG, b_to_a_BG = (logits.masked_fill(twice_BG, -torch.inf) for logits in (a_to_b_BG, b_to_a_BG))
        if mined_BD is not None:
            mined_BM = scale * a_BD @ gather_with_grad(mined_BD).T
            if items_B is not None and mined_items_B is not None:
                mined_BM = mined_BM.masked_fill(items_B[:, None] == gather_with_grad(mined_items_B), -torch.inf)
            a_to_b_BG = torch.cat([a_to_b_BG, mined_BM], dim=1)
        a_to_b, b_to_a = F.cross_entropy(a_to_b_BG, owners_B), F.cross_entropy(b_to_a_BG, owners_B)
    return _global_value((a_to_b + b_to_a) / 2)


def siglip_loss(a_BD: Tensor, b_BD: Tensor, scale: Tensor | float, bias: Tensor | float) -> Tensor:
    """Return the pairwise sigmoid loss over the global batch (Zhai et al. 2023, "Sigmoid loss for language image pre-training").

    Args:
        a_BD: this rank's L2-normalised embeddings, (B, D), the same B on every rank.
        b_BD: their partners, (B, D).
        scale: factor on the cosine similarities.
        bias: added to the logits; SigLIP starts at -10.

    Returns:
        Scalar, in nats: the sum over the pairs divided by the global number of rows.

    Raises:
        ValueError: the shapes differ.
    """
    _require_one_shape("paired embeddings", a_BD, b_BD)
    all_b_GD = gather_with_grad(b_BD)
    sign_BG = 2 * F.one_hot(_owners(a_BD), len(all_b_GD)).to(a_BD.dtype) - 1
    with torch.autocast(a_BD.device.type, enabled=False):
        logits_BG = scale * a_BD @ all_b_GD.T + bias
    return _global_value(-F.logsigmoid(sign_BG * logits_BG).sum(dim=1).mean())


def nt_xent_loss(first_BD: Tensor, second_BD: Tensor, temperature: float, crops: Sequence[Tensor] = ()) -> Tensor:
    """Classify each view's partner view among all views of the global batch (NT-Xent; Chen et al. 2020, Eqn. 1).

    Use small crops for multi-crop: they search both views of their image, and are not searched (Caron et al. 2020, §3.2). Loss
    and gradient over several ranks equal a single process's (see :func:`clip_contrastive_loss`).

    Args:
        first_BD: a view of this rank's images, L2-normalised, the same B on every rank.
        second_BD: another view of the same images.
        temperature: τ.
        crops: small crops of the same images, each (B, D) and L2-normalised.

    Returns:
        Scalar, in nats: the mean over all searches, 2 + 2 · crops per image.

    Raises:
        ValueError: the shapes differ.

    Example:
        >>> views = torch.eye(4)
        >>> bool(nt_xent_loss(views, views, 0.01) < 1e-6)
        True
    """
    for view_BD in (second_BD, *crops):
        _require_one_shape("views of images", first_BD, view_BD)
    all_first_GD, all_second_GD = gather_with_grad(first_BD), gather_with_grad(second_BD)
    count, own_B = len(all_first_GD), _owners(first_BD)
    views_VD = torch.cat([all_first_GD, all_second_GD])
    firsts_B, seconds_B = own_B, own_B + count
    # view, its target, and the view that is not a negative: itself, or the other view of its image
    looking = [(first_BD, seconds_B, firsts_B), (second_BD, firsts_B, seconds_B)]
    for crop_BD in crops:
        looking += [(crop_BD, seconds_B, firsts_B), (crop_BD, firsts_B, seconds_B)]
    losses = []
    for mine_BD, wanted_B, left_out_B in looking:
        with torch.autocast(mine_BD.device.type, enabled=False):
            logits_BV = mine_BD @ views_VD.T / temperature
            logits_BV = logits_BV.scatter(1, left_out_B[:, None], -torch.inf)
            losses.append(F.cross_entropy(logits_BV, wanted_B))
    return _global_value(sum(losses[1:], losses[0]) / len(losses))


def ract_loss(new_BD: Tensor, old_BD: Tensor, labels_B: Tensor, temperature: float, topk_negatives: int | None = None) -> Tensor:
    """Return the regression-alleviating compatible training loss (Zhang et al. 2022; "Contrast" in BT² §4.3).

    L = mean_i −log(p_i / (p_i + Σ_k exp(cos(new_i, old_k)/τ) + Σ_k exp(cos(new_i, new_k)/τ))) with p_i = exp(cos(new_i, old_i)/τ)
    and k over the global batch's samples with other classes. A sample's own old embedding should score above other classes' old
    and new embeddings, so that a partly refreshed gallery has no new errors. Other samples with its class are neither positives
    nor negatives. This is the authors' code; BT² misprints the formula. Unlike there, all negatives have gradients.

    Args:
        new_BD: this rank's new embeddings, of any length, the same B on every rank.
        old_BD: the same samples' old embeddings, of any length.
        labels_B: (B,) int64.
        temperature: τ; the public code has .05 (and .01).
        topk_negatives: number of hardest old negatives, and of hardest new negatives, per anchor; None to use all.

    Returns:
        Scalar, in nats; 0 if all samples share a class. Its mean over the ranks is the global batch's loss.

    Raises:
        XcompatError: the shapes differ.

    Example:
        >>> ract_loss(torch.eye(2), torch.eye(2), torch.tensor([7, 7]), 0.05).item()
        0.0
    """
    if new_BD.shape != old_BD.shape:
        raise XcompatError(
            f"new and old embeddings must have the same shape, got {tuple(new_BD.shape)} and {tuple(old_BD.shape)}; pass only "
            "the old dimensions of expanded features"
        )
    dtype = loss_dtype(new_BD, old_BD)
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
    """Return the supervised contrast between queries and stored embeddings (Khosla et al. 2020, Eqn. 2, with fixed keys).

    L = −mean_i mean_{j in P(i)} log softmax_j(s·cos(x_i, o_j)). P(i) are the bank rows with the sample's class, except its own
    row. Without such rows or labels, the sample's own old embedding is the positive and joins the softmax.

    Args:
        mapped_Bd: queries in the bank's space, L2-normalised.
        own_Bd: the same samples' stored embeddings, L2-normalised.
        bank_Kd: stored embeddings, L2-normalised; NaN rows are ignored.
        scale: s, factor on cosines.
        labels_B: (B,) int64; None without labels.
        bank_labels_K: (K,) int64.
        index_B: (B,) int64, number of each sample's own row in the whole bank.
        rows_K: (K,) int64, number of each given row in the whole bank.

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


def neighbour_weights(old_Bd: Tensor, bank_Qd: Tensor, labels_B: Tensor, bank_labels_Q: Tensor) -> Tensor:
    """Weight each stored old embedding for each sample: (1 + cos)/2 between old embeddings within a class, else 0.

    Args:
        old_Bd: the samples' old embeddings, of any length.
        bank_Qd: stored old embeddings, of any length.
        labels_B: (B,) int64, the samples' classes.
        bank_labels_Q: (Q,) int64, the stored samples' classes.

    Returns:
        (B, Q) in [0, 1], without gradient.

    Example:
        >>> old, bank = torch.tensor([[1.0, 0.0]]), torch.tensor([[2.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
        >>> neighbour_weights(old, bank, torch.tensor([0]), torch.tensor([0, 0, 1])).tolist()
        [[1.0, 0.5, 0.0]]
    """
    cosines_BQ = (F.normalize(old_Bd, dim=-1) @ F.normalize(bank_Qd, dim=-1).T).detach()
    return ((1 + cosines_BQ) / 2).where(labels_B[:, None] == bank_labels_Q, torch.zeros_like(cosines_BQ))


def neighbourhood_loss(anchors_BE: Tensor, bank_QE: Tensor, weights_BQ: Tensor, temperature: float) -> Tensor:
    """Return neighbourhood consensus contrast, L = −mean_i 1/|P_i| Σ_{q ∈ P_i} w_iq·log softmax_q(a_i·b_q/τ) (Wu et al. 2022).

    For features, use normalised new embeddings as anchors and normalised old embeddings as bank; for logits, use classifier
    logits for both. P_i are the stored samples with a weight above 0. The public MixBCT code has the same loss, but counts empty
    queue places as negatives.

    Args:
        anchors_BE: the new model's embeddings or logits.
        bank_QE: the old model's embeddings or logits.
        weights_BQ: from :func:`neighbour_weights`, the same for features and logits.
        temperature: τ.

    Returns:
        Scalar, in nats: the mean over the anchors with a neighbour, or 0 without any.

    Example:
        >>> neighbourhood_loss(torch.eye(2), torch.eye(2), torch.zeros(2, 2), 1.0).item()
        0.0
    """
    with torch.autocast(anchors_BE.device.type, enabled=False):
        log_shares_BQ = F.log_softmax(anchors_BE @ bank_QE.T / temperature, dim=1)
    positives_B = (weights_BQ > 0).sum(dim=1)
    losses_B = -(weights_BQ * log_shares_BQ).sum(dim=1) / positives_B.clamp(min=1)
    return mean_of_known(losses_B, positives_B > 0)


def _require_one_shape(what: str, a_BD: Tensor, b_BD: Tensor) -> None:
    if a_BD.shape != b_BD.shape:
        raise ValueError(f"{what} must have the same shape, got {tuple(a_BD.shape)} and {tuple(b_BD.shape)}")


def _owners(batch_BD: Tensor) -> Tensor:
    """Return this rank's row positions in the gathered batch: (B,) int64."""
    first = rank() * len(batch_BD) if is_distributed() else 0
    return torch.arange(first, first + len(batch_BD), device=batch_BD.device)


def _global_value(local: Tensor) -> Tensor:
    """Return a scalar with this rank's gradient and the mean over all ranks as its value."""
    return local + (mean_over_ranks(local.detach()) - local.detach())
