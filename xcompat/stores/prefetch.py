"""Prefetching in a thread."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def prefetch(items: Iterator[T]) -> Generator[T, None, None]:
    """Prefetch the next item in a thread.

    Example:
        >>> list(prefetch(iter(range(3))))
        [0, 1, 2]
    """
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(lambda: next(items, None))
        while (item := coming.result()) is not None:
            coming = pool.submit(lambda: next(items, None))
            yield item
