"""Who queries whom when items are images with a class: every case, and whether the new model is backward compatible."""

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
    ValueKey,
    beside_same_memory,
    judge_cases,
    measure_case,
    measure_differences,
    who_queries_whom,
)
from xcompat.evaluation.ranking import RankedQueries, ranking_per_query
from xcompat.evaluation.scores import Embeddings, Ids, as_ids
from xcompat.fingerprint import Fingerprint

IMAGE_TO_IMAGE = "image-to-image"


@dataclass(frozen=True)
class EmbeddedImages:
    """What one model makes of labelled queries and of a labelled gallery.

    Args:
        name: what people call the model.
        fingerprint: which model it is.
        query_embeds_QD: ``(Q, D)`` embeddings of the queries.
        gallery_embeds_GD: ``(G, D)`` embeddings of the gallery; queries may be in it, and never find themselves.
        query_ids: Q hashables, one per image.
        gallery_ids: G hashables.
        query_labels: Q classes.
        gallery_labels: G classes.
    """

    name: str
    fingerprint: Fingerprint
    query_embeds_QD: Embeddings
    gallery_embeds_GD: Embeddings
    query_ids: Ids
    gallery_ids: Ids
    query_labels: Ids
    gallery_labels: Ids

    @property
    def dim(self) -> int:
        """Dimensions of the embeddings."""
        return int(self.gallery_embeds_GD.shape[1])

    def require_same_items(self, other: EmbeddedImages, name: str) -> None:
        """See :meth:`xcompat.evaluation.cases.Contestant.require_same_items`."""
        for what in ("query_ids", "gallery_ids", "query_labels", "gallery_labels"):
            expected, found = getattr(self, what), getattr(other, what)
            if as_ids(expected, len(expected), "old") != as_ids(found, len(found), name):
                raise XcompatError(f"{what} of {name} are not those of old; embed the same images in the same order with both")

    def matrices(self) -> dict[str, Embeddings]:
        """See :meth:`xcompat.evaluation.cases.Contestant.matrices`."""
        return {"queries": self.query_embeds_QD, "images": self.gallery_embeds_GD}

    def with_matrices(self, matrices: Mapping[str, Embeddings]) -> EmbeddedImages:
        """See :meth:`xcompat.evaluation.cases.Contestant.with_matrices`."""
        return replace(self, query_embeds_QD=matrices["queries"], gallery_embeds_GD=matrices["images"])

    def readable(self) -> tuple[np.ndarray, ...]:
        """See :meth:`xcompat.evaluation.cases.Contestant.readable`."""
        return tuple(np.isfinite(np.asarray(embeds)[:, 0]) for embeds in (self.query_embeds_QD, self.gallery_embeds_GD))

    def keep(self, masks: tuple[np.ndarray, ...]) -> EmbeddedImages:
        """See :meth:`xcompat.evaluation.cases.Contestant.keep`."""
        kept_Q, kept_G = masks
        if kept_Q.all() and kept_G.all():
            return self
        rows_Q, rows_G = np.flatnonzero(kept_Q).tolist(), np.flatnonzero(kept_G).tolist()
        return EmbeddedImages(
            self.name,
            self.fingerprint,
            np.asarray(self.query_embeds_QD)[rows_Q],
            np.asarray(self.gallery_embeds_GD)[rows_G],
            [self.query_ids[row] for row in rows_Q],
            [self.gallery_ids[row] for row in rows_G],
            [self.query_labels[row] for row in rows_Q],
            [self.gallery_labels[row] for row in rows_G],
        )


def evaluate_labelled_cases(
    old: EmbeddedImages,
    new_view: EmbeddedImages,
    new: EmbeddedImages | None,
    independent: EmbeddedImages | None,
    extra: Mapping[str, EmbeddedImages] | Iterable[tuple[str, EmbeddedImages]] = (),
    upgraded: EmbeddedImages | None = None,
    old_on_new: bool = False,
    ks: Sequence[int] = (1, 5),
    chunk_size: int = 1024,
    n_resamples: int = 1000,
    seed: int = 0,
    shared: bool = False,
    beside: Mapping[tuple[str, str], tuple[EmbeddedImages, EmbeddedImages]] | None = None,
) -> Evaluation:
    """Measure CMC and mean average precision of every case and judge backward compatibility (Shen et al. 2020).

    Args:
        old: the old model; its embeddings are the gallery that stays.
        new_view: the new model in the space of that gallery: ``new/old``.
        new: the new model's own embeddings: ``new/new``.
        independent: the new model without any training for compatibility; for ``independent/old`` its first dimensions are
            compared (zero-padded if it has fewer).
        extra: further query models in the old space: each gives the case ``name/old``.
        upgraded: the old gallery mapped towards the new model (FCT), of the dimension of ``new_view``: ``new/old`` searches it.
        old_on_new: whether to measure ``old/new`` too: old queries on the new model's gallery, in the space that both share.
        ks: cut-offs of CMC.
        chunk_size: rows per block; results do not depend on it.
        n_resamples: bootstrap draws over queries.
        seed: of the draws.
        shared: whether every process calls this with the same arguments, to rank a share of the queries each; all get everything.
        beside: further cases: names of query and gallery -> who asks and what is searched.

    Returns:
        Cases, verdict, ranks, average precision of every query.

    Raises:
        XcompatError: items or dimensions do not fit, there is nothing to measure, or ``old_on_new`` of a gallery that is mapped.
    """
    pairs = who_queries_whom(old, new_view, new, independent, dict(extra), upgraded, old_on_new, beside)
    ranked = {(case[0], case[1]): _rank(*case, chunk_size, shared) for case in pairs}
    sampling = Sampling(n_resamples, seed)
    floor = ranked["old", "old"]
    known_Q = floor.first_hit_ranks_Q >= 0
    cases, differences = list[Case](), list[Difference]()
    for (query, gallery), result in ranked.items():
        columns = dict(values := _values(result, ks, known_Q))
        if gallery == "old" and query not in ("old", "independent"):
            columns[FLIP_METRIC] = ((floor.first_hit_ranks_Q == 0) & (result.first_hit_ranks_Q > 0))[known_Q]
        cases.append(measure_case(query, gallery, IMAGE_TO_IMAGE, len(old.gallery_embeds_GD), columns, None, sampling))
        if (query, gallery) == ("new", "old"):
            differences = measure_differences(IMAGE_TO_IMAGE, values, _values(floor, ks, known_Q), None, sampling)
    ranks: dict[RankKey, np.ndarray] = {(*key, IMAGE_TO_IMAGE): result.first_hit_ranks_Q for key, result in ranked.items()}
    dropped = int((~known_Q).sum())
    notes = [f"{dropped} queries have no image of their class in the gallery and are left out."] if dropped else []
    if upgraded is None and (own := ranked.get((OLD_WITH_MEMORY, "old"))) is not None:
        notes.append(_beside(ranked["new", "old"], own, ks, known_Q, sampling))
    if upgraded is not None:
        notes.append("new/old is measured on the old gallery after its stored embeddings were mapped towards the new model.")
    return Evaluation(cases, judge_cases(cases, differences), ranks, {IMAGE_TO_IMAGE: dropped}, notes, _per_query(ranked))


def _beside(new: RankedQueries, own: RankedQueries, ks: Sequence[int], known_Q: np.ndarray, sampling: Sampling) -> str:
    """Say what new queries find more than old ones that remember the same."""
    found, floor = (_values(result, ks, known_Q) for result in (new, own))
    return beside_same_memory(measure_differences(IMAGE_TO_IMAGE, found, floor, None, sampling))


def _values(result: RankedQueries, ks: Sequence[int], known_Q: np.ndarray) -> dict[str, np.ndarray]:
    """Return each metric of each query that has a positive."""
    values = {f"cmc@{k}": (result.first_hit_ranks_Q < k)[known_Q] for k in ks}
    return values | {metric: values_Q[known_Q] for metric, values_Q in _precision(result).items()}


def _precision(result: RankedQueries) -> dict[str, np.ndarray]:
    """Return what ranks of first hits do not say: float64 ``(Q,)`` by metric, NaN for queries without a positive."""
    return {"map@1.0": result.average_precision_Q, "map@R": result.average_precision_at_r_Q}


def _per_query(ranked: Mapping[tuple[str, str], RankedQueries]) -> dict[ValueKey, np.ndarray]:
    return {
        (*key, IMAGE_TO_IMAGE, metric): values_Q.astype(np.float32)
        for key, result in ranked.items()
        for metric, values_Q in _precision(result).items()
    }


def _rank(
    query_name: str, gallery_name: str, queries: EmbeddedImages, gallery: EmbeddedImages, chunk_size: int, shared: bool
) -> RankedQueries:
    """Rank one case; an error names it."""
    try:
        return ranking_per_query(
            queries.query_embeds_QD,
            gallery.gallery_embeds_GD,
            queries.query_labels,
            gallery.gallery_labels,
            queries.query_ids,
            gallery.gallery_ids,
            chunk_size=chunk_size,
            shared=shared,
        )
    except XcompatError as error:
        raise XcompatError(f"{query_name}/{gallery_name}: {error}") from None
