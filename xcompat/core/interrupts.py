"""Ctrl-C and SIGTERM handling, to stop work between two steps."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any, Self


class Interrupts:
    """Recorder of the first signal, in :attr:`asked`. A second signal acts immediately.

    Launchers send SIGTERM after Ctrl-C, and schedulers send it before they end a job. Python delivers signals only to the main
    thread, so other threads record nothing.
    """

    def __init__(self) -> None:
        self.asked = False  # never reset: a signal may arrive while processes exchange it
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        signal.signal(number, self._previous[number])

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}
