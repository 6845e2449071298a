"""Sentences about verdicts, cases and metrics, for page and terminal."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from xcompat.core.metric_names import metric_name
from xcompat.evaluation.cases import (
    ALL,
    KNOWN,
    NEW,
    NEW_IN_WHOLE,
    BackfillLoss,
    Case,
    Threshold,
    failed_comparisons,
    find_deciding_difference,
    is_zero_shot,
    overall_outcome,
)
from xcompat.evaluation.intervals import POWER
from xcompat.report.content import Report

NOT_SHOWN = "Validation did not show that queries of this map find as much as old queries. Compare both on your own data first."
EVIDENCE, AGREEMENT = "evidence", "agreement"
"""Key of a report's ``run`` with the kind of evidence, and the kind that shows no verdict."""
COMPATIBLE_QUESTION = "Backward compatible"
LUCK_QUESTION = "Statistical comparison with old queries"
NOT_HURT_QUESTION = "New model unharmed by compatibility training"

_POPULATIONS = {
    ALL: "",
    KNOWN: "queries of known classes",
    NEW: "queries of new classes",
    NEW_IN_WHOLE: "queries of new classes, with training items in the gallery",
}
_MEANINGS = {
    "old/old": "old queries, old gallery: the current system",
    "independent/old": "independent new queries, old gallery: the result without compatibility training",
    "slerp/old": "mixture of old and new queries, old gallery; each query is embedded twice",
    "fallback/old": "new queries, or old ones at low confidence, old gallery; some queries are embedded twice",
    "without memory/old": "new queries without learned transform and memory, old gallery: the effect of the map alone",
    "old+memory/old": "old queries with the same learned transform and memory, old gallery: the gain that needs no new model",
    "new/old": "new queries, old gallery: compatible search, nothing re-embedded",
    "new alone/old": "new queries alone, without this map's old queries; old gallery",
    "new+rerank/old": "new queries, old gallery; the new model embeds the first hits and re-ranks them",
    "new/backfilled": "new queries, old gallery after a complete backfill: every item re-embedded in the old space",
    "mapped/mapped": "old queries and old gallery, both mapped: the effect of the map on the old model alone",
    "old/new": "old queries, new gallery, in the shared space: old clients after a backfill",
    "new/new": "new queries, new gallery: everything re-embedded",
    "new+memory/new+memory": "new queries and new gallery with the same kind of memory: the ceiling with memory",
    "independent/independent": "independent new model on its own gallery: the ceiling",
}
_METRICS = {
    "recall@": (
        "R@k",
        "share of queries with a match among the first k. Ties with wrong items count against the query.",
    ),
    "cmc@": (
        "CMC@k",
        "share of queries with another image of their class among the first k. Ties with wrong images count against the query.",
    ),
    "map": (
        "mAP",
        "average precision over the whole ranking, mean over queries; 100 % if all images of the class come first.",
    ),
    "map@R": (
        "mAP@R",
        "average precision over the first R items, for R images of the query's class in the gallery; mean over queries.",
    ),
    "tar@far=": (
        "TAR@FAR",
        "true acceptance rate of verification: share of accepted pairs of one class, at the threshold that accepts a share FAR "
        "of the pairs of two classes. The interval keeps the threshold and resamples queries with all of their pairs.",
    ),
    "tpir@fpir=": (
        "TPIR@FPIR",
        "true positive identification rate in an open set: share of queries with a correct first place above the threshold. "
        "A share FPIR of the queries without a match is above it. The interval keeps the threshold.",
    ),
    "tpir@far=": (
        "TPIR@FAR",
        "share of queries with a match above the threshold that FAR wrong items per query exceed, over all queries together. "
        "Used if the gallery has every query's subject. The interval keeps the threshold.",
    ),
    "negative_flip_rate@1": (
        "NFR@1",
        "negative flip rate: share of queries whose first place is correct with the old model and wrong with the new one. Lower "
        "is better. It does not affect the verdict.",
    ),
    "zero_shot@1": ("Zero-shot top-1", "share of images whose nearest class embedding is that of their class."),
}
_JUDGED = {
    "ndcg@": (
        "nDCG@k",
        "discounted gains of the first k passages, relative to the best ranking; mean over queries. A passage that ties with "
        "one of lower gain ranks behind it.",
    ),
    "mrr@": ("MRR@k", "reciprocal rank of the first relevant passage, 0 if it is not among the first k; mean over queries."),
    "recall@": ("R@k", "share of a query's relevant passages among the first k, mean over queries."),
    "map": ("mAP", "average precision over the whole ranking, mean over queries."),
}
"""Meanings of the metrics of judged passages; they replace those of the same name."""


class Verdict(NamedTuple):
    """Question and its answer.

    Args:
        question: in plain words.
        answer: ``yes``, ``no`` or ``not measured``; ``better``, ``worse`` or ``undecided``.
        detail: reason, in a sentence or two.
    """

    question: str
    answer: str
    detail: str


def percent(value: float) -> str:
    """Return a fraction as a percentage with a decimal digit.

    Example:
        >>> percent(0.1234)
        '12.3 %'
    """
    return f"{value * 100:.1f} %"


def search_name(direction: str, population: str = ALL) -> str:
    """Return the direction of a search in words, with its query population unless it is all queries.

    Example:
        >>> search_name("image-to-image"), search_name("image-to-image", "new")
        ('image to image', 'image to image, queries of new classes')
    """
    queries = _POPULATIONS.get(population, population)
    return direction.replace("-", " ") + (f", {queries}" if queries else "")


def interval(ci95: tuple[float, float]) -> str:
    """Return an interval (low, high) of fractions in percent, or differences in percentage points.

    Example:
        >>> interval((0.1, 0.25))
        '10.0 to 25.0'
    """
    return f"{ci95[0] * 100:.1f} to {ci95[1] * 100:.1f}"


def spread(mean: float, std: float | None) -> str:
    """Return mean and standard deviation of fractions over seeds in percent; a single seed has no deviation.

    Example:
        >>> spread(0.123, 0.0104), spread(0.5, None)
        ('12.3 ± 1.0', '50.0')
    """
    return f"{mean * 100:.1f}" + (f" ± {std * 100:.1f}" if std is not None else "")


def gain_with_interval(mean: float, low: float, high: float) -> str:
    """Return a difference of fractions in percentage points with its interval.

    Example:
        >>> gain_with_interval(0.0312, 0.01, 0.05)
        '+3.1 (1.0 to 5.0)'
    """
    return f"{gain(mean)} ({interval((low, high))})"


def gain(mean: float) -> str:
    """Return a difference of fractions in percentage points, with its sign.

    Example:
        >>> gain(0.0312)
        '+3.1'
    """
    return f"{mean * 100:+.1f}"


def metric_meanings(metrics: Iterable[str]) -> list[tuple[str, str]]:
    """Return (name, meaning) for each kind of metric in ``report.json``.

    Example:
        >>> [name for name, _ in metric_meanings(["cmc@1", "cmc@5", "map@R"])]
        ['CMC@k', 'mAP@R']
    """
    names = tuple(metrics)
    meanings = _METRICS | _JUDGED if any(name.startswith("ndcg@") for name in names) else _METRICS
    plain = ("zero_shot@1" if is_zero_shot(name) else name for name in names)
    kinds = {name if name in meanings else "".join(re.split("([=@])", name)[:-1]) for name in plain}
    return [told for kind, told in meanings.items() if kind in kinds]


def case_meaning(label: str) -> str:
    """Return a short description of a case ``query/gallery``.

    Example:
        >>> case_meaning("ridge/old")
        'queries mapped into the old space by ridge, old gallery'
    """
    query, _, gallery = label.partition("/")
    return _MEANINGS.get(label, f"queries mapped into the old space by {query}, {gallery} gallery")


def verdicts(report: Report) -> list[Verdict]:
    """Return the verdicts on compatibility, statistical outcome, and (if it was trained) harm to the new model."""
    criterion = report.criterion
    if report.run.get(EVIDENCE) == AGREEMENT:
        why = "There are no classes, captions or judgements, and agreement with the new model does not show this."
        return [Verdict(COMPATIBLE_QUESTION, "not measured", why)]
    failed = [each.case for each in failed_comparisons(report.cases)]
    total = len(criterion.differences)
    why = f"New queries find more than old queries on all {total} metrics."
    if not criterion.backward_compatible:
        why = f"{failed.count('new/old')} of {total} metrics did not improve over old queries."
    found = [
        Verdict(COMPATIBLE_QUESTION, _yes_or_no(criterion.backward_compatible), why),
        Verdict(LUCK_QUESTION, overall_outcome(criterion.differences), " ".join(_describe_outcome(report))),
    ]
    if _is_unchanged(report.cases):
        return found
    if criterion.new_model_not_hurt is None:
        return [*found, Verdict(NOT_HURT_QUESTION, "not measured", _describe_missing(report))]
    hurt = failed.count("new/new")
    detail = "No metric fell." if not hurt else f"{hurt} metric{'s' * (hurt != 1)} fell."
    return [*found, Verdict(NOT_HURT_QUESTION, _yes_or_no(criterion.new_model_not_hurt), detail)]


def _is_unchanged(cases: Sequence[Case]) -> bool:
    """Return whether the new model finds exactly what it finds without compatibility training, as with a map."""
    own, plain = (
        [(case.direction, case.population, case.metrics) for case in cases if case.label == label]
        for label in ("new/new", "independent/independent")
    )
    return bool(own) and own == plain


def _describe_missing(report: Report) -> str:
    """Name the missing embeddings for the third verdict."""
    there, options = {case.label for case in report.cases}, report.method == "embeddings"  # a recipe has none
    needed = {
        "new/new": ("the new model's own embeddings", " (--new-own FOLDER; for a map, its inputs)"),
        "independent/independent": ("embeddings of the new model without compatibility training", " (--independent FOLDER)"),
    }
    missing = [what + how * options for label, (what, how) in needed.items() if label not in there]
    return f"Only for a trained new model; this needs {' and '.join(missing)}."


def _yes_or_no(answer: bool) -> str:
    return "yes" if answer else "no"


def _describe_outcome(report: Report) -> Iterator[str]:
    """Describe the intervals, and the number of queries needed if the outcome is open."""
    differences = report.criterion.differences
    outcomes = [each.outcome for each in differences]
    places = {"better": "lie above zero", "worse": "lie below zero", "undecided": "include zero"}
    told = [f"{outcomes.count(outcome)} {where}" for outcome, where in places.items() if outcome in outcomes]
    yield f"95 % intervals of the {len(outcomes)} gains: {', '.join(told)}." if told else "No gain was measured."
    if overall_outcome(differences) != "undecided":
        return
    if (each := find_deciding_difference(differences)) is None or each.queries_needed is None:
        yield "The number of queries needed for a decision is unknown, as a metric does not differ on any query."
        return
    search = each.direction, each.population
    asked = [
        case.n_queries for case in report.cases if (case.direction, case.population) == search and each.metric in case.metrics
    ]
    now = f" (now {asked[0]:,})" if asked else ""
    result = "show a loss" if each.mean < 0 else "show all gains"
    yield (
        f"About {round_count(each.queries_needed)} queries{now} would {result}: {search_name(*search)} "
        f"{metric_name(each.metric)} ({gain(each.mean)} points) needs the {'fewest' if each.mean < 0 else 'most'}. "
        f"The estimate is for {100 * POWER:.0f} % power, with gain and spread as measured."
    )


def round_count(count: int) -> str:
    """Return a count with two significant digits.

    Example:
        >>> round_count(1289), round_count(182), round_count(96)
        ('1,300', '180', '96')
    """
    return f"{round(count, min(0, 2 - len(str(count)))):,}"


def backfill_warning(losses: Sequence[BackfillLoss]) -> str:
    """Return a warning about a backfill's quality loss, with the largest loss.

    Args:
        losses: at least 1.

    Example:
        >>> backfill_warning([BackfillLoss("image-to-image", "cmc@1", 0.417, 0.36)])
        'A backfill with this model loses quality: image to image CMC@1 falls from 41.7 % to 36.0 % in the end.'
    """
    worst = max(losses, key=lambda loss: loss.before - loss.after)
    others = f", and {len(losses) - 1} more metric{'s' * (len(losses) > 2)} fall" + "s" * (len(losses) == 2)
    return (
        f"A backfill with this model loses quality: {worst.direction.replace('-', ' ')} {metric_name(worst.metric)} falls from "
        f"{percent(worst.before)} to {percent(worst.after)} in the end{others * (len(losses) > 1)}."
    )


def threshold_lines(thresholds: Sequence[Threshold]) -> list[str]:
    """Return a sentence per threshold: acceptance of the old threshold, and its replacements.

    Example:
        >>> old = Threshold("old", "text-to-image", "matches", 0.3, (0.3, 0.3), 0.8, 2.5)
        >>> new = Threshold("new", "text-to-image", "matches", 0.21, (0.2, 0.22), 0.8, 2.0)
        >>> threshold_lines([old, new])[1]
        'text to image, new queries: cut off at 0.210 (0.200 to 0.220) to accept as many true matches, and 2.0 items per query.'
    """
    lines = []
    for each in thresholds:
        accepted = f"{percent(each.matches)} of the true matches"
        where = search_name(each.direction)
        if each.query == "old":
            lines.append(
                f"{where}, old queries: the threshold {each.score:g} accepts {accepted}, and {each.hits:.1f} items per query."
            )
            continue
        kept = "true matches" if each.keeps == "matches" else "items per query"
        if each.score is None or each.ci95 is None:
            lines.append(
                f"{where}, {each.query} queries: no threshold accepts as many {kept}; all hits together have {accepted}."
            )
            continue
        low, high = each.ci95
        beside = f"{each.hits:.1f} items per query" if each.keeps == "matches" else accepted
        lines.append(
            f"{where}, {each.query} queries: cut off at {each.score:.3f} ({low:.3f} to {high:.3f}) to accept as many {kept}, "
            f"and {beside}."
        )
    return lines


def failed_lines(report: Report) -> list[str]:
    """Return a line per failed comparison, in percent as in the tables."""
    lines = []
    for each in failed_comparisons(report.cases):
        digits = 1 if each.value == each.floor or percent(each.value) != percent(each.floor) else 3
        value, floor = (f"{100 * number:.{digits}f} %" for number in (each.value, each.floor))
        where = f"{search_name(each.direction, each.population)} {metric_name(each.metric)}"
        lines.append(f"{where}: {each.case} {value} {each.sign} {each.than} {floor}")
    return lines
