"""Choice of the old scores' weight and of the number of hits for re-ranking."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from xcompat.evaluation import PairedDifference, paired_bootstrap
from xcompat.mapping.candidates import Candidate
from xcompat.mapping.held_out import RESAMPLES, FoldResult, Trial, ValidationSplit
from xcompat.models import CompatModel
from xcompat.score_scale import CANDIDATES, OLD_WEIGHT

OLD_WEIGHTS = (OLD_WEIGHT, 0.0, 0.5)
"""Weights of old scores to try."""
COUNTS = (10, CANDIDATES, 50, 100)
"""Numbers of hits to try. Each hit costs an embedding."""
TOLERATED = 0.005
"""Loss that fewer hits may cost. Without it, 100 hits win on all our photos, often by 0.4 points over 20."""


@dataclass(frozen=True)
class RerankedTrial:
    """Result of the chosen re-ranking.

    Args:
        trial: gains over old queries.
        old_weight: weight of old scores with the largest worst gain at :data:`CANDIDATES` hits.
        candidates: smallest number of hits that is not surely more than :data:`TOLERATED` below the best number.
        losses: number of hits -> difference from the best number, in the mean of all metrics per query.
    """

    trial: Trial
    old_weight: float
    candidates: int
    losses: Mapping[int, PairedDifference]

    def store_in(self, model: CompatModel) -> None:
        """Write the chosen values into a model's configuration."""
        model.config.rerank_old_weight, model.config.rerank_candidates = self.old_weight, self.candidates


def choose_reranking(held: ValidationSplit, candidate: Candidate) -> RerankedTrial | None:
    """Try weights of old scores, then numbers of hits; return None for maps of galleries.

    Args:
        held: validation split.
        candidate: the chosen map.
    """
    measure = held.prepare_reranking(held.queries_of(candidate), max(COUNTS))
    if measure is None:
        return None
    by_weight = {weight: measure(weight, CANDIDATES) for weight in OLD_WEIGHTS}
    trials = {weight: held.compare_with_old(candidate, results) for weight, results in by_weight.items()}
    best_weight = max(trials, key=lambda weight: (round(1000 * trials[weight].worst), trials[weight].mean))
    results = {k: by_weight[best_weight] if k == CANDIDATES else measure(best_weight, k) for k in COUNTS}
    quality = {k: _quality(found, held.shown_only) for k, found in results.items()}
    best = max(COUNTS, key=lambda k: quality[k].mean())
    clusters_Q = np.concatenate([each.clusters_Q for each in results[best] if each.protocol not in held.shown_only])
    losses = {k: paired_bootstrap(quality[k], quality[best], RESAMPLES, seed=held.seed, clusters_Q=clusters_Q) for k in COUNTS}
    chosen = min(k for k, loss in losses.items() if loss.high >= -TOLERATED)
    return RerankedTrial(held.compare_with_old(candidate, results[chosen]), best_weight, chosen, losses)


def _quality(results: Sequence[FoldResult], shown_only: Sequence[str]) -> NDArray[np.float64]:
    """Return the mean of each query's metrics."""
    return np.concatenate([np.mean([*each.found.values()], axis=0) for each in results if each.protocol not in shown_only])
