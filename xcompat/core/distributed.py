"""Ranks, collectives and devices of this process."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar, cast

from xcompat.core.lazy import dist, faiss

T = TypeVar("T")
COLLECTIVE_TIMEOUT = timedelta(hours=6)
"""Maximum wait for another process, which may be evaluating or embedding larger shards."""

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    import torch
    from accelerate import PartialState


def process_state() -> PartialState:
    """Start the process group if a launcher set it up, and return accelerate's state with the device and rank.

    Without an accelerator, accelerate needs ``cpu=True``. Otherwise every process behaves like a single process.
    """
    import torch
    import torch.distributed
    from accelerate import PartialState
    from accelerate.utils import DistributedType, is_torch_xla_available, parse_flag_from_env

    from xcompat.core.threads import use_share_of_cores  # imports torch

    use_share_of_cores()
    present = torch.accelerator.is_available() or is_torch_xla_available()
    # PartialState does not read the launcher's use_cpu; the timeout is long because only the first process evaluates
    state = PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU") or not present, timeout=COLLECTIVE_TIMEOUT)
    if state.distributed_type == DistributedType.XLA and not torch.distributed.is_initialized():
        # on TPU accelerate sets neither the ranks in the environment nor the collectives of torch.distributed
        os.environ |= {"RANK": str(state.process_index), "WORLD_SIZE": str(state.num_processes)}
        torch.distributed.init_process_group("xla", init_method="xla://")
    return state


def device() -> torch.device:
    """Return this process's device, an accelerator if available."""
    return process_state().device


def pin_for(tensor: torch.Tensor, place: torch.device) -> torch.Tensor:
    """Return a tensor on the CPU in pinned memory if a GPU is to copy it, because the CPU waits for copies of other memory."""
    return tensor.pin_memory() if place.type == "cuda" else tensor


def copy_to_gpus(index: faiss.Index) -> faiss.Index:
    """Copy a faiss index to all GPUs.

    Args:
        index: any faiss index, trained or not.

    Returns:
        The copy. The index itself if there is no GPU, no GPU build of faiss, no kernel for this index, or too little memory.
    """
    if not faiss.get_num_gpus():
        return index
    try:
        return faiss.index_cpu_to_all_gpus(index)
    except RuntimeError:
        return index


def end_processes() -> None:
    """Leave the process group. A process that exits during communication is aborted."""
    if "RANK" in os.environ and is_distributed():  # the environment first: torch takes seconds to import
        dist.destroy_process_group()


def is_distributed() -> bool:
    """Return whether ``torch.distributed`` is running."""
    return dist.is_available() and dist.is_initialized()


def world_size() -> int:
    """Return the number of processes (1 without ``torch.distributed``)."""
    if is_distributed():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """Return this process's global rank, also before ``torch.distributed`` starts."""
    if is_distributed():
        return dist.get_rank()
    return int(os.environ.get("RANK", "0"))


def is_main_process() -> bool:
    """Return whether this process has rank 0. Only rank 0 prints and writes shared files."""
    return int(os.environ.get("RANK", "0")) == 0


def barrier() -> None:
    """Wait for all processes. A single process continues immediately."""
    if is_distributed():
        dist.barrier()


def my_share(rows_N: np.ndarray, shared: bool) -> np.ndarray:
    """Return this process's contiguous share of rows.

    Args:
        rows_N: (N,) row numbers, the same on every process.
        shared: whether all processes take part. Use False to return all rows.
    """
    if not (shared and is_distributed()):
        return rows_N
    import numpy as np

    return np.array_split(rows_N, world_size())[rank()]


def gather_objects(mine: T, shared: bool) -> list[T]:
    """Return the objects of all processes in rank order.

    Args:
        mine: this process's object.
        shared: whether all processes take part. Use False to return only this process's object.
    """
    if not (shared and is_distributed()):
        return [mine]
    gathered: list[Any] = [None] * dist.get_world_size()  # accelerate's gather_object refuses TPUs
    dist.all_gather_object(gathered, mine)
    return gathered


def compute_in_shares(total: int, compute: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Compute an array's rows, each process a contiguous share. Every process must call this, and gets all rows.

    Args:
        total: number of rows.
        compute: returns the rows with the given ascending numbers. A row must not depend on the other numbers.

    Example:
        >>> import numpy as np
        >>> compute_in_shares(3, lambda rows_n: 10 * rows_n).tolist()
        [0, 10, 20]
    """
    import numpy as np

    return np.concatenate(gather_objects(compute(my_share(np.arange(total), shared=True)), shared=True))


def from_main_process(make: Callable[[], T]) -> T:
    """Call a function on the first process, and return its result on every process."""
    return cast(T, gather_objects(make() if is_main_process() else None, shared=True)[0])


def sum_over_ranks(value: torch.Tensor) -> torch.Tensor:
    """Sum a detached tensor over the processes."""
    if not is_distributed():
        return value
    total = value.detach().clone()
    dist.all_reduce(total)
    return total


def share_buffers(model: torch.nn.Module) -> None:
    """Copy the first process's buffers to all processes. Batch norms count each process's own batches."""
    if is_distributed():
        for buffer in model.buffers():
            dist.broadcast(buffer, 0)


def mean_over_ranks(value: torch.Tensor) -> torch.Tensor:
    """Average a detached scalar over the processes."""
    return sum_over_ranks(value) / world_size() if is_distributed() else value
