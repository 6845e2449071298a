"""Backfill: re-embed a gallery within a budget, frequent hits first."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from xcompat.core.distributed import from_main_process, is_main_process
from xcompat.core.parallel import Executor
from xcompat.data import BadSamples
from xcompat.embeddings.provider import query_model
from xcompat.models.base import CompatModel
from xcompat.models.embedder import Embedder
from xcompat.retrieval.gallery import Gallery
from xcompat.retrieval.ingestion import IngestCounts, ingest
from xcompat.retrieval.new_embeddings import NewEmbeddings
from xcompat.retrieval.originals import Originals, origins_of
from xcompat.retrieval.segment import id_hashes

CACHED_AT_ONCE = 4096
TRIED = 64
"""Originals to embed for a time estimate."""


class Backfill:
    """Re-embedding of a gallery's originals.

    Args:
        gallery: the gallery.
        originals: its images or texts, possibly with others.
        embedder: the newer model.
        budget: largest number to embed; None for all.

    Raises:
        XcompatError: no original is in the gallery, or the model cannot embed them.
    """

    def __init__(self, gallery: Gallery, originals: Originals, embedder: Embedder, budget: int | None = None) -> None:
        self.gallery, self.originals, self.embedder = gallery, originals, embedder
        originals.require(embedder)
        self._kept = existing_embeddings(gallery.path, embedder)
        self.remaining = remaining_rows(gallery, originals, embedder, self._kept)
        ids = [originals.ids[row] for row in self.remaining.tolist()]
        known = set() if self._kept is None else self._kept.known_ids(ids, gallery.generation)
        is_cached = np.array([name in known for name in ids], bool)
        self.cached, self.to_embed = self.remaining[is_cached], self.remaining[~is_cached]
        self.items = min(budget or len(self.to_embed), len(self.to_embed))

    def seconds(self) -> float:
        """Estimate the time from a few originals."""
        tried, started = self.to_embed[:TRIED], time.perf_counter()
        count = sum(len(rows) for rows, _ in self.originals.embed(self.embedder, tried, BadSamples(1.0, len(tried))))
        return (time.perf_counter() - started) / max(count, 1) * self.items

    def run(self, spread: Executor | None = None) -> IngestCounts:
        """Replace old embeddings until the budget is spent. Cached ones are free.

        Args:
            spread: as in :func:`~xcompat.retrieval.ingestion.ingest`.

        Raises:
            XcompatError: another process writes, or too many originals are unreadable.
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
        """Add cached embeddings to the gallery, without a commit."""
        model = query_model(self.embedder)
        for start in range(0, len(self.cached), CACHED_AT_ONCE):
            rows = self.cached[start : start + CACHED_AT_ONCE]
            ids = [self.originals.ids[row] for row in rows.tolist()]
            assert self._kept is not None
            embeds = self._kept.get(ids, self.gallery.generation)
            about = self.originals.metadata(rows)
            put = [place for place, name in enumerate(ids) if name in embeds]  # the rest was replaced or damaged meanwhile
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
    """Return the rows of originals embedded by another model, in demand order, then random order.

    Re-ranked searches can record demand. The rest is sorted by id hashes, equal in every call, so the next call continues. Other
    orders find less during the backfill (``benchmarks/studies/mixed_gallery.py``).

    Args:
        gallery: the gallery.
        originals: as in :class:`Backfill`.
        embedder: the newer model.
        kept: cache with the recorded demand.

    Raises:
        XcompatError: no original is in the gallery.
    """
    rows = np.flatnonzero([origin not in (None, embedder.fingerprint) for origin in origins_of(gallery, originals)])
    ids = [originals.ids[row] for row in rows.tolist()]
    demand = np.zeros(len(rows), np.int64) if kept is None else kept.demand(ids)
    return rows[np.lexsort((id_hashes(ids), -demand))] if len(rows) else rows


def existing_embeddings(gallery: Path, embedder: Embedder) -> NewEmbeddings | None:
    """Return the new embeddings that re-ranked searches cached for a model, or None."""
    model = query_model(embedder)
    if isinstance(model, CompatModel):
        return NewEmbeddings.find(gallery, *model.lineage.embeds)
    return NewEmbeddings.find(gallery, embedder.version, embedder.dim)
