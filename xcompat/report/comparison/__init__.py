"""Comparison of methods over several seeds under the same protocol."""

from __future__ import annotations

from xcompat.report.comparison.files import comparison_file, require_comparison_place, write_comparison
from xcompat.report.comparison.study import Comparison, EvaluatedMethod, ItemCost, MethodRow, Row, Spread, compare
from xcompat.report.comparison.tables import print_comparison

__all__ = [
    "Comparison",
    "EvaluatedMethod",
    "ItemCost",
    "MethodRow",
    "Row",
    "Spread",
    "compare",
    "comparison_file",
    "print_comparison",
    "require_comparison_place",
    "write_comparison",
]
