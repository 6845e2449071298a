"""Confidence of queries: the probability to find no less than the old model's query, calibrated on held-out items.

The length of what a query recalls predicts it best. That length is the gate, which tells whether the query resembles any entry,
times the agreement of the entries that it resembles. The margin between the two nearest entries, and the distance between the
mapped query and what it recalls, add nothing that holds on other data (`benchmarks/studies/confidence.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from xcompat.evaluation.selective import Area, area_under_roc, calibration_error, risk_coverage

FEWEST = 20
"""Least number of hurt queries, and of other ones, in a fold: fewer are no evidence."""
COVERAGES = (1.0, 0.9, 0.75, 0.5, 0.25)


@dataclass(frozen=True)
class Evidence:
    """Results of held-out queries of all protocols, about equally many of each.

    Args:
        leaning_Q: the length of what each query recalls.
        hurt_Q: whether each is hurt: its average precision, or for captions its reciprocal rank, is below the old query's.
        folds_Q: the fold of each.
        about_Q: the item of each; several protocols ask about the same item.
    """

    leaning_Q: NDArray[np.float64]
    hurt_Q: NDArray[np.bool_]
    folds_Q: NDArray[np.int64]
    about_Q: NDArray[np.int64]


@dataclass(frozen=True)
class Calibration:
    """A logistic function from a query's leaning to the probability that it is not hurt, with its quality on held-out folds.

    Args:
        slope: of the function, fitted on all folds.
        offset: of the function, fitted on all folds.
        area: AUROC of the probability, which tells hurt queries from others.
        error: the expected calibration error.
        hurt: the share of queries that are hurt.
        risk: share of the surest queries -> share of these that are hurt.
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
        evidence: of a candidate with a memory.

    Returns:
        The calibration and an empty string, or None and the reason why there is none.
    """
    sides = [(evidence.folds_Q == fold, evidence.folds_Q != fold) for fold in np.unique(evidence.folds_Q)]
    fewest = min(np.bincount(evidence.hurt_Q[mine_Q], minlength=2).min() for mine_Q, _ in sides)
    if fewest < FEWEST:
        return None, f"in a fold {fewest} queries alone were hurt, or were not, and it takes {FEWEST} of both"
    probability_Q = np.empty(len(evidence.hurt_Q))
    for mine_Q, others_Q in sides:
        slope, offset = _fitted(evidence.leaning_Q[others_Q], evidence.hurt_Q[others_Q])
        probability_Q[mine_Q] = 1 / (1 + np.exp(-(slope * evidence.leaning_Q[mine_Q] + offset)))
    area = area_under_roc(probability_Q, ~evidence.hurt_Q, evidence.about_Q)
    if not area.low > 0.5:
        return None, f"what was held out tells no better than chance which are (AUROC {area.low:.2f} to {area.high:.2f})"
    risk_Q = risk_coverage(probability_Q, evidence.hurt_Q)
    risk = {share: float(risk_Q[max(1, round(share * len(risk_Q))) - 1]) for share in COVERAGES}
    error, hurt = calibration_error(probability_Q, ~evidence.hurt_Q), float(evidence.hurt_Q.mean())
    return Calibration(*_fitted(evidence.leaning_Q, evidence.hurt_Q), area, error, hurt, risk), ""


def _fitted(leaning_Q: NDArray[np.float64], hurt_Q: NDArray[np.bool_]) -> tuple[float, float]:
    """Return slope and offset."""
    from sklearn.linear_model import LogisticRegression

    found = LogisticRegression(C=1e4).fit(leaning_Q[:, None], ~hurt_Q)
    return float(found.coef_[0, 0]), float(found.intercept_[0])
