"""Losses that learn from images alone."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from xcompat.distributed import gather_with_grad, is_distributed, mean_over_ranks, rank


def nt_xent_loss(first_BD: Tensor, second_BD: Tensor, temperature: float) -> Tensor:
    """Find each view's other view among all views of the global batch (NT-Xent; Chen et al. 2020, Eqn. 1).

    Each rank computes the rows it owns; with gradients gathered and averaged by data-parallel training this is the loss and the
    gradient of one process with the whole batch.

    Args:
        first_BD: one view of this rank's images, L2-normalised, the same B on every rank.
        second_BD: another view of the same images.
        temperature: τ.

    Returns:
        Scalar, in nats: the mean over both views.

    Raises:
        ValueError: when the shapes differ.

    Example:
        >>> views = torch.eye(4)
        >>> bool(nt_xent_loss(views, views, 0.01) < 1e-6)
        True
    """
    if first_BD.shape != second_BD.shape:
        raise ValueError(f"two views must have one shape, got {tuple(first_BD.shape)} and {tuple(second_BD.shape)}")
    all_first_GD, all_second_GD = gather_with_grad(first_BD), gather_with_grad(second_BD)
    count, start = len(all_first_GD), rank() * len(first_BD) if is_distributed() else 0
    own_B = torch.arange(start, start + len(first_BD), device=first_BD.device)
    views_VD = torch.cat([all_first_GD, all_second_GD])
    losses = []
    for mine_BD, itself_B, other_B in ((first_BD, own_B, own_B + count), (second_BD, own_B + count, own_B)):
        with torch.autocast(mine_BD.device.type, enabled=False):
            logits_BV = mine_BD @ views_VD.T / temperature
            logits_BV = logits_BV.scatter(1, itself_B[:, None], -torch.inf)
            losses.append(F.cross_entropy(logits_BV, other_B))
    local = (losses[0] + losses[1]) / 2
    return local + (mean_over_ranks(local.detach()) - local.detach())
