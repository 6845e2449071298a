"""The cores and the memory of one process: work that is spread over them, and memory that is used again."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from typing import TypeVar

import torch

MOST_THREADS = 16
"""Each holds blocks of its own in memory, and shares the machine's way to it with all others."""
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
KEPT = 2**30
"""Bytes of freed memory that a process keeps, and the size from which on memory is the system's nevertheless."""
T = TypeVar("T")
R = TypeVar("R")


@functools.cache
def keep_freed_memory() -> None:
    """Have glibc give freed memory to whoever asks next (mallopt(3)), for the rest of the process.

    Left alone it returns anything as large as a batch's activations to the system, which clears every page of it for the next
    batch, and takes a third of the time for that where a ResNet-50 embeds on a CPU
    (`python benchmarks/speed/freed_memory.py`). Other C libraries stay as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, KEPT)
        mallopt(M_TRIM_THRESHOLD, KEPT)


def map_in_threads(function: Callable[[T], R], items: Iterable[T], threads: int) -> Iterator[R]:
    """Compute ahead of who asks, in order, and at most one item more than there are threads.

    Args:
        function: what is computed of each item; most of it must run outside Python's lock.
        items: read one by one, by the thread that asks.
        threads: how many items are worked on at a time.

    Yields:
        The results in the order of the items.

    Example:
        >>> list(map_in_threads(abs, [-3, 2, -1], threads=2))
        [3, 2, 1]
    """
    with ThreadPoolExecutor(
        threads
    ) as pool:  # whose map reads all items at once before Python 3.14; joblib reads them in its threads
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
    """Compute as many items at once as there are threads, in order, and nothing while who asks uses them.

    A model on the same cores loses more to threads that compute beside it than these gain: each of its products waits for the
    core that was taken.

    Args:
        function: what is computed of each item; most of it must run outside Python's lock.
        items: read by the thread that asks, so many at a time.
        threads: how many items are worked on at a time.

    Yields:
        The results in the order of the items.

    Example:
        >>> list(map_in_rounds(abs, [-3, 2, -1], threads=2))
        [3, 2, 1]
    """
    remaining = iter(items)
    with ThreadPoolExecutor(threads) as pool:
        while together := list(islice(remaining, threads)):
            yield from list(pool.map(function, together))


def cores(device: torch.device) -> int:
    """Return how many threads :func:`map_over_cores` spreads work over: as many as torch computes with, on a CPU."""
    return min(torch.get_num_threads(), MOST_THREADS) if device.type == "cpu" else 1


def usable_cores() -> int:
    """Return how many cores this process may use, which may be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def map_over_cores(function: Callable[[T], R], items: Iterable[T], device: torch.device) -> Iterator[R]:
    """Compute each item on a core of its own, as sorting, counting and indexing in torch know no other way.

    Args:
        function: what is computed of each item.
        items: independent of each other.
        device: what is computed on; anything but a CPU is given one item after the other.

    Yields:
        The results in the order of the items.
    """
    if (threads := cores(device)) == 1:
        yield from map(function, items)
    else:
        yield from map_in_threads(on_one_core(function), items, threads)


def on_one_core(function: Callable[[T], R]) -> Callable[[T], R]:
    """Return a function for threads beside each other: torch computes on the one that calls it, and starts no more for each.

    Args:
        function: what is to be called.
    """
    of_all = torch.get_num_threads()

    def alone(item: T) -> R:
        with _one_torch_thread(of_all):
            return function(item)

    return alone


@contextmanager
def _one_torch_thread(of: int) -> Iterator[None]:
    """Have torch compute on the calling thread alone; other threads keep what they have."""
    torch.get_num_threads()  # the first question in a thread takes over everyone's number, over what it was told before
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(of)  # what threads that start later take over
