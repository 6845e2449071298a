"""One ranking out of several: scores of one query against stored embeddings of different versions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from xcompat.errors import XcompatError, nearest

Merge = Literal["raw", "standardised", "rank"]

SAMPLE = 2048
"""Stored embeddings of each version whose scores say what a query's scores are like there."""
_RANK_OFFSET = 60  # of reciprocal rank fusion (Cormack et al. 2009)


class Candidates(NamedTuple):
    """What a query finds among the stored embeddings of one version.

    Args:
        scores_Qk: the best first; -inf where there are no more.
        segments_Qk: index of the segment of each.
        rows_Qk: its row there.
        sample_QS: scores against a sample of that version's embeddings; needed for ``standardised``.
    """

    scores_Qk: NDArray[np.float32]
    segments_Qk: NDArray[np.int64]
    rows_Qk: NDArray[np.int64]
    sample_QS: NDArray[np.float32] | None = None


def merge_candidates(
    found: Sequence[Candidates], k: int, merge: Merge
) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.int64]]:
    """Merge what was found per version.

    ``raw`` compares scores as they are. ``standardised`` takes off the mean of the query's scores against a sample of the
    version and divides by their deviation: another view has other cosines between things that have nothing in common. It takes
    the items of each version to be alike, as they are where chance says what is embedded anew first.
    ``rank`` compares places (reciprocal rank fusion), and so takes from all versions in turn.

    Args:
        found: one per version.
        k: how many hits to keep.
        merge: how.

    Returns:
        (Q, k) scores as they were computed, (Q, k) segments and (Q, k) rows, -1 where there are no more.

    Raises:
        XcompatError: there is no such way.

    Example:
        >>> one = Candidates(np.array([[0.9, 0.2]]), np.array([[0, 0]]), np.array([[5, 6]]))
        >>> other = Candidates(np.array([[0.5, 0.4]]), np.array([[1, 1]]), np.array([[7, 8]]))
        >>> merge_candidates([one, other], 3, "raw")[2].tolist(), merge_candidates([one, other], 3, "rank")[2].tolist()
        ([[5, 7, 8]], [[5, 7, 6]])
    """
    if merge not in get_args(Merge):
        raise XcompatError(f"there is no way {merge!r} to merge scores of several versions; {nearest(merge, get_args(Merge))}")
    keys = [_keys(each, merge) for each in found] if len(found) > 1 else [found[0].scores_Qk]
    key_QK = np.concatenate(keys, axis=1)
    scores_QK, segments_QK, rows_QK = (np.concatenate([each[part] for each in found], axis=1) for part in range(3))
    key_QK = np.where(rows_QK < 0, -np.inf, key_QK)
    order_Qk = np.argsort(-key_QK, axis=1, kind="stable")[:, :k]
    taken = (np.take_along_axis(array, order_Qk, 1) for array in (scores_QK, segments_QK, rows_QK))
    scores_Qk, segments_Qk, rows_Qk = taken
    return scores_Qk, segments_Qk, rows_Qk


def _keys(found: Candidates, merge: Merge) -> NDArray[np.float32]:
    if merge == "raw":
        return found.scores_Qk
    if merge == "rank":
        places_k = 1.0 / (_RANK_OFFSET + 1 + np.arange(found.scores_Qk.shape[1]))
        return np.broadcast_to(places_k.astype(np.float32), found.scores_Qk.shape)
    assert found.sample_QS is not None
    mean_Q1, std_Q1 = found.sample_QS.mean(1, keepdims=True), found.sample_QS.std(1, keepdims=True)
    scores_Qk = np.where(found.rows_Qk < 0, -np.inf, found.scores_Qk)  # faiss's own is so low that dividing it overflows
    return (scores_Qk - mean_Q1) / np.maximum(std_Q1, 1e-6)
