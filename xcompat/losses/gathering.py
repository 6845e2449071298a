"""Batches of all processes, with gradients."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from xcompat.core.distributed import is_distributed
from xcompat.core.lazy import dist


def gather_with_grad(embeds_BD: Tensor) -> Tensor:
    """Concatenate equally sized batches of all processes. Gradients flow back to their owners.

    Args:
        embeds_BD: this rank's rows, with the same B on every rank.

    Returns:
        ``(world_size * B, D)`` in rank order, or the input itself without ``torch.distributed``. Its gradient is the sum over all
        ranks of the gradients with respect to this rank's rows.
    """
    return cast(Tensor, _Gather.apply(embeds_BD)) if is_distributed() else embeds_BD


def sum_with_grad(value: Tensor) -> Tensor:
    """Sum a tensor over all processes. Each gets the gradients of all."""
    return gather_with_grad(value[None]).sum(dim=0) if is_distributed() else value


class _Gather(torch.autograd.Function):
    """Defined once and not in a function, because a compiled step cannot define a class."""

    @staticmethod
    def forward(ctx: object, mine: Tensor) -> Tensor:
        gathered = mine.new_empty(dist.get_world_size() * len(mine), *mine.shape[1:])
        dist.all_gather_into_tensor(gathered, mine.contiguous())
        return gathered

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        mine = gradient.new_empty(len(gradient) // dist.get_world_size(), *gradient.shape[1:])
        dist.reduce_scatter_tensor(mine, gradient.contiguous())
        return mine
