"""The results of an evaluation: cases, differences and the verdict."""

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
"""Direction of pairs of templates, each verified by itself (1:1)."""
IDENTIFICATION = "identification"
"""Direction of templates that search a gallery of templates (1:N)."""
OLD_WITH_MEMORY = "old+memory"
"""Query side of a case: old queries with a metric and a memory like those of the new ones."""
WITHOUT_MEMORY = "without memory"
"""Query side of a case: new queries without metric and memory, or on a gallery that was mapped without memory."""
NEW_WITH_MEMORY = "new+memory"
"""Both sides of a case: queries and gallery of the new model, with a memory like that of a mapped gallery."""
RERANKED = "new+rerank"
"""Query side of a case: new queries whose first hits the new model scores again, by its own embeddings of both."""
ALONE = "new alone"
"""Query side of a case: new queries of a map that was chosen to search half-way with the old model's, without these."""
SENT = ("new", "slerp", ALONE, RERANKED)
"""Kinds of new queries that a service may send to the old gallery."""
BACKFILLED = "backfilled"
"""Gallery side of a case: the old gallery after a backfill, all of it re-embedded in the form in which galleries store it."""
MAPPED = "mapped"
"""Both sides of a case: old queries and the old gallery, mapped towards the new model."""
OF_MODELS = frozenset({"old", "new", "independent", "new_view", RERANKED, ALONE})
"""Names that no extra model may have, as they name one of the five cases."""
ALL, KNOWN, NEW, NEW_IN_WHOLE = "all", "known", "new", "new in the whole gallery"
"""Populations of queries: all; of learned classes; of new classes; of new classes in a gallery with the learned items."""
POPULATIONS = (ALL, KNOWN, NEW, NEW_IN_WHOLE)
FLIP_METRIC = "negative_flip_rate@1"
ZERO_SHOT = "zero_shot"
RankKey = tuple[str, str, str]
"""(query, gallery, direction)."""
ValueKey = tuple[str, str, str, str]
"""(query, gallery, direction, metric)."""


def zero_shot_metric(name: str) -> str:
    """Return what a zero-shot classification measures, of images by a name, or of the only ones without a name.

    Example:
        >>> zero_shot_metric("sketch"), zero_shot_metric("")
        ('zero_shot:sketch', 'zero_shot')
    """
    return f"{ZERO_SHOT}:{name}" if name else ZERO_SHOT


def is_zero_shot(metric: str) -> bool:
    """Return whether a metric is that of a zero-shot classification.

    Example:
        >>> is_zero_shot("zero_shot@1"), is_zero_shot("zero_shot:sketch@1"), is_zero_shot("recall@1")
        (True, True, False)
    """
    return metric.partition("@")[0].partition(":")[0] == ZERO_SHOT


@dataclass(frozen=True)
class Case:
    """One row of a report: queries of one model against the gallery of another, in one direction.

    Args:
        query: the model that embeds the queries.
        gallery: the model that embedded the gallery.
        direction: ``image-to-text``, ``text-to-image``, ``image-to-image`` or ``text-to-text``; of templates ``verification`` or
            ``identification``.
        n_queries: queries with a match; others are not measured.
        n_gallery: items in the gallery.
        metrics: name such as ``recall@1`` -> fraction.
        ci95: the same names -> 95 % bootstrap interval.
        population: the queries: :data:`ALL`, :data:`KNOWN`, :data:`NEW` or :data:`NEW_IN_WHOLE`.
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
        """The case as ``query/gallery``."""
        return f"{self.query}/{self.gallery}"


@dataclass(frozen=True)
class Difference:
    """How much better new queries do than old ones on the same gallery: ``new/old`` minus ``old/old``.

    Args:
        direction: as in :class:`Case`.
        metric: such as ``recall@10``.
        mean: the difference.
        ci95: its 95 % interval by the paired bootstrap.
        queries_needed: how many queries an interval beside zero takes, as
            :func:`~xcompat.evaluation.intervals.queries_needed` estimates it; None if there is no estimate.
        population: the queries, as in :class:`Case`.
    """

    direction: str
    metric: str
    mean: float
    ci95: tuple[float, float]
    queries_needed: int | None = None
    population: str = ALL

    @property
    def outcome(self) -> Outcome:
        """Whether new queries find more than old ones by more than luck of the test set, less, or it cannot be told."""
        return outcome_of(*self.ci95)


def overall_outcome(differences: Sequence[Difference]) -> Outcome:
    """Return what of a verdict is more than luck of the test set.

    It is better if every interval lies above zero, as a yes takes them all; worse if one lies below, as one failure is enough
    for a no (of many comparisons, one lies below by luck oftener than each in its 2.5 %); else it cannot be told.
    """
    outcomes = {each.outcome for each in differences}
    return "worse" if "worse" in outcomes else "better" if outcomes == {"better"} else "cannot tell"


def hangs_on(differences: Sequence[Difference]) -> Difference | None:
    """Return the comparison by whose ``queries_needed`` an outcome would be told.

    Were means and spreads of these queries the true ones, that is the first that shows that new queries are worse, or, if none of
    the open ones would, the last that shows that they are better.

    Returns:
        The comparison; None if the outcome is told already, or a comparison that it hangs on has no estimate.
    """
    if overall_outcome(differences) != "cannot tell":
        return None
    open_ones = [each for each in differences if each.outcome == "cannot tell"]
    losing = [each for each in open_ones if each.mean < 0]
    known = [(each.queries_needed, each) for each in losing or open_ones if each.queries_needed is not None]
    if not known or (not losing and len(known) < len(open_ones)):
        return None
    return (min if losing else max)(known, key=lambda pair: pair[0])[1]


@dataclass(frozen=True)
class Criterion:
    """The verdict.

    Args:
        backward_compatible: ``new/old > old/old`` for every metric in every direction, for every population of queries.
        new_model_not_hurt: ``new/new >= independent/independent`` over all queries; None if one of them was not evaluated.
        failed: one line per comparison that failed, of either verdict.
        differences: ``new/old - old/old`` per direction, population and metric.
    """

    backward_compatible: bool
    new_model_not_hurt: bool | None
    failed: list[str]
    differences: list[Difference]


Keeps = Literal["matches", "hits"]


class Threshold(NamedTuple):
    """A score at which a service may cut off, in place of an old threshold.

    Args:
        query: the queries, such as ``new`` or ``new+rerank``.
        direction: of the search.
        keeps: what stays as it was: the share of true ``matches`` at or above the threshold, or the number of ``hits``.
        score: the new threshold; None if these queries cannot keep as many.
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
    """A metric on which new queries find less after a complete backfill than on the untouched gallery.

    Args:
        direction: as in :class:`Case`.
        metric: such as ``recall@10``.
        before: on the untouched gallery, or on the mapped one.
        after: on the re-embedded gallery.
    """

    direction: str
    metric: str
    before: float
    after: float


def backfill_losses(cases: Iterable[Case]) -> list[BackfillLoss]:
    """Return the metrics on which ``new/backfilled`` (``new/new`` where that is not measured) is below ``new/old``.

    Args:
        cases: of one evaluation.
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


class Failed(NamedTuple):
    """A comparison that failed.

    Args:
        direction: as in :class:`Case`.
        metric: such as ``recall@10``.
        case: ``new/old`` or ``new/new``.
        value: what it reaches.
        than: the case that it is held against.
        floor: what that reaches.
        population: the queries, as in :class:`Case`.
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
        """How the two compare; new queries must find more than old ones, the new model alone no less than before."""
        return "<=" if self.case == "new/old" else "<"


def failed_comparisons(cases: Iterable[Case]) -> list[Failed]:
    """Compare ``new/old`` with ``old/old``, then ``new/new`` with ``independent/independent``, metric by metric.

    Args:
        cases: of one evaluation.

    Returns:
        What failed; negative flips are not judged, as they compare with old/old, which has none.
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
                failed.append(Failed(direction, metric, asked, value, than, floor, population))
    return failed


@dataclass(frozen=True)
class Evaluation:
    """The whole result of an evaluation.

    Args:
        cases: one per (query, gallery, direction), zero-shot cases last.
        criterion: the verdict.
        ranks: (query, gallery, direction) -> int64 ``(Q,)`` of :func:`xcompat.evaluation.first_hit_ranks`, for recall curves.
        dropped: direction -> number of queries that are left out because they have no match.
        notes: remarks for the reader, one sentence each.
        average_precision: (query, gallery, direction, metric) -> float32 ``(Q,)``, NaN for queries left out.
        clusters: direction -> int64 ``(Q,)``, equal for queries about one item, which the bootstrap draws together; a direction
            without an entry has no clusters.
        confidence: direction -> float32 ``(Q,)``, the new queries' confidence that they find no less than the old ones; NaN for
            queries left out, and empty if the model has no confidence.
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
