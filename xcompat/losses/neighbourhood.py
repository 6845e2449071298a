"""NCCL: every new embedding is taught by all old embeddings of its class, the more the nearer they were to its own old one."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from xcompat.losses.classification import mean_of_known


def neighbour_weights(old_Bd: Tensor, bank_Qd: Tensor, labels_B: Tensor, bank_labels_Q: Tensor) -> Tensor:
    """Say how much each stored old embedding teaches each sample: (1 + cos)/2 of the old embeddings within a class, else 0.

    Args:
        old_Bd: old embeddings of the samples, of any length.
        bank_Qd: stored old embeddings of earlier samples (and these), of any length; no empty places.
        labels_B: (B,) int64 classes of the samples.
        bank_labels_Q: (Q,) int64 classes of the stored ones.

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
    """Neighbourhood consensus contrast, L = −mean_i 1/|P_i| Σ_{q ∈ P_i} w_iq·log softmax_q(a_i·b_q/τ) (Wu et al. 2022).

    At the level of features, anchors are normalised new embeddings and the bank holds normalised old ones; at the level of
    logits, both are what the classifiers say. P_i are the stored samples with a weight. This is the loss as the public code
    of MixBCT's authors has it, but for their queue, which counts its empty places as negatives.

    Args:
        anchors_BE: of the new model.
        bank_QE: of the old model.
        weights_BQ: from :func:`neighbour_weights`, the same at both levels.
        temperature: τ.

    Returns:
        Scalar, in nats: the mean over the anchors that have a neighbour, 0 when none has.

    Example:
        >>> neighbourhood_loss(torch.eye(2), torch.eye(2), torch.zeros(2, 2), 1.0).item()
        0.0
    """
    with torch.autocast(anchors_BE.device.type, enabled=False):
        log_shares_BQ = F.log_softmax(anchors_BE @ bank_QE.T / temperature, dim=1)
    positives_B = (weights_BQ > 0).sum(dim=1)
    losses_B = -(weights_BQ * log_shares_BQ).sum(dim=1) / positives_B.clamp(min=1)
    return mean_of_known(losses_B, positives_B > 0)
