"""What every layer needs to know about the other processes, and the one collective that carries gradients."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def is_distributed() -> bool:
    """Return whether ``torch.distributed`` runs; launchers set ranks in the environment before it does."""
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()


def world_size() -> int:
    """Return the number of processes (1 without ``torch.distributed``)."""
    if is_distributed():
        import torch.distributed as dist

        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """Return this process's global rank; launchers set it before ``torch.distributed`` starts."""
    if is_distributed():
        import torch.distributed as dist

        return dist.get_rank()
    return int(os.environ.get("RANK", "0"))


def is_main_process() -> bool:
    """Return whether this process prints and writes what only one may."""
    return int(os.environ.get("RANK", "0")) == 0


def barrier() -> None:
    """Wait until every process is here; does nothing alone."""
    if is_distributed():
        import torch.distributed as dist

        dist.barrier()


def gather_with_grad(embeds_BD: torch.Tensor) -> torch.Tensor:
    """Concatenate equally sized batches of all processes, gradients flowing back to their owners.

    Args:
        embeds_BD: this rank's rows, the same B on every rank.

    Returns:
        ``(world_size * B, D)`` in rank order; the input itself without ``torch.distributed``.
    """
    if not is_distributed():
        return embeds_BD
    import torch
    from torch.distributed.nn.functional import all_gather

    return torch.cat(all_gather(embeds_BD.contiguous()))


def mean_over_ranks(value: torch.Tensor) -> torch.Tensor:
    """Average a detached scalar over the processes."""
    if not is_distributed():
        return value
    import torch.distributed as dist

    total = value.detach().clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()
