"""Contrastive losses between two batches of which equal rows belong together."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from xcompat.distributed import gather_with_grad, is_distributed, mean_over_ranks, rank


def clip_contrastive_loss(a_BD: Tensor, b_BD: Tensor, scale: Tensor | float) -> Tensor:
    """Symmetric InfoNCE over the global batch (Radford et al. 2021; L_c in xbt.txt Eqns. 3 and 5).

    Each rank computes the B rows and B columns it owns against the whole batch. With the gathering of gradients and their
    averaging by data-parallel training this is exactly the loss and the gradient of one process with the whole batch;
    every rank returns the global value.

    Args:
        a_BD: L2-normalised embeddings of this rank, (B, D), the same B on every rank.
        b_BD: their partners, (B, D).
        scale: factor on the cosine similarities (CLIP's exponentiated logit scale).

    Returns:
        Scalar, in nats.

    Raises:
        ValueError: when the shapes differ.

    Example:
        >>> a = torch.eye(4)
        >>> bool(clip_contrastive_loss(a, a, 100.0) < 1e-6)
        True
    """
    if a_BD.shape != b_BD.shape:
        raise ValueError(f"paired embeddings must have one shape, got {tuple(a_BD.shape)} and {tuple(b_BD.shape)}")
    all_a_GD, all_b_GD = gather_with_grad(a_BD), gather_with_grad(b_BD)
    owners_B = _owners(a_BD)
    with torch.autocast(a_BD.device.type, enabled=False):  # bf16 logits would be rounded to 1/16 at scale 14
        a_to_b = F.cross_entropy(scale * a_BD @ all_b_GD.T, owners_B)
        b_to_a = F.cross_entropy(scale * b_BD @ all_a_GD.T, owners_B)
    return _global_value((a_to_b + b_to_a) / 2)


def siglip_loss(a_BD: Tensor, b_BD: Tensor, scale: Tensor | float, bias: Tensor | float) -> Tensor:
    """Pairwise sigmoid loss over the global batch (Zhai et al. 2023, "Sigmoid loss for language image pre-training").

    Args:
        a_BD: L2-normalised embeddings of this rank, (B, D), the same B on every rank.
        b_BD: their partners, (B, D).
        scale: factor on the cosine similarities.
        bias: added to the logits; SigLIP starts at -10.

    Returns:
        Scalar, in nats: the sum over the pairs divided by the global number of rows.

    Raises:
        ValueError: when the shapes differ.
    """
    if a_BD.shape != b_BD.shape:
        raise ValueError(f"paired embeddings must have one shape, got {tuple(a_BD.shape)} and {tuple(b_BD.shape)}")
    all_b_GD = gather_with_grad(b_BD)
    sign_BG = 2 * F.one_hot(_owners(a_BD), len(all_b_GD)).to(a_BD.dtype) - 1
    with torch.autocast(a_BD.device.type, enabled=False):
        logits_BG = scale * a_BD @ all_b_GD.T + bias
    return _global_value(-F.logsigmoid(sign_BG * logits_BG).sum(dim=1).mean())


def _owners(batch_BD: Tensor) -> Tensor:
    """Return the positions of this rank's rows in the gathered batch: (B,) int64."""
    first = rank() * len(batch_BD) if is_distributed() else 0
    return torch.arange(first, first + len(batch_BD), device=batch_BD.device)


def _global_value(local: Tensor) -> Tensor:
    """Return a scalar with this rank's gradient and the mean over all ranks as its value."""
    return local + (mean_over_ranks(local.detach()) - local.detach())
