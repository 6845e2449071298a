"""Embed the pictures of a gallery anew with a newer model, within a budget, in an order that is random and stays the same."""

from __future__ import annotations

import time
from pathlib import Path

import datasets as hf
import numpy as np
from numpy.typing import NDArray

from xcompat.data import BadSamples
from xcompat.data.schema import ID
from xcompat.distributed import from_main_process
from xcompat.embedding import embed_rows, images_per_batch
from xcompat.models.embedder import Embedder
from xcompat.retrieval.gallery import Gallery
from xcompat.retrieval.ingestion import Added, add_rows, load_pictures, origins_of
from xcompat.retrieval.segment import id_hashes

IMAGES_TRIED = 64
"""Pictures that are embedded to estimate how long all will take."""


class Backfill:
    """Pictures of a gallery that are to be embedded anew.

    Args:
        gallery: the gallery.
        pictures: where its pictures are.
        embedder: the newer model.
        budget: most pictures to embed; None for all.

    Raises:
        XcompatError: none of the pictures is an item of the gallery.
    """

    def __init__(self, gallery: Gallery, pictures: str | Path, embedder: Embedder, budget: int | None = None) -> None:
        self.gallery, self.embedder = gallery, embedder
        self.dataset = load_pictures(pictures)
        self.remaining = remaining_rows(gallery, self.dataset, embedder)
        self.items = min(budget or len(self.remaining), len(self.remaining))

    def seconds(self) -> float:
        """Estimate from a few pictures how long it takes, changing nothing."""
        size = images_per_batch(self.embedder.processor, self.embedder.device)
        tried, started = self.remaining[:IMAGES_TRIED].tolist(), time.perf_counter()
        embedded = list(embed_rows(self.embedder, self.dataset, tried, size, bad=BadSamples(1.0, len(tried))))
        count = sum(len(embeds.cpu()) for _, embeds in embedded)
        return (time.perf_counter() - started) / max(count, 1) * self.items

    def run(self) -> Added:
        """Put new embeddings in the place of old ones, in the order of :attr:`remaining`, until the budget is spent.

        Returns:
            The counts.

        Raises:
            XcompatError: another process writes, or too many pictures cannot be read.
        """
        rows = from_main_process(lambda: self.remaining[: self.items])
        return add_rows(self.gallery, self.dataset, rows, self.embedder, replace=True)


def remaining_rows(gallery: Gallery, dataset: hf.Dataset, embedder: Embedder) -> NDArray[np.int64]:
    """Return the pictures that are in a gallery, embedded by another model, in the order of hashes of their ids.

    That order is random with respect to what they show, and the same in every call: the next one goes on where this one stops.
    Scores are standardised per version, so what is embedded anew should be like what is left. Orders that choose (folder by
    folder, hubs, what is mapped worst) make two versions that differ, and find less (``benchmarks/studies/mixed_gallery.py``).

    Args:
        gallery: the gallery.
        dataset: its pictures, perhaps among others.
        embedder: the model.

    Returns:
        Row numbers of the data set.

    Raises:
        XcompatError: none of the pictures is there.
    """
    ids = dataset[ID][:]
    rows = np.flatnonzero([origin not in (None, embedder.fingerprint) for origin in origins_of(gallery, ids)])
    return rows[np.argsort(id_hashes([ids[row] for row in rows.tolist()]), kind="stable")]
