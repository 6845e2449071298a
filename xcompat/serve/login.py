"""Password, sessions, and delays after wrong passwords."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from math import ceil

from xcompat.serve.lane import BusyError

SESSION_SECONDS = 12 * 3600
SESSIONS = 1000
"""Maximum sessions. Beyond it, the oldest session ends."""
LONGEST_DELAY = 60.0
"""Maximum seconds that an address waits after a wrong password."""
ADDRESSES = 10_000
"""Maximum addresses with recorded wrong passwords."""


class Login:
    """Visitors' password and sessions.

    Args:
        password: the password.
        clock: monotonic seconds.
    """

    def __init__(self, password: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._password, self._clock = _digest(password), clock
        self._sessions: OrderedDict[bytes, float] = OrderedDict()
        self._failures: OrderedDict[str, tuple[int, float]] = OrderedDict()

    def start_session(self, password: str, address: str) -> str | None:
        """Return a new session's token, or None for a wrong password.

        Args:
            password: the visitor's input.
            address: the visitor's address. Each wrong password doubles its wait.

        Raises:
            BusyError: the address must wait after a wrong password.
        """
        count, until = self._failures.get(address, (0, 0.0))
        if (left := until - self._clock()) > 0:
            raise BusyError(429, f"wrong password; try again in {ceil(left)} s")
        if not hmac.compare_digest(_digest(password), self._password):
            delay = min(2.0 ** min(count, 16), LONGEST_DELAY)
            self._failures[address] = count + 1, self._clock() + delay
            self._failures.move_to_end(address)
            _drop_oldest(self._failures, ADDRESSES)
            return None
        self._failures.pop(address, None)
        token = secrets.token_urlsafe(32)
        self._sessions[_digest(token)] = self._clock() + SESSION_SECONDS
        _drop_oldest(self._sessions, SESSIONS)
        return token

    def has_session(self, token: str) -> bool:
        """Return whether a token belongs to an active session."""
        key = _digest(token)
        if self._sessions.get(key, 0.0) <= self._clock():
            self._sessions.pop(key, None)
            return False
        return True

    def end_session(self, token: str) -> None:
        """End a session if it exists."""
        self._sessions.pop(_digest(token), None)


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def _drop_oldest(entries: OrderedDict, most: int) -> None:
    while len(entries) > most:
        entries.popitem(last=False)
