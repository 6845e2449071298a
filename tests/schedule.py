"""Which parameters of a test run on every change, and which in ``make nightly``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def mostly_nightly(values: Iterable[Any], daily: Callable[[Any], bool]) -> list[Any]:
    """Return the parameters of a test; all but the daily ones run in ``make nightly`` only.

    Args:
        values: all parameters.
        daily: whether a parameter runs on every change.
    """
    return [value if daily(value) else pytest.param(value, marks=pytest.mark.nightly) for value in values]
