"""The models of an evaluation, as embeddings of one test set, and the cases: whose queries search whose gallery."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Generic, NamedTuple, Protocol, Self, TypeVar

import numpy as np

from xcompat.core.errors import XcompatError
from xcompat.core.fingerprint import Fingerprint
from xcompat.core.metric_names import metric_name
from xcompat.evaluation.cases import ALL, ALONE, BACKFILLED, MAPPED, NEW_WITH_MEMORY, OF_MODELS, RERANKED, WITHOUT_MEMORY
from xcompat.evaluation.scores import Embeddings, as_rows
from xcompat.evaluation.thresholds import Compared
from xcompat.score_scale import OLD_WEIGHT


@dataclass(frozen=True)
class EvaluationOptions:
    """How contestants are judged.

    Args:
        ks: cut-offs of recall or CMC; None: 1, 5, 10 and 50 of captions, 1 and 5 of classes.
        old_on_new: whether to measure ``old/new`` too: old queries on the new model's gallery, in the space that both share.
        chunk_size: rows per block; results do not depend on it.
        n_resamples: bootstrap draws; queries about one item are drawn together.
        seed: of the draws.
        shared: whether all processes evaluate the same contestants: each ranks a share of the queries, all get the result.
        fars: false acceptance rates at which pairs of images with classes are verified (TAR@FAR); none by default.
        fpirs: false positive identification rates at which these images are identified in an open set (TPIR@FPIR).
        rerank: hits of each new query that the new model scores again, which adds the case ``new+rerank/old``; 0 for none.
        rerank_weight: weight of old scores in it.
        threshold: cosine at which old queries cut off, which is carried over to new ones; None for none.
    """

    ks: Sequence[int] | None = None
    old_on_new: bool = False
    chunk_size: int = 1024
    n_resamples: int = 1000
    seed: int = 0
    shared: bool = False
    fars: Sequence[float] = ()
    fpirs: Sequence[float] = ()
    rerank: int = 0
    rerank_weight: float = OLD_WEIGHT
    threshold: float | None = None


@dataclass(frozen=True)
class Direction:
    """One way to search a test set, and the metric that counts the hits.

    Args:
        name: such as ``image-to-text`` or ``image-to-image``.
        metric: name of the metric for a match among the first k, such as ``recall``.
        ks: the cut-offs k.
        n_gallery: items in the gallery.
        clusters_Q: int64 ``(Q,)``, equal for queries about one item; None if the queries are independent.
        without_match: describes the queries that are left out, in a note.
        notes: remarks for the reader, one sentence each.
        is_ranked: whether queries are ranked; else there are no ranks, and no flips of them.
        population: the queries that search, as in :class:`~xcompat.evaluation.cases.Case`.
        parts: population -> bool ``(Q,)``: the queries of it, whose results are reported by themselves too.
    """

    name: str
    metric: str
    ks: Sequence[int]
    n_gallery: int
    clusters_Q: np.ndarray | None = None
    without_match: str = ""
    notes: tuple[str, ...] = ()
    is_ranked: bool = True
    population: str = ALL
    parts: Mapping[str, np.ndarray] = field(default_factory=dict)


def telling_cut_offs(
    name: str, metric: str, ks: Sequence[int], n_gallery: int, n_searched: int | None = None
) -> tuple[list[int], tuple[str, ...]]:
    """Return the cut-offs that can tell two models apart: below the number of items that a query searches, which all find.

    Args:
        name: of the direction.
        metric: of the cut-offs.
        ks: the cut-offs.
        n_gallery: items in the gallery.
        n_searched: the most of them that a query searches, where its own item is none; None: all.

    Returns:
        Those that are kept, and a note on those that are not.
    """
    n_searched = n_gallery if n_searched is None else n_searched
    kept = [int(k) for k in ks if 1 <= k < n_searched]
    left_out = ", ".join(metric_name(f"{metric}@{k}") for k in ks if k not in kept)
    but = " that count for a query" if n_searched < n_gallery else ""
    return kept, (f"{left_out} left out of {name}: the gallery has only {n_searched} items{but}.",) if left_out else ()


def require_cut_offs(name: str, kept: Sequence[int], ks: Sequence[int], n_searched: int) -> None:
    """Refuse a ranking of which :func:`telling_cut_offs` keeps no cut-off."""
    if not kept:
        raise XcompatError(
            f"{name}: none of ks={tuple(ks)} lies from 1 to below the gallery's {n_searched} items; use more items"
        )


class Found(NamedTuple):
    """The result of each query of one model in the gallery of another.

    Args:
        ranks_Q: int64 ``(Q,)`` of :func:`xcompat.evaluation.first_hit_ranks`.
        average_precision: metric -> float64 ``(Q,)``, NaN for queries without a match; empty if only the first match counts.
        shares: metric -> its value, for shares of pairs, of which the numbers per query only carry the spread
            (:func:`~xcompat.evaluation.verification.share_per_query`).
    """

    ranks_Q: np.ndarray
    average_precision: Mapping[str, np.ndarray]
    shares: Mapping[str, float] = MappingProxyType({})

    def of_queries(self, mask_Q: np.ndarray) -> Found:
        """Return the results of some queries, as if the others had no match; without shares, which are of all together."""
        of_pairs = self.shares.keys()
        values = {name: values_Q for name, values_Q in self.average_precision.items() if name not in of_pairs}
        return Found(
            np.where(mask_Q, self.ranks_Q, -1), {name: np.where(mask_Q, each_Q, np.nan) for name, each_Q in values.items()}
        )


class Contestant(Protocol):
    """One model's embeddings of a test set."""

    @property
    def name(self) -> str:
        """The model's name, for people."""

    @property
    def fingerprint(self) -> Fingerprint:
        """The model's identity."""

    @property
    def dim(self) -> int:
        """Dimensions of the embeddings."""

    def require_same_items(self, other: Self, name: str) -> None:
        """Raise unless the other model, called ``name``, embedded the same items; the error names the first that differs."""

    def matrices(self) -> dict[str, Embeddings]:
        """Return the matrices of embeddings by the kind of their items, such as ``images``."""

    def with_matrices(self, matrices: Mapping[str, Embeddings]) -> Self:
        """Return the same items with other embeddings."""

    def queries_alone(self) -> Self:
        """Return the same items without the embeddings of those that are only searched, where that saves something."""

    def readable(self) -> tuple[np.ndarray, ...]:
        """Return one mask per kind of item: False for rows of NaN, whose item could not be read."""

    def keep(self, masks: tuple[np.ndarray, ...]) -> Self:
        """Return only the items for which the masks, as :meth:`readable` returns them, are True."""

    def directions(self, ks: Sequence[int] | None) -> list[Direction]:
        """Return the directions of search with these cut-offs; classification comes last."""

    def compare(self, gallery: Self, direction: Direction, options: EvaluationOptions, own: Self | None = None) -> Compared:
        """Return the pairs of queries and gallery items of one direction. The arguments are those of :meth:`find`."""

    def find(self, gallery: Self, direction: Direction, options: EvaluationOptions, own: Self | None = None) -> Found | None:
        """Search another model's gallery in one direction; None if that cannot be measured.

        Args:
            gallery: what is searched.
            direction: of the search.
            options: cut-offs, and how many hits are scored again.
            own: the new model in its own space, which scores the first hits again; None for a plain search.
        """


C = TypeVar("C", bound=Contestant)


class Search(NamedTuple, Generic[C]):
    """A case that is measured.

    Args:
        query: name of the model that embeds the queries.
        gallery: name of the gallery.
        asking: embeddings of the queries.
        searched: embeddings of the gallery.
        own: the new model in its own space, which scores the first hits again; None for a plain search.
    """

    query: str
    gallery: str
    asking: C
    searched: C
    own: C | None = None


@dataclass(frozen=True)
class Contestants(Generic[C]):
    """All models of an evaluation, as embeddings of one test set.

    Args:
        old: the old model; its gallery stays.
        new_view: the new model in the space of that gallery: ``new/old``.
        new: the new model in its own space: ``new/new``.
        backfilled: what a gallery of the old model holds after it is re-embedded, in the old space: ``new/backfilled``.
        independent: the new model without any training for compatibility. For ``independent/old`` its first dimensions are
            compared (zero-padded if it has fewer).
        extra: other query models in the old space, such as ``phi`` or ``ridge``: each gives the case ``name/old``.
        upgraded: the old model's items mapped towards the new model (FCT), of the dimension of ``new_view``, which searches them.
            Mapped old queries search them too, the case ``mapped/mapped``: what the map makes of the old model alone.
        forgetful: the same gallery, mapped without the map's memory.
        ceiling: the new model in its own space, with the same kind of memory for its queries and its gallery.
        side_info: side-information that is stored beside the old gallery and mapped with it.
        confidence: the confidence of the new queries, ``(N, 1)`` per kind of item.
        alone: where ``new_view`` mixes new and old queries, the new ones: they search what is re-embedded.
    """

    old: C
    new_view: C
    new: C | None = None
    independent: C | None = None
    extra: Mapping[str, C] = field(default_factory=dict)
    upgraded: C | None = None
    forgetful: C | None = None
    ceiling: C | None = None
    side_info: C | None = None
    confidence: C | None = None
    backfilled: C | None = None
    alone: C | None = None

    def _roles(self) -> dict[str, C]:
        """Return the models by role, without the extra ones."""
        roles = {role.name: getattr(self, role.name) for role in fields(self) if role.name != "extra"}
        return {role: model for role, model in roles.items() if model is not None}

    def without_unreadable(self) -> Contestants[C]:
        """Return the models with the items that all of them could read.

        Raises:
            XcompatError: the models embedded different items.
        """
        self._require_same_items()
        roles = self._roles()
        masks_of_each = (model.readable() for model in (*roles.values(), *self.extra.values()))
        masks = tuple(np.all(rows, axis=0) for rows in zip(*masks_of_each, strict=True))
        extra = {name: model.keep(masks) for name, model in self.extra.items()}
        return replace(self, extra=extra, **{role: model.keep(masks) for role, model in roles.items()})

    def searches(self, old_on_new: bool = False, rerank: bool = False) -> list[Search[C]]:
        """Check that the models fit together, and list the cases in the report's order.

        Args:
            old_on_new: whether old queries search the new model's gallery too.
            rerank: whether the new model scores the first hits of its queries again.

        Raises:
            XcompatError: a name is taken, items differ, dimensions do not fit, ``old_on_new`` is set for a mapped gallery, or
                there are no embeddings in the new model's own space that could score again.
        """
        old, plain, stays = self.old, self.independent, self._gallery_that_stays
        self._require_same_items()
        self._require_fitting()
        if old_on_new and self.upgraded is not None:
            raise XcompatError("this method maps the old gallery, and old queries have no place there; set old_on_new to false")
        if rerank and self.new is None:
            raise XcompatError("re-ranking needs the new model's own embeddings of queries and gallery; give them (--new-own)")
        cases: list[tuple[str, str, C | None, C | None]] = [
            ("old", "old", old, old),
            ("independent", "old", None if plain is None else _fit_dim(plain, old.dim), old),
            *((name, "old", model, old) for name, model in self.extra.items()),
            ("new", "old", self.new_view, stays),
            (RERANKED, "old", self.new_view if rerank else None, stays),
            (ALONE, "old", self.alone, stays),
            ("new", BACKFILLED, self.alone or self.new_view, self.backfilled),
            (WITHOUT_MEMORY, "old", self.new_view, self.forgetful),
            (NEW_WITH_MEMORY, NEW_WITH_MEMORY, self.ceiling, self.ceiling),
            (MAPPED, MAPPED, self.upgraded, self.upgraded),
            ("old", "new", old, self.new_view if old_on_new else None),
            ("new", "new", self.new, self.new),
            ("independent", "independent", plain, plain),
        ]
        return [
            Search(query, gallery, asking, searched, self.new if query == RERANKED else None)
            for query, gallery, asking, searched in cases
            if asking is not None and searched is not None
        ]

    @property
    def _gallery_that_stays(self) -> C:
        return self.old if self.upgraded is None else self.upgraded

    def _require_same_items(self) -> None:
        for name, model in (*self._roles().items(), *self.extra.items()):
            self.old.require_same_items(model, name)

    def _require_fitting(self) -> None:
        """Refuse names that are taken, and queries of another dimension than the gallery they search."""
        taken = OF_MODELS & self.extra.keys()
        if taken:
            raise XcompatError(f"{min(taken)!r} cannot name an extra model, as it names a case of its own; choose another name")
        asking = [("new_view", self.new_view, self._gallery_that_stays), *((*extra, self.old) for extra in self.extra.items())]
        for name, model, gallery in asking:
            if model.dim != gallery.dim:
                raise XcompatError(
                    f"{name} has {model.dim} dimensions but the old gallery has {gallery.dim}; pass its view of the old space"
                )


def _fit_dim(model: C, dim: int) -> C:
    """Cut embeddings to their first ``dim`` dimensions, or fill them up with zeros."""

    def fit(embeds_ND: Embeddings) -> np.ndarray:
        rows_ND = as_rows(embeds_ND, model.name)[:, :dim]
        return np.pad(rows_ND, ((0, 0), (0, dim - rows_ND.shape[1])))

    return model.with_matrices({name: fit(embeds) for name, embeds in model.matrices().items()})
