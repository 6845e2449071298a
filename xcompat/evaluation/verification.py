"""Verification (TAR@FAR) and open-set identification (TPIR@FPIR) at exact thresholds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from xcompat.core.errors import XcompatError
from xcompat.evaluation.identities import Ids
from xcompat.evaluation.labelled import EXCLUDED_SCORE, MATED_ROWS, Items, LabelledPairs
from xcompat.evaluation.ranking import RankedQueries
from xcompat.evaluation.ranking import rank as rank_pairs
from xcompat.evaluation.scores import Embeddings, blocks, copy_score, tie_margin

_SLACK = 2**20  # extra scores collected before the lowest are dropped


def tar_at_far(
    queries_QD: Embeddings,
    gallery_GD: Embeddings,
    query_labels: Ids,
    gallery_labels: Ids,
    query_ids: Ids | None = None,
    gallery_ids: Ids | None = None,
    fars: Sequence[float] = (1e-4, 1e-3, 1e-2),
) -> dict[float, float]:
    """Return the true acceptance rate of 1:1 verification at each false acceptance rate.

    Pairs of the same class are positive, others negative; pairs with equal ids are excluded. Each threshold is the lowest
    that accepts at most a share ``far`` of the negatives. It is exact, and lies above tied negatives. A single pass keeps the
    highest negatives, as many as the largest rate accepts, at some 35 bytes each.

    Args:
        queries_QD: ``(Q, D)`` embeddings, compared by cosine.
        gallery_GD: ``(G, D)`` embeddings.
        query_labels: Q hashable classes.
        gallery_labels: G hashables.
        query_ids: Q hashables; None if no query is in the gallery.
        gallery_ids: G hashables, or None like ``query_ids``.
        fars: false acceptance rates, in [0, 1].

    Returns:
        far -> true acceptance rate in [0, 1].

    Raises:
        XcompatError: invalid input, or no positive or no negative pairs.

    Example:
        >>> gallery = np.array([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]])
        >>> tar_at_far(gallery[:1], gallery, "a", "aab", fars=(0, 1))
        {0.0: 1.0, 1.0: 1.0}
        >>> tar_at_far(gallery[:1], gallery, "a", "aba", fars=(0, 1))
        {0.0: 0.5, 1.0: 1.0}
    """
    pairs = LabelledPairs(Items(queries_QD, query_labels, query_ids), Items(gallery_GD, gallery_labels, gallery_ids))
    verified = accepted_per_query(pairs, fars)
    n_positives = int(verified.positives_Q.sum())
    return {rate: int(accepted_Q.sum()) / n_positives for rate, accepted_Q in verified.accepted.items()}


class VerificationCounts(NamedTuple):
    """Counts of accepted pairs of the same class.

    Args:
        accepted: false acceptance rate -> int64 ``(Q,)`` accepted positive pairs per query.
        positives_Q: int64 ``(Q,)`` positive pairs per query.
    """

    accepted: dict[float, np.ndarray]
    positives_Q: np.ndarray


def accepted_per_query(pairs: LabelledPairs, fars: Sequence[float]) -> VerificationCounts:
    """Verify all pairs as in :func:`tar_at_far` and count per query.

    Args:
        pairs: queries and gallery.
        fars: false acceptance rates, in [0, 1].

    Returns:
        The counts.

    Raises:
        XcompatError: no positive or no negative pairs, or an invalid rate.
    """
    rates = _as_rates(fars)
    positives_Q = np.zeros(pairs.n_queries, dtype=np.int64)
    for rows_B in _mated_strips(pairs):
        positives_Q[rows_B] = np.bincount(pairs.positives(rows_B)[1].cpu().numpy(), minlength=len(rows_B))
    n_positives = int(positives_Q.sum())
    n_negatives = pairs.n_pairs - n_positives
    if not n_positives or not n_negatives:
        missing = "one class" if not n_positives else "two classes"
        raise XcompatError(f"no pair of {missing} to verify; use the same labels on both sides")
    allowed = {rate: _most_within(rate, n_negatives) for rate in rates}
    highest_N = _highest_negatives(pairs, min(max(allowed.values()) + 1, n_negatives))
    bars = {
        rate: _score_threshold(highest_N, n_allowed, pairs.copy_score, pairs.tie_margin) for rate, n_allowed in allowed.items()
    }
    accepted = {rate: np.zeros(pairs.n_queries, dtype=np.int64) for rate in rates}
    for rows_B in _mated_strips(pairs):
        scores_N, owners_N = (each.cpu().numpy() for each in pairs.positives(rows_B))
        for rate, lowest in bars.items():
            accepted[rate][rows_B] = np.bincount(owners_N[scores_N > lowest], minlength=len(rows_B))
    return VerificationCounts(accepted, positives_Q)


def pair_thresholds(negatives_N: np.ndarray, fars: Sequence[float], dim: int) -> dict[float, float]:
    """Return the score threshold of each false acceptance rate.

    Args:
        negatives_N: exact scores of negative pairs.
        fars: false acceptance rates, in [0, 1].
        dim: embedding dimension.

    Returns:
        far -> exact score; pairs above it are accepted.
    """
    allowed = {rate: _most_within(rate, len(negatives_N)) for rate in _as_rates(fars)}
    highest_N = np.sort(_select_highest([negatives_N], min(max(allowed.values()) + 1, len(negatives_N))))[::-1]
    return {rate: _score_threshold(highest_N, n_allowed, copy_score(dim), tie_margin(dim)) for rate, n_allowed in allowed.items()}


def search_thresholds(pairs: LabelledPairs, n_positives: int, rates: Sequence[float]) -> dict[float, float]:
    """Return the score threshold for each rate of negatives per query.

    Args:
        pairs: queries and gallery.
        n_positives: number of positive pairs.
        rates: accepted negatives per query, on average, in [0, 1].

    Returns:
        rate -> exact score; pairs above it are accepted.
    """
    n_negatives = pairs.n_pairs - n_positives
    allowed = {rate: min(_most_within(rate, pairs.n_queries), n_negatives) for rate in _as_rates(rates)}
    highest_N = _highest_negatives(pairs, min(max(allowed.values()) + 1, n_negatives))
    return {
        rate: _score_threshold(highest_N, n_allowed, pairs.copy_score, pairs.tie_margin) for rate, n_allowed in allowed.items()
    }


def share_per_query(accepted_Q: np.ndarray, positives_Q: np.ndarray) -> tuple[np.ndarray, float]:
    """Turn a share of pairs into a number per query, with the same mean and spread.

    With a_q of query q's n_q pairs accepted, the share is r = Σa / Σn. The numbers are r + (a_q - r n_q) Q / Σn over the Q
    queries with pairs: the linearised ratio (Cochran 1977, §6.4). For large Q, its bootstrap is that of r.

    Args:
        accepted_Q: ``(Q,)`` accepted pairs.
        positives_Q: ``(Q,)`` pairs.

    Returns:
        float64 ``(Q,)``, NaN for queries without pairs, and the share.

    Example:
        >>> share_per_query(np.array([1, 1, 0]), np.array([1, 3, 0]))
        (array([0.75, 0.25,  nan]), 0.5)
    """
    known_Q, n_pairs = positives_Q > 0, int(positives_Q.sum())
    share = int(accepted_Q.sum()) / n_pairs
    values_Q = share + (accepted_Q - share * positives_Q) * (int(known_Q.sum()) / n_pairs)
    return np.where(known_Q, values_Q, np.nan), share


def tpir_at_far(
    queries_QD: Embeddings,
    gallery_GD: Embeddings,
    query_labels: Ids,
    gallery_labels: Ids,
    query_ids: Ids | None = None,
    gallery_ids: Ids | None = None,
    fars: Sequence[float] = (1e-2, 1e-1),
    rank: int = 1,
) -> dict[float, float]:
    """Return the true positive identification rate of open-set 1:N search at each false positive identification rate.

    A query is an impostor if the gallery has no other item of its class. Each threshold is the lowest that accepts at most a
    share ``far`` of the impostors by their best score. A known query counts if its best positive is accepted and within ``rank``
    places; ties count against it.

    Args:
        queries_QD: ``(Q, D)`` embeddings, compared by cosine.
        gallery_GD: ``(G, D)`` embeddings.
        query_labels: Q hashable classes.
        gallery_labels: G hashables.
        query_ids: Q hashables; items with the query's id are skipped. None if no query is in the gallery.
        gallery_ids: G hashables, or None like ``query_ids``.
        fars: shares of accepted impostors (false positive identification rates), in [0, 1].
        rank: places within which the class must be found, at least 1.

    Returns:
        far -> true positive identification rate in [0, 1].

    Raises:
        XcompatError: invalid input, or all queries are known, or all unknown.

    Example:
        >>> queries = np.array([[1.0, 0.0], [0.6, 0.8], [-0.7, 0.7]])
        >>> tpir_at_far(queries, np.eye(2), "abz", "ab", fars=(0, 0.5, 1))
        {0.0: 1.0, 0.5: 1.0, 1.0: 1.0}
        >>> tpir_at_far(queries, np.eye(2), "azb", "ab", fars=(0, 0.5, 1))
        {0.0: 0.5, 0.5: 0.5, 1.0: 1.0}
    """
    rates = _as_rates(fars)
    if rank < 1:
        raise XcompatError(f"rank must be at least 1 place, not {rank}")
    pairs = LabelledPairs(Items(queries_QD, query_labels, query_ids), Items(gallery_GD, gallery_labels, gallery_ids))
    ranked = rank_pairs(pairs)
    found = identify_queries(pairs, ranked, rates, rank)
    known_Q = ranked.positives_Q > 0
    return {rate: float(found_Q[known_Q].mean()) for rate, found_Q in found.items()}


def identify_queries(
    pairs: LabelledPairs, ranked: RankedQueries, fars: Sequence[float], rank: int = 1
) -> dict[float, np.ndarray]:
    """Identify queries in an open set as in :func:`tpir_at_far`.

    Args:
        pairs: queries and gallery.
        ranked: ranks of the same pairs.
        fars: shares of accepted impostors, in [0, 1].
        rank: places within which the class must be found.

    Returns:
        far -> bool ``(Q,)``, True for identified queries, False for impostors.

    Raises:
        XcompatError: all queries are known, or a rate is invalid.
    """
    rates, unknown_Q = _as_rates(fars), ranked.positives_Q == 0
    if not unknown_Q.any():
        raise XcompatError("every query's class is in the gallery, so there are no impostors; add queries of other classes")
    impostors_N = np.sort(_best_scores(pairs, np.flatnonzero(unknown_Q)))[::-1]
    bars = {
        rate: _score_threshold(impostors_N, _most_within(rate, len(impostors_N)), pairs.copy_score, pairs.tie_margin)
        for rate in rates
    }
    within_Q = ~unknown_Q & (ranked.first_hit_ranks_Q < rank)
    return {rate: within_Q & (ranked.best_scores_Q > lowest) for rate, lowest in bars.items()}


def metric_at_rate(metric: str, rate: float) -> str:
    """Return the name of a metric at a rate.

    Example:
        >>> metric_at_rate("tar@far", 1e-4), metric_at_rate("tpir@fpir", 0.01)
        ('tar@far=1e-4', 'tpir@fpir=1e-2')
    """
    return f"{metric}={np.format_float_scientific(rate, trim='-', exp_digits=1)}"


def _as_rates(fars: Sequence[float]) -> list[float]:
    rates = [float(far) for far in fars]
    if not rates or not all(0 <= rate <= 1 for rate in rates):
        raise XcompatError(f"fars must be one or more shares in [0, 1], not {tuple(fars)}")
    return rates


def _most_within(rate: float, total: int) -> int:
    """Return the largest count with ``count / total <= rate`` in float division."""
    count = min(int(rate * total) + 1, total)
    while count / total > rate:
        count -= 1
    return count


def _score_threshold(highest_N: np.ndarray, n_allowed: int, of_copies: float, margin: float) -> float:
    """Return the score above which at most ``n_allowed`` negatives lie, none of them tied with the next."""
    if n_allowed >= len(highest_N):
        return EXCLUDED_SCORE
    lowest = float(highest_N[n_allowed])
    return lowest + margin if lowest < of_copies else math.inf  # all pairs of copies are equally similar


def _mated_strips(pairs: LabelledPairs) -> Iterator[np.ndarray]:
    for rows_B in pairs.mated_blocks():
        for part in blocks(len(rows_B), MATED_ROWS):
            yield rows_B[part]


def _highest_negatives(pairs: LabelledPairs, n_kept: int) -> np.ndarray:
    gallery_codes_G = torch.from_numpy(pairs.gallery_codes).to(pairs.device)
    kept: list[np.ndarray] = []
    floor, n_held = EXCLUDED_SCORE, 0
    for rows_B in pairs.blocks_of(np.arange(pairs.n_queries)):
        codes_B = torch.from_numpy(pairs.query_codes[rows_B]).to(pairs.device)
        for part, columns, scores_RC in pairs.tiles(rows_B):
            row_N, column_N = (scores_RC > floor).nonzero(as_tuple=True)
            negative_N = codes_B[part][row_N] != gallery_codes_G[columns][column_N]
            kept.append(scores_RC[row_N, column_N][negative_N].cpu().numpy())
            n_held += len(kept[-1])
            if n_held > n_kept + max(n_kept // 4, _SLACK):
                kept, n_held = [_select_highest(kept, n_kept)], n_kept
                floor = float(kept[0].min())
    return np.sort(_select_highest(kept, n_kept))[::-1]


def _select_highest(pieces: list[np.ndarray], n_kept: int) -> np.ndarray:
    """Return the highest numbers, unsorted; clear ``pieces``."""
    values_N = np.concatenate(pieces)
    pieces.clear()  # frees memory before the copy below
    values_N.partition(len(values_N) - n_kept)
    return values_N[len(values_N) - n_kept :].copy()


def _best_scores(pairs: LabelledPairs, rows_N: np.ndarray) -> np.ndarray:
    best = []
    for rows_B in pairs.blocks_of(rows_N):
        best_B = torch.full((len(rows_B),), EXCLUDED_SCORE, dtype=torch.float64, device=pairs.device)
        for part, _, scores_RC in pairs.tiles(rows_B):
            best_B[part] = torch.maximum(best_B[part], scores_RC.amax(dim=1))
        best.append(best_B.cpu().numpy())
    return np.concatenate(best)
