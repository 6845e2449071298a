"""Fair queue for a single worker thread."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")


class BusyError(Exception):
    """The server has no room or no time for a request.

    Args:
        status: the answer's HTTP status.
        line: the reason, in one line.
    """

    def __init__(self, status: int, line: str) -> None:
        super().__init__(line)
        self.status, self.line = status, line


class Client(NamedTuple):
    """A request's sender.

    Args:
        address: network address. A 64-bit IPv6 network counts as a single address.
        visitor: session or browser at that address.
    """

    address: str
    visitor: str = ""


class Worker:
    """Thread that runs tasks sequentially and does not delay an interrupted server's exit."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        self._thread: Thread | None = None

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Return a task's future result."""
        if self._thread is None:
            self._thread = Thread(target=self._work_forever, daemon=True)
            self._thread.start()
        result: Future[T] = Future()
        self._queue.put((result, work))
        return result

    def _work_forever(self) -> None:
        while True:
            result, work = self._queue.get()
            try:
                result.set_result(work())
            except BaseException as error:
                result.set_exception(error)
            del result, work  # they hold a visitor's image


class Lane:
    """Queue for a worker thread. Addresses take turns, and so do visitors at an address.

    Args:
        capacity: maximum waiting requests. When full, the client with the most waiting requests loses its newest.
        wait_seconds: maximum wait for a turn. None to wait without limit.
        work_seconds: maximum wait for a result. None to wait without limit.
    """

    def __init__(self, capacity: int, wait_seconds: float | None = None, work_seconds: float | None = None) -> None:
        self.capacity, self.wait_seconds, self.work_seconds = capacity, wait_seconds, work_seconds
        self._worker = Worker()
        self._waiting: dict[str, dict[str, deque[asyncio.Future[None]]]] = {}
        self._is_busy = False

    async def run(self, client: Client, work: Callable[[], T], is_gone: Callable[[], Awaitable[bool]] | None = None) -> T:
        """Run a task at the client's turn.

        Args:
            client: the request's sender.
            work: called in the lane's thread.
            is_gone: tells whether the client has left, to skip its work.

        Raises:
            BusyError: the queue is full, or the task or the wait took too long.
        """
        await self._wait_for_turn(client)
        try:
            if is_gone is not None and await is_gone():
                raise BusyError(499, "the client has left")
            working = asyncio.wrap_future(self._worker.submit(work))
        except BaseException:
            self._start_next()
            raise
        working.add_done_callback(self._end)
        await asyncio.wait([working], timeout=self.work_seconds)
        if not working.done():
            raise BusyError(503, f"this takes longer than {self.work_seconds:g} s; request fewer results")
        return working.result()

    @property
    def waiting(self) -> int:
        """Number of waiting requests."""
        return sum(map(self._count, self._waiting))

    def _count(self, address: str) -> int:
        return sum(map(len, self._waiting.get(address, {}).values()))

    async def _wait_for_turn(self, client: Client) -> None:
        if not self._is_busy:
            self._is_busy = True
            return
        if self.waiting >= self.capacity:
            self._make_room(client)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client.address, {}).setdefault(client.visitor, deque()).append(turn)
        try:
            await asyncio.wait([turn], timeout=self.wait_seconds)
        except asyncio.CancelledError:
            if turn.done() and turn.exception() is None:
                self._start_next()
            raise
        finally:
            self._remove(client, turn)
        if not turn.done():
            raise BusyError(503, "the server is busy; try again in a moment")
        turn.result()

    def _make_room(self, client: Client) -> None:
        """Refuse the newest request from the client with the most waiting requests, possibly this client."""
        address = max(self._waiting, key=self._count)
        visitors = self._waiting[address]
        visitor = max(visitors, key=lambda name: len(visitors[name]))
        busy = BusyError(429, "too many requests of yours are waiting; try again in a moment")
        if client.address != address:
            is_smaller = self._count(client.address) + 1 < self._count(address)
        else:
            is_smaller = len(visitors.get(client.visitor, ())) + 1 < len(visitors[visitor])
        if not is_smaller:
            raise busy
        turn = visitors[visitor][-1]
        self._remove(Client(address, visitor), turn)
        turn.set_exception(busy)

    def _remove(self, client: Client, turn: asyncio.Future[None]) -> None:
        visitors = self._waiting.get(client.address, {})
        turns = visitors.get(client.visitor, deque())
        if turn in turns:
            turns.remove(turn)
        if not turns:
            visitors.pop(client.visitor, None)
        if not visitors:
            self._waiting.pop(client.address, None)

    def _end(self, working: asyncio.Future[T]) -> None:
        if not working.cancelled():
            working.exception()  # marks it as retrieved if nobody waits for it
        self._start_next()

    def _start_next(self) -> None:
        """Give the next address's next visitor a turn, and move both to the end of their queues."""
        if not self._waiting:
            self._is_busy = False
            return
        address = next(iter(self._waiting))
        visitors = self._waiting.pop(address)
        visitor = next(iter(visitors))
        turns = visitors.pop(visitor)
        turn = turns.popleft()
        if turns:
            visitors[visitor] = turns
        if visitors:
            self._waiting[address] = visitors
        turn.set_result(None)
