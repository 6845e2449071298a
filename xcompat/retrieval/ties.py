"""Order of items with equal scores: by row, independent of the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

MORE, HITS_AT_ONCE = 4, 2**22
"""Growth factor of a search with ties, and largest number of hits in memory."""
ROUNDING = 2.0**-18
"""Relative error of a float32 score, for any order of summation."""
COMPARED_BYTES = 2**27


class Scored(NamedTuple):
    """Nearest rows for some queries.

    Args:
        scores_Qk: (Q, k) the index's scores, best first.
        rows_Qk: (Q, k) rows, padded with -1.
        exact_Qk: (Q, k) batch-independent scores, for ranking.
        slack_Q: (Q,) largest rounding difference between equal vectors' scores.
    """

    scores_Qk: NDArray[np.float32]
    rows_Qk: NDArray[np.int64]
    exact_Qk: NDArray[np.float32]
    slack_Q: NDArray[np.float32]


Find: TypeAlias = Callable[[NDArray[np.float32], int], Scored]


def search_with_ties(
    find: Find, queries_Qd: NDArray[np.float32], k: int, rows: int
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Find each query's k nearest rows, with ties sorted by row.

    An index returns any rows among equal scores, so the search is repeated with more hits until a lower score follows.

    Args:
        find: returns the k nearest rows for queries.
        queries_Qd: (Q, d) float32.
        k: rows per query.
        rows: the index's rows.

    Returns:
        (Q, k) scores, best first, and (Q, k) rows, padded with -1.
    """
    scores_Qk = np.empty((len(queries_Qd), k), np.float32)
    rows_Qk = np.empty((len(queries_Qd), k), np.int64)
    open_n, most = np.arange(len(queries_Qd)), max(k, rows)
    more = min(k + 1 + k // 8, most)
    while len(open_n):
        wanting = []
        for part in np.array_split(open_n, -(-len(open_n) * more // HITS_AT_ONCE)):
            found = find(queries_Qd[part], more)
            order_Qk = np.lexsort((found.rows_Qk, -found.exact_Qk))[:, :k]
            scores_Qk[part] = np.take_along_axis(found.exact_Qk, order_Qk, 1)
            rows_Qk[part] = np.take_along_axis(found.rows_Qk, order_Qk, 1)
            wanting.append(part[_may_lack_ties(found, k)] if more < most else part[:0])
        open_n, more = np.concatenate(wanting), min(more * MORE, most)
    return scores_Qk, rows_Qk


def _may_lack_ties(found: Scored, k: int) -> NDArray[np.bool_]:
    """Return queries that may have further rows with their last score."""
    last_Q, worst_Q = found.scores_Qk[:, k - 1], found.scores_Qk[:, -1]
    return (found.rows_Qk[:, -1] >= 0) & (worst_Q >= last_Q - found.slack_Q)


def compare_exactly(
    queries_Qd: NDArray[np.float32],
    rows_Qk: NDArray[np.int64],
    scores_Qk: NDArray[np.float32],
    vectors: Callable[[NDArray[np.int64]], NDArray[np.float32]],
    metric: str,
) -> Scored:
    """Recompute scores in float64, so equal vectors get equal scores in every batch.

    Args:
        queries_Qd: (Q, d) float32.
        rows_Qk: (Q, k) rows, padded with -1.
        scores_Qk: (Q, k) the index's scores.
        vectors: returns the rows' vectors.
        metric: ``l2`` for squared distances, else inner products.
    """
    exact_Qk, slack_Q = scores_Qk.copy(), np.empty(len(queries_Qd), np.float32)
    (count, k), dim = rows_Qk.shape, queries_Qd.shape[1]
    size = max(1, COMPARED_BYTES // (8 * max(k, 1) * dim))
    for start in range(0, count, size):
        here = slice(start, start + size)
        queries_qd, rows_qk = queries_Qd[here].astype(np.float64), rows_Qk[here]
        vectors_qkd = vectors(np.maximum(rows_qk, 0).ravel()).reshape(*rows_qk.shape, dim).astype(np.float64)
        lengths_q, lengths_qk = np.einsum("qd,qd->q", queries_qd, queries_qd), np.einsum("qkd,qkd->qk", vectors_qkd, vectors_qkd)
        longest_q = np.where(rows_qk < 0, 0, lengths_qk).max(axis=1, initial=0)
        if metric == "l2":
            vectors_qkd -= queries_qd[:, None]
            scores_qk = -np.einsum("qkd,qkd->qk", vectors_qkd, vectors_qkd)
            slack_Q[here] = ROUNDING * (lengths_q + longest_q)
        else:
            scores_qk = np.einsum("qd,qkd->qk", queries_qd, vectors_qkd)
            slack_Q[here] = ROUNDING * np.sqrt(lengths_q * longest_q)
        exact_Qk[here] = np.where(rows_qk < 0, scores_Qk[here], scores_qk)
    return Scored(scores_Qk, rows_Qk, exact_Qk, slack_Q)
