"""Who queries whom: the cases that every report shows, and whether the new model is backward compatible."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from xcompat.errors import XcompatError
from xcompat.evaluation.intervals import interval_bounds, paired_bootstrap, resampled_means
from xcompat.evaluation.metrics import first_hit_ranks, zero_shot_ranks
from xcompat.evaluation.scores import Embeddings, Ids, as_ids, as_rows
from xcompat.fingerprint import Fingerprint

IMAGE_TO_TEXT = "image-to-text"
TEXT_TO_IMAGE = "text-to-image"
FLIP_METRIC = "negative_flip_rate@1"
ZERO_SHOT_METRIC = "zero_shot@1"
RankKey = tuple[str, str, str]
"""(query, gallery, direction)."""


@dataclass(frozen=True)
class ZeroShot:
    """One model's side of a zero-shot classification.

    Args:
        image_embeds_ND: ``(N, D)`` embeddings of labelled images.
        class_embeds_CD: ``(C, D)`` from :func:`xcompat.evaluation.class_embeddings`.
        labels_N: N integers in [0, C).
    """

    image_embeds_ND: Embeddings
    class_embeds_CD: Embeddings
    labels_N: Ids


@dataclass(frozen=True)
class EmbeddedPairs:
    """What one model makes of the test set.

    Args:
        name: what people call the model.
        fingerprint: which model it is.
        image_embeds_ND: ``(N, D)`` embeddings.
        text_embeds_MD: ``(M, D)`` embeddings.
        image_ids: N hashables; several images may share one.
        text_ids: M hashables; the id of the image or images that each text describes.
        zero_shot: the same model's side of a zero-shot classification, if there is one.
    """

    name: str
    fingerprint: Fingerprint
    image_embeds_ND: Embeddings
    text_embeds_MD: Embeddings
    image_ids: Ids
    text_ids: Ids
    zero_shot: ZeroShot | None = None

    @property
    def dim(self) -> int:
        """Dimensions of the embeddings."""
        return int(self.image_embeds_ND.shape[1])


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
    """

    cases: list[Case]
    criterion: Criterion
    ranks: dict[RankKey, np.ndarray] = field(repr=False)
    dropped: dict[str, int]
    notes: list[str]


@dataclass(frozen=True)
class _Sampling:
    """How intervals are drawn."""

    n_resamples: int
    seed: int


def evaluate_cases(
    old: EmbeddedPairs,
    new_view: EmbeddedPairs,
    new: EmbeddedPairs | None,
    independent: EmbeddedPairs | None,
    extra: Mapping[str, EmbeddedPairs] | Iterable[tuple[str, EmbeddedPairs]] = (),
    ks: Sequence[int] = (1, 5, 10, 50),
    chunk_size: int = 1024,
    n_resamples: int = 1000,
    seed: int = 0,
) -> Evaluation:
    """Measure every case in both directions and judge backward compatibility.

    The criterion is the empirical one of BCT (Shen et al. 2020): new queries must find more in the old gallery than old ones.

    Args:
        old: the old model; its embeddings are the gallery that stays.
        new_view: the new model's embeddings in the old space, of the old dimension: ``new/old``.
        new: the new model's own embeddings: ``new/new``.
        independent: the new model before any compatibility training. For ``independent/old`` its first dimensions are compared
            (zero-padded if it has fewer).
        extra: further query models in the old space, such as ``phi`` or ``ridge``: each gives the case ``name/old``.
        ks: cut-offs of the recall; those that do not leave anything out of a gallery are dropped with a note.
        chunk_size: rows per block; results do not depend on it.
        n_resamples: bootstrap draws; queries with one id are drawn together.
        seed: of the draws.

    Returns:
        Cases, verdict, ranks.

    Raises:
        XcompatError: if the models were not evaluated on the same items, dimensions do not fit, or there is nothing to measure.
    """
    pairs = _who_queries_whom(old, new_view, new, independent, dict(extra))
    ranks = {
        (query, gallery, direction): _direction_ranks(f"{query}/{gallery}", queries, items, direction, chunk_size)
        for query, gallery, queries, items in pairs
        for direction in (IMAGE_TO_TEXT, TEXT_TO_IMAGE)
    }
    sampling = _Sampling(n_resamples, seed)
    cases, differences, notes, dropped = _retrieval_cases(old, ranks, ks, sampling)
    zero_cases, zero_differences = _zero_shot_cases(pairs, chunk_size, sampling)
    cases, differences = cases + zero_cases, differences + zero_differences
    return Evaluation(cases, _judge(cases, differences), ranks, dropped, notes)


def _who_queries_whom(
    old: EmbeddedPairs,
    new_view: EmbeddedPairs,
    new: EmbeddedPairs | None,
    independent: EmbeddedPairs | None,
    further: Mapping[str, EmbeddedPairs],
) -> list[tuple[str, str, EmbeddedPairs, EmbeddedPairs]]:
    """Check that the models fit together; return (query, gallery, query model, gallery model) per case, in the report's order."""
    taken = {"old", "new", "independent", "new_view"} & further.keys()
    if taken:
        raise XcompatError(f"{min(taken)!r} cannot name an extra model, as it names one of the five cases; choose another name")
    models = {"new_view": new_view, "new": new, "independent": independent, **further}
    for name, model in models.items():
        if model is not None:
            _require_same_items(old, model, name)
    for name, model in {"new_view": new_view, **further}.items():
        if model.dim != old.dim:
            raise XcompatError(
                f"{name} has {model.dim} dimensions but the old gallery has {old.dim}; pass its view of the old space"
            )

    pairs = [("old", "old", old, old)]
    if independent is not None:
        pairs.append(("independent", "old", _fit_dim(independent, old.dim), old))
    pairs += [(name, "old", model, old) for name, model in further.items()]
    pairs.append(("new", "old", new_view, old))
    if new is not None:
        pairs.append(("new", "new", new, new))
    if independent is not None:
        pairs.append(("independent", "independent", independent, independent))
    return pairs


def _require_same_items(old: EmbeddedPairs, other: EmbeddedPairs, name: str) -> None:
    """Raise with the first id in which two models' test sets differ."""
    sides: list[tuple[str, Ids, Ids]] = [("image", old.image_ids, other.image_ids), ("text", old.text_ids, other.text_ids)]
    if old.zero_shot is not None and other.zero_shot is not None:
        sides.append(("zero-shot label", old.zero_shot.labels_N, other.zero_shot.labels_N))
    for kind, expected_ids, found_ids in sides:
        expected, found = as_ids(expected_ids, len(expected_ids), "old"), as_ids(found_ids, len(found_ids), name)
        if len(expected) != len(found):
            raise XcompatError(f"{name} has {len(found)} {kind}s but old has {len(expected)}; embed the same items with both")
        for position, (want, have) in enumerate(zip(expected, found, strict=True)):
            if want != have:
                raise XcompatError(
                    f"{kind} {position} is {have!r} in {name} but {want!r} in old; embed the same items in the same order"
                )


def _fit_dim(model: EmbeddedPairs, dim: int) -> EmbeddedPairs:
    """Cut a raw embedding to the first ``dim`` dimensions, or fill it up with zeros."""

    def fit(embeds_ND: Embeddings) -> np.ndarray:
        rows_ND = as_rows(embeds_ND, model.name)[:, :dim]
        return np.pad(rows_ND, ((0, 0), (0, dim - rows_ND.shape[1])))

    zero_shot = model.zero_shot
    if zero_shot is not None:
        zero_shot = ZeroShot(fit(zero_shot.image_embeds_ND), fit(zero_shot.class_embeds_CD), zero_shot.labels_N)
    images_ND, texts_MD = fit(model.image_embeds_ND), fit(model.text_embeds_MD)
    return EmbeddedPairs(model.name, model.fingerprint, images_ND, texts_MD, model.image_ids, model.text_ids, zero_shot)


def _direction_ranks(label: str, queries: EmbeddedPairs, gallery: EmbeddedPairs, direction: str, chunk_size: int) -> np.ndarray:
    """Return the ranks of one case; an error names it."""
    if direction == IMAGE_TO_TEXT:
        query_side, gallery_side = (queries.image_embeds_ND, queries.image_ids), (gallery.text_embeds_MD, gallery.text_ids)
    else:
        query_side, gallery_side = (queries.text_embeds_MD, queries.text_ids), (gallery.image_embeds_ND, gallery.image_ids)
    try:
        return first_hit_ranks(query_side[0], gallery_side[0], query_side[1], gallery_side[1], chunk_size)
    except XcompatError as error:
        raise XcompatError(f"{label} {direction}: {error}") from None


def _retrieval_cases(
    old: EmbeddedPairs, ranks: Mapping[RankKey, np.ndarray], ks: Sequence[int], sampling: _Sampling
) -> tuple[list[Case], list[Difference], list[str], dict[str, int]]:
    """Turn ranks into cases with intervals, and into the differences between new and old queries."""
    sides = {IMAGE_TO_TEXT: (old.image_ids, len(old.text_ids)), TEXT_TO_IMAGE: (old.text_ids, len(old.image_ids))}
    kept_ks: dict[str, list[int]] = {}
    clusters: dict[str, list[object]] = {}
    notes, dropped = [], {}
    for direction, (query_ids, n_gallery) in sides.items():
        kept_ks[direction] = [int(k) for k in ks if 1 <= k < n_gallery]
        left_out = [f"recall@{k}" for k in ks if k not in kept_ks[direction]]
        if not kept_ks[direction]:
            raise XcompatError(
                f"{direction}: none of ks={tuple(ks)} lies from 1 to below the gallery's {n_gallery} items; use more items"
            )
        if left_out:
            notes.append(f"{', '.join(left_out)} left out of {direction}: the gallery has only {n_gallery} items.")
        found_Q = ranks["old", "old", direction] >= 0
        if not found_Q.any():
            raise XcompatError(f"{direction}: no query id occurs in the gallery; image_ids and text_ids must name the same items")
        all_ids = as_ids(query_ids, len(query_ids), "old")
        clusters[direction] = [item for item, found in zip(all_ids, found_Q, strict=True) if found]
        dropped[direction] = int((~found_Q).sum())
        if dropped[direction]:
            notes.append(f"{dropped[direction]} {direction} queries have no match in the gallery and are left out.")
    cases, differences = [], []
    for (query, gallery, direction), ranks_Q in ranks.items():
        floor_Q = ranks["old", "old", direction]
        values = {f"recall@{k}": (ranks_Q < k)[ranks_Q >= 0] for k in kept_ks[direction]}
        columns = dict(values)
        if gallery == "old" and query not in ("old", "independent"):
            columns[FLIP_METRIC] = ((floor_Q == 0) & (ranks_Q > 0))[ranks_Q >= 0]
        cases.append(_case(query, gallery, direction, sides[direction][1], columns, clusters[direction], sampling))
        if (query, gallery) == ("new", "old"):
            floor = {f"recall@{k}": (floor_Q < k)[floor_Q >= 0] for k in kept_ks[direction]}
            differences += _differences(direction, values, floor, clusters[direction], sampling)
    return cases, differences, notes, dropped


def _zero_shot_cases(
    pairs: Sequence[tuple[str, str, EmbeddedPairs, EmbeddedPairs]], chunk_size: int, sampling: _Sampling
) -> tuple[list[Case], list[Difference]]:
    """Classify each query model's images by each gallery model's class embeddings, where both have them."""
    cases: list[Case] = []
    right: dict[str, np.ndarray] = {}
    for query, gallery, queries, items in pairs:
        if queries.zero_shot is None or items.zero_shot is None:
            continue
        images, classes = queries.zero_shot, items.zero_shot.class_embeds_CD
        right_N = zero_shot_ranks(images.image_embeds_ND, classes, images.labels_N, chunk_size) < 1
        cases.append(_case(query, gallery, IMAGE_TO_TEXT, len(classes), {ZERO_SHOT_METRIC: right_N}, None, sampling))
        right[f"{query}/{gallery}"] = right_N
    if "new/old" not in right or "old/old" not in right:
        return cases, []
    values, floor = {ZERO_SHOT_METRIC: right["new/old"]}, {ZERO_SHOT_METRIC: right["old/old"]}
    return cases, _differences(IMAGE_TO_TEXT, values, floor, None, sampling)


def _case(
    query: str,
    gallery: str,
    direction: str,
    n_gallery: int,
    columns: Mapping[str, np.ndarray],
    clusters: Ids | None,
    sampling: _Sampling,
) -> Case:
    """Average each column over the queries and attach its interval."""
    values_QK = np.stack(list(columns.values()), axis=1).astype(np.float64)
    low_K, high_K = interval_bounds(resampled_means(values_QK, sampling.n_resamples, sampling.seed, clusters), 0.95)
    metrics = {name: float(column.mean()) for name, column in columns.items()}
    ci95 = {name: (float(low), float(high)) for name, low, high in zip(columns, low_K, high_K, strict=True)}
    return Case(query, gallery, direction, len(values_QK), n_gallery, metrics, ci95)


def _differences(
    direction: str,
    values: Mapping[str, np.ndarray],
    floor: Mapping[str, np.ndarray],
    clusters: Ids | None,
    sampling: _Sampling,
) -> list[Difference]:
    """Compare the same queries under two models, metric by metric."""
    found = []
    for name, values_Q in values.items():
        paired = paired_bootstrap(values_Q, floor[name], sampling.n_resamples, 0.95, sampling.seed, clusters)
        found.append(Difference(direction, name, paired.mean, (paired.low, paired.high)))
    return found


def _judge(cases: Sequence[Case], differences: list[Difference]) -> Criterion:
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
