"""Queries with gains or losses between two models, by the rank of their first match."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np

Order = Literal["lost", "gained"]


class SortedQueries(NamedTuple):
    """Sorted queries.

    Args:
        rows_q: int64 rows of the evaluated queries, largest loss or gain first.
        flips: number of leading queries with a correct first hit from only one model.
    """

    rows_q: np.ndarray
    flips: int


def sort_by_change(old_Q: np.ndarray, new_Q: np.ndarray, order: Order) -> SortedQueries:
    """Sort queries by their loss or gain with a new model; flips at the first place come first.

    Ranks are compared on a log scale: falling from place 1 to 4 counts as much as from 10 to 40.

    Args:
        old_Q: ``(Q,)`` ranks of :func:`xcompat.evaluation.first_hit_ranks` with the old model, -1 for excluded queries.
        new_Q: ranks with the new model.
        order: ``lost`` or ``gained`` first.

    Example:
        >>> sort_by_change(np.array([0, 9, 3, -1]), np.array([3, 99, 0, -1]), "lost")
        SortedQueries(rows_q=array([0, 1, 2]), flips=1)
    """
    judged_q = np.flatnonzero((old_Q >= 0) & (new_Q >= 0))
    before_q, after_q = (old_Q[judged_q], new_Q[judged_q]) if order == "lost" else (new_Q[judged_q], old_Q[judged_q])
    flipped_q = (before_q == 0) & (after_q > 0)
    fell_q = np.log1p(after_q) - np.log1p(before_q)
    return SortedQueries(judged_q[np.lexsort((-fell_q, ~flipped_q))], int(flipped_q.sum()))
