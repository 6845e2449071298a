"""Confidence of queries: probability to find no less than the old model's query, calibrated on held-out items.

The recalled embedding's length predicts it best. It is the product of the gate (does the query resemble an entry?) and the
agreement of these entries. Two more features add nothing on other data (`benchmarks/studies/confidence.py`): the margin between
the two nearest entries, and the distance from mapped query to recalled embedding.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from xcompat.evaluation.selective import Area, area_under_roc, calibration_error, risk_coverage

FEWEST = 20
"""Fewest hurt queries, and fewest other ones, in a fold."""
COVERAGES = (1.0, 0.9, 0.75, 0.5, 0.25)


@dataclass(frozen=True)
class Evidence:
    """Results of held-out queries, with similar counts for all protocols.

    Args:
        recalled_norm_Q: norm of the old embedding that the memory recalls for each query, a weighted mean of similar items' old
            embeddings. Longer means that these items agree.
        hurt_Q: whether average precision (captions: reciprocal rank) is below the old query's.
        folds_Q: fold of each query.
        about_Q: item of each query; protocols share items.
    """

    recalled_norm_Q: NDArray[np.float64]
    hurt_Q: NDArray[np.bool_]
    folds_Q: NDArray[np.int64]
    about_Q: NDArray[np.int64]


@dataclass(frozen=True)
class Calibration:
    """Logistic function from the norm of the recalled embedding to the probability of an unhurt query.

    Args:
        slope: slope, fitted on all folds.
        offset: offset, fitted on all folds.
        area: AUROC of the probability on held-out folds.
        error: expected calibration error.
        hurt: share of hurt queries.
        risk: share of the surest queries -> share of hurt ones among them.
    """

    slope: float
    offset: float
    area: Area
    error: float
    hurt: float
    risk: dict[float, float]


def calibrate(evidence: Evidence) -> tuple[Calibration | None, str]:
    """Fit the logistic function.

    Args:
        evidence: held-out results of a candidate with a memory.

    Returns:
        The calibration and an empty string, or None and the reason.
    """
    sides = [(evidence.folds_Q == fold, evidence.folds_Q != fold) for fold in np.unique(evidence.folds_Q)]
    fewest = min(np.bincount(evidence.hurt_Q[mine_Q], minlength=2).min() for mine_Q, _ in sides)
    if fewest < FEWEST:
        return None, f"a fold has only {fewest} queries that were hurt, or that were not; {FEWEST} of each are needed"
    probability_Q = np.empty(len(evidence.hurt_Q))
    for mine_Q, others_Q in sides:
        slope, offset = _fit_logistic(evidence.recalled_norm_Q[others_Q], evidence.hurt_Q[others_Q])
        probability_Q[mine_Q] = 1 / (1 + np.exp(-(slope * evidence.recalled_norm_Q[mine_Q] + offset)))
    area = area_under_roc(probability_Q, ~evidence.hurt_Q, evidence.about_Q)
    if not area.low > 0.5:
        return None, f"on the validation split it is no better than chance (AUROC {area.low:.2f} to {area.high:.2f})"
    risk_Q = risk_coverage(probability_Q, evidence.hurt_Q)
    risk = {share: float(risk_Q[max(1, round(share * len(risk_Q))) - 1]) for share in COVERAGES}
    error, hurt = calibration_error(probability_Q, ~evidence.hurt_Q), float(evidence.hurt_Q.mean())
    return Calibration(*_fit_logistic(evidence.recalled_norm_Q, evidence.hurt_Q), area, error, hurt, risk), ""


def _fit_logistic(recalled_norm_Q: NDArray[np.float64], hurt_Q: NDArray[np.bool_]) -> tuple[float, float]:
    from sklearn.linear_model import LogisticRegression

    found = LogisticRegression(C=1e4).fit(recalled_norm_Q[:, None], ~hurt_Q)
    return float(found.coef_[0, 0]), float(found.intercept_[0])
