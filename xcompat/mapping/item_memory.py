"""Memory of all items as a candidate without labels, and its results."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from xcompat.evaluation import PairedDifference
from xcompat.mapping.candidates import Candidate

SHARPNESS, SHARE = 60.0, 0.5
"""β and λ, fixed because stored items as queries differ from users' queries (docs/results/lines.md)."""
LEAST_COVERAGE = 0.5
"""Least share of the gallery that the memory must know. Below it users' queries found less, which agreement does not show."""


class ItemMemory(NamedTuple):
    """Agreement of the chosen map with and without a memory of all items, in the whole gallery.

    Args:
        coverage: share of the gallery's items that the memory knows.
        alone: share of the new model's neighbours that queries find without the memory.
        gain: change with the memory; None if the coverage is below :data:`LEAST_COVERAGE`.
        n_queries: number of queries.
    """

    coverage: float
    alone: float = 0.0
    gain: PairedDifference | None = None
    n_queries: int = 0

    @property
    def is_chosen(self) -> bool:
        """Whether queries surely find more of the new model's neighbours with the memory."""
        return self.gain is not None and self.gain.low > 0


def with_item_memory(candidate: Candidate) -> Candidate:
    """Return a candidate with a memory of all items."""
    return replace(candidate, sharpness=SHARPNESS, share=SHARE)
