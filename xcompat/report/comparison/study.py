"""Results of a study: mean and spread of each method over seeds, and differences with intervals over queries."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from xcompat.core.errors import XcompatError
from xcompat.core.metric_names import metric_name
from xcompat.evaluation import Difference, PairedDifference, paired_bootstrap
from xcompat.evaluation.cases import ALL, OLD_WITH_MEMORY, RERANKED, WITHOUT_MEMORY
from xcompat.report.content import Report

Key = tuple[str, str]
"""(direction, metric)."""

_OWN_CASES = ("old/old", "new/old", "new/new")
_COMMON_CASES = ("old/old", "independent/old", "independent/independent")
_SAME = 0.005  # re-embedding on another machine changes a few ranks; another model or test set changes over half a point
_ROUNDING = 2.0**-23  # of a difference of two numbers of about 1, stored as float32


class Spread(NamedTuple):
    """Metric over seeds.

    Args:
        mean: a fraction.
        std: sample standard deviation (n - 1); None for a single seed.
    """

    mean: float
    std: float | None


class ItemCost(NamedTuple):
    """Cost of a gallery item for a new model (FCT Figure 3).

    Args:
        map_macs: multiply-accumulate operations (MACs) to map its stored vector; 0 if the method does not map galleries.
        stored_bytes: bytes of its vectors in float32, with side-information.
        embed_macs: MACs to embed its image with the new model instead; None if unknown.
        image_bytes: bytes of the model's input pixels; None if unknown.
    """

    map_macs: int
    stored_bytes: int
    embed_macs: int | None = None
    image_bytes: int | None = None


@dataclass(frozen=True)
class EvaluatedMethod:
    """Method that was trained and evaluated with every seed.

    Args:
        name: stage name.
        method: name in recipes.
        reports: seed -> report.
        parameters: number of parameters in the finished model outside its encoder.
        maps_galleries: whether gallery items pass through those parameters, not queries.
        seconds: training time per seed.
        query: query side of the cases to compare, e.g. ``slerp`` for half-way queries.
        item_cost: cost of a gallery item; None if unknown.
    """

    name: str
    method: str
    reports: Mapping[int, Report]
    parameters: int
    maps_galleries: bool
    seconds: Sequence[float]
    query: str = "new"
    item_cost: ItemCost | None = None


@dataclass(frozen=True)
class Row:
    """Results of a model's queries.

    Args:
        name: model name.
        old_gallery: (direction, metric) -> result on the old gallery.
        own_gallery: (direction, metric) -> result on the model's own gallery; empty for the old model.
    """

    name: str
    old_gallery: dict[Key, Spread]
    own_gallery: dict[Key, Spread]


@dataclass(frozen=True)
class MethodRow(Row):
    """Results of a method: ``old_gallery`` is its new/old, ``own_gallery`` its new/new.

    Args:
        method: name in recipes.
        compatible: number of seeds with new/old above old/old on every metric.
        not_hurt: number of seeds with new/new not below independent/independent; None if not measured.
        gains: (direction, metric) -> new/old - old/old, mean over seeds, with its interval over queries.
        behind_best: the same for new/old - new/old of the best method; empty for the best method.
        from_old: (direction, metric) -> old queries on the new gallery, old/new; empty if not measured.
        reranked: (direction, metric) -> new+rerank/old; empty if not measured.
        without_memory: (direction, metric) -> new queries without learned transform and memory on the old gallery; empty if they
            use neither.
        old_with_memory: (direction, metric) -> old queries with the same learned transform and memory on the old gallery.
        beside_old_with_memory: new/old - ``old_with_memory``, mean over seeds, with its interval over queries.
        extra_dims: new minus old embedding dimension.
        parameters: see :class:`EvaluatedMethod`.
        maps_galleries: see :class:`EvaluatedMethod`.
        seconds: training time, mean over seeds.
        peak_memory: most bytes of any seed during training or solving; None if unknown for a seed.
        item_cost: see :class:`EvaluatedMethod`.
    """

    method: str
    compatible: int
    not_hurt: int | None
    gains: dict[Key, PairedDifference]
    behind_best: dict[Key, PairedDifference]
    from_old: dict[Key, Spread]
    reranked: dict[Key, Spread]
    without_memory: dict[Key, Spread]
    old_with_memory: dict[Key, Spread]
    beside_old_with_memory: dict[Key, PairedDifference]
    extra_dims: int
    parameters: int
    maps_galleries: bool
    seconds: float
    peak_memory: int | None
    item_cost: ItemCost | None

    @property
    def differences(self) -> list[Difference]:
        """Gains in the form of a report, with outcomes and numbers of queries needed."""
        return [Difference(*key, each.mean, (each.low, each.high), each.queries_needed) for key, each in self.gains.items()]


@dataclass(frozen=True)
class Comparison:
    """Result of a study.

    Args:
        name: study name.
        seeds: all seeds.
        old: old/old, the baseline.
        independent: independent/old, and independent/independent, the ceiling; None if no report has them.
        methods: a row per method, in the study's order.
        best: method name with the highest new/old on the first metric.
        sizes: direction -> (queries, gallery items).
        notes: notes for the reader, a sentence each.
    """

    name: str
    seeds: list[int]
    old: Row
    independent: Row | None
    methods: list[MethodRow]
    best: str
    sizes: dict[str, tuple[int, int]]
    notes: list[str]

    @property
    def rows(self) -> list[Row]:
        """All rows in order: baseline, ceiling, methods."""
        return [self.old, *([self.independent] if self.independent is not None else []), *self.methods]

    @property
    def first_metric(self) -> Key:
        """Metric to choose the best method."""
        return next(iter(self.old.old_gallery))


def compare(name: str, contenders: Sequence[EvaluatedMethod], n_resamples: int = 1000, notes: Sequence[str] = ()) -> Comparison:
    """Compare the reports of several methods and seeds.

    Differences are between values per query, averaged over seeds. Their 95 % intervals come from a paired bootstrap over queries,
    so they generalise to other queries, not to other seeds.

    Args:
        name: study name.
        contenders: a contender per method, all with the same test set and old model.
        n_resamples: bootstrap draws.
        notes: more notes for the reader.

    Returns:
        The comparison.

    Raises:
        XcompatError: no contender, a missing report of a seed, or reports with different cases.
    """
    seeds = _require_comparable(contenders)
    first = next(iter(contenders[0].reports.values()))
    old = Row("old", _spreads(contenders[0], "old/old"), {})
    key = next(iter(old.old_gallery))
    best = max(contenders, key=lambda each: _spreads(each, f"{each.query}/old")[key].mean)
    values = {each.name: _values_per_query(each, each.query) for each in contenders}
    floor = _values_per_query(contenders[0], "old")
    differences = partial(_differences, clusters=first.clusters, n_resamples=n_resamples)
    rows = [
        MethodRow(
            each.name,
            _spreads(each, f"{each.query}/old"),
            _spreads(each, f"{each.query}/new"),
            each.method,
            *_verdicts(each),
            gains=differences(values[each.name], floor),
            behind_best=differences(values[each.name], values[best.name]) if each is not best else {},
            from_old=_spreads(each, "old/new"),
            reranked=_spreads(each, f"{RERANKED}/old"),
            without_memory=_spreads(each, f"{WITHOUT_MEMORY}/old", plain="new/old"),
            old_with_memory=_spreads(each, f"{OLD_WITH_MEMORY}/old", plain="old/old"),
            beside_old_with_memory=differences(values[each.name], _values_per_query(each, OLD_WITH_MEMORY, plain="old")),
            extra_dims=max(report.new.dim - report.old.dim for report in each.reports.values()),
            parameters=each.parameters,
            maps_galleries=each.maps_galleries,
            seconds=float(np.mean(each.seconds)),
            peak_memory=_peak_memory(each),
            item_cost=each.item_cost,
        )
        for each in contenders
    ]
    overall = [case for case in reversed(first.cases) if case.population == ALL]  # zero-shot cases come last
    sizes = {case.direction: (case.n_queries, case.n_gallery) for case in overall}
    notes = [*notes, *dict.fromkeys(note for each in contenders for report in each.reports.values() for note in report.notes)]
    notes += [said for each in contenders if (said := _memory_note(each))]
    silent = [each.name for each in contenders if not values[each.name]]
    if silent:
        notes.append(f"No differences for {', '.join(silent)}: their reports lack report_data.safetensors; evaluate again.")
    ceiling = _ceiling(contenders)
    return Comparison(name, seeds, old, ceiling, rows, best.name, {each: sizes[each] for each in first.directions}, notes)


def _ceiling(contenders: Sequence[EvaluatedMethod]) -> Row | None:
    """Return the row of the independent model; None if no contender has it in every report."""
    case = "independent/independent"
    plain = next((each for each in contenders if all(_metrics(report, case) for report in each.reports.values())), None)
    return None if plain is None else Row("independent", _spreads(plain, "independent/old"), _spreads(plain, case))


def _memory_note(contender: EvaluatedMethod) -> str:
    """Return a note if only some seeds use a memory, else an empty text."""
    reports = contender.reports.values()
    forgetful = sum(not _metrics(report, f"{WITHOUT_MEMORY}/old") for report in reports)
    if forgetful in (0, len(reports)):
        return ""
    return (
        f"In {forgetful} of {len(reports)} seeds, queries of {contender.name} use no learned transform and no memory. "
        f"For these seeds, new/old replaces {WITHOUT_MEMORY}/old, and old/old replaces {OLD_WITH_MEMORY}/old."
    )


def values_per_query(report: Report, query: str, direction: str, metric: str) -> np.ndarray | None:
    """Return the value of a metric for each query on the old gallery.

    Args:
        report: the report.
        query: query model.
        direction: as in the report's cases.
        metric: recall or CMC at some k, or a mean average precision.

    Returns:
        float64 ``(Q,)``, NaN for excluded queries; None if the report lacks them.
    """
    stored_Q = report.average_precision.get((query, "old", direction, metric))
    if stored_Q is not None:
        return stored_Q.astype(np.float64)
    ranks_Q = report.ranks.get((query, "old", direction))
    kind, _, k = metric.partition("@")
    if ranks_Q is None or kind not in ("recall", "cmc"):
        return None
    return np.where(ranks_Q >= 0, ranks_Q < int(k), np.nan)


def _values_per_query(contender: EvaluatedMethod, query: str, plain: str = "") -> dict[Key, np.ndarray]:
    """Average each query's values over seeds; ``plain`` replaces ``query`` for seeds without memory."""
    reports = list(contender.reports.values())
    asked = [query if _metrics(report, f"{query}/old") else plain for report in reports]
    if plain and query not in asked:
        return {}
    found = {}
    for direction, metric in _metrics(reports[0], f"{asked[0]}/old"):
        per_seed = [values_per_query(report, who, direction, metric) for who, report in zip(asked, reports, strict=True)]
        known = [values_Q for values_Q in per_seed if values_Q is not None]
        if len(known) == len(reports):
            found[direction, metric] = np.mean(known, axis=0)
    return found


def _differences(
    mine: Mapping[Key, np.ndarray], other: Mapping[Key, np.ndarray], clusters: Mapping[str, np.ndarray], n_resamples: int
) -> dict[Key, PairedDifference]:
    found = {}
    for key, values_Q in mine.items():
        if key in other:
            known_Q = np.isfinite(values_Q)
            together = clusters[key[0]][known_Q] if key[0] in clusters else None
            mine_Q, other_Q = values_Q[known_Q], other[key][known_Q]
            found[key] = paired_bootstrap(mine_Q, other_Q, n_resamples, clusters_Q=together, rounding=_ROUNDING)
    return found


def _metrics(report: Report, label: str) -> dict[Key, float]:
    cases = [case for case in report.cases if case.label == label and case.population == ALL]
    return {(case.direction, metric): value for case in cases for metric, value in case.metrics.items()}


def _spreads(contender: EvaluatedMethod, label: str, plain: str = "") -> dict[Key, Spread]:
    """Return mean and deviation of a case over seeds; ``plain`` replaces it for seeds without it."""
    reports = list(contender.reports.values())
    per_seed = [_metrics(report, label) for report in reports]
    if plain and any(per_seed):
        per_seed = [found or _metrics(report, plain) for found, report in zip(per_seed, reports, strict=True)]
    shared = [key for key in per_seed[0] if all(key in metrics for metrics in per_seed)]  # old queries have no flip rate
    return {key: _spread([metrics[key] for metrics in per_seed]) for key in shared}


def _spread(values: Sequence[float]) -> Spread:
    return Spread(float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else None)


def _peak_memory(contender: EvaluatedMethod) -> int | None:
    costs = [report.costs.get(contender.name) for report in contender.reports.values()]
    known = [cost.own_memory for cost in costs if cost is not None]
    peaks = [peak for peak in known if peak is not None]
    return max(peaks) if len(peaks) == len(costs) else None


def _verdicts(contender: EvaluatedMethod) -> tuple[int, int | None]:
    if contender.query != "new":  # reports judge new queries
        sides = [(_metrics(each, f"{contender.query}/old"), _metrics(each, "old/old")) for each in contender.reports.values()]
        return sum(all(value > old[key] for key, value in mine.items() if key in old) for mine, old in sides), None
    criteria = [report.criterion for report in contender.reports.values()]
    unhurt = [each.new_model_not_hurt for each in criteria if each.new_model_not_hurt is not None]
    return sum(each.backward_compatible for each in criteria), sum(unhurt) if len(unhurt) == len(criteria) else None


# ------------------------------------------------------------------------------------------------------- one protocol


def _require_comparable(contenders: Sequence[EvaluatedMethod]) -> list[int]:
    if not contenders:
        raise XcompatError("nothing to compare: no stage of the study is evaluated; add an old model and a test set")
    seeds = list(dict.fromkeys(seed for each in contenders for seed in each.reports))
    for each in contenders:
        missing = [seed for seed in seeds if seed not in each.reports]
        if missing or not seeds:
            what = f"seed {missing[0]}" if missing else "any seed"
            raise XcompatError(f"{each.name} has no report for {what}; run `xcompat compare` until it is finished")
    reference = contenders[0]
    for each in contenders:
        for seed, report in each.reports.items():
            names = f"{reference.name} (seed {seeds[0]})", f"{each.name} (seed {seed})"
            _require_same_cases(names, reference.reports[seeds[0]], report)
            _require_same_opponents(reference, each, seed)
    return seeds


def _require_same_cases(names: tuple[str, str], one: Report, other: Report) -> None:
    shapes = [
        {
            (f"{case.label} {case.direction} {metric_name(metric)}", case.n_queries, case.n_gallery)
            for case in report.cases
            if case.label in _OWN_CASES and case.population == ALL
            for metric in case.metrics
        }
        for report in (one, other)
    ]
    different = sorted(shapes[0] ^ shapes[1])
    left_out = all(
        (one.ranks[key] < 0).tolist() == (ranks_Q < 0).tolist() for key, ranks_Q in other.ranks.items() if key in one.ranks
    )
    if different or not left_out:
        what = f"{different[0][0]} is missing in one, or differs in size" if different else "they excluded different queries"
        raise XcompatError(
            f"{' and '.join(names)} do not share the same cases: {what}; "
            "use the same test data and evaluation.ks for all stages of the study"
        )


def _require_same_opponents(one: EvaluatedMethod, other: EvaluatedMethod, seed: int) -> None:
    reports = one.reports[seed], other.reports[seed]
    if reports[0].old.fingerprint != reports[1].old.fingerprint:
        raise XcompatError(
            f"{one.name} and {other.name} do not share the same cases: their old models are {reports[0].old.name} and "
            f"{reports[1].old.name} (seed {seed}); compare methods with the same old model"
        )
    for label in _COMMON_CASES:
        metrics = [_metrics(report, label) for report in reports]
        for key in metrics[0].keys() & metrics[1].keys():
            if not math.isclose(metrics[0][key], metrics[1][key], abs_tol=_SAME):
                raise XcompatError(
                    f"{one.name} and {other.name} do not share the same cases: {label} {' '.join(key)} is "
                    f"{metrics[0][key]:.4f} and {metrics[1][key]:.4f} (seed {seed}); "
                    "use the same test data and independent model for all stages"
                )
