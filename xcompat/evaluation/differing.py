"""Which queries gained and which lost between two models, from the ranks of their first matches."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np

Order = Literal["lost", "gained"]


class Differing(NamedTuple):
    """Queries, sorted.

    Args:
        rows_q: int64 numbers of the queries that were judged: those that lost most or gained most come first.
        flips: how many of the first are right at the first place with one model and wrong with the other.
    """

    rows_q: np.ndarray
    flips: int


def differing(old_Q: np.ndarray, new_Q: np.ndarray, order: Order) -> Differing:
    """Sort queries by what a new model lost or gained; what flipped at the first place comes first.

    A first match that falls from place 1 to 4 lost as much as one that falls from 10 to 40: places are looked at from the top.

    Args:
        old_Q: ``(Q,)`` ranks of :func:`xcompat.evaluation.first_hit_ranks` with the old model, -1 for queries left out.
        new_Q: the same with the new model.
        order: what comes first.

    Example:
        >>> differing(np.array([0, 9, 3, -1]), np.array([3, 99, 0, -1]), "lost")
        Differing(rows_q=array([0, 1, 2]), flips=1)
    """
    judged_q = np.flatnonzero((old_Q >= 0) & (new_Q >= 0))
    before_q, after_q = (old_Q[judged_q], new_Q[judged_q]) if order == "lost" else (new_Q[judged_q], old_Q[judged_q])
    flipped_q = (before_q == 0) & (after_q > 0)
    fell_q = np.log1p(after_q) - np.log1p(before_q)
    return Differing(judged_q[np.lexsort((-fell_q, ~flipped_q))], int(flipped_q.sum()))
