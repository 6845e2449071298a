"""A claim for databases without locks: a record that ends by itself, and at once where the process that made it is dead."""

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
"""After so long without :meth:`Lease.renew`, a claim of another machine has ended."""
_HELD: set[str] = set()
"""Owners of the claims that this process holds; one that it lost with a connection is not among them."""


class Lease:
    """A claim on a store.

    Two processes that begin within the same instant may both believe that they have it. The next renewal stops the one whose
    record the other replaced; until then both write the same vectors.

    Args:
        store: holds the record.
        clock: gives the seconds since 1970.
    """

    def __init__(self, store: Store, clock: Callable[[], float] = time.time) -> None:
        self.store, self.clock = store, clock
        self.owner = uuid.uuid4().hex

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the claim.

        Raises:
            XcompatError: another process has it.
        """
        found = self.store.record(RECORD)
        if found is not None and self._lives(found):
            raise self._taken()
        _HELD.add(self.owner)
        try:
            self._write()
            self.renew()
            yield
        finally:
            _HELD.discard(self.owner)
            if self._own():
                self.store.set_record(RECORD, None)

    def renew(self) -> None:
        """Hold it for longer.

        Raises:
            XcompatError: another process took it.
        """
        if not self._own():
            raise self._taken()
        self._write()

    def _own(self) -> bool:
        found = self.store.record(RECORD)
        return found is not None and found["owner"] == self.owner

    def _write(self) -> None:
        who = {"owner": self.owner, "host": socket.gethostname(), "pid": os.getpid()}
        self.store.set_record(RECORD, {**who, "until": self.clock() + SECONDS})

    def _lives(self, found: dict[str, Any]) -> bool:
        """Whether its process may still run: one of this machine can be looked for."""
        if found["host"] != socket.gethostname():
            return bool(self.clock() < found["until"])
        if found["pid"] == os.getpid():  # or a process before this one, whose number it has
            return found["owner"] in _HELD
        try:
            os.kill(found["pid"], 0)
        except ProcessLookupError:
            return False
        except PermissionError:  # somebody else's process
            return True
        return True

    def _taken(self) -> XcompatError:
        return XcompatError(f"{self.store.uri} is being migrated by another process; wait for it, or stop it first")
