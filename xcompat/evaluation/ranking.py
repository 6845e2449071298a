"""Image retrieval by class: exact CMC@k, mAP and mAP@R without sorting the ranking."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import torch

from xcompat.core.distributed import gather_objects
from xcompat.core.errors import XcompatError
from xcompat.core.threads import map_over_cores
from xcompat.evaluation.counting import count_at_least
from xcompat.evaluation.identities import Ids
from xcompat.evaluation.labelled import MATED_ROWS, Items, LabelledPairs
from xcompat.evaluation.scores import SCORE_BITS, Embeddings, blocks, scores_of, sort_keys, sorted_keys

_NONE_FOUND = "no query has another item of its class in the gallery; check that both sides use the same labels"


@dataclass(frozen=True)
class RankedQueries:
    """Ranks and average precisions of each query.

    Args:
        first_hit_ranks_Q: int64 ``(Q,)`` negatives before the best positive, 0 for a first place, -1 without positives.
        average_precision_Q: float64 ``(Q,)`` over the whole ranking; NaN without positives.
        average_precision_at_r_Q: float64 ``(Q,)`` over the first R places, R being the number of positives; NaN without
            positives.
        positives_Q: int64 ``(Q,)`` gallery items of the query's class, without excluded ones and the query itself.
        best_scores_Q: float64 ``(Q,)`` the best positive's exact score, comparable within a dimension; NaN without positives.
    """

    first_hit_ranks_Q: np.ndarray
    average_precision_Q: np.ndarray
    average_precision_at_r_Q: np.ndarray
    positives_Q: np.ndarray
    best_scores_Q: np.ndarray


def cmc(
    queries_QD: Embeddings,
    gallery_GD: Embeddings,
    query_labels: Ids,
    gallery_labels: Ids,
    query_ids: Ids | None = None,
    gallery_ids: Ids | None = None,
    ks: Sequence[int] = (1, 5),
    *,
    query_cameras: Ids | None = None,
    gallery_cameras: Ids | None = None,
) -> dict[int, float]:
    """Return the share of queries with an item from their class among the first k (cumulative match characteristic).

    Args:
        queries_QD: ``(Q, D)`` embeddings, compared by cosine.
        gallery_GD: ``(G, D)`` embeddings.
        query_labels: Q hashable classes.
        gallery_labels: G hashables.
        query_ids: Q hashables; items with the query's id are skipped. None if no query is in the gallery.
        gallery_ids: G hashables, or None like ``query_ids``.
        ks: cut-offs, at least 1.
        query_cameras: Q hashables; items of the query's class and camera are skipped, as in re-identification. None to ignore
            cameras.
        gallery_cameras: G hashables, or None like ``query_cameras``.

    Returns:
        k -> fraction in [0, 1] of the queries with a positive.

    Raises:
        XcompatError: invalid input, or no query has a positive.

    Example:
        >>> embeds = np.array([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.8, 0.2]])
        >>> cmc(embeds, embeds, "aabb", "aabb", range(4), range(4), ks=(1, 2))
        {1: 0.75, 2: 0.75}
    """
    if not ks or any(k < 1 for k in ks):
        raise XcompatError(f"ks must be one or more cut-offs of at least 1, not {tuple(ks)}")
    queries = Items(queries_QD, query_labels, query_ids, query_cameras)
    gallery = Items(gallery_GD, gallery_labels, gallery_ids, gallery_cameras)
    ranked = rank(LabelledPairs(queries, gallery))
    found_Q = ranked.first_hit_ranks_Q[ranked.positives_Q > 0]
    return {int(k): float((found_Q < k).mean()) for k in ks}


def mean_average_precision(
    queries_QD: Embeddings,
    gallery_GD: Embeddings,
    query_labels: Ids,
    gallery_labels: Ids,
    query_ids: Ids | None = None,
    gallery_ids: Ids | None = None,
    at: int | Literal["R"] | None = None,
    *,
    query_cameras: Ids | None = None,
    gallery_cameras: Ids | None = None,
) -> float:
    """Return the mean average precision over queries.

    Average precision is the mean precision at the ranks of a query's positives. The j-th best positive has the rank j + the
    number of negatives with at least its score, and the precision j / rank. In a ranking cut after k places, later positives
    count 0 and the divisor is min(k, R), with R positives. k = R gives mAP@R (Musgrave et al. 2020, section 3.2).

    Args:
        queries_QD: ``(Q, D)`` embeddings.
        gallery_GD: ``(G, D)`` embeddings.
        query_labels: Q hashable classes.
        gallery_labels: G hashables.
        query_ids: Q hashables; items with the query's id are skipped. None if no query is in the gallery.
        gallery_ids: G hashables, or None like ``query_ids``.
        at: None for the whole ranking (mAP), "R" to cut after each query's number of positives, or a number of places.
        query_cameras: as in :func:`cmc`.
        gallery_cameras: G hashables, or None like ``query_cameras``.

    Returns:
        A fraction in [0, 1], over the queries with a positive.

    Raises:
        XcompatError: invalid input, or no query has a positive.

    Example:
        >>> gallery = np.array([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0]])
        >>> [mean_average_precision(gallery[:1], gallery, "b", "abb", at=at) for at in (None, "R", 3)]
        [0.5833333333333333, 0.25, 0.5833333333333333]
    """
    if at not in (None, "R") and not (isinstance(at, int | np.integer) and at >= 1):
        raise XcompatError(f'at must be None (the whole ranking), "R", or a number of places of at least 1, not {at!r}')
    queries = Items(queries_QD, query_labels, query_ids, query_cameras)
    pairs = LabelledPairs(queries, Items(gallery_GD, gallery_labels, gallery_ids, gallery_cameras))
    per_query = [hits.average_precision(at) for hits in ranked_hits(pairs)]
    return float(np.concatenate(per_query).mean())


def ranking_per_query(
    queries_QD: Embeddings,
    gallery_GD: Embeddings,
    query_labels: Ids,
    gallery_labels: Ids,
    query_ids: Ids | None = None,
    gallery_ids: Ids | None = None,
    *,
    query_cameras: Ids | None = None,
    gallery_cameras: Ids | None = None,
    chunk_size: int = 1024,
    shared: bool = False,
) -> RankedQueries:
    """Return first hits and average precisions per query, for means, flips and bootstrap intervals.

    Scores are exact, ties count against the query, and the result is the same to the bit for every chunk size.

    Args:
        queries_QD: ``(Q, D)`` embeddings.
        gallery_GD: ``(G, D)`` embeddings.
        query_labels: Q hashable classes.
        gallery_labels: G hashables.
        query_ids: Q hashables; items with the query's id are skipped. None if no query is in the gallery.
        gallery_ids: G hashables, or None like ``query_ids``.
        query_cameras: as in :func:`cmc`.
        gallery_cameras: G hashables, or None like ``query_cameras``.
        chunk_size: queries per block; affects memory only.
        shared: whether all processes call this to share the work; all get the result.

    Returns:
        A number of each kind per query.

    Raises:
        XcompatError: invalid input, or no query has a positive.

    Example:
        >>> ranked = ranking_per_query(np.eye(2), np.ones((3, 2)), "az", "abb")
        >>> ranked.first_hit_ranks_Q.tolist(), ranked.average_precision_Q.round(3).tolist(), ranked.positives_Q.tolist()
        ([2, -1], [0.333, nan], [1, 0])
    """
    queries = Items(queries_QD, query_labels, query_ids, query_cameras)
    gallery = Items(gallery_GD, gallery_labels, gallery_ids, gallery_cameras)
    return rank(LabelledPairs(queries, gallery, chunk_size), shared)


def rank(pairs: LabelledPairs, shared: bool = False) -> RankedQueries:
    """Rank the positives of every query as in :func:`ranking_per_query`.

    Args:
        pairs: queries and gallery.
        shared: whether all processes call this with the same pairs.

    Returns:
        A number of each kind per query.

    Raises:
        XcompatError: no query has a positive.
    """
    first_Q, positives_Q = np.full(pairs.n_queries, -1, dtype=np.int64), np.zeros(pairs.n_queries, dtype=np.int64)
    whole_Q, at_r_Q, best_Q = (np.full(pairs.n_queries, np.nan) for _ in range(3))
    mine = [
        (
            hits.rows_B,
            hits.first_hit_ranks_B,
            hits.positives_B,
            hits.average_precision(None),
            hits.average_precision("R"),
            hits.best_scores_B,
        )
        for hits in ranked_hits(pairs, shared)
    ]
    for rows_B, *values in (block for blocks_of_one in gather_objects(mine, shared) for block in blocks_of_one):
        first_Q[rows_B], positives_Q[rows_B], whole_Q[rows_B], at_r_Q[rows_B], best_Q[rows_B] = values
    if not positives_Q.any():
        raise XcompatError(_NONE_FOUND)
    return RankedQueries(first_Q, whole_Q, at_r_Q, positives_Q, best_Q)


@dataclass(frozen=True)
class Hits:
    """Ranked positives for a query block, worst to best for each query.

    Args:
        rows_B: rows of the queries; each has a positive.
        positives_B: positives per query.
        owners_N: query of each positive, as a position in ``rows_B``, ascending.
        places_N: place of each positive among its query's positives, 1 for the best.
        ranks_N: rank of each positive in the gallery, 1 for the best.
        best_scores_B: exact score of each query's best positive.
        first_hit_ranks_B: negatives before each query's best positive.
    """

    rows_B: np.ndarray
    positives_B: np.ndarray
    owners_N: np.ndarray
    places_N: np.ndarray
    ranks_N: np.ndarray
    best_scores_B: np.ndarray
    first_hit_ranks_B: np.ndarray

    def average_precision(self, at: int | Literal["R"] | None) -> np.ndarray:
        """Return each query's average precision, float64 ``(B,)``, cut as in :func:`mean_average_precision`."""
        precisions_N, most_B = self.places_N / self.ranks_N, self.positives_B
        if at is not None:
            places_B = self.positives_B if at == "R" else np.full_like(self.positives_B, at)
            precisions_N, most_B = precisions_N * (self.ranks_N <= places_B[self.owners_N]), np.minimum(places_B, most_B)
        # bincount adds in the order of the scores, so the sum does not depend on the block size
        return np.bincount(self.owners_N, weights=precisions_N, minlength=len(self.rows_B)) / most_B


def ranked_hits(pairs: LabelledPairs, shared: bool = False) -> Iterator[Hits]:
    """Rank all queries' positives, block by block.

    Args:
        pairs: queries and gallery.
        shared: whether each process ranks a share of the queries; a share may lack positives.

    Yields:
        The ranked positives of a block.

    Raises:
        XcompatError: no query has a positive.
    """
    none = True
    for hits in map_over_cores(partial(_rank_block, pairs), pairs.mated_blocks(shared), pairs.device):
        if hits is not None:
            none = False
            yield hits
    if none and not shared:
        raise XcompatError(_NONE_FOUND)


def _rank_block(pairs: LabelledPairs, rows_B: np.ndarray) -> Hits | None:
    scores_BG = pairs.whole_tile(rows_B)
    scores_N, owners_N = _sorted_positives(pairs, rows_B, scores_BG)
    positives_B = torch.bincount(owners_N, minlength=len(rows_B))
    has_any_B = positives_B > 0  # a query can be the only one of its class
    if not has_any_B.any():
        return None
    rows_B, positives_B = rows_B[has_any_B.cpu().numpy()], positives_B[has_any_B]
    owners_N = torch.repeat_interleave(positives_B)
    scores_BG = scores_BG if scores_BG is None or has_any_B.all() else scores_BG[has_any_B]
    at_least_N = count_at_least(pairs, rows_B, scores_N - pairs.tie_margin, owners_N, positives_B, scores_BG)
    positives, owners, scores, at_least = (values.cpu().numpy() for values in (positives_B, owners_N, scores_N, at_least_N))
    return ranks_from_counts(rows_B, positives, owners, scores, at_least, pairs.tie_margin)


def ranks_from_counts(
    rows_B: np.ndarray,
    positives_B: np.ndarray,
    owners_N: np.ndarray,
    scores_N: np.ndarray,
    at_least_N: np.ndarray,
    margin: float,
) -> Hits:
    """Turn the counts of items at or above each positive into ranks; tied positives do not lower each other.

    Args:
        rows_B: query rows.
        positives_B: positives per query, at least 1.
        owners_N: query of each positive, as a position in ``rows_B``, ascending.
        scores_N: exact scores of the positives, ascending for each query.
        at_least_N: number of items with at least each positive's score minus the margin, including itself.
        margin: largest difference of tied scores.

    Returns:
        The positives and their ranks.
    """
    positions_N, ends_B = np.arange(len(scores_N)), np.cumsum(positives_B)
    ends_N, best_B = ends_B[owners_N], ends_B - 1
    tied_from_N = positions_N.copy()
    is_tied_N = (scores_N[:-1] >= scores_N[1:] - margin) & (owners_N[:-1] == owners_N[1:])
    for owner in np.unique(owners_N[1:][is_tied_N]):  # few queries have tied positives
        end = ends_B[owner]
        start = end - positives_B[owner]
        tied_from_N[start:end] = start + np.searchsorted(scores_N[start:end], scores_N[start:end] - margin)
    places_N = ends_N - positions_N
    ranks_N = places_N + at_least_N - (ends_N - tied_from_N)
    return Hits(rows_B, positives_B, owners_N, places_N, ranks_N, scores_N[best_B], ranks_N[best_B] - 1)


def _sorted_positives(
    pairs: LabelledPairs, rows_B: np.ndarray, scores_BG: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scores and queries of all positives, sorted by query, then by score."""
    scores, owners = [], []
    for part in blocks(len(rows_B), MATED_ROWS):
        scores_PG = scores_BG[part] if scores_BG is not None else None
        keys_N = sorted_keys(sort_keys(*pairs.positives(rows_B[part], scores_PG)))
        scores.append(scores_of(keys_N))
        owners.append((keys_N >> SCORE_BITS) + part.start)
    return torch.cat(scores), torch.cat(owners)
