"""Re-ranking of hits with new-model embeddings of their originals."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from xcompat.core.arrays import normalise_rows
from xcompat.core.errors import FingerprintMismatchError, XcompatError
from xcompat.core.fingerprint import Fingerprint
from xcompat.core.lazy import datasets as hf
from xcompat.core.progress import console, literal, notice, notice_once
from xcompat.data import BadSamples
from xcompat.data.schema import ID, METADATA, TEXT
from xcompat.embeddings.provider import ServedMap, query_model
from xcompat.models.base import CompatModel
from xcompat.models.embedder import Embedder
from xcompat.retrieval.addressed_images import fetch_images
from xcompat.retrieval.new_embeddings import FOLDER, NewEmbeddings
from xcompat.retrieval.originals import Originals, Texts
from xcompat.retrieval.searching import Hit, SearchedGallery
from xcompat.retrieval.versions import as_float32
from xcompat.score_scale import CANDIDATES, OLD_WEIGHT, combine_scores

if TYPE_CHECKING:
    from torch import Tensor

    from xcompat.retrieval.manifest import Metric
    from xcompat.retrieval.queries import Queries, QueryBlock, Source

COMPARED, ALIKE = 8, 0.9
"""Originals to compare with stored embeddings, and the cosine of equal ones."""
FEWEST, CLOSER = 16, 0.75
"""Originals to check a map with, and the least share that must be closer to its own stored embedding than to others."""


@dataclass
class Counts:
    """Candidates in all searches, by the source of their embeddings.

    Args:
        stored: in the gallery.
        cached: made by an earlier search.
        embedded: made now.
        missing: unknown, unreadable or over budget; the old score is kept.
        unreadable: those of the missing that are among the originals.
    """

    stored: int = 0
    cached: int = 0
    embedded: int = 0
    missing: int = 0
    unreadable: int = 0

    def __str__(self) -> str:
        parts = (
            (self.embedded, "embedded"),
            (self.cached, "from the cache"),
            (self.stored, "stored"),
            (self.missing - self.unreadable, "missing"),
            (self.unreadable, "unreadable"),
        )
        return ", ".join(f"{count:,} {name}" for count, name in parts if count) or "none"


class EmbeddingCache(Protocol):
    """Cache of new embeddings, e.g. :class:`~xcompat.retrieval.new_embeddings.NewEmbeddings`."""

    def get(self, ids: Sequence[str], generation: int) -> dict[str, NDArray[np.float32]]:
        """Return the known embeddings of items."""

    def put(self, embeds: Mapping[str, NDArray[np.float32]], generation: int) -> None:
        """Store embeddings."""

    def count_demand(self, ids: Iterable[str]) -> None:
        """Count candidates."""


def require_source(source: Source) -> Embedder | ServedMap:
    """Return a model that can embed originals.

    Raises:
        XcompatError: it is a map with an unknown encoder, or only a model name.
    """
    if isinstance(source, Embedder | ServedMap):
        return source
    raise XcompatError(f"{source} cannot embed originals; set the new model with --rerank-with")


class Reranker:
    """Reordering of the first hits by new-model embeddings of their originals.

    A candidate's score becomes ``(1 - w) · new + w · old``, with ``new`` the similarity between query and original in the new
    model's own space. If an original is unreadable, its old score is shifted by the mean difference of the query's other
    candidates.

    Each embedding is computed once and cached (:class:`~xcompat.retrieval.new_embeddings.NewEmbeddings`), for use in later
    searches and ``xcompat gallery upgrade --backfill``.

    Args:
        model: the new model, alone or with its map.
        originals: the gallery's images or texts; None to use its metadata: texts, or images at ``address_column``.
        candidates: hits to re-rank per query, more if a search asks for more hits; None to use the number fitted with the
            model, or 20.
        old_weight: w; None to use the value fitted with the model, or 1/3.
        budget: largest number of embeddings to compute; further candidates keep their old scores.
        keep: whether to cache embeddings.
        record_demand: whether to count candidates, so a backfill starts with frequent candidates.
        cache_bytes: size limit of a gallery's cache; beyond it, the oldest embeddings are deleted. None for no limit.
        cache_days: maximum age of a gallery's cached embeddings. None for no limit.
        address_column: metadata key with the web address of an item's image, which is downloaded
            (:func:`~xcompat.retrieval.fetching.fetch`).
        allow_private_addresses: whether these addresses may be on this machine or in private networks.

    Raises:
        XcompatError: a number is out of range, or the model cannot embed the originals.

    Example:
        ``gallery.search(embeds, model, top_k=10, rerank=Reranker(load_embedder("runs/map"), load_originals("photos")))``
    """

    def __init__(
        self,
        model: Embedder | ServedMap,
        originals: Originals | None = None,
        candidates: int | None = None,
        old_weight: float | None = None,
        budget: int | None = None,
        keep: bool = True,
        record_demand: bool = False,
        cache_bytes: int | None = None,
        cache_days: float | None = None,
        address_column: str | None = None,
        allow_private_addresses: bool = False,
    ) -> None:
        config = getattr(query_model(model), "config", None)
        if candidates is None:
            candidates = getattr(config, "rerank_candidates", None) or CANDIDATES
        if candidates < 1:
            raise XcompatError(f"cannot re-rank {candidates} candidates; set at least 1")
        if old_weight is None:
            chosen = getattr(config, "rerank_old_weight", None)
            old_weight = OLD_WEIGHT if chosen is None else chosen
        if not 0 <= old_weight < 1:
            raise XcompatError(f"the weight of old scores is {old_weight}; set a number from 0 to below 1")
        self.source, self.originals = model, originals
        self.candidates, self.old_weight, self.budget = candidates, old_weight, budget
        self.keep, self.record_demand = keep, record_demand
        self.cache_limits = cache_bytes, cache_days
        self.address_column, self.allow_private_addresses = address_column, allow_private_addresses
        self.counts = Counts()
        self._kept: dict[str, NewEmbeddings | None] = {}
        self._has_checked = self._has_announced = False
        self._n_queries = 1  # of the last search
        if originals is not None:
            if address_column is not None:
                raise XcompatError("give originals, or the metadata key with their addresses (address_column): not both")
            self._require_kind(originals)

    def _require_kind(self, originals: Originals) -> None:
        if isinstance(self.source, Embedder):
            originals.require(self.source)
        elif not isinstance(originals, Texts):
            raise XcompatError(f"{self.source.provider.name} embeds texts, but the originals are {originals.kind}; give texts")

    @cached_property
    def _embedder(self) -> Embedder | None:
        """The model in its own space, with the prompt for passages; None for a service."""
        if isinstance(self.source, ServedMap):
            return None
        embedder = self.source.passages or self.source
        return Embedder.from_model(embedder.model, "own") if isinstance(embedder.model, CompatModel) else embedder

    def re_embed_queries(self, queries: Queries, asked: QueryBlock, source: Source) -> Tensor | NDArray[np.float32] | None:
        """Embed queries with this model; return None if it embedded them already.

        Args:
            queries: their source.
            asked: their last block.
            source: the model that embedded them.

        Raises:
            XcompatError: they are another model's embeddings.
        """
        if source is self.source or (isinstance(source, CompatModel) and source.embeds_in_memory):
            return None
        if all(text is None for text in asked.texts) and isinstance(source, CompatModel | Fingerprint):
            raise XcompatError(f"{self.fingerprint} cannot embed queries given as embeddings; give texts or images")
        if self._embedder is None:
            raise XcompatError(
                f"{self.fingerprint} is a service and can only re-rank its own queries; search with a map fitted for this service"
            )
        return queries.re_embed(self._embedder.for_queries(), range(len(asked.ids)))

    @property
    def fingerprint(self) -> Fingerprint:
        """Fingerprint of the new embeddings."""
        if self._embedder is None:
            assert isinstance(self.source, ServedMap)
            return self.source.provider.fingerprint
        return self._embedder.fingerprint

    @property
    def dim(self) -> int:
        """Dimension of the new embeddings."""
        model = query_model(self.source)
        return model.config.embedding_dim if isinstance(model, CompatModel) else model.dim

    @cached_property
    def _rows(self) -> dict[str, int]:
        assert self.originals is not None
        return {name: row for row, name in enumerate(self.originals.ids)}

    def order(
        self,
        queries_QD: ArrayLike,
        hits_Q: Sequence[Sequence[Hit]],
        gallery: SearchedGallery | None = None,
        metric: Metric = "cosine",
        cache: EmbeddingCache | None = None,
    ) -> list[list[Hit]]:
        """Return each query's hits in their new order.

        Args:
            queries_QD: (Q, D) queries as output by the new model.
            hits_Q: each query's hits, best first.
            gallery: the searched gallery with the cache; None for a store.
            metric: a store's metric.
            cache: a store's cache, or None.

        Raises:
            XcompatError: the queries and the model's embeddings have different dimensions.
        """
        queries = as_float32(queries_QD)
        if queries.shape[1] != self.dim:
            raise FingerprintMismatchError(
                f"the queries have {queries.shape[1]} dimensions, but {self.fingerprint} has {self.dim}; embed the queries "
                "with this model"
            )
        wanted = {hit.id: hit for hits in hits_Q for hit in hits}
        self._n_queries = len(hits_Q)
        embeds = self._new_embeddings(gallery, wanted, cache)
        if not embeds:
            return [list(hits) for hits in hits_Q]
        self._notice_unrelated_originals(gallery, wanted, embeds)
        places = {name: place for place, name in enumerate(embeds)}
        unit = np.float32(1 if gallery is None else gallery.manifest.present()[0].length ** 2)
        new_ND, own_QD = self._own_view(np.stack([*embeds.values()])), self._own_view(queries)
        ordered = []
        for query_D, hits in zip(own_QD, hits_Q, strict=True):
            read = np.array([hit.id in places for hit in hits], bool)
            new_nD = new_ND[[places[hit.id] for hit in hits if hit.id in places]]
            is_l2 = (metric if gallery is None else gallery.metric) == "l2"
            new_n = -((new_nD - query_D) ** 2).sum(axis=1) if is_l2 else new_nD @ query_D
            ordered.append(self._sort_hits(list(hits), read, unit * new_n))
        return ordered

    def _own_view(self, embeds_ND: NDArray[np.float32]) -> NDArray[np.float32]:
        """Convert embeddings to the form in which the model compares them."""
        model = query_model(self.source)
        if not isinstance(model, CompatModel):
            return normalise_rows(embeds_ND)
        with torch.inference_mode():
            viewed = model.self_view(torch.from_numpy(np.array(embeds_ND)).to(model.device)).float().cpu().numpy()
        return viewed if model.metric == "l2" else normalise_rows(viewed)

    def _sort_hits(self, hits: list[Hit], read: NDArray[np.bool_], new_n: NDArray[np.float32]) -> list[Hit]:
        """Rescore and sort one query's candidates; ties keep their order."""
        if not read.any():
            return hits
        comparable = all(hit.standing is None for hit in hits)  # else the versions' score scales differ
        weight = self.old_weight if comparable else 0.0
        old_k = np.array([hit.score for hit in hits], np.float32)
        score_k = old_k.copy()
        score_k[read] = combine_scores(old_k[read], new_n, weight)
        score_k[~read] += (score_k[read] - old_k[read]).mean()
        return [hits[place]._replace(score=float(score_k[place]), standing=None) for place in np.argsort(-score_k, kind="stable")]

    def notice_other_originals(self, source: Source, gallery: SearchedGallery, hits: Sequence[Hit]) -> None:
        """Print a notice if originals differ from the gallery's stored originals.

        Args:
            source: the query model; only the stored embeddings' model can check this.
            gallery: the searched gallery.
            hits: some hits; the first :data:`COMPARED` are checked.
        """
        if self.originals is None or not isinstance(source, Embedder):
            return
        old = source.passages or source
        wanted = {hit.id: hit for hit in hits[:COMPARED] if hit.version.digest == old.fingerprint.digest}
        stored, cosines = gallery.vectors(list(wanted)), dict[str, float]()
        for originals, rows in self._read(wanted):
            for part, embeds in originals.embed(old, rows, BadSamples(1.0, len(rows), what=originals.kind, raised_by="")):
                names = [originals.ids[row] for row in part.tolist()]
                kept = normalise_rows(np.stack([stored[name] for name in names]))
                cosines |= dict(zip(names, (normalise_rows(embeds) * kept).sum(axis=1).tolist(), strict=True))
        if other := sorted((cosine, name) for name, cosine in cosines.items() if cosine < ALIKE):
            notice_once(
                f"{len(other)} of {len(cosines)} compared originals differ from those that the gallery stores, e.g. "
                f"{other[0][1]!r} (cosine {other[0][0]:.2f}); {self._fix(gallery)}. `xcompat gallery doctor` shows more"
            )

    def _fix(self, gallery: SearchedGallery) -> str:
        return (
            f"check --images or --texts, and delete {gallery.path / FOLDER}: it caches their embeddings"
            if self.keep
            else "check --images or --texts"
        )

    @torch.inference_mode()
    def _notice_unrelated_originals(
        self, gallery: SearchedGallery | None, wanted: Mapping[str, Hit], embeds: Mapping[str, NDArray[np.float32]]
    ) -> None:
        """Print a notice if the map brings originals no closer to their own stored embeddings than to those of other items."""
        model = query_model(self.source)
        if gallery is None or self._has_checked or not isinstance(model, CompatModel) or model.maps_galleries:
            return
        names = [name for name in embeds if wanted[name].version in model.compatible_with[:1]]
        if len(names) < FEWEST:
            return
        self._has_checked = True
        mapped_nd = model.to_space(torch.from_numpy(np.stack([embeds[name] for name in names])).to(model.device)).float().cpu()
        stored = gallery.vectors(names)
        cosines_nn = normalise_rows(mapped_nd.numpy()) @ normalise_rows(np.stack([stored[name] for name in names])).T
        closer = float((cosines_nn.diagonal() > np.median(cosines_nn, axis=1)).mean())
        if closer < CLOSER:
            notice_once(
                f"the originals seem to be other items than those stored under the same ids: only {closer:.0%} of {len(names)} "
                f"are closer to their stored embedding than to others (by chance 50%); {self._fix(gallery)}"
            )

    # ------------------------------------------------------------------------------------------------ new embeddings

    def _new_embeddings(
        self, gallery: SearchedGallery | None, wanted: Mapping[str, Hit], cache: EmbeddingCache | None
    ) -> dict[str, NDArray[np.float32]]:
        """Return items' new embeddings: stored, cached, or computed now."""
        known, kept = self._read_stored(gallery, wanted), cache if gallery is None else self._cache(gallery)
        self.counts.stored += len(known)
        generation = 0 if gallery is None else gallery.generation
        left = [name for name in wanted if name not in known]
        if kept is not None:
            cached = self._look_up(kept, wanted, left, generation)
            self.counts.cached += len(cached)
            known |= cached
            left = [name for name in left if name not in cached]
        allowed = left if self.budget is None else left[: max(0, self.budget - self.counts.embedded)]
        made = self._embed({name: wanted[name] for name in allowed})
        self.counts.embedded += len(made)
        self.counts.missing += len(left) - len(made)
        if len(allowed) < len(left):
            notice_once(f"the budget of {self.budget:,} embeddings is spent; further candidates keep their old scores")
        if made and kept is not None:
            try:
                kept.put(made, generation)
            except XcompatError as error:
                notice_once(f"{error}; the search continues without the saved embeddings")
        return known | made

    def _look_up(
        self, kept: EmbeddingCache, wanted: Mapping[str, Hit], left: list[str], generation: int
    ) -> dict[str, NDArray[np.float32]]:
        """Return cached embeddings; count demand if enabled."""
        if self.record_demand:
            try:
                kept.count_demand(wanted)
            except XcompatError as error:
                notice_once(f"{error}; the search continues")
        try:
            return kept.get(left, generation)
        except XcompatError as error:
            notice_once(f"{error}; the search continues without the saved embeddings")
            return {}

    def _read_stored(self, gallery: SearchedGallery | None, wanted: Mapping[str, Hit]) -> dict[str, NDArray[np.float32]]:
        """Return the gallery's embeddings that this model made, as output by it."""
        model = query_model(self.source)
        if gallery is None or (isinstance(model, CompatModel) and model.stores_view):
            return {}
        version = model.lineage.stores.fingerprint if isinstance(model, CompatModel) else model.version
        names = [name for name, hit in wanted.items() if hit.version.digest == version.digest]
        return gallery.vectors(names) if names else {}

    def _cache(self, gallery: SearchedGallery | None) -> NewEmbeddings | None:
        if gallery is None:
            return None
        place = str(gallery.path)
        if self.keep and place not in self._kept:
            try:
                self._kept[place] = NewEmbeddings(gallery.path, self.fingerprint, self.dim, *self.cache_limits)
            except XcompatError as error:
                notice(f"{error}; new embeddings are not cached")
                self._kept[place] = None
        return self._kept.get(place)

    def _embed(self, wanted: Mapping[str, Hit]) -> dict[str, NDArray[np.float32]]:
        """Embed originals; skip unreadable ones, and all if the model fails."""
        made: dict[str, NDArray[np.float32]] = {}
        count = 0
        for originals, rows in self._read(wanted):
            count += len(rows)
            try:
                for part, embeds in self._embed_rows(originals, rows):
                    made.update(zip([originals.ids[row] for row in part.tolist()], embeds, strict=True))
            except XcompatError as error:  # e.g. a failing service: the old order is better than none
                notice_once(f"candidates keep their old scores: {error}")
        usable = {name: embed_D for name, embed_D in made.items() if np.isfinite(embed_D).all() and embed_D.any()}
        self.counts.unreadable += count - len(usable)
        return usable

    def _embed_rows(
        self, originals: Originals, rows: NDArray[np.int64]
    ) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]]:
        if self._embedder is not None:
            bad = BadSamples(1.0, len(rows), what=originals.kind, raised_by="")
            yield from originals.embed(self._embedder, rows, bad)
            return
        assert isinstance(self.source, ServedMap)
        size = self.source.provider.batch
        self._announce_cost(originals, rows)
        for start in range(0, len(rows), size):
            part = rows[start : start + size]
            yield part, self.source.embed(originals.contents(part).values).float().cpu().numpy()

    def _announce_cost(self, originals: Originals, rows: NDArray[np.int64]) -> None:
        """Print the estimated price of the first queries' candidates before a service embeds them, once."""
        assert isinstance(self.source, ServedMap)
        if self._has_announced:
            return
        self._has_announced, provider = True, self.source.provider
        size = sum(len(str(text).encode()) for text in originals.contents(rows).values) / self._n_queries
        most = "" if self.budget is None else f"; at most {self.budget:,} texts in all (budget)"
        console.print(
            literal(
                f"re-ranking: {provider.name} embeds {len(rows) / self._n_queries:,.1f} texts per query, "
                f"{provider.describe_cost(size)}{most}"
            ),
            soft_wrap=True,
        )

    def _read(self, wanted: Mapping[str, Hit]) -> Iterator[tuple[Originals, NDArray[np.int64]]]:
        """Yield the given originals, or those that the metadata holds, with row numbers."""
        if self.originals is not None:
            rows = [self._rows[name] for name in wanted if name in self._rows]
            if rows:
                yield self.originals, np.array(rows)
            elif wanted:
                notice_once(
                    f"none of the candidates, e.g. {next(iter(wanted))!r}, is among the {self.originals.kind}, e.g. "
                    f"{self.originals.ids[0]!r}: ids are {self.originals.ids_are}"
                )
            return
        key = TEXT if self.address_column is None else self.address_column
        held = {
            name: value for name, hit in wanted.items() if (value := (hit.metadata or {}).get(key)) and isinstance(value, str)
        }
        if held:
            for found in self._from_metadata(held):
                self._require_kind(found)
                yield found, np.arange(len(found.ids))
        elif wanted and self.address_column is not None:
            raise XcompatError(
                f"no candidate has an address in its metadata under {key!r}; choose another key (--address-column)"
            )
        elif wanted:
            raise XcompatError("this gallery stores no texts to re-embed; set them with --images or --texts")

    def _from_metadata(self, held: Mapping[str, str]) -> Iterator[Originals]:
        """Yield the texts in the metadata, or the images at the addresses in it."""
        if self.address_column is not None:
            yield from fetch_images(held, self.allow_private_addresses)
        else:
            yield Texts(hf.Dataset.from_dict({ID: [*held], TEXT: [*held.values()], METADATA: [None] * len(held)}))
