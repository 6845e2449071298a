"""Measure all cases, and judge whether the new model is backward compatible."""

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
    SENT,
    Case,
    Criterion,
    Difference,
    Evaluation,
    Threshold,
    failed_comparisons,
    is_zero_shot,
)
from xcompat.evaluation.contestants import C, Contestants, Direction, EvaluationOptions, Found, Search
from xcompat.evaluation.intervals import interval_bounds, paired_bootstrap, resampled_means
from xcompat.evaluation.thresholds import thresholds


def evaluate(contestants: Contestants[C], options: EvaluationOptions | None = None) -> Evaluation:
    """Measure every case in every direction and judge backward compatibility.

    The criterion is the empirical one of BCT (Shen et al. 2020): new queries must find more in the old gallery than old ones.

    Args:
        contestants: embeddings of one test set, all of them readable: :class:`EmbeddedPairs` or :class:`EmbeddedImages`.
        options: cut-offs and resampling; the defaults of :class:`EvaluationOptions` if None.

    Returns:
        Cases, verdict, and the ranks of every query.

    Raises:
        XcompatError: the models embedded different items, dimensions do not fit, there is nothing to measure, or ``old_on_new``
            is set for a mapped gallery.
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
        notes.append(f"Gain over old queries with the same metric and memory, in points: {_as_points(beside)}.")
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
        dropped={each.direction.name: each.dropped for each in retrieval},
        notes=notes,
        average_precision={
            (*key, metric): values_Q.astype(np.float32)
            for key, one in found.items()
            for metric, values_Q in one.average_precision.items()
        },
        clusters={each.direction.name: codes_Q for each in retrieval if (codes_Q := each.direction.clusters_Q) is not None},
        thresholds=[found for each in retrieval for found in _carry_over(searches, each, options)],
    )


def _carry_over(searches: Sequence[Search[C]], measured: _Measured, options: EvaluationOptions) -> list[Threshold]:
    """Carry the threshold of old queries over to the others that a service may send, in one direction; none if none is given."""
    if options.threshold is None:
        return []
    sent = [search for search in searches if search.gallery == "old" and search.query in ("old", *SENT)]
    compared = [
        (search.query, search.asking.compare(search.searched, measured.direction, options, search.own)) for search in sent
    ]
    clusters_Q = measured.direction.clusters_Q
    draws = options.n_resamples, options.seed
    return thresholds(compared, measured.direction.name, options.threshold, measured.known, clusters_Q, *draws)


@dataclass(frozen=True)
class _Measured:
    """The results of all cases in one direction; queries without a match are left out."""

    direction: Direction
    found: Mapping[tuple[str, str], Found]
    options: EvaluationOptions

    @property
    def known(self) -> np.ndarray:
        """Which queries have a match."""
        return self.found["old", "old"].ranks_Q >= 0

    @property
    def dropped(self) -> int:
        """Queries that are left out."""
        return int((~self.known).sum())

    def parts(self) -> list[_Measured]:
        """Return these results, and those of each population; none of a population that new queries do not search or match."""
        if ("new", "old") not in self.found and self.direction.population != ALL:
            return []
        named = replace(self.direction, parts={})
        parts = [
            _Measured(
                replace(named, population=population),
                {pair: found.of_queries(mask_Q) for pair, found in self.found.items()},
                self.options,
            )
            for population, mask_Q in self.direction.parts.items()
        ]
        return [part for part in (self, *parts) if part.direction.population == ALL or part.known.any()]

    def notes(self) -> list[str]:
        """Return the direction's notes, and one on the queries that are left out."""
        but = ", except that they are the impostors of TPIR" if self.options.fpirs else ""
        left_out = [f"{self.dropped} {self.direction.without_match} and are left out{but}."] if self.dropped else []
        return [*self.direction.notes, *left_out]

    def case(self, query: str, gallery: str) -> Case:
        """Average each metric over the queries and attach its interval."""
        columns = self._values(query, gallery)
        if (
            gallery == "old"
            and query not in ("old", "independent")
            and not is_zero_shot(self.direction.metric)
            and self.direction.is_ranked
        ):
            floor_Q, ranks_Q = (self.found[asking, "old"].ranks_Q[self.known] for asking in ("old", query))
            columns[FLIP_METRIC] = (floor_Q == 0) & (ranks_Q > 0)
        values_QK = np.stack(list(columns.values()), axis=1).astype(np.float64)
        means_RK = resampled_means(values_QK, self.options.n_resamples, self.options.seed, self._clusters)
        low_K, high_K = interval_bounds(means_RK, 0.95)
        metrics = {name: float(column.mean()) for name, column in columns.items()}
        ci95 = {name: (float(low), float(high)) for name, low, high in zip(columns, low_K, high_K, strict=True)}
        for name, share in self.found[query, gallery].shares.items():  # not their mean, which rounding may take past a tie
            metrics[name], ci95[name] = share, (max(0.0, ci95[name][0]), min(1.0, ci95[name][1]))
        direction = self.direction
        return Case(query, gallery, direction.name, len(values_QK), direction.n_gallery, metrics, ci95, direction.population)

    def differences(self, query: str, than: str) -> list[Difference]:
        """Compare two kinds of queries on the old gallery, by metric; empty if one was not measured."""
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
        """Return metric -> value of each query that has a match."""
        found, known_Q = self.found[query, gallery], self.known
        hits = {f"{self.direction.metric}@{k}": found.ranks_Q < k for k in self.direction.ks}
        return {name: values_Q[known_Q] for name, values_Q in {**hits, **found.average_precision}.items()}

    @property
    def _clusters(self) -> np.ndarray | None:
        """Return what a bootstrap draws; None for single queries, also where they are all of one cluster."""
        clusters_Q = self.direction.clusters_Q
        known_Q = clusters_Q[self.known] if clusters_Q is not None else None
        return None if known_Q is None or (known_Q == known_Q[:1]).all() else known_Q


def _measure(searches: Sequence[Search[C]], direction: Direction, options: EvaluationOptions, among_others: bool) -> _Measured:
    """Search in every case; an error names the case, and the direction if there are several."""
    measured = {}
    for query, gallery, asking, searched, own in searches:
        try:
            found = asking.find(searched, direction, options, own)
        except XcompatError as error:
            where = f"{query}/{gallery} {direction.name}" if among_others else f"{query}/{gallery}"
            raise XcompatError(f"{where}: {error}") from None
        if found is not None:
            measured[query, gallery] = found
    return _Measured(direction, measured, options)


def _as_points(differences: Sequence[Difference]) -> str:
    """Return differences in percentage points with their intervals."""
    return ", ".join(
        f"{each.direction}{'' if each.population == ALL else f' ({each.population})'} {metric_name(each.metric)} "
        f"{100 * each.mean:+.1f} ({100 * low:.1f} to {100 * high:.1f})"
        for each in differences
        for low, high in [each.ci95]
    )


def _judge(cases: Sequence[Case], differences: list[Difference]) -> Criterion:
    """Compare ``new/old`` with ``old/old``, and ``new/new`` with ``independent/independent``, metric by metric."""
    failed = failed_comparisons(cases)
    lines = [
        f"{each.direction} {each.metric}{'' if each.population == ALL else f' ({each.population})'}: "
        f"{each.case} {each.value:.4f} {each.sign} {each.than} {each.floor:.4f}"
        for each in failed
    ]
    lost, hurt = (any(each.case == case for each in failed) for case in ("new/old", "new/new"))
    both = {"new/new", "independent/independent"} <= {case.label for case in cases}
    return Criterion(not lost, not hurt if both else None, lines, differences)
