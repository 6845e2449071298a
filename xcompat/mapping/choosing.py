"""Which map of queries a training set says is the best: by what each finds on items and classes that were held out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from xcompat.evaluation import PairedDifference, RankedQueries, paired_bootstrap, ranking_per_query
from xcompat.mapping.candidates import Candidate, Known
from xcompat.mapping.folds import PROTOCOLS, Searched, folds
from xcompat.mapping.paired import PairedEmbeddings

METRICS = ("cmc@1", "cmc@5", "map@1.0")
RESAMPLES = 1000
LINES = (Candidate("procrustes"), Candidate("ridge"))
POWERS, DAMPINGS = (0.15, 0.25, 0.35, 0.5), (0.1, 0.3, 1.0)
SHARPNESSES, SHARES = (20.0, 30.0, 40.0), (0.3, 0.5, 0.8, 1.2)


@dataclass(frozen=True)
class Trial:
    """What a candidate finds on what was held out, beside old queries on the same gallery.

    Args:
        candidate: the candidate.
        gains: protocol -> metric -> new/old minus old/old, paired over the queries of all folds.
    """

    candidate: Candidate
    gains: dict[str, dict[str, PairedDifference]]

    @property
    def worst(self) -> float:
        """The smallest gain over all protocols and metrics."""
        return min(gain.mean for gains in self.gains.values() for gain in gains.values())

    @property
    def mean(self) -> float:
        """The mean gain."""
        return float(np.mean([gain.mean for gains in self.gains.values() for gain in gains.values()]))


@dataclass(frozen=True)
class Choice:
    """What was tried and what is taken.

    Args:
        trials: all, in the order of trying.
        chosen: the best of them.
        without_new_model: old queries with the metric and the memory of the best: what of its gain needs no new model; None where
            it has neither.
        floor: protocol -> metric -> what old queries find.
        n_queries: protocol -> how many were asked.
    """

    trials: list[Trial]
    chosen: Trial
    without_new_model: Trial | None
    floor: dict[str, dict[str, float]]
    n_queries: dict[str, int]

    def best_of_each_kind(self) -> list[Trial]:
        """Return the best trial of each kind of candidate, in the order of trying."""
        kinds = dict.fromkeys(trial.candidate.kind for trial in self.trials)
        return [better(trial for trial in self.trials if trial.candidate.kind == kind) for kind in kinds]


class _HeldOut:
    """Folds of a training set, what is learned from each, and what old queries find there."""

    def __init__(self, pairs: PairedEmbeddings, searched: Searched, seed: int) -> None:
        assert pairs.labels_N is not None
        self.pairs, self.protocols = pairs, PROTOCOLS[searched]
        self.folds = list(folds(pairs.labels_N, searched, seed))
        self.known = [Known(pairs.take(fold.fit_F)) for fold in self.folds]
        self.floor = self._values(lambda _, rows: pairs.old_Nd[rows])
        self.seed = seed

    def _values(self, queries: Callable[[Known, np.ndarray], np.ndarray]) -> dict[str, dict[str, np.ndarray]]:
        """Return protocol -> metric -> value of each query of every fold."""
        assert self.pairs.labels_N is not None
        found: dict[str, dict[str, list[np.ndarray]]] = {name: {metric: [] for metric in METRICS} for name in self.protocols}
        for fold, known in zip(self.folds, self.known, strict=True):
            for protocol, rows_Q in fold.searched.items():
                labels = self.pairs.labels_N[rows_Q]
                ranked = ranking_per_query(queries(known, rows_Q), self.pairs.old_Nd[rows_Q], labels, labels, rows_Q, rows_Q)
                for metric, values_Q in _metrics(ranked).items():
                    found[protocol][metric].append(values_Q)
        return {name: {metric: np.concatenate(parts) for metric, parts in found[name].items()} for name in self.protocols}

    def try_(self, candidate: Candidate) -> Trial:
        """Measure a candidate."""
        found = self._values(lambda known, rows: known.queries(candidate, self.pairs.new_ND[rows]).numpy())
        gains = {
            protocol: {
                metric: paired_bootstrap(values_Q, self.floor[protocol][metric], RESAMPLES, seed=self.seed)
                for metric, values_Q in metrics.items()
            }
            for protocol, metrics in found.items()
        }
        return Trial(candidate, gains)


def _metrics(ranked: RankedQueries) -> dict[str, np.ndarray]:
    known_Q = ranked.positives_Q > 0
    first_Q = ranked.first_hit_ranks_Q[known_Q]
    return {
        "cmc@1": (first_Q < 1).astype(np.float64),
        "cmc@5": (first_Q < 5).astype(np.float64),
        "map@1.0": ranked.average_precision_Q[known_Q],
    }


def better(trials: Iterable[Trial]) -> Trial:
    """Return the best: of the largest worst gain over protocols and metrics, to a tenth of a point, then of the largest mean."""
    return max(trials, key=lambda trial: (round(1000 * trial.worst), trial.mean))


def choose(pairs: PairedEmbeddings, searched: Searched = "unknown", seed: int = 0) -> Choice:
    """Try what a map can be made of, a part after the other: a line, its metric, its memory, and then finer settings.

    Args:
        pairs: the training set, with classes.
        searched: what is known of the classes that will be searched.
        seed: of the folds and of the intervals.

    Returns:
        Every trial, and the best.

    Raises:
        XcompatError: there are too few items to hold any out.
    """
    held = _HeldOut(pairs, searched, seed)
    trials: dict[Candidate, Trial] = {}

    def best_of(candidates: Sequence[Candidate]) -> Candidate:
        for each in candidates:
            if each not in trials:
                trials[each] = held.try_(each)
        return better(trials[each] for each in candidates).candidate

    best_of(LINES)
    metric = best_of([replace(line, power=power) for line in LINES for power in POWERS])
    memory = best_of([replace(metric, sharpness=beta, share=share) for beta in SHARPNESSES for share in SHARES])
    best_of([memory, *(replace(memory, damping=damping) for damping in DAMPINGS)])
    chosen = better(trials.values())
    floor = {name: {metric: float(v.mean()) for metric, v in metrics.items()} for name, metrics in held.floor.items()}
    counts = {name: len(metrics["cmc@1"]) for name, metrics in held.floor.items()}
    without_new_model = None
    if chosen.candidate.power is not None:  # a rotation of old embeddings to themselves is none
        old_queries = _HeldOut(replace(pairs, new_ND=pairs.old_Nd), searched, seed)
        without_new_model = old_queries.try_(replace(chosen.candidate, line="procrustes"))
    return Choice(list(trials.values()), chosen, without_new_model, floor, counts)
