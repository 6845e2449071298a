"""Work of the next block while the one before is in use."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def ahead(items: Iterator[T]) -> Generator[T, None, None]:
    """Yield items, of which a thread makes the next while one is in use.

    Example:
        >>> list(ahead(iter(range(3))))
        [0, 1, 2]
    """
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(lambda: next(items, None))
        while (item := coming.result()) is not None:
            coming = pool.submit(lambda: next(items, None))
            yield item
