"""Results of an evaluation: cases, differences and the verdict."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from xcompat.evaluation.intervals import Outcome, outcome_of

IMAGE_TO_IMAGE = "image-to-image"
IMAGE_TO_TEXT = "image-to-text"
TEXT_TO_IMAGE = "text-to-image"
TEXT_TO_TEXT = "text-to-text"
VERIFICATION = "verification"
"""Direction of 1:1 verification of template pairs."""
IDENTIFICATION = "identification"
"""Direction of 1:N search in a gallery of templates."""
OLD_WITH_MEMORY = "old+memory"
"""Query side: old queries with the same learned transform and memory as the new ones."""
WITHOUT_MEMORY = "without memory"
"""Query side: new queries without learned transform and memory, or on a gallery mapped without memory."""
NEW_WITH_MEMORY = "new+memory"
"""Both sides: queries and gallery of the new model, with the kind of memory of a mapped gallery."""
RERANKED = "new+rerank"
"""Query side: new queries whose first hits the new model re-ranks with its own embeddings."""
UNMIXED = "new alone"
"""Query side: new queries alone, of a map that mixes them with old queries."""
SERVABLE_QUERIES = ("new", "slerp", UNMIXED, RERANKED)
"""Kinds of new queries that a service can send to the old gallery."""
BACKFILLED = "backfilled"
"""Gallery side: the old gallery after a complete backfill, in the form that galleries store."""
MAPPED = "mapped"
"""Both sides: old queries and old gallery, mapped towards the new model."""
RESERVED_NAMES = frozenset({"old", "new", "independent", "new_view", RERANKED, UNMIXED})
"""Reserved names, not available to extra models."""
ALL, KNOWN, NEW, NEW_IN_WHOLE = "all", "known", "new", "new in the whole gallery"
"""Query populations: all, of training classes, of new classes, of new classes in a gallery with training items."""
POPULATIONS = (ALL, KNOWN, NEW, NEW_IN_WHOLE)
FLIP_METRIC = "negative_flip_rate@1"
ZERO_SHOT = "zero_shot"
RankKey = tuple[str, str, str]
"""(query, gallery, direction)."""
ValueKey = tuple[str, str, str, str]
"""(query, gallery, direction, metric)."""


def zero_shot_metric(name: str) -> str:
    """Return the metric of a zero-shot classification with this name.

    Example:
        >>> zero_shot_metric("sketch"), zero_shot_metric("")
        ('zero_shot:sketch', 'zero_shot')
    """
    return f"{ZERO_SHOT}:{name}" if name else ZERO_SHOT


def is_zero_shot(metric: str) -> bool:
    """Return whether a metric belongs to a zero-shot classification.

    Example:
        >>> is_zero_shot("zero_shot@1"), is_zero_shot("zero_shot:sketch@1"), is_zero_shot("recall@1")
        (True, True, False)
    """
    return metric.partition("@")[0].partition(":")[0] == ZERO_SHOT


@dataclass(frozen=True)
class Case:
    """A report row: a model's queries on another model's gallery, in a single direction.

    Args:
        query: model that embeds the queries.
        gallery: model that embedded the gallery.
        direction: ``image-to-text``, ``text-to-image``, ``image-to-image`` or ``text-to-text``; for templates ``verification`` or
            ``identification``.
        n_queries: queries with a match; others are not measured.
        n_gallery: gallery size.
        metrics: name, e.g. ``recall@1`` -> fraction.
        ci95: name -> 95 % bootstrap interval.
        population: :data:`ALL`, :data:`KNOWN`, :data:`NEW` or :data:`NEW_IN_WHOLE`.
    """

    query: str
    gallery: str
    direction: str
    n_queries: int
    n_gallery: int
    metrics: dict[str, float]
    ci95: dict[str, tuple[float, float]]
    population: str = ALL

    @property
    def label(self) -> str:
        """Name of the case, ``query/gallery``."""
        return f"{self.query}/{self.gallery}"


@dataclass(frozen=True)
class Difference:
    """Gain of new queries over old ones on the same gallery: ``new/old`` minus ``old/old``.

    Args:
        direction: as in :class:`Case`.
        metric: e.g. ``recall@10``.
        mean: mean difference.
        ci95: 95 % interval of the mean from the paired bootstrap.
        queries_needed: number of queries needed to exclude zero (:func:`~xcompat.evaluation.intervals.queries_needed`); None
            without an estimate.
        population: as in :class:`Case`.
    """

    direction: str
    metric: str
    mean: float
    ci95: tuple[float, float]
    queries_needed: int | None = None
    population: str = ALL

    @property
    def outcome(self) -> Outcome:
        """Whether new queries find significantly more than old ones, less, or neither."""
        return outcome_of(*self.ci95)


def overall_outcome(differences: Sequence[Difference]) -> Outcome:
    """Return the statistical outcome of all differences together.

    "better" needs every interval above zero, "worse" a single interval below. With many comparisons, chance causes this more
    often than the 2.5 % of each.
    """
    outcomes = {each.outcome for each in differences}
    return "worse" if "worse" in outcomes else "better" if outcomes == {"better"} else "undecided"


def find_deciding_difference(differences: Sequence[Difference]) -> Difference | None:
    """Return the comparison whose ``queries_needed`` would settle an open outcome.

    With means and spreads taken as the true values, this is the first comparison to show a loss. Without losses, it is the last
    to show a gain.

    Returns:
        The comparison; None if the outcome is settled, or a deciding comparison has no estimate.
    """
    if overall_outcome(differences) != "undecided":
        return None
    open_ones = [each for each in differences if each.outcome == "undecided"]
    losing = [each for each in open_ones if each.mean < 0]
    known = [(each.queries_needed, each) for each in losing or open_ones if each.queries_needed is not None]
    if not known or (not losing and len(known) < len(open_ones)):
        return None
    return (min if losing else max)(known, key=lambda pair: pair[0])[1]


@dataclass(frozen=True)
class Criterion:
    """The verdict.

    Args:
        backward_compatible: ``new/old > old/old`` for every metric, direction and query population.
        new_model_not_hurt: ``new/new >= independent/independent`` over all queries; None if not measured.
        failed: a line per failed comparison of either verdict.
        differences: ``new/old - old/old`` per direction, query population and metric.
    """

    backward_compatible: bool
    new_model_not_hurt: bool | None
    failed: list[str]
    differences: list[Difference]


Keeps = Literal["matches", "hits"]


class Threshold(NamedTuple):
    """Score threshold for a service, in place of an old threshold.

    Args:
        query: kind of queries, e.g. ``new`` or ``new+rerank``.
        direction: search direction.
        keeps: the quantity that stays the same: share of true ``matches`` or number of ``hits`` at or above the threshold.
        score: new threshold; None if these queries cannot keep the quantity.
        ci95: its 95 % interval over queries; None without a threshold.
        matches: share of the true matches at or above it.
        hits: items per query at or above it.
    """

    query: str
    direction: str
    keeps: Keeps
    score: float | None
    ci95: tuple[float, float] | None
    matches: float
    hits: float


class BackfillLoss(NamedTuple):
    """Metric on which new queries find less after a complete backfill than before it.

    Args:
        direction: as in :class:`Case`.
        metric: e.g. ``recall@10``.
        before: value on the untouched or mapped gallery.
        after: value on the re-embedded gallery.
    """

    direction: str
    metric: str
    before: float
    after: float


def backfill_losses(cases: Iterable[Case]) -> list[BackfillLoss]:
    """Return the metrics on which ``new/backfilled`` (or else ``new/new``) is below ``new/old``.

    Args:
        cases: all cases of an evaluation.
    """
    table = {(case.label, case.direction): case.metrics for case in cases if case.population == ALL}
    losses = []
    for (label, direction), before in table.items():
        after = table.get((f"new/{BACKFILLED}", direction)) or table.get(("new/new", direction)) or {}
        if label == "new/old":
            losses += [
                BackfillLoss(direction, metric, value, after[metric])
                for metric, value in before.items()
                if metric in after and metric != FLIP_METRIC and after[metric] < value
            ]
    return losses


class FailedComparison(NamedTuple):
    """Failed comparison.

    Args:
        direction: as in :class:`Case`.
        metric: e.g. ``recall@10``.
        case: ``new/old`` or ``new/new``.
        value: result of this case.
        than: case to compare with.
        floor: that case's result.
        population: as in :class:`Case`.
    """

    direction: str
    metric: str
    case: str
    value: float
    than: str
    floor: float
    population: str = ALL

    @property
    def sign(self) -> str:
        """Relation of value to floor: new queries must beat old ones, and the new model must not fall."""
        return "<=" if self.case == "new/old" else "<"


def failed_comparisons(cases: Iterable[Case]) -> list[FailedComparison]:
    """Compare ``new/old`` with ``old/old``, then ``new/new`` with ``independent/independent``, metric by metric.

    Args:
        cases: all cases of an evaluation.

    Returns:
        The failures. Negative flips are not judged, as old/old has none to compare with.
    """
    table = {
        (case.label, case.direction, case.population, metric): value for case in cases for metric, value in case.metrics.items()
    }
    failed = []
    for asked, than, populations in (
        ("new/old", "old/old", POPULATIONS),
        ("new/new", "independent/independent", (ALL,)),
    ):
        for (label, direction, population, metric), value in table.items():
            floor = table.get((than, direction, population, metric))
            if label != asked or floor is None or population not in populations:
                continue
            if not (value > floor or (asked == "new/new" and value == floor)):
                failed.append(FailedComparison(direction, metric, asked, value, than, floor, population))
    return failed


@dataclass(frozen=True)
class Evaluation:
    """Complete result of an evaluation.

    Args:
        cases: a case per (query, gallery, direction), zero-shot cases last.
        criterion: the verdict.
        ranks: (query, gallery, direction) -> int64 ``(Q,)`` of :func:`xcompat.evaluation.first_hit_ranks`, for recall curves.
        dropped: direction -> number of queries without a match, which are excluded.
        notes: notes for the reader, a sentence each.
        average_precision: (query, gallery, direction, metric) -> float32 ``(Q,)``, NaN for excluded queries.
        clusters: direction -> int64 ``(Q,)``, equal for queries about the same item, which the bootstrap draws together; no entry
            without clusters.
        confidence: direction -> float32 ``(Q,)`` confidence that new queries find no less than old ones; NaN for excluded
            queries. Empty without a confidence model.
        thresholds: an old threshold carried over to new queries; empty if none was given.
    """

    cases: list[Case]
    criterion: Criterion
    ranks: dict[RankKey, np.ndarray] = field(repr=False)
    dropped: dict[str, int]
    notes: list[str]
    average_precision: dict[ValueKey, np.ndarray] = field(default_factory=dict, repr=False)
    clusters: dict[str, np.ndarray] = field(default_factory=dict, repr=False)
    confidence: dict[str, np.ndarray] = field(default_factory=dict, repr=False)
    thresholds: list[Threshold] = field(default_factory=list)
