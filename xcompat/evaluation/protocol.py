"""Who queries whom: the cases that every report shows, and whether the new model is backward compatible."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from xcompat.errors import XcompatError
from xcompat.evaluation.cases import (
    FLIP_METRIC,
    OLD_WITH_MEMORY,
    Case,
    Difference,
    Evaluation,
    RankKey,
    Sampling,
    beside_same_memory,
    judge_cases,
    measure_case,
    measure_differences,
    who_queries_whom,
)
from xcompat.evaluation.metrics import first_hit_ranks, zero_shot_ranks
from xcompat.evaluation.scores import Embeddings, Ids, as_ids, id_codes
from xcompat.fingerprint import Fingerprint

IMAGE_TO_TEXT = "image-to-text"
TEXT_TO_IMAGE = "text-to-image"
ZERO_SHOT_METRIC = "zero_shot@1"


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

    def require_same_items(self, other: EmbeddedPairs, name: str) -> None:
        """See :meth:`xcompat.evaluation.cases.Contestant.require_same_items`."""
        sides: list[tuple[str, Ids, Ids]] = [
            ("image", self.image_ids, other.image_ids),
            ("text", self.text_ids, other.text_ids),
        ]
        if self.zero_shot is not None and other.zero_shot is not None:
            sides.append(("zero-shot label", self.zero_shot.labels_N, other.zero_shot.labels_N))
        for kind, expected_ids, found_ids in sides:
            expected, found = as_ids(expected_ids, len(expected_ids), "old"), as_ids(found_ids, len(found_ids), name)
            if len(expected) != len(found):
                raise XcompatError(f"{name} has {len(found)} {kind}s but old has {len(expected)}; embed the same items with both")
            for position, (want, have) in enumerate(zip(expected, found, strict=True)):
                if want != have:
                    raise XcompatError(
                        f"{kind} {position} is {have!r} in {name} but {want!r} in old; embed the same items in the same order"
                    )

    def matrices(self) -> dict[str, Embeddings]:
        """See :meth:`xcompat.evaluation.cases.Contestant.matrices`."""
        own = {"images": self.image_embeds_ND, "texts": self.text_embeds_MD}
        zero = self.zero_shot
        return own | ({"zero-shot images": zero.image_embeds_ND, "classes": zero.class_embeds_CD} if zero is not None else {})

    def with_matrices(self, matrices: Mapping[str, Embeddings]) -> EmbeddedPairs:
        """See :meth:`xcompat.evaluation.cases.Contestant.with_matrices`."""
        zero_shot = self.zero_shot and replace(
            self.zero_shot, image_embeds_ND=matrices["zero-shot images"], class_embeds_CD=matrices["classes"]
        )
        return replace(self, image_embeds_ND=matrices["images"], text_embeds_MD=matrices["texts"], zero_shot=zero_shot)

    def readable(self) -> tuple[np.ndarray, ...]:
        """See :meth:`xcompat.evaluation.cases.Contestant.readable`; texts can always be read."""
        return (np.isfinite(np.asarray(self.image_embeds_ND)[:, 0]),)

    def keep(self, masks: tuple[np.ndarray, ...]) -> EmbeddedPairs:
        """Drop images, and the captions of those that are gone altogether."""
        (kept_N,) = masks
        if kept_N.all():
            return self
        image_ids = [self.image_ids[row] for row in np.flatnonzero(kept_N).tolist()]
        left = set(image_ids)
        kept_M = np.array([text_id in left for text_id in self.text_ids])
        text_ids = [self.text_ids[row] for row in np.flatnonzero(kept_M).tolist()]
        images_ND, texts_MD = np.asarray(self.image_embeds_ND)[kept_N], np.asarray(self.text_embeds_MD)[kept_M]
        return replace(self, image_embeds_ND=images_ND, text_embeds_MD=texts_MD, image_ids=image_ids, text_ids=text_ids)


def evaluate_cases(
    old: EmbeddedPairs,
    new_view: EmbeddedPairs,
    new: EmbeddedPairs | None,
    independent: EmbeddedPairs | None,
    extra: Mapping[str, EmbeddedPairs] | Iterable[tuple[str, EmbeddedPairs]] = (),
    upgraded: EmbeddedPairs | None = None,
    old_on_new: bool = False,
    ks: Sequence[int] = (1, 5, 10, 50),
    chunk_size: int = 1024,
    n_resamples: int = 1000,
    seed: int = 0,
    shared: bool = False,
    beside: Mapping[tuple[str, str], tuple[EmbeddedPairs, EmbeddedPairs]] | None = None,
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
        upgraded: the old gallery after it was mapped towards the new model (FCT); then ``new/old`` searches it, with queries of
            the new model's dimension.
        old_on_new: whether to measure ``old/new`` too: old queries on the new model's gallery, in the space that both share.
        ks: cut-offs of the recall; those that do not leave anything out of a gallery are dropped with a note.
        chunk_size: rows per block; results do not depend on it.
        n_resamples: bootstrap draws; queries with one id are drawn together.
        seed: of the draws.
        shared: whether every process calls this with the same arguments, to rank a share of the queries each; all get everything.
        beside: further cases: names of query and gallery -> who asks and what is searched.

    Returns:
        Cases, verdict, ranks.

    Raises:
        XcompatError: if the models were not evaluated on the same items, dimensions do not fit, or there is nothing to measure.
    """
    pairs = who_queries_whom(old, new_view, new, independent, dict(extra), upgraded, old_on_new, beside)
    ranks = {
        (query, gallery, direction): _direction_ranks(f"{query}/{gallery}", queries, items, direction, chunk_size, shared)
        for query, gallery, queries, items in pairs
        for direction in (IMAGE_TO_TEXT, TEXT_TO_IMAGE)
    }
    sampling = Sampling(n_resamples, seed)
    cases, differences, notes, dropped = _retrieval_cases(old, ranks, ks, sampling)
    zero_cases, zero_differences = _zero_shot_cases(pairs, chunk_size, sampling)
    cases, differences = cases + zero_cases, differences + zero_differences
    if upgraded is not None:
        notes.append("new/old is measured on the old gallery after its stored embeddings were mapped towards the new model.")
    clusters = {
        direction: id_codes(as_ids(ids, len(ids), "old"), ())[0]
        for direction, ids in ((IMAGE_TO_TEXT, old.image_ids), (TEXT_TO_IMAGE, old.text_ids))
    }
    return Evaluation(cases, judge_cases(cases, differences), ranks, dropped, notes, clusters=clusters)


def _direction_ranks(
    label: str, queries: EmbeddedPairs, gallery: EmbeddedPairs, direction: str, chunk_size: int, shared: bool
) -> np.ndarray:
    """Return the ranks of one case; an error names it."""
    if direction == IMAGE_TO_TEXT:
        query_side, gallery_side = (queries.image_embeds_ND, queries.image_ids), (gallery.text_embeds_MD, gallery.text_ids)
    else:
        query_side, gallery_side = (queries.text_embeds_MD, queries.text_ids), (gallery.image_embeds_ND, gallery.image_ids)
    try:
        return first_hit_ranks(query_side[0], gallery_side[0], query_side[1], gallery_side[1], chunk_size, shared)
    except XcompatError as error:
        raise XcompatError(f"{label} {direction}: {error}") from None


def _retrieval_cases(
    old: EmbeddedPairs, ranks: Mapping[RankKey, np.ndarray], ks: Sequence[int], sampling: Sampling
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
    cases, differences, beside = list[Case](), list[Difference](), list[Difference]()
    for (query, gallery, direction), ranks_Q in ranks.items():
        floor_Q = ranks["old", "old", direction]
        values = {f"recall@{k}": (ranks_Q < k)[ranks_Q >= 0] for k in kept_ks[direction]}
        columns = dict(values)
        if gallery == "old" and query not in ("old", "independent"):
            columns[FLIP_METRIC] = ((floor_Q == 0) & (ranks_Q > 0))[ranks_Q >= 0]
        cases.append(measure_case(query, gallery, direction, sides[direction][1], columns, clusters[direction], sampling))
        if (query, gallery) == ("new", "old"):
            floor = {f"recall@{k}": (floor_Q < k)[floor_Q >= 0] for k in kept_ks[direction]}
            differences += measure_differences(direction, values, floor, clusters[direction], sampling)
            if (own_Q := ranks.get((OLD_WITH_MEMORY, "old", direction))) is not None:
                own = {f"recall@{k}": (own_Q < k)[own_Q >= 0] for k in kept_ks[direction]}
                beside += measure_differences(direction, values, own, clusters[direction], sampling)
    return cases, differences, [*notes, *([beside_same_memory(beside)] if beside else [])], dropped


def _zero_shot_cases(
    pairs: Sequence[tuple[str, str, EmbeddedPairs, EmbeddedPairs]], chunk_size: int, sampling: Sampling
) -> tuple[list[Case], list[Difference]]:
    """Classify each query model's images by each gallery model's class embeddings, where both have them."""
    cases: list[Case] = []
    right: dict[str, np.ndarray] = {}
    for query, gallery, queries, items in pairs:
        if queries.zero_shot is None or items.zero_shot is None:
            continue
        images, classes = queries.zero_shot, items.zero_shot.class_embeds_CD
        right_N = zero_shot_ranks(images.image_embeds_ND, classes, images.labels_N, chunk_size) < 1
        cases.append(measure_case(query, gallery, IMAGE_TO_TEXT, len(classes), {ZERO_SHOT_METRIC: right_N}, None, sampling))
        right[f"{query}/{gallery}"] = right_N
    if "new/old" not in right or "old/old" not in right:
        return cases, []
    values, floor = {ZERO_SHOT_METRIC: right["new/old"]}, {ZERO_SHOT_METRIC: right["old/old"]}
    return cases, measure_differences(IMAGE_TO_TEXT, values, floor, None, sampling)
