"""Metrics of query confidence: how well it predicts which new queries find less than old ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from xcompat.core.errors import XcompatError
from xcompat.evaluation.cases import IMAGE_TO_IMAGE, RankKey, ValueKey
from xcompat.evaluation.identities import Ids
from xcompat.evaluation.intervals import cluster_codes

_BINS = 10
_NORMAL = 1.96
"""Standard deviations on either side of the mean that cover 95 % of a normal distribution."""


class Area(NamedTuple):
    """Area under the ROC curve: how often a better query scores higher than a worse query; 0.5 is chance.

    Args:
        value: in [0, 1].
        low: lower end of the 95 % interval.
        high: upper end of the 95 % interval.
    """

    value: float
    low: float
    high: float


def query_quality(
    ranks: Mapping[RankKey, np.ndarray], average_precision: Mapping[ValueKey, np.ndarray], query: str, direction: str
) -> np.ndarray:
    """Return how well each query searches the old gallery: average precision for classes, reciprocal rank otherwise.

    Args:
        ranks: ``ranks`` of an :class:`~xcompat.evaluation.Evaluation`.
        average_precision: its ``average_precision``.
        query: query model, e.g. ``new``.
        direction: e.g. ``image-to-image``.

    Returns:
        ``(Q,)`` floats, NaN without a match.
    """
    values_Q = average_precision.get((query, "old", direction, "map"))
    if values_Q is not None and direction == IMAGE_TO_IMAGE:
        return values_Q
    ranks_Q = ranks[query, "old", direction]
    return np.where(ranks_Q < 0, np.nan, 1 / (1.0 + np.maximum(ranks_Q, 0)))


def area_under_roc(scores_Q: np.ndarray, better_Q: np.ndarray, clusters_Q: Ids | None = None) -> Area:
    """Return the area under the ROC curve (Hanley and McNeil 1982), with an interval for clustered queries.

    The interval is normal. Its variance is the Mann-Whitney statistic's (DeLong et al. 1988), summed over clusters
    (Obuchowski 1997).

    Args:
        scores_Q: ``(Q,)`` scores; higher predicts a better query.
        better_Q: ``(Q,)``, True for better queries.
        clusters_Q: item of each query; None if independent.

    Returns:
        The area; ties count half.

    Raises:
        XcompatError: all queries are better, or none is.

    Example:
        >>> area_under_roc(np.array([0.9, 0.8, 0.3, 0.1]), np.array([True, True, False, False])).value
        1.0
    """
    from scipy.stats import rankdata

    better_Q = np.asarray(better_Q, bool)
    better, worse = np.asarray(scores_Q)[better_Q], np.asarray(scores_Q)[~better_Q]
    if not len(better) or not len(worse):
        raise XcompatError("the area under the ROC curve needs better and worse queries, but all queries are of one kind")
    ranks_Q = rankdata(np.concatenate([better, worse]))
    above_P = (ranks_Q[: len(better)] - rankdata(better)) / len(worse)
    below_N = 1 - (ranks_Q[len(better) :] - rankdata(worse)) / len(better)
    area = float(above_P.mean())
    shares_Q = np.empty(len(better_Q))
    shares_Q[better_Q], shares_Q[~better_Q] = (above_P - area) / len(better), (below_N - area) / len(worse)
    half = _NORMAL * float(np.sqrt((np.bincount(cluster_codes(clusters_Q, len(better_Q)), shares_Q) ** 2).sum()))
    return Area(area, max(0.0, area - half), min(1.0, area + half))


def calibration_error(probabilities_Q: np.ndarray, happened_Q: np.ndarray) -> float:
    """Return the expected calibration error over ten groups of equal size.

    Args:
        probabilities_Q: ``(Q,)`` in [0, 1].
        happened_Q: ``(Q,)``, True if the predicted event happened.

    Example:
        >>> calibration_error(np.full(10, 0.75), np.arange(10) < 5)  # ten groups of one query each
        0.5
    """
    order_Q = np.argsort(probabilities_Q, kind="stable")
    differences_Q = np.asarray(probabilities_Q, np.float64)[order_Q] - np.asarray(happened_Q, np.float64)[order_Q]
    return sum(abs(float(group.sum())) for group in np.array_split(differences_Q, _BINS)) / len(order_Q)


def risk_coverage(confidence_Q: np.ndarray, hurt_Q: np.ndarray) -> np.ndarray:
    """Return the share of hurt queries among the most confident queries, by their number (El-Yaniv and Wiener 2010).

    Args:
        confidence_Q: ``(Q,)``, higher is more confident.
        hurt_Q: ``(Q,)``, True for queries with worse results than the old model's.

    Returns:
        float64 ``(Q,)``: share among the 1, 2, … Q most confident queries.

    Example:
        >>> risk_coverage(np.array([0.2, 0.9, 0.6, 0.1]), np.array([True, False, False, True])).tolist()
        [0.0, 0.0, 0.3333333333333333, 0.5]
    """
    hurt_Q = np.asarray(hurt_Q, np.float64)[np.argsort(-np.asarray(confidence_Q), kind="stable")]
    return np.cumsum(hurt_Q) / np.arange(1, len(hurt_Q) + 1)
