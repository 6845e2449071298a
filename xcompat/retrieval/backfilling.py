"""Re-embed the pictures or texts of a gallery with a newer model, within a budget: what people ask for first."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from xcompat.core.distributed import from_main_process, is_main_process
from xcompat.core.parallel import Spread
from xcompat.data import BadSamples
from xcompat.embeddings.provider import asking
from xcompat.models.base import CompatModel
from xcompat.models.embedder import Embedder
from xcompat.retrieval.gallery import Gallery
from xcompat.retrieval.ingestion import Added, ingest
from xcompat.retrieval.new_embeddings import NewEmbeddings
from xcompat.retrieval.originals import Originals, origins_of
from xcompat.retrieval.segment import id_hashes

CACHED_AT_ONCE = 4096
TRIED = 64
"""Originals that are embedded to estimate the time for all."""


class Backfill:
    """Originals of a gallery that are to be re-embedded.

    Args:
        gallery: the gallery.
        originals: its pictures or texts, perhaps among others.
        embedder: the newer model.
        budget: most of them to embed; None for all.

    Raises:
        XcompatError: none of them is an item of the gallery, or the model embeds no such originals.
    """

    def __init__(self, gallery: Gallery, originals: Originals, embedder: Embedder, budget: int | None = None) -> None:
        self.gallery, self.originals, self.embedder = gallery, originals, embedder
        originals.require(embedder)
        self._kept = existing_embeddings(gallery.path, embedder)
        self.remaining = remaining_rows(gallery, originals, embedder, self._kept)
        ids = [originals.ids[row] for row in self.remaining.tolist()]
        known = set() if self._kept is None else self._kept.known(ids, gallery.generation)
        is_cached = np.array([name in known for name in ids], bool)
        self.cached, self.to_embed = self.remaining[is_cached], self.remaining[~is_cached]
        self.items = min(budget or len(self.to_embed), len(self.to_embed))

    def seconds(self) -> float:
        """Estimate the time from a few of them, without changing the gallery."""
        tried, started = self.to_embed[:TRIED], time.perf_counter()
        count = sum(len(rows) for rows, _ in self.originals.embed(self.embedder, tried, BadSamples(1.0, len(tried))))
        return (time.perf_counter() - started) / max(count, 1) * self.items

    def run(self, spread: Spread | None = None) -> Added:
        """Replace old embeddings by new ones until the budget is spent; those that searches have made already cost nothing.

        Args:
            spread: as :func:`~xcompat.retrieval.ingestion.ingest` takes it.

        Returns:
            The counts.

        Raises:
            XcompatError: another process writes, or too many cannot be read.
        """
        rows = from_main_process(lambda: self.to_embed[: self.items])
        by = f"backfill {len(rows) + len(self.cached):,} with {self.embedder.name}"
        if is_main_process():
            self._take_cached(by)
        added = ingest(
            self.gallery, self.originals, self.embedder, replace=True, rows=rows, spread=spread, by=by, same_originals=True
        )
        return added._replace(cached=len(self.cached))

    def _take_cached(self, by: str) -> None:
        """Put embeddings that re-ranked searches have made into the gallery; they are committed with the others."""
        model = asking(self.embedder)
        for start in range(0, len(self.cached), CACHED_AT_ONCE):
            rows = self.cached[start : start + CACHED_AT_ONCE]
            ids = [self.originals.ids[row] for row in rows.tolist()]
            assert self._kept is not None
            embeds = self._kept.get(ids, self.gallery.generation)
            about = self.originals.metadata(rows)
            put = [place for place, name in enumerate(ids) if name in embeds]  # others were replaced or damaged meanwhile
            if put:
                self.gallery.add(
                    np.stack([embeds[ids[place]] for place in put]),
                    [ids[place] for place in put],
                    [about[place] for place in put],
                    model,
                    replace=True,
                    same_originals=True,
                )


def remaining_rows(
    gallery: Gallery, originals: Originals, embedder: Embedder, kept: NewEmbeddings | None = None
) -> NDArray[np.int64]:
    """Return the originals of a gallery that another model embedded: those that people ask for first, then a random order.

    Demand is known if re-ranked searches recorded it. The rest is ordered by hashes of the ids. That order does not depend on
    the content, and is the same in every call: the next call continues where this one stops. Orders that choose otherwise (folder
    by folder, hubs, worst mapped first) find less on the way (``benchmarks/studies/mixed_gallery.py``).

    Args:
        gallery: the gallery.
        originals: as :class:`Backfill` takes them.
        embedder: the newer model.
        kept: counts the demand; None if nothing does.

    Returns:
        Row numbers of the originals.

    Raises:
        XcompatError: none of them is in the gallery.
    """
    rows = np.flatnonzero([origin not in (None, embedder.fingerprint) for origin in origins_of(gallery, originals)])
    ids = [originals.ids[row] for row in rows.tolist()]
    demand = np.zeros(len(rows), np.int64) if kept is None else kept.demand(ids)
    return rows[np.lexsort((id_hashes(ids), -demand))] if len(rows) else rows


def existing_embeddings(gallery: Path, embedder: Embedder) -> NewEmbeddings | None:
    """Return the new embeddings that re-ranked searches of a gallery have kept for a model; None if there are none."""
    model = asking(embedder)
    if isinstance(model, CompatModel):
        return NewEmbeddings.find(gallery, model.embeds_fingerprint(), model.config.embedding_dim)
    return NewEmbeddings.find(gallery, embedder.version, embedder.dim)
