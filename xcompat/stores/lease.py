"""Lease for databases without locks. It expires on its own, or immediately if its owner has died."""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from xcompat.core.errors import XcompatError

if TYPE_CHECKING:
    from xcompat.stores.base import Store

RECORD = "claim"
SECONDS = 60.0
"""A lease of another machine expires after this time without :meth:`Lease.renew`."""
_HELD: set[str] = set()
"""Owners of this process's leases, without leases lost with a connection."""


class Lease:
    """Lease on a store.

    If two processes start at the same instant, both can get it, and write the same vectors. The next renewal stops the loser.

    Args:
        store: holds the record.
        clock: returns the seconds since 1970.
    """

    def __init__(self, store: Store, clock: Callable[[], float] = time.time) -> None:
        self.store, self.clock = store, clock
        self.owner = uuid.uuid4().hex

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Hold the lease.

        Raises:
            XcompatError: another process has it.
        """
        found = self.store.record(RECORD)
        if found is not None and self._lives(found):
            raise self._lease_error()
        _HELD.add(self.owner)
        try:
            self._write()
            self.renew()
            yield
        finally:
            _HELD.discard(self.owner)
            if self._is_own():
                self.store.set_record(RECORD, None)

    def renew(self) -> None:
        """Extend the lease.

        Raises:
            XcompatError: another process took the lease.
        """
        if not self._is_own():
            raise self._lease_error()
        self._write()

    def _is_own(self) -> bool:
        found = self.store.record(RECORD)
        return found is not None and found["owner"] == self.owner

    def _write(self) -> None:
        who = {"owner": self.owner, "host": socket.gethostname(), "pid": os.getpid()}
        self.store.set_record(RECORD, {**who, "until": self.clock() + SECONDS})

    def _lives(self, found: dict[str, Any]) -> bool:
        """Return whether the owner can be alive. Only processes on this machine are checked."""
        if found["host"] != socket.gethostname():
            return bool(self.clock() < found["until"])
        if found["pid"] == os.getpid():  # or an older process with the same number
            return found["owner"] in _HELD
        try:
            os.kill(found["pid"], 0)
        except ProcessLookupError:
            return False
        except PermissionError:  # another user's process
            return True
        return True

    def _lease_error(self) -> XcompatError:
        return XcompatError(f"{self.store.uri} is being migrated by another process; wait for it or stop it")
