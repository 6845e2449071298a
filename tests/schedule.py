"""Which parameters of a test run on every change, and which in ``make nightly``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

METHOD_OF_EACH_KIND = ("xbt", "bct", "query_map", "fct")
"""A model of images and texts, one of images, a map of queries and a map of galleries: tests of every method run these daily."""


def mostly_nightly(values: Iterable[Any], daily: Callable[[Any], bool]) -> list[Any]:
    """Return the parameters of a test; all but the daily ones run in ``make nightly`` only."""
    return [value if daily(value) else pytest.param(value, marks=pytest.mark.nightly) for value in values]


def mostly_nightly_rows(rows: Iterable[Sequence[Any]], daily: Callable[..., bool]) -> list[Any]:
    """Return likewise the values of several parameters, a row for each case."""
    return [pytest.param(*row, marks=() if daily(*row) else pytest.mark.nightly) for row in rows]
