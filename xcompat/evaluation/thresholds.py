"""Score thresholds for new queries in place of an old threshold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from xcompat.core.errors import XcompatError
from xcompat.evaluation.cases import Keeps, Threshold
from xcompat.evaluation.intervals import interval_bounds, resampled_means
from xcompat.evaluation.labelled import LabelledPairs

BINS = 1024
"""Bins for scores from -1 to 1. Thresholds are interpolated inside a bin (0.002 wide)."""
MOST_QUERIES = 5000


class MatchedPairs(NamedTuple):
    """Query-gallery pairs of a case.

    Args:
        pairs: pairs with their scores.
        is_match: query rows (R,) and a gallery slice -> bool (R, C), True for true matches.
    """

    pairs: LabelledPairs
    is_match: Callable[[NDArray[np.int64], slice], torch.Tensor]


class ScoreCounts(NamedTuple):
    """Numbers of items at or above each score.

    Args:
        matches_QB: float64 (Q, B) true matches at or above each edge.
        hits_QB: float64 (Q, B) items at or above each edge.
        known_Q: (Q,) true matches of each query.
    """

    matches_QB: NDArray[np.float64]
    hits_QB: NDArray[np.float64]
    known_Q: NDArray[np.float64]


def score_edges(threshold: float) -> NDArray[np.float64]:
    """Return the scores at which items are counted, ascending and including the threshold."""
    width = 2 / BINS
    return threshold + width * np.arange(-np.floor((1 + threshold) / width), np.ceil((1 - threshold) / width) + 1)


def count_by_score(compared: MatchedPairs, edges_B: NDArray[np.float64], rows_Q: NDArray[np.int64]) -> ScoreCounts:
    """Count the items of some queries by score.

    Args:
        compared: queries and gallery.
        edges_B: ascending scores.
        rows_Q: query rows.
    """
    n_bins, device = len(edges_B), compared.pairs.device
    bars = torch.from_numpy(edges_B).to(device)
    matches, hits = (torch.zeros(len(rows_Q), n_bins + 1, dtype=torch.float64, device=device) for _ in range(2))
    start = 0
    for rows_B in compared.pairs.blocks_of(rows_Q):
        for part, columns, scores_RC in compared.pairs.tiles(rows_B):
            bins_RC = torch.bucketize(compared.pairs.cosines(scores_RC), bars, right=True)
            at = slice(start + part.start, start + part.stop)
            is_match_RC = compared.is_match(rows_B[part], columns).to(device)
            hits[at].scatter_add_(1, bins_RC, torch.ones_like(scores_RC))
            matches[at].scatter_add_(1, bins_RC, is_match_RC.double())
        start += len(rows_B)
    matches_QB, hits_QB = (each.flip(1).cumsum(1).flip(1).cpu().numpy() for each in (matches, hits))
    return ScoreCounts(matches_QB[:, 1:], hits_QB[:, 1:], matches_QB[:, 0])


class ThresholdTransfer:
    """Thresholds of new queries that accept as many items as old thresholds.

    Args:
        old_QB: (Q, B) items of old queries at or above each edge.
        new_QB: (Q, B) items of the same queries with the new model.
        edges_B: ascending scores at which they are counted.
        clusters_Q: clusters that are drawn together; None if independent.
        n_resamples: bootstrap draws.
        seed: random seed.
    """

    def __init__(
        self,
        old_QB: NDArray[np.float64],
        new_QB: NDArray[np.float64],
        edges_B: NDArray[np.float64],
        clusters_Q: NDArray[np.int64] | None,
        n_resamples: int,
        seed: int,
    ) -> None:
        self.edges_B = edges_B
        both_QK = np.concatenate([old_QB, new_QB], axis=1)
        draws_RK = resampled_means(both_QK, n_resamples, seed, clusters_Q)
        self._mean, self._draws = both_QK.mean(axis=0).reshape(2, -1), draws_RK.reshape(n_resamples, 2, -1)

    def transfer(self, threshold: float) -> tuple[float | None, tuple[float, float] | None]:
        """Return the new threshold for an old one (an edge) and its 95 % interval; None if not found."""
        place = int(np.argmin(np.abs(self.edges_B - threshold)))
        score = _crossing(self._mean[1], self._mean[0, place], self.edges_B)
        if score is None:
            return None, None
        drawn = [_crossing(new_B, old_B[place], self.edges_B) for old_B, new_B in self._draws]
        lowest = float(self.edges_B[0])
        low, high = interval_bounds(np.array([[lowest if each is None else each] for each in drawn]), 0.95)
        return score, (float(low[0]), float(high[0]))


def _crossing(counts_B: NDArray[np.float64], wanted: float, edges_B: NDArray[np.float64]) -> float | None:
    """Return the highest score with ``wanted`` items at or above it, interpolated; None if there are fewer."""
    if counts_B[0] < wanted - 1e-12:
        return None
    enough = int(np.flatnonzero(counts_B >= wanted - 1e-12)[-1])
    if enough + 1 == len(edges_B) or counts_B[enough] == counts_B[enough + 1]:
        return float(edges_B[enough])
    share = (counts_B[enough] - wanted) / (counts_B[enough] - counts_B[enough + 1])
    return float(edges_B[enough] + share * (edges_B[enough + 1] - edges_B[enough]))


def carry_over_threshold(
    compared: Sequence[tuple[str, MatchedPairs]],
    direction: str,
    threshold: float,
    has_match_Q: NDArray[np.bool_],
    clusters_Q: NDArray[np.int64] | None = None,
    n_resamples: int = 1000,
    seed: int = 0,
) -> list[Threshold]:
    """Carry a threshold of old queries over to other queries on the same gallery.

    Args:
        compared: (kind of queries, their pairs), the old model first.
        direction: search direction.
        threshold: cosine threshold of old queries.
        has_match_Q: bool (Q,), True for queries with a true match; others are excluded.
        clusters_Q: int64 (Q,) clusters of queries that are drawn together.
        n_resamples: bootstrap draws.
        seed: random seed.

    Returns:
        The old threshold and its acceptance, then two thresholds per other kind of queries: the first keeps the share of
        true matches, the second the number of hits.

    Raises:
        XcompatError: the threshold is not a cosine.
    """
    if not -1 < threshold < 1:
        raise XcompatError(f"threshold must be a cosine between -1 and 1, not {threshold:g}")
    rows_Q = np.flatnonzero(has_match_Q)
    if len(rows_Q) > MOST_QUERIES:
        rows_Q = rows_Q[np.linspace(0, len(rows_Q) - 1, MOST_QUERIES).astype(np.int64)]
    drawn_Q = clusters_Q[rows_Q] if clusters_Q is not None and len(np.unique(clusters_Q[rows_Q])) > 1 else None
    edges_B = score_edges(threshold)
    counted = [(name, count_by_score(each, edges_B, rows_Q)) for name, each in compared]
    old = counted[0][1]
    place = int(np.argmin(np.abs(edges_B - threshold)))
    share, hits = float(old.matches_QB[:, place].mean() / old.known_Q.mean()), float(old.hits_QB[:, place].mean())
    found = [Threshold("old", direction, "matches", threshold, (threshold, threshold), share, hits)]
    for name, new in counted[1:]:
        sides: list[tuple[Keeps, NDArray[np.float64], NDArray[np.float64]]] = [
            ("matches", old.matches_QB, new.matches_QB),
            ("hits", old.hits_QB, new.hits_QB),
        ]
        for keeps, old_QB, new_QB in sides:
            score, ci95 = ThresholdTransfer(old_QB, new_QB, edges_B, drawn_Q, n_resamples, seed).transfer(threshold)
            at = float(edges_B[0]) if score is None else score
            matches, hits = (float(np.interp(at, edges_B, each.mean(axis=0))) for each in (new.matches_QB, new.hits_QB))
            found.append(Threshold(name, direction, keeps, score, ci95, matches / float(new.known_Q.mean()), hits))
    return found
