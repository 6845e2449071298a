"""Ranks, collectives and the devices of this process; one collective carries gradients."""

from __future__ import annotations

import functools
import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar, cast

T = TypeVar("T")
JUDGING = timedelta(hours=6)
"""Longest wait of processes for one of them, which may be evaluating, or embedding larger shards."""

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    import torch
    from accelerate import PartialState


def process_state() -> PartialState:
    """Start the process group if a launcher set one up; return accelerate's state with this process's device and rank.

    accelerate must be told if there is no accelerator: otherwise it expects one, and every process takes itself for the only one.
    """
    import torch
    import torch.distributed
    from accelerate import PartialState
    from accelerate.utils import DistributedType, is_torch_xla_available, parse_flag_from_env

    present = torch.accelerator.is_available() or is_torch_xla_available()
    # PartialState does not read the launcher's use_cpu itself; the timeout is long as the first process evaluates alone
    state = PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU") or not present, timeout=JUDGING)
    if state.distributed_type == DistributedType.XLA and not torch.distributed.is_initialized():
        # on TPU accelerate sets neither the ranks in the environment nor the collectives of torch.distributed
        os.environ |= {"RANK": str(state.process_index), "WORLD_SIZE": str(state.num_processes)}
        torch.distributed.init_process_group("xla", init_method="xla://")
    return state


def device() -> torch.device:
    """Return this process's device, an accelerator if there is one."""
    return process_state().device


def on_gpus(index: Any) -> Any:  # noqa: ANN401 - faiss has no types
    """Copy a faiss index to all GPUs.

    Args:
        index: of any kind, trained or not.

    Returns:
        The copy; the index itself if this is faiss for CPUs, sees no GPU, has no kernels for this kind, or memory is too small.
    """
    import faiss

    if not faiss.get_num_gpus():
        return index
    try:
        return faiss.index_cpu_to_all_gpus(index)
    except RuntimeError:
        return index


def end_processes() -> None:
    """Leave the process group: a process that exits while its threads still communicate is aborted."""
    if "RANK" in os.environ and is_distributed():  # the environment first: torch takes seconds to import
        import torch.distributed as dist

        dist.destroy_process_group()


def is_distributed() -> bool:
    """Return whether ``torch.distributed`` has been started."""
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
    """Return whether this process has rank 0, which alone prints and writes shared files."""
    return int(os.environ.get("RANK", "0")) == 0


def barrier() -> None:
    """Wait for all processes; a single process goes on at once."""
    if is_distributed():
        import torch.distributed as dist

        dist.barrier()


def gather_with_grad(embeds_BD: torch.Tensor) -> torch.Tensor:
    """Concatenate equally sized batches of all processes; gradients flow back to their owners.

    Args:
        embeds_BD: this rank's rows, the same B on every rank.

    Returns:
        ``(world_size * B, D)`` in rank order; the input itself without ``torch.distributed``. Its gradient is the sum over
        the ranks of the gradients with respect to this rank's rows.
    """
    if not is_distributed():
        return embeds_BD
    return _gather_function().apply(embeds_BD)


@functools.cache
def _gather_function() -> Any:  # noqa: ANN401 - an autograd function, made late so that importing this module stays cheap
    import torch
    import torch.distributed as dist

    class Gather(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, mine: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
            gathered = mine.new_empty(dist.get_world_size() * len(mine), *mine.shape[1:])
            dist.all_gather_into_tensor(gathered, mine.contiguous())
            return gathered

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
            mine = gradient.new_empty(len(gradient) // dist.get_world_size(), *gradient.shape[1:])
            dist.reduce_scatter_tensor(mine, gradient.contiguous())
            return mine

    return Gather


def my_share(rows_N: np.ndarray, shared: bool) -> np.ndarray:
    """Return this process's share of some rows, a contiguous part.

    Args:
        rows_N: (N,) row numbers, the same on every process.
        shared: whether all processes take part; if not, all rows are this process's.
    """
    if not (shared and is_distributed()):
        return rows_N
    import numpy as np

    return np.array_split(rows_N, world_size())[rank()]


def gather_objects(mine: T, shared: bool) -> list[T]:
    """Return the objects of all processes, in the order of their ranks.

    Args:
        mine: this process's object.
        shared: whether all processes take part; if not, the list holds only this process's object.
    """
    if not (shared and is_distributed()):
        return [mine]
    import torch.distributed as dist

    gathered: list[Any] = [None] * dist.get_world_size()  # accelerate's gather_object refuses TPUs
    dist.all_gather_object(gathered, mine)
    return gathered


def from_main_process(make: Callable[[], T]) -> T:
    """Call a function on the first process only, and return its result on every process."""
    return cast(T, gather_objects(make() if is_main_process() else None, shared=True)[0])


def sum_over_ranks(value: torch.Tensor) -> torch.Tensor:
    """Add a detached scalar up over the processes."""
    if not is_distributed():
        return value
    import torch.distributed as dist

    total = value.detach().clone()
    dist.all_reduce(total)
    return total


def mean_over_ranks(value: torch.Tensor) -> torch.Tensor:
    """Average a detached scalar over the processes."""
    return sum_over_ranks(value) / world_size() if is_distributed() else value
