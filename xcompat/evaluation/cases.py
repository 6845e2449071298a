"""Cases, differences and the verdict: what an evaluation finds, whatever its items are."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

IMAGE_TO_IMAGE = "image-to-image"
IMAGE_TO_TEXT = "image-to-text"
TEXT_TO_IMAGE = "text-to-image"
TEXT_TO_TEXT = "text-to-text"
OLD_WITH_MEMORY = "old+memory"
"""Who asks old queries that wear the metric and the memory of the new ones."""
WITHOUT_MEMORY = "without memory"
"""Who asks new queries that wear neither."""
NEW_WITH_MEMORY = "new+memory"
"""Who asks new queries that remember what a mapped gallery does; a gallery of the new model that does likewise."""
FLIP_METRIC = "negative_flip_rate@1"
ZERO_SHOT = "zero_shot"
ZERO_SHOT_METRIC = f"{ZERO_SHOT}@1"
RankKey = tuple[str, str, str]
"""(query, gallery, direction)."""
ValueKey = tuple[str, str, str, str]
"""(query, gallery, direction, metric)."""


@dataclass(frozen=True)
class Case:
    """One row of a report: queries of one model against the gallery of another, in one direction.

    Args:
        query: the model that embeds the queries.
        gallery: the model that embedded the gallery.
        direction: ``image-to-text``, ``text-to-image``, ``image-to-image`` or ``text-to-text``.
        n_queries: queries measured, those without any match left out.
        n_gallery: items in the gallery.
        metrics: name such as ``recall@1`` -> fraction.
        ci95: the same names -> 95 % bootstrap interval.
    """

    query: str
    gallery: str
    direction: str
    n_queries: int
    n_gallery: int
    metrics: dict[str, float]
    ci95: dict[str, tuple[float, float]]

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
    """

    direction: str
    metric: str
    mean: float
    ci95: tuple[float, float]


@dataclass(frozen=True)
class Criterion:
    """The verdict.

    Args:
        backward_compatible: ``new/old > old/old`` for every metric in every direction.
        new_model_not_hurt: ``new/new >= independent/independent`` likewise; None if one of them was not evaluated.
        failed: one line per comparison that failed, of either verdict.
        differences: ``new/old - old/old`` per direction and metric.
    """

    backward_compatible: bool
    new_model_not_hurt: bool | None
    failed: list[str]
    differences: list[Difference]


@dataclass(frozen=True)
class Evaluation:
    """Everything that was measured.

    Args:
        cases: one per (query, gallery, direction), zero-shot cases last.
        criterion: the verdict.
        ranks: (query, gallery, direction) -> int64 ``(Q,)`` of :func:`xcompat.evaluation.first_hit_ranks`, for recall curves.
        dropped: direction -> queries without any match, left out.
        notes: what a reader must know, one sentence each.
        average_precision: (query, gallery, direction, metric) -> float32 ``(Q,)``, NaN for queries left out; ranks do not
            say it.
        clusters: direction -> int64 ``(Q,)``, equal for queries about one item, which intervals draw together; each query by
            itself in directions that are not in it.
        confidence: direction -> float32 ``(Q,)``, how sure new queries are that they find no less than old ones, NaN for queries
            left out; where the model says so.
    """

    cases: list[Case]
    criterion: Criterion
    ranks: dict[RankKey, np.ndarray] = field(repr=False)
    dropped: dict[str, int]
    notes: list[str]
    average_precision: dict[ValueKey, np.ndarray] = field(default_factory=dict, repr=False)
    clusters: dict[str, np.ndarray] = field(default_factory=dict, repr=False)
    confidence: dict[str, np.ndarray] = field(default_factory=dict, repr=False)
