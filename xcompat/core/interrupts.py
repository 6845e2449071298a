"""Ctrl-C and SIGTERM noted, so that work stops between two steps and keeps what is done."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any, Self


class Interrupts:
    """Notes the first signal in :attr:`asked`; a second one acts at once.

    A launcher sends SIGTERM after Ctrl-C, and a cluster's scheduler before it ends a job. Only the main thread of a process gets
    signals: in any other nothing is noted.
    """

    def __init__(self) -> None:
        self.asked = False  # never reset, as a signal may come while processes ask each other
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        """Take over the signals."""
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        signal.signal(number, self._previous[number])

    def __exit__(self, *_: object) -> None:
        """Restore the handlers of the signals."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}
