"""Cases, differences and the verdict: what an evaluation finds, whatever its items are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, Self, TypeVar

import numpy as np

from xcompat.errors import XcompatError
from xcompat.evaluation.intervals import interval_bounds, paired_bootstrap, resampled_means
from xcompat.evaluation.scores import Embeddings, Ids, as_rows
from xcompat.fingerprint import Fingerprint

OLD_WITH_MEMORY = "old+memory"
"""Who asks old queries that wear the metric and the memory of the new ones."""
WITHOUT_MEMORY = "without memory"
"""Who asks new queries that wear neither."""
NEW_WITH_MEMORY = "new+memory"
"""Who asks new queries that remember what a mapped gallery does; a gallery of the new model that does likewise."""
FLIP_METRIC = "negative_flip_rate@1"
RankKey = tuple[str, str, str]
"""(query, gallery, direction)."""
ValueKey = tuple[str, str, str, str]
"""(query, gallery, direction, metric)."""


class Contestant(Protocol):
    """What one model makes of a test set, of whatever items."""

    @property
    def name(self) -> str:
        """What people call the model."""

    @property
    def fingerprint(self) -> Fingerprint:
        """Which model it is."""

    @property
    def dim(self) -> int:
        """Dimensions of the embeddings."""

    def require_same_items(self, other: Self, name: str) -> None:
        """Refuse another model's embeddings of other items, naming the first that differs."""

    def matrices(self) -> dict[str, Embeddings]:
        """Return every matrix of embeddings by what it holds, such as ``images``."""

    def with_matrices(self, matrices: Mapping[str, Embeddings]) -> Self:
        """Return the same items with other embeddings."""

    def readable(self) -> tuple[np.ndarray, ...]:
        """Return masks of the rows that are embeddings, not the NaN of an item that could not be read."""

    def keep(self, masks: tuple[np.ndarray, ...]) -> Self:
        """Return the items that masks like those of :meth:`readable` leave."""


C = TypeVar("C", bound=Contestant)


@dataclass(frozen=True)
class Case:
    """One row of a report: queries of one model against the gallery of another, in one direction.

    Args:
        query: the model that embeds the queries.
        gallery: the model that embedded the gallery.
        direction: ``image-to-text``, ``text-to-image`` or ``image-to-image``.
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


@dataclass(frozen=True)
class Sampling:
    """How intervals are drawn.

    Args:
        n_resamples: bootstrap draws.
        seed: of the draws.
    """

    n_resamples: int
    seed: int


def who_queries_whom(
    old: C,
    new_view: C,
    new: C | None,
    independent: C | None,
    further: Mapping[str, C],
    upgraded: C | None = None,
    old_on_new: bool = False,
    beside: Mapping[tuple[str, str], tuple[C, C]] | None = None,
) -> list[tuple[str, str, C, C]]:
    """Check that the models fit together and list the cases.

    Args:
        old: the old model, whose gallery stays.
        new_view: the new model in the space of that gallery.
        new: the new model in its own space.
        independent: the new model without any training for compatibility.
        further: more query models in the old space, by name.
        upgraded: the old gallery mapped towards the new model, for methods that map galleries.
        old_on_new: whether old queries search the new model's gallery too.
        beside: further cases: names of query and gallery -> who asks and what is searched.

    Returns:
        (query, gallery, query model, gallery model) per case, in the report's order.

    Raises:
        XcompatError: a name is taken, items differ, dimensions do not fit, or old queries have no place in the new space.
    """
    stays, beside = old if upgraded is None else upgraded, beside or {}
    searched = {f"{query}/{gallery}": items for (query, gallery), (_, items) in beside.items()}
    roles = {"new_view": new_view, "new": new, "independent": independent, "upgraded": upgraded, **searched}
    _require_fitting(old, stays, roles, further)
    if old_on_new and upgraded is not None:
        raise XcompatError("this method maps the old gallery, and old queries have no place there; set old_on_new to false")
    pairs = [("old", "old", old, old)]
    if independent is not None:
        pairs.append(("independent", "old", fit_dim(independent, old.dim), old))
    pairs += [(name, "old", model, old) for name, model in further.items()]
    pairs.append(("new", "old", new_view, stays))
    pairs += [(query, gallery, *models) for (query, gallery), models in beside.items()]
    if old_on_new:
        pairs.append(("old", "new", old, new_view))
    if new is not None:
        pairs.append(("new", "new", new, new))
    if independent is not None:
        pairs.append(("independent", "independent", independent, independent))
    return pairs


def _require_fitting(old: C, stays: C, roles: Mapping[str, C | None], further: Mapping[str, C]) -> None:
    """Refuse models that were evaluated on other items, or whose queries are of another dimension than the gallery that stays."""
    taken = {"old", "new", "independent", "new_view"} & further.keys()
    if taken:
        raise XcompatError(f"{min(taken)!r} cannot name an extra model, as it names one of the five cases; choose another name")
    for name, model in {**roles, **further}.items():
        if model is not None:
            old.require_same_items(model, name)
    searching = {"new_view": (roles["new_view"], stays)} | {name: (model, old) for name, model in further.items()}
    for name, (model, gallery) in searching.items():
        if model is not None and model.dim != gallery.dim:
            raise XcompatError(
                f"{name} has {model.dim} dimensions but the old gallery has {gallery.dim}; pass its view of the old space"
            )


def fit_dim(model: C, dim: int) -> C:
    """Cut embeddings to their first dimensions, or fill them up with zeros.

    Args:
        model: with D dimensions.
        dim: how many there shall be.

    Returns:
        The same items with ``dim`` dimensions.
    """

    def fit(embeds_ND: Embeddings) -> np.ndarray:
        rows_ND = as_rows(embeds_ND, model.name)[:, :dim]
        return np.pad(rows_ND, ((0, 0), (0, dim - rows_ND.shape[1])))

    return model.with_matrices({name: fit(embeds) for name, embeds in model.matrices().items()})


def readable(models: Mapping[str, C]) -> dict[str, C]:
    """Drop the items that some model could not read.

    Args:
        models: embeddings of one test set by several models.

    Returns:
        The same with equal rows left in each.
    """
    masks = tuple(np.all(rows, axis=0) for rows in zip(*(model.readable() for model in models.values()), strict=True))
    return {name: model.keep(masks) for name, model in models.items()}


def measure_case(
    query: str,
    gallery: str,
    direction: str,
    n_gallery: int,
    columns: Mapping[str, np.ndarray],
    clusters: Ids | None,
    sampling: Sampling,
) -> Case:
    """Average each column over the queries and attach its interval."""
    values_QK = np.stack(list(columns.values()), axis=1).astype(np.float64)
    low_K, high_K = interval_bounds(resampled_means(values_QK, sampling.n_resamples, sampling.seed, clusters), 0.95)
    metrics = {name: float(column.mean()) for name, column in columns.items()}
    ci95 = {name: (float(low), float(high)) for name, low, high in zip(columns, low_K, high_K, strict=True)}
    return Case(query, gallery, direction, len(values_QK), n_gallery, metrics, ci95)


def measure_differences(
    direction: str,
    values: Mapping[str, np.ndarray],
    floor: Mapping[str, np.ndarray],
    clusters: Ids | None,
    sampling: Sampling,
) -> list[Difference]:
    """Compare the same queries under two models, metric by metric."""
    found = []
    for name, values_Q in values.items():
        paired = paired_bootstrap(values_Q, floor[name], sampling.n_resamples, 0.95, sampling.seed, clusters)
        found.append(Difference(direction, name, paired.mean, (paired.low, paired.high)))
    return found


def beside_same_memory(differences: Sequence[Difference]) -> str:
    """Say what new queries find more than old ones that remember the same; the verdict is about old ones as they are.

    Args:
        differences: of ``new/old`` and ``old+memory/old``.

    Returns:
        A sentence.
    """
    points = (
        f"{each.direction} {each.metric} {100 * each.mean:+.1f} ({100 * each.ci95[0]:.1f} to {100 * each.ci95[1]:.1f})"
        for each in differences
    )
    return f"Points of new queries over old ones that wear the same metric and memory: {', '.join(points)}."


def judge_cases(cases: Sequence[Case], differences: list[Difference]) -> Criterion:
    """Compare ``new/old`` with ``old/old``, and ``new/new`` with ``independent/independent``, metric by metric."""
    table = {(case.label, case.direction, metric): value for case in cases for metric, value in case.metrics.items()}
    lost, hurt = [], []  # negative flips are of new queries against old ones: old/old has none, so they are not judged
    for (label, direction, metric), value in table.items():
        floor = table.get(("old/old", direction, metric))
        if label == "new/old" and floor is not None and not value > floor:
            lost.append(f"{direction} {metric}: new/old {value:.4f} <= old/old {floor:.4f}")
        ceiling = table.get(("independent/independent", direction, metric))
        if label == "new/new" and ceiling is not None and not value >= ceiling:
            hurt.append(f"{direction} {metric}: new/new {value:.4f} < independent/independent {ceiling:.4f}")
    labels = {case.label for case in cases}
    both = {"new/new", "independent/independent"} <= labels
    return Criterion(not lost, not hurt if both else None, lost + hurt, differences)
