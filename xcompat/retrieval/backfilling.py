"""Re-embed the pictures or texts of a gallery with a newer model, within a budget, in an order that is random but fixed."""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from xcompat.data import BadSamples
from xcompat.distributed import from_main_process
from xcompat.models.embedder import Embedder
from xcompat.retrieval.gallery import Gallery
from xcompat.retrieval.ingestion import Added, ingest
from xcompat.retrieval.originals import Originals, origins_of
from xcompat.retrieval.segment import id_hashes
from xcompat.spreading import Spread

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
        self.remaining = remaining_rows(gallery, originals, embedder)
        self.items = min(budget or len(self.remaining), len(self.remaining))

    def seconds(self) -> float:
        """Estimate the time from a few of them, without changing the gallery."""
        tried, started = self.remaining[:TRIED], time.perf_counter()
        count = sum(len(rows) for rows, _ in self.originals.embed(self.embedder, tried, BadSamples(1.0, len(tried))))
        return (time.perf_counter() - started) / max(count, 1) * self.items

    def run(self, spread: Spread | None = None) -> Added:
        """Replace old embeddings by new ones, in the order of :attr:`remaining`, until the budget is spent.

        Args:
            spread: as :func:`~xcompat.retrieval.ingestion.ingest` takes it.

        Returns:
            The counts.

        Raises:
            XcompatError: another process writes, or too many cannot be read.
        """
        rows = from_main_process(lambda: self.remaining[: self.items])
        by = f"backfill {len(rows):,} with {self.embedder.name}"
        return ingest(self.gallery, self.originals, self.embedder, replace=True, rows=rows, spread=spread, by=by)


def remaining_rows(gallery: Gallery, originals: Originals, embedder: Embedder) -> NDArray[np.int64]:
    """Return the originals of a gallery that another model embedded, ordered by hashes of their ids.

    That order does not depend on what they show, and is the same in every call: the next call continues where this one stops.
    What is re-embedded is a random sample. Orders that choose (folder by folder, hubs, worst mapped first) find less on the way
    (``benchmarks/studies/mixed_gallery.py``).

    Args:
        gallery: the gallery.
        originals: as :class:`Backfill` takes them.
        embedder: the newer model.

    Returns:
        Row numbers of the originals.

    Raises:
        XcompatError: none of them is in the gallery.
    """
    rows = np.flatnonzero([origin not in (None, embedder.fingerprint) for origin in origins_of(gallery, originals)])
    return rows[np.argsort(id_hashes([originals.ids[row] for row in rows.tolist()]), kind="stable")]
