"""How sure a query is: how probable it is that it finds no less than the old model's, calibrated on what was held out.

What a query leans on tells most of it: the length of what it recalls is the gate, which says how much the query looks like
anything remembered, times how much of one mind the entries are that it resembles. The margin between the two nearest entries, and
how far the query's own place is from what it recalls, add nothing that stays on other data (`benchmarks/studies/confidence.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from xcompat.evaluation.selective import Area, area_under_roc, calibration_error, risk_coverage

FEWEST = 20
"""Queries of a fold that are hurt, and such that are not, at least: fewer say nothing."""
COVERAGES = (1.0, 0.9, 0.75, 0.5, 0.25)


@dataclass(frozen=True)
class Evidence:
    """What held-out queries found, those of all protocols, which have about as many each.

    Args:
        leaning_Q: the length of what each recalls.
        hurt_Q: whether each finds less than the old model's: average precision, or of captions the reciprocal rank, is lower.
        folds_Q: the fold that each is of.
        about_Q: what each is about, the same in several protocols.
    """

    leaning_Q: NDArray[np.float64]
    hurt_Q: NDArray[np.bool_]
    folds_Q: NDArray[np.int64]
    about_Q: NDArray[np.int64]


@dataclass(frozen=True)
class Calibration:
    """The probability that a query is not hurt, a logistic function of its leaning, and how good it is on folds it is not of.

    Args:
        slope: of the function that is fitted on all folds.
        offset: likewise.
        area: how well the probability tells who is hurt.
        error: the expected calibration error.
        hurt: the share of queries that are hurt.
        risk: share of the queries, the surest first -> how many of these are hurt.
    """

    slope: float
    offset: float
    area: Area
    error: float
    hurt: float
    risk: dict[float, float]


def calibrate(evidence: Evidence) -> tuple[Calibration | None, str]:
    """Fit the function.

    Args:
        evidence: of a candidate whose queries remember something.

    Returns:
        The calibration, or None and why there is none.
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
