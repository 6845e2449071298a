"""Bootstrap intervals over queries or query clusters, and estimates of the queries needed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from xcompat.core.errors import XcompatError
from xcompat.evaluation.identities import Ids, as_ids, id_codes

_BLOCK_NUMBERS = 4_000_000  # resampling weights in memory at once (32 MB)
POWER = 0.8
"""Statistical power of :func:`queries_needed` (Cohen's convention)."""
ROUNDING = 1e-12
"""Largest rounding error of a mean of float64 differences of numbers of about 1. Means up to it count as zero."""
Outcome = Literal["better", "worse", "undecided"]
"""Position of a difference's interval: above zero, below it, or on both sides."""


@dataclass(frozen=True)
class PairedDifference:
    """Mean difference between two models on the same queries, with its bootstrap interval.

    Args:
        mean: mean of ``a - b``.
        low: lower end.
        high: upper end.
        queries_needed: estimate of :func:`queries_needed`; None if there is none.
    """

    mean: float
    low: float
    high: float
    queries_needed: int | None = None

    @property
    def expected(self) -> tuple[float, float]:
        """Interval of the difference on as many other queries: √2 times as wide, because these are a sample too."""
        return self.mean - math.sqrt(2) * (self.mean - self.low), self.mean + math.sqrt(2) * (self.high - self.mean)

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval excludes zero."""
        return outcome_of(self.low, self.high) != "undecided"


def outcome_of(low: float, high: float) -> Outcome:
    """Return the outcome that the interval of a difference shows.

    Example:
        >>> outcome_of(0.01, 0.05), outcome_of(-0.05, -0.01), outcome_of(-0.01, 0.05)
        ('better', 'worse', 'undecided')
    """
    return "better" if low > 0 else "worse" if high < 0 else "undecided"


def bootstrap_interval(
    values_Q: np.ndarray,
    n_resamples: int = 1000,
    level: float = 0.95,
    seed: int = 0,
    clusters_Q: Ids | None = None,
) -> tuple[float, float]:
    """Return the percentile bootstrap interval of a mean (Efron 1979).

    Args:
        values_Q: ``(Q,)`` numbers, e.g. 1 for a hit and 0 for a miss.
        n_resamples: draws.
        level: confidence level.
        seed: random seed. Equal seeds draw equal queries, so intervals over the same queries are comparable.
        clusters_Q: cluster of each query, e.g. its item. Queries in the same cluster depend on each other and are drawn together.

    Returns:
        (low, high), equal for a single cluster.

    Raises:
        XcompatError: no values, or clusters that do not fit.

    Example:
        >>> bootstrap_interval(np.ones(10))
        (1.0, 1.0)
    """
    values_Q1 = _column(values_Q)
    low, high = interval_bounds(resampled_means(values_Q1, n_resamples, seed, clusters_Q), level)
    return float(low[0]), float(high[0])


def paired_bootstrap(
    a_Q: np.ndarray,
    b_Q: np.ndarray,
    n_resamples: int = 1000,
    level: float = 0.95,
    seed: int = 0,
    clusters_Q: Ids | None = None,
    rounding: float = ROUNDING,
) -> PairedDifference:
    """Return the mean of ``a - b`` with its interval, drawing the same queries for both.

    Args:
        a_Q: ``(Q,)`` numbers of the first model.
        b_Q: ``(Q,)`` numbers of the other model for the same queries in the same order.
        n_resamples: draws.
        level: confidence level.
        seed: random seed.
        clusters_Q: as in :func:`bootstrap_interval`.
        rounding: as in :func:`queries_needed`.

    Returns:
        The difference. Its mean and ends are exactly 0 if only rounding separates them from 0.

    Raises:
        XcompatError: the numbers of queries differ.

    Example:
        >>> paired_bootstrap(np.ones(50), np.zeros(50)).excludes_zero
        True
    """
    (difference,) = paired_bootstraps(_column(a_Q), _column(b_Q), n_resamples, level, seed, clusters_Q, rounding)
    return difference


def paired_bootstraps(
    a_QK: np.ndarray,
    b_QK: np.ndarray,
    n_resamples: int,
    level: float,
    seed: int,
    clusters_Q: Ids | None,
    rounding: float = ROUNDING,
) -> list[PairedDifference]:
    """Return :func:`paired_bootstrap` of each column of two float64 ``(Q, K)`` arrays, all on the same draws."""
    if a_QK.shape != b_QK.shape:
        raise XcompatError(f"a paired comparison needs the same queries on both sides, not {len(a_QK)} and {len(b_QK)}")
    differences_KQ = np.ascontiguousarray((a_QK - b_QK).T)
    ends = interval_bounds(resampled_means(differences_KQ.T, n_resamples, seed, clusters_Q), level)
    found = []
    for difference_Q, low, high in zip(differences_KQ, *ends, strict=True):
        needed = queries_needed(difference_Q, level, clusters_Q=clusters_Q, rounding=rounding)
        mean, lowest, highest = (_unless_rounding(end, difference_Q, rounding) for end in (difference_Q.mean(), low, high))
        found.append(PairedDifference(mean, lowest, highest, needed))
    return found


def queries_needed(
    differences_Q: np.ndarray,
    level: float = 0.95,
    power: float = POWER,
    clusters_Q: Ids | None = None,
    rounding: float = ROUNDING,
) -> int | None:
    """Estimate how many queries a mean difference needs until its interval excludes zero.

    Uses the normal approximation (Cohen 1988, chapter 2), with mean d and spread of these Q queries taken as the true values:

        n = Q (z₁ + z₂)² s² / d²,   s² = C / (C - 1) · Σ_c (Σ_{q in c} (d_q - d))² / Q²

    z₁ and z₂ are the standard normal quantiles at (1 + level) / 2 and ``power``. s² is the variance of d over its C clusters.
    More queries are assumed to keep the cluster size. With few queries, d and n are rough.

    Args:
        differences_Q: ``(Q,)`` differences between two models on the same queries.
        level: confidence level.
        power: probability that the interval excludes zero.
        clusters_Q: as in :func:`bootstrap_interval`.
        rounding: error for numbers around 1; a mean up to it counts as zero.

    Returns:
        Number of queries; None for a mean of zero or a single cluster.

    Raises:
        XcompatError: the clusters do not fit.

    Example:
        >>> queries_needed(np.tile([1.0, 0.0, 0.0, 0.0, -1.0, 0.0, 1.0, 0.0], 25))  # +12.5 points on 200 queries
        182
    """
    from scipy.special import ndtri

    differences_Q = _column(differences_Q)[:, 0]
    codes_Q, mean = cluster_codes(clusters_Q, len(differences_Q)), _unless_rounding(differences_Q.mean(), differences_Q, rounding)
    n_clusters = int(codes_Q.max()) + 1
    if mean == 0 or n_clusters == 1:
        return None
    sums_C = np.bincount(codes_Q, differences_Q - mean)
    variance = n_clusters / (n_clusters - 1) * float(sums_C @ sums_C) / len(differences_Q) ** 2
    ratio = float(ndtri((1 + level) / 2) + ndtri(power)) ** 2 * variance / mean**2
    return max(1, math.ceil(len(differences_Q) * ratio))


def resampled_means(values_QK: np.ndarray, n_resamples: int, seed: int, clusters_Q: Ids | None = None) -> np.ndarray:
    """Return the means of K columns over resampled clusters.

    A resample draws C of the C clusters with replacement. Its mean is over all queries in these clusters.

    Args:
        values_QK: ``(Q, K)`` numbers.
        n_resamples: draws, at least 1.
        seed: random seed.
        clusters_Q: a hashable per query; None if independent.

    Returns:
        float64 ``(n_resamples, K)``.

    Raises:
        XcompatError: no values, no draws, or clusters that do not fit.
    """
    values_QK = np.asarray(values_QK, dtype=np.float64)
    n_queries = len(values_QK)
    if n_queries == 0 or n_resamples < 1:
        raise XcompatError(f"a bootstrap of {n_queries} values and {n_resamples} resamples is empty; both must be at least 1")
    codes_Q = cluster_codes(clusters_Q, n_queries)
    sizes_C = np.bincount(codes_Q)
    n_clusters = len(sizes_C)
    # With the sizes as a column, one weighted sum over clusters gives numerators and denominator.
    sums_CK = np.stack([np.bincount(codes_Q, column, n_clusters) for column in values_QK.T] + [sizes_C], axis=1)
    is_small = n_resamples * n_clusters <= _BLOCK_NUMBERS
    drawn = _draw_once(n_resamples, n_clusters, seed) if is_small else _draw_clusters(n_resamples, n_clusters, seed)
    means = []
    for times_RC in drawn:
        totals_RK = times_RC.astype(np.float64) @ sums_CK
        means.append(totals_RK[:, :-1] / totals_RK[:, -1:])
    return np.concatenate(means)


def _draw_clusters(n_resamples: int, n_clusters: int, seed: int) -> Iterator[NDArray[np.unsignedinteger]]:
    """Yield how many times each resample draws each cluster, block by block."""
    generator, kind = np.random.default_rng(seed), np.min_scalar_type(n_clusters)
    per_block = max(1, _BLOCK_NUMBERS // n_clusters)
    for start in range(0, n_resamples, per_block):
        count = min(per_block, n_resamples - start)
        drawn_RC = generator.integers(n_clusters, size=(count, n_clusters))
        offsets_R1 = np.arange(count)[:, None] * n_clusters
        times_RC = np.bincount((drawn_RC + offsets_R1).ravel(), minlength=count * n_clusters).reshape(count, n_clusters)
        yield times_RC.astype(kind)


@lru_cache(maxsize=8)
def _draw_once(n_resamples: int, n_clusters: int, seed: int) -> tuple[NDArray[np.unsignedinteger], ...]:
    """Return :func:`_draw_clusters` for a single block; all metrics of the same queries use it."""
    return tuple(_draw_clusters(n_resamples, n_clusters, seed))


def interval_bounds(means_RK: np.ndarray, level: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the percentile interval for each column of resampled means.

    Args:
        means_RK: ``(R, K)`` from :func:`resampled_means`.
        level: confidence level, in (0, 1).

    Returns:
        float64 ``(K,)`` lower and ``(K,)`` upper ends.

    Raises:
        XcompatError: ``level`` is out of range.
    """
    if not 0 < level < 1:
        raise XcompatError(f"level must be between 0 and 1, e.g. 0.95, not {level}")
    low_K, high_K = np.quantile(means_RK, [(1 - level) / 2, (1 + level) / 2], axis=0)
    return low_K, high_K


def _unless_rounding(mean: float, differences: np.ndarray, rounding: float) -> float:
    """Return a mean of differences, or 0 if it is within rounding error."""
    return 0.0 if abs(mean) <= rounding * max(1.0, float(np.abs(differences).max())) else float(mean)


def _column(values_Q: np.ndarray) -> np.ndarray:
    values_Q = np.asarray(values_Q, dtype=np.float64)
    if values_Q.ndim != 1:
        raise XcompatError(f"a bootstrap needs a number per query, not an array of shape {values_Q.shape}")
    return values_Q[:, None]


def cluster_codes(clusters_Q: Ids | None, n_queries: int) -> np.ndarray:
    """Return int64 ``(Q,)`` cluster numbers; without clusters each query is its own."""
    if clusters_Q is None:
        return np.arange(n_queries)
    if isinstance(clusters_Q, np.ndarray) and clusters_Q.dtype.kind == "i" and clusters_Q.shape == (n_queries,):
        _, first_K, codes_Q = np.unique(clusters_Q, return_index=True, return_inverse=True)
        return np.argsort(np.argsort(first_K))[codes_Q]  # numbered by first occurrence, as below
    return id_codes(as_ids(clusters_Q, n_queries, "clusters"), ())[0]
