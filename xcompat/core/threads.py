"""Threads and memory of a process."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from itertools import islice
from typing import Any, Generic, TypeVar

import torch
from threadpoolctl import ThreadpoolController, threadpool_limits

MOST_THREADS = 16
"""Maximum threads. Each holds its own blocks in memory, and all share the memory bandwidth."""
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # constants of malloc.h
KEPT_BYTES = 2**30
"""Bytes of freed memory that a process keeps. Larger single blocks go back to the system."""
SMALL = 1024
"""Largest dimension of matrices for :func:`one_thread_if_small`."""
T = TypeVar("T")
R = TypeVar("R")


class unlocked_property(Generic[T]):  # noqa: N801 - a decorator
    """Attribute that is computed on first use, like :class:`functools.cached_property`, but for all objects in parallel.

    Before Python 3.12, all objects of a class share the lock of a cached property, so threads compute it in turn. An object that
    several threads share may compute it several times.

    Args:
        compute: method that computes the value.
    """

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self._compute = compute
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type | None = None) -> T:
        value: T = self._compute(instance)
        vars(instance)[self._name] = value  # found before this descriptor from now on
        return value


@functools.cache
def keep_freed_memory() -> None:
    """Make glibc keep freed memory for the next allocation (mallopt(3)), for the rest of the process.

    By default glibc returns large blocks to the system, which clears their pages again for the next batch. This takes a third
    of the time when a ResNet-50 embeds on a CPU (`python benchmarks/speed/freed_memory.py`).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, KEPT_BYTES)
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)


def map_in_threads(function: Callable[[T], R], items: Iterable[T], threads: int) -> Iterator[R]:
    """Apply a function in threads. Threads run ahead of the consumer by at most ``threads + 1`` items.

    Args:
        function: must spend most time outside Python's global lock.
        items: read singly in the consumer's thread.
        threads: number of threads.

    Yields:
        The results, in order.

    Example:
        >>> list(map_in_threads(abs, [-3, 2, -1], threads=2))
        [3, 2, 1]
    """
    # before Python 3.14 the pool's own map reads all items at once, and joblib reads them in its threads
    with ThreadPoolExecutor(threads) as pool:
        started = (pool.submit(function, item) for item in items)
        ahead = deque(islice(started, threads + 1))
        try:
            while ahead:
                result = ahead.popleft().result()
                ahead.extend(islice(started, 1))
                yield result
        finally:
            pool.shutdown(cancel_futures=True)


def map_in_rounds(function: Callable[[T], R], items: Iterable[T], threads: int) -> Iterator[R]:
    """Apply a function to ``threads`` items at a time, and pause while the consumer uses the results.

    Use it if the consumer runs a model on the same cores: parallel threads would slow its matrix products.

    Args:
        function: must spend most time outside Python's global lock.
        items: read in the consumer's thread, ``threads`` at a time.
        threads: number of threads.

    Yields:
        The results, in order.

    Example:
        >>> list(map_in_rounds(abs, [-3, 2, -1], threads=2))
        [3, 2, 1]
    """
    remaining = iter(items)
    with ThreadPoolExecutor(threads) as pool:
        while together := list(islice(remaining, threads)):
            yield from list(pool.map(function, together))


def cores(device: torch.device) -> int:
    """Return the thread count for :func:`map_over_cores`: torch's setting on a CPU, else 1."""
    return min(torch.get_num_threads(), MOST_THREADS) if device.type == "cpu" else 1


def usable_cores() -> int:
    """Return the number of cores that this process can use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def share_of_cores() -> int:
    """Return the number of cores per process that a launcher started on this machine."""
    return max(1, usable_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def use_share_of_cores() -> None:
    """Use several threads in this process, if a launcher for GPUs has set a single one.

    Without ``OMP_NUM_THREADS``, `accelerate launch` and `torchrun` set it to 1. That is too few for faiss, k-means, rankings and
    NumPy on the CPU. For CPUs, `accelerate launch` shares the cores itself.
    """
    on_cpu = os.environ.get("ACCELERATE_USE_CPU")
    is_launched = on_cpu is not None or "LOCAL_WORLD_SIZE" in os.environ
    if not is_launched or str(on_cpu).lower() in ("1", "true") or os.environ.get("OMP_NUM_THREADS") != "1":
        return
    threads = min(share_of_cores(), MOST_THREADS)
    os.environ["OMP_NUM_THREADS"] = str(threads)  # for libraries that are loaded later
    torch.set_num_threads(threads)
    threadpool_limits(threads)


def map_over_cores(function: Callable[[T], R], items: Iterable[T], device: torch.device) -> Iterator[R]:
    """Compute each item on a single core, for sorting, counting and indexing, which torch does not parallelise.

    Args:
        function: computes an item with torch.
        items: independent of each other.
        device: the device it computes on. On anything but a CPU, items run sequentially.

    Yields:
        The results, in order.
    """
    if (threads := cores(device)) == 1:
        yield from map(function, items)
    else:
        yield from map_in_threads(on_one_core(function), items, threads)


def on_one_core(function: Callable[[T], R]) -> Callable[[T], R]:
    """Wrap a function for use in several threads: torch then computes only in the calling thread."""
    of_all = torch.get_num_threads()

    def run_alone(item: T) -> R:
        with _one_torch_thread(of_all):
            return function(item)

    return run_alone


@functools.cache
def _thread_pools() -> ThreadpoolController:
    """Return the process's thread pools. Finding them takes 8 ms."""
    return ThreadpoolController()


def one_blas_thread() -> AbstractContextManager[object]:
    """Make NumPy compute its products in the calling thread only."""
    pools: AbstractContextManager[object] = _thread_pools().limit(limits=1, user_api="blas")
    return pools


@contextmanager
def one_thread_if_small(dim: int) -> Iterator[None]:
    """Make torch decompose small matrices in the calling thread only.

    Threads of eigenvalues and singular values often wait for each other. If other programs use the cores, two threads take up
    to 100 times as long as a single thread.

    Args:
        dim: largest dimension of the matrices.
    """
    if dim > SMALL or (threads := torch.get_num_threads()) == 1:
        yield
        return
    with _one_torch_thread(threads):
        yield


@contextmanager
def _one_torch_thread(of: int) -> Iterator[None]:
    """Make torch compute only in the calling thread. Other threads keep their setting."""
    torch.get_num_threads()  # a thread's first call adopts the global number, and would undo the next line later
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(of)  # the number that later threads adopt
