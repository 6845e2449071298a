"""Models of an evaluation, as embeddings of the same test set, and the cases to measure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Generic, NamedTuple, Protocol, Self, TypeVar

import numpy as np
import torch

from xcompat.core.errors import XcompatError
from xcompat.core.fingerprint import Fingerprint
from xcompat.core.metric_names import metric_name
from xcompat.evaluation.cases import ALL, BACKFILLED, MAPPED, NEW_WITH_MEMORY, RERANKED, RESERVED_NAMES, UNMIXED, WITHOUT_MEMORY
from xcompat.evaluation.scores import Embeddings, as_rows
from xcompat.evaluation.thresholds import MatchedPairs
from xcompat.score_scale import OLD_WEIGHT


@dataclass(frozen=True)
class EvaluationOptions:
    """Options of an evaluation.

    Args:
        ks: cut-offs of recall or CMC. None: 1, 5, 10 and 50 for captions, 1 and 5 for classes.
        old_on_new: whether to measure ``old/new``, in the shared space.
        chunk_size: rows per block; affects memory only.
        n_resamples: bootstrap draws; queries about the same item are drawn together.
        seed: random seed.
        shared: whether all processes share the work; all get the result.
        fars: false acceptance rates for TAR@FAR of labelled images.
        fpirs: false positive identification rates for TPIR@FPIR of labelled images.
        rerank: hits per new query to re-rank with the new model (``new+rerank/old``); 0 for none.
        rerank_weight: weight of the old scores in re-ranking.
        threshold: cosine threshold of old queries, to convert to a threshold of new queries.
        device: CUDA device to rank embeddings in memory on; the results are the same as on a CPU.
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
    device: torch.device | None = None


@dataclass(frozen=True)
class Direction:
    """One search direction of a test set, with the metric that counts hits.

    Args:
        name: e.g. ``image-to-text`` or ``image-to-image``.
        metric: metric of a match among the first k, e.g. ``recall``.
        ks: cut-offs k.
        n_gallery: gallery size.
        clusters_Q: int64 ``(Q,)``, equal for queries about the same item; None if independent.
        without_match: description of the excluded queries, for a note.
        notes: notes for the reader, a sentence each.
        is_ranked: whether queries are ranked; otherwise there are no ranks and no flips.
        population: as in :class:`~xcompat.evaluation.cases.Case`.
        parts: population -> bool ``(Q,)`` mask of its queries, which are also reported separately.
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


def select_cut_offs(
    name: str, metric: str, ks: Sequence[int], n_gallery: int, n_searched: int | None = None
) -> tuple[list[int], tuple[str, ...]]:
    """Return the cut-offs below the number of searched items, which can tell two models apart.

    Args:
        name: direction.
        metric: metric of the cut-offs.
        ks: cut-offs.
        n_gallery: gallery size.
        n_searched: largest number of relevant items per query; None to use all.

    Returns:
        The remaining cut-offs, and a note about the others.
    """
    n_searched = n_gallery if n_searched is None else n_searched
    kept = [int(k) for k in ks if 1 <= k < n_searched]
    left_out = ", ".join(metric_name(f"{metric}@{k}") for k in ks if k not in kept)
    but = " that count for a query" if n_searched < n_gallery else ""
    return kept, (f"{left_out} not measured for {name}: the gallery has only {n_searched} items{but}.",) if left_out else ()


def require_cut_offs(name: str, kept: Sequence[int], ks: Sequence[int], n_searched: int) -> None:
    """Raise if :func:`select_cut_offs` keeps no cut-off."""
    if not kept:
        raise XcompatError(
            f"{name}: no cutoff of ks={tuple(ks)} is from 1 to below the {n_searched} searched items; set smaller cutoffs, or "
            "add items"
        )


class SearchResults(NamedTuple):
    """Results of a model's queries on another model's gallery.

    Args:
        ranks_Q: int64 ``(Q,)`` of :func:`xcompat.evaluation.first_hit_ranks`.
        average_precision: metric -> float64 ``(Q,)``, NaN without a match; empty if only the first match counts.
        shares: metric -> value, for shares of pairs. Their numbers per query only give the spread
            (:func:`~xcompat.evaluation.verification.share_per_query`).
    """

    ranks_Q: np.ndarray
    average_precision: Mapping[str, np.ndarray]
    shares: Mapping[str, float] = MappingProxyType({})

    def select_queries(self, mask_Q: np.ndarray) -> SearchResults:
        """Return the results as if only these queries had matches. Shares are dropped, as they cover all queries."""
        of_pairs = self.shares.keys()
        values = {name: values_Q for name, values_Q in self.average_precision.items() if name not in of_pairs}
        return SearchResults(
            np.where(mask_Q, self.ranks_Q, -1), {name: np.where(mask_Q, each_Q, np.nan) for name, each_Q in values.items()}
        )


class EvaluatedModel(Protocol):
    """Protocol for a model's test set embeddings."""

    @property
    def name(self) -> str:
        """Display name."""

    @property
    def fingerprint(self) -> Fingerprint:
        """Model identity."""

    @property
    def dim(self) -> int:
        """Embedding dimension."""

    def require_same_items(self, other: Self, name: str) -> None:
        """Raise unless ``other`` embedded the same items; the error names the first difference."""

    def matrices(self) -> dict[str, Embeddings]:
        """Return embedding matrices by kind of item, e.g. ``images``."""

    def with_matrices(self, matrices: Mapping[str, Embeddings]) -> Self:
        """Return the same items with other embeddings."""

    def without_gallery(self) -> Self:
        """Drop embeddings used only as gallery, if any."""

    def readable(self) -> tuple[np.ndarray, ...]:
        """Return a mask per kind of item, False for unreadable items (rows of NaN)."""

    def keep(self, masks: tuple[np.ndarray, ...]) -> Self:
        """Keep the items selected by masks in the form of :meth:`readable`."""

    def directions(self, ks: Sequence[int] | None) -> list[Direction]:
        """Return the search directions with these cut-offs; classification comes last."""

    def compare(self, gallery: Self, direction: Direction, options: EvaluationOptions, own: Self | None = None) -> MatchedPairs:
        """Return the query-gallery pairs of a direction; arguments as in :meth:`find`."""

    def find(
        self, gallery: Self, direction: Direction, options: EvaluationOptions, own: Self | None = None
    ) -> SearchResults | None:
        """Search another model's gallery in a direction; return None if this cannot be measured.

        Args:
            gallery: gallery to search.
            direction: search direction.
            options: cut-offs and re-ranking.
            own: new model in its own space, to re-rank the first hits; None for a plain search.
        """


C = TypeVar("C", bound=EvaluatedModel)


class Search(NamedTuple, Generic[C]):
    """Case to measure.

    Args:
        query: name of the query model.
        gallery: name of the gallery.
        asking: query embeddings.
        searched: gallery embeddings.
        own: as in :meth:`EvaluatedModel.find`.
    """

    query: str
    gallery: str
    asking: C
    searched: C
    own: C | None = None


@dataclass(frozen=True)
class EvaluatedModels(Generic[C]):
    """All models of an evaluation, as embeddings of the same test set.

    Args:
        old: old model; its gallery stays.
        new_view: new model in the old gallery's space (``new/old``).
        new: new model in its own space (``new/new``).
        independent: new model without compatibility training. ``independent/old`` uses its first dimensions, zero-padded if it
            has fewer.
        extra: other query models in the old space, e.g. ``phi`` or ``ridge``; each adds the case ``name/old``.
        upgraded: old items mapped towards the new model (FCT), in the dimension of ``new_view``, which searches them. Mapped old
            queries search them too (``mapped/mapped``), which shows the map's effect on the old model alone.
        forgetful: the same gallery, mapped without the map's memory.
        ceiling: new model in its own space, with the same kind of memory for queries and gallery.
        side_info: side-information stored with the old gallery and mapped with it.
        confidence: confidence of the new queries, ``(N, 1)`` per kind of item.
        backfilled: old gallery after re-embedding, in the old space (``new/backfilled``).
        alone: the new queries, if ``new_view`` mixes new and old ones; they search the backfilled gallery.
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
        roles = {role.name: getattr(self, role.name) for role in fields(self) if role.name != "extra"}
        return {role: model for role, model in roles.items() if model is not None}

    def without_unreadable(self) -> EvaluatedModels[C]:
        """Keep the items that all models could read.

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
        """Validate the models and list the cases in report order.

        Args:
            old_on_new: whether old queries also search the new gallery.
            rerank: whether the new model re-ranks the first hits.

        Raises:
            XcompatError: a name is reserved, items or dimensions differ, ``old_on_new`` is set for a mapped gallery, or
                re-ranking lacks the new model's own embeddings.
        """
        old, plain, stays = self.old, self.independent, self._gallery_that_stays
        self._require_same_items()
        self._require_fitting()
        if old_on_new and self.upgraded is not None:
            raise XcompatError("old_on_new does not apply: this method moves the gallery to the new space; set it to false")
        if rerank and self.new is None:
            raise XcompatError(
                "re-ranking needs the new model's own embeddings of queries and gallery; pass these embeddings (--new-own)"
            )
        cases: list[tuple[str, str, C | None, C | None]] = [
            ("old", "old", old, old),
            ("independent", "old", None if plain is None else _fit_dim(plain, old.dim), old),
            *((name, "old", model, old) for name, model in self.extra.items()),
            ("new", "old", self.new_view, stays),
            (RERANKED, "old", self.new_view if rerank else None, stays),
            (UNMIXED, "old", self.alone, stays),
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
        taken = RESERVED_NAMES & self.extra.keys()
        if taken:
            raise XcompatError(f"{min(taken)!r} cannot name an extra model, as a case has this name; choose another name")
        asking = [("new_view", self.new_view, self._gallery_that_stays), *((*extra, self.old) for extra in self.extra.items())]
        for name, model, gallery in asking:
            if model.dim != gallery.dim:
                raise XcompatError(
                    f"{name} has {model.dim} dimensions but the old gallery has {gallery.dim}; pass embeddings in the old space"
                )


def _fit_dim(model: C, dim: int) -> C:
    """Cut or zero-pad embeddings."""

    def fit(embeds_ND: Embeddings) -> np.ndarray:
        rows_ND = as_rows(embeds_ND, model.name)[:, :dim]
        return np.pad(rows_ND, ((0, 0), (0, dim - rows_ND.shape[1])))

    return model.with_matrices({name: fit(embeds) for name, embeds in model.matrices().items()})
