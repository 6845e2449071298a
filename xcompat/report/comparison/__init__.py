"""Many methods, several seeds, one protocol, one table."""

from __future__ import annotations

from xcompat.report.comparison.files import write_comparison
from xcompat.report.comparison.study import Comparison, Contender, MethodRow, Row, Spread, compare
from xcompat.report.comparison.terminal import print_comparison

__all__ = [
    "Comparison",
    "Contender",
    "MethodRow",
    "Row",
    "Spread",
    "compare",
    "print_comparison",
    "write_comparison",
]
