"""Prefetch and rate limit of the blocks of a migration."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
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


class Throttle:
    """Limit of the rows per second.

    Args:
        per_second: the limit; None for no limit.
        sleep: waits the given seconds.
    """

    def __init__(self, per_second: float | None, sleep: Callable[[float], None] = time.sleep) -> None:
        self.per_second, self.sleep, self.started, self.done = per_second, sleep, time.monotonic(), 0

    def wait(self, rows: int) -> None:
        """Count rows, and wait while there are more than the limit allows."""
        self.done += rows
        if self.per_second is not None:
            self.sleep(max(0.0, self.started + self.done / self.per_second - time.monotonic()))
