"""The confidence of new queries on a test set, and the fallback to old queries below a threshold."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from xcompat.evaluation import Contestant, Evaluation
from xcompat.evaluation.cases import ALL, FLIP_METRIC, IMAGE_TO_IMAGE, IMAGE_TO_TEXT, TEXT_TO_IMAGE, TEXT_TO_TEXT
from xcompat.evaluation.contestants import C
from xcompat.evaluation.selective import area_under_roc, calibration_error, query_quality

FALLBACK = "fallback"
"""Query side of a case: new queries, replaced by old ones where their confidence is low."""
_ASKING = {IMAGE_TO_IMAGE: "queries", TEXT_TO_TEXT: "queries", TEXT_TO_IMAGE: "texts", IMAGE_TO_TEXT: "images"}


def fallback_queries(new_view: C, instead: C, confidence: Contestant, below: float) -> C:
    """Replace the new queries whose confidence is below a threshold.

    Args:
        new_view: the new model in the space of the old gallery.
        instead: the replacements: the old model, or a mix of both.
        confidence: confidence of the new queries, (N, 1) per kind of item.
        below: the threshold.

    Returns:
        The same items.
    """
    others, sure = instead.matrices(), confidence.matrices()
    mixed = {kind: np.where(np.asarray(sure[kind]) < below, others[kind], embeds) for kind, embeds in new_view.matrices().items()}
    fingerprint = new_view.fingerprint.derived(f"{FALLBACK} {below} {instead.fingerprint.digest}")
    return replace(new_view.with_matrices(mixed), name=FALLBACK, fingerprint=fingerprint)  # type: ignore[type-var]


def confidence_of(confidence: Contestant, evaluation: Evaluation) -> dict[str, np.ndarray]:
    """Return the confidence of each query by direction, float32 (Q,), NaN for queries that the evaluation left out."""
    matrices, found = confidence.matrices(), {}
    for direction, kind in _ASKING.items():
        if (ranks_Q := evaluation.ranks.get(("new", "old", direction))) is not None:
            found[direction] = np.where(ranks_Q >= 0, np.asarray(matrices[kind])[:, 0], np.nan).astype(np.float32)
    return found


def said_of_confidence(evaluation: Evaluation, below: float | None) -> list[str]:
    """Return notes on how well confidence predicts which new queries find less than old ones, and on the fallback.

    Args:
        evaluation: with the confidence of its queries.
        below: the threshold of the fallback; None without fallback.
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
            f"{direction}: {hurt_Q.mean():.1%} of the new queries find less than the old ones. Their confidence tells which with "
            f"an AUROC of {area.value:.2f} ({area.low:.2f} to {area.high:.2f}), and is off by "
            f"{100 * calibration_error(sure_Q, ~hurt_Q):.1f} points on average."
        )
        if below is not None:
            before, after = (flips[who, direction] for who in ("new", FALLBACK))
            share = f"{(sure_Q < below).mean():.1%} of the queries fall back, those with a confidence below {below:g}"
            said.append(f"{direction}: {share}; negative flips {before:.1%} without, {after:.1%} with it.")
    return said
