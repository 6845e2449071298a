"""Evaluation of all cases, with the backward compatibility verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from xcompat.core.errors import XcompatError
from xcompat.core.metric_names import metric_name
from xcompat.evaluation.cases import (
    ALL,
    FLIP_METRIC,
    OLD_WITH_MEMORY,
    RERANKED,
    SERVABLE_QUERIES,
    Case,
    Criterion,
    Difference,
    Evaluation,
    Threshold,
    failed_comparisons,
    is_zero_shot,
)
from xcompat.evaluation.evaluated_models import C, Direction, EvaluatedModels, EvaluationOptions, Search, SearchResults
from xcompat.evaluation.intervals import interval_bounds, paired_bootstrap, resampled_means
from xcompat.evaluation.thresholds import carry_over_threshold


def evaluate(contestants: EvaluatedModels[C], options: EvaluationOptions | None = None) -> Evaluation:
    """Measure every case in every direction and judge backward compatibility.

    The criterion follows BCT (Shen et al. 2020): new queries must score higher on the old gallery than old queries.

    Args:
        contestants: models with readable embeddings of the same test set, e.g. :class:`EmbeddedPairs` or :class:`EmbeddedImages`.
        options: cut-offs and resampling; None to use the defaults in :class:`EvaluationOptions`.

    Returns:
        Cases, verdict and ranks of every query.

    Raises:
        XcompatError: items or dimensions differ, nothing can be measured, or ``old_on_new`` is set for a mapped gallery.
    """
    options = options or EvaluationOptions()
    searches = contestants.searches(options.old_on_new, options.rerank > 0)
    directions = contestants.old.directions(options.ks)
    measured = [_measure(searches, direction, options, len(directions) > 1) for direction in directions]
    retrieval = [each for each in measured if not is_zero_shot(each.direction.metric) and each.direction.population == ALL]
    measured = [part for each in measured for part in each.parts()]
    pairs = [(search.query, search.gallery) for search in searches]
    cases = [each.case(*pair) for pair in pairs for each in measured if pair in each.found]
    cases.sort(key=lambda case: any(map(is_zero_shot, case.metrics)))
    differences = [difference for each in measured for difference in each.differences("new", "old")]
    notes = [note for each in retrieval for note in each.notes()]
    if beside := [difference for each in retrieval for difference in each.differences("new", OLD_WITH_MEMORY)]:
        notes.append(f"Gain over old queries with the same learned transform and memory, in points: {_as_points(beside)}.")
    if again := [difference for each in measured for difference in each.differences(RERANKED, "old")]:
        notes.append(f"Gain over old queries with {options.rerank} hits per query re-ranked, in points: {_as_points(again)}.")
    if contestants.upgraded is not None:
        notes.append("new/old is measured on the old gallery after its stored embeddings were mapped towards the new model.")
    ranked = {each.direction.name for each in retrieval if each.direction.is_ranked}
    found = {(*pair, each.direction.name): each.found[pair] for pair in pairs for each in retrieval if pair in each.found}
    return Evaluation(
        cases,
        _judge(cases, differences),
        ranks={key: one.ranks_Q for key, one in found.items() if key[2] in ranked},
        dropped={each.direction.name: each.n_dropped for each in retrieval},
        notes=notes,
        average_precision={
            (*key, metric): values_Q.astype(np.float32)
            for key, one in found.items()
            for metric, values_Q in one.average_precision.items()
        },
        clusters={each.direction.name: codes_Q for each in retrieval if (codes_Q := each.direction.clusters_Q) is not None},
        thresholds=[found for each in retrieval for found in _carry_over(searches, each, options)],
    )


def _carry_over(searches: Sequence[Search[C]], measured: _DirectionResults, options: EvaluationOptions) -> list[Threshold]:
    """Carry the old threshold over to the queries that a service may send; return an empty list without a threshold."""
    if options.threshold is None:
        return []
    sent = [search for search in searches if search.gallery == "old" and search.query in ("old", *SERVABLE_QUERIES)]
    compared = [
        (search.query, search.asking.compare(search.searched, measured.direction, options, search.own)) for search in sent
    ]
    clusters_Q = measured.direction.clusters_Q
    draws = options.n_resamples, options.seed
    return carry_over_threshold(compared, measured.direction.name, options.threshold, measured.is_matched, clusters_Q, *draws)


@dataclass(frozen=True)
class _DirectionResults:
    """Results of all cases in a direction; queries without a match are excluded."""

    direction: Direction
    found: Mapping[tuple[str, str], SearchResults]
    options: EvaluationOptions

    @property
    def is_matched(self) -> np.ndarray:
        return self.found["old", "old"].ranks_Q >= 0

    @property
    def n_dropped(self) -> int:
        return int((~self.is_matched).sum())

    def parts(self) -> list[_DirectionResults]:
        """Return these results and those of each population; skip populations without new queries or matches."""
        if ("new", "old") not in self.found and self.direction.population != ALL:
            return []
        named = replace(self.direction, parts={})
        parts = [
            _DirectionResults(
                replace(named, population=population),
                {pair: found.select_queries(mask_Q) for pair, found in self.found.items()},
                self.options,
            )
            for population, mask_Q in self.direction.parts.items()
        ]
        return [part for part in (self, *parts) if part.direction.population == ALL or part.is_matched.any()]

    def notes(self) -> list[str]:
        """Return the direction's notes and the number of excluded queries."""
        but = ", but serve as impostors for TPIR" if self.options.fpirs else ""
        left_out = [f"{self.n_dropped} {self.direction.without_match} and are excluded{but}."] if self.n_dropped else []
        return [*self.direction.notes, *left_out]

    def case(self, query: str, gallery: str) -> Case:
        """Return the mean and interval of each metric."""
        columns = self._values(query, gallery)
        if (
            gallery == "old"
            and query not in ("old", "independent")
            and not is_zero_shot(self.direction.metric)
            and self.direction.is_ranked
        ):
            floor_Q, ranks_Q = (self.found[asking, "old"].ranks_Q[self.is_matched] for asking in ("old", query))
            columns[FLIP_METRIC] = (floor_Q == 0) & (ranks_Q > 0)
        values_QK = np.stack(list(columns.values()), axis=1).astype(np.float64)
        means_RK = resampled_means(values_QK, self.options.n_resamples, self.options.seed, self._clusters)
        low_K, high_K = interval_bounds(means_RK, 0.95)
        metrics = {name: float(column.mean()) for name, column in columns.items()}
        ci95 = {name: (float(low), float(high)) for name, low, high in zip(columns, low_K, high_K, strict=True)}
        for name, share in self.found[query, gallery].shares.items():  # the exact share; rounding can move the mean past a tie
            metrics[name], ci95[name] = share, (max(0.0, ci95[name][0]), min(1.0, ci95[name][1]))
        direction = self.direction
        return Case(query, gallery, direction.name, len(values_QK), direction.n_gallery, metrics, ci95, direction.population)

    def differences(self, query: str, than: str) -> list[Difference]:
        """Compare two kinds of queries on the old gallery by metric; return an empty list if either is not measured."""
        if not {(query, "old"), (than, "old")} <= self.found.keys():
            return []
        values, floor = self._values(query, "old"), self._values(than, "old")
        differences = []
        for name, values_Q in values.items():
            draws = self.options.n_resamples, 0.95, self.options.seed, self._clusters
            paired = paired_bootstrap(values_Q, floor[name], *draws)
            ci95 = paired.low, paired.high
            differences.append(
                Difference(self.direction.name, name, paired.mean, ci95, paired.queries_needed, self.direction.population)
            )
        return differences

    def _values(self, query: str, gallery: str) -> dict[str, np.ndarray]:
        found, known_Q = self.found[query, gallery], self.is_matched
        hits = {f"{self.direction.metric}@{k}": found.ranks_Q < k for k in self.direction.ks}
        return {name: values_Q[known_Q] for name, values_Q in {**hits, **found.average_precision}.items()}

    @property
    def _clusters(self) -> np.ndarray | None:
        """Bootstrap clusters; None if there are fewer than two."""
        clusters_Q = self.direction.clusters_Q
        known_Q = clusters_Q[self.is_matched] if clusters_Q is not None else None
        return None if known_Q is None or (known_Q == known_Q[:1]).all() else known_Q


def _measure(
    searches: Sequence[Search[C]], direction: Direction, options: EvaluationOptions, among_others: bool
) -> _DirectionResults:
    """Search in every case; errors name the case."""
    measured = {}
    for query, gallery, asking, searched, own in searches:
        try:
            found = asking.find(searched, direction, options, own)
        except XcompatError as error:
            where = f"{query}/{gallery} {direction.name}" if among_others else f"{query}/{gallery}"
            raise XcompatError(f"{where}: {error}") from None
        if found is not None:
            measured[query, gallery] = found
    return _DirectionResults(direction, measured, options)


def _as_points(differences: Sequence[Difference]) -> str:
    return ", ".join(
        f"{each.direction}{'' if each.population == ALL else f' ({each.population})'} {metric_name(each.metric)} "
        f"{100 * each.mean:+.1f} ({100 * low:.1f} to {100 * high:.1f})"
        for each in differences
        for low, high in [each.ci95]
    )


def _judge(cases: Sequence[Case], differences: list[Difference]) -> Criterion:
    failed = failed_comparisons(cases)
    lines = [
        f"{each.direction} {each.metric}{'' if each.population == ALL else f' ({each.population})'}: "
        f"{each.case} {each.value:.4f} {each.sign} {each.than} {each.floor:.4f}"
        for each in failed
    ]
    lost, hurt = (any(each.case == case for each in failed) for case in ("new/old", "new/new"))
    both = {"new/new", "independent/independent"} <= {case.label for case in cases}
    return Criterion(not lost, not hurt if both else None, lines, differences)
