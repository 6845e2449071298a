"""Confidence of new queries, and fallback to old ones."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from xcompat.evaluation import EvaluatedModel, Evaluation
from xcompat.evaluation.cases import ALL, FLIP_METRIC, IMAGE_TO_IMAGE, IMAGE_TO_TEXT, TEXT_TO_IMAGE, TEXT_TO_TEXT
from xcompat.evaluation.evaluated_models import C
from xcompat.evaluation.selective import area_under_roc, calibration_error, query_quality

FALLBACK = "fallback"
"""Query side of a case: new queries, or old ones at low confidence."""
_ASKING = {IMAGE_TO_IMAGE: "queries", TEXT_TO_TEXT: "queries", TEXT_TO_IMAGE: "texts", IMAGE_TO_TEXT: "images"}


def fallback_queries(new_view: C, instead: C, confidence: EvaluatedModel, below: float) -> C:
    """Replace new queries with low confidence.

    Args:
        new_view: new queries in the old space.
        instead: replacements: old or mixed queries.
        confidence: confidence of new queries, (N, 1) per kind.
        below: threshold.

    Returns:
        The same items.
    """
    others, sure = instead.matrices(), confidence.matrices()
    mixed = {kind: np.where(np.asarray(sure[kind]) < below, others[kind], embeds) for kind, embeds in new_view.matrices().items()}
    fingerprint = new_view.fingerprint.derive(f"{FALLBACK} {below} {instead.fingerprint.digest}")
    return replace(new_view.with_matrices(mixed), name=FALLBACK, fingerprint=fingerprint)  # type: ignore[type-var]


def confidence_of(confidence: EvaluatedModel, evaluation: Evaluation) -> dict[str, np.ndarray]:
    """Return confidence by direction: float32 (Q,), NaN outside the evaluation."""
    matrices, found = confidence.matrices(), {}
    for direction, kind in _ASKING.items():
        if (ranks_Q := evaluation.ranks.get(("new", "old", direction))) is not None:
            found[direction] = np.where(ranks_Q >= 0, np.asarray(matrices[kind])[:, 0], np.nan).astype(np.float32)
    return found


def describe_confidence(evaluation: Evaluation, below: float | None) -> list[str]:
    """Return report notes on the confidence and the fallback.

    Args:
        evaluation: with confidences.
        below: threshold of the fallback, or None.
    """
    said = []
    overall = [case for case in evaluation.cases if case.population == ALL]
    flips = {(case.query, case.direction): case.metrics[FLIP_METRIC] for case in overall if FLIP_METRIC in case.metrics}
    for direction, confidence_Q in evaluation.confidence.items():
        known_Q = np.isfinite(confidence_Q)
        new_Q, old_Q = (
            query_quality(evaluation.ranks, evaluation.average_precision, who, direction)[known_Q] for who in ("new", "old")
        )
        hurt_Q, sure_Q = new_Q < old_Q, confidence_Q[known_Q]
        if hurt_Q.all() or not hurt_Q.any():
            continue
        clusters_Q = evaluation.clusters.get(direction)
        area = area_under_roc(sure_Q, ~hurt_Q, clusters_Q[known_Q] if clusters_Q is not None else None)
        said.append(
            f"{direction}: {hurt_Q.mean():.1%} of the new queries find less than the old ones. Confidence predicts which with "
            f"an AUROC of {area.value:.2f} ({area.low:.2f} to {area.high:.2f}); its calibration error is "
            f"{100 * calibration_error(sure_Q, ~hurt_Q):.1f} points."
        )
        if not area.low > 0.5:
            said.append(
                f"{direction}: confidence is no better than chance; do not choose by it which queries the old model answers."
            )
        if below is not None:
            before, after = (flips[who, direction] for who in ("new", FALLBACK))
            share = f"{(sure_Q < below).mean():.1%} of the queries have a confidence below {below:g} and fall back"
            said.append(f"{direction}: {share}; negative flips {before:.1%} without the fallback, {after:.1%} with it.")
    return said
