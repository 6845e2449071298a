"""Re-embed the pictures of a gallery with a newer model, within a budget, in an order that is random but fixed."""

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
from xcompat.retrieval.ingestion import Added, add_pictures, load_pictures, origins_of
from xcompat.retrieval.segment import id_hashes

IMAGES_TRIED = 64
"""Pictures that are embedded to estimate the time for all."""


class Backfill:
    """Pictures of a gallery that are to be re-embedded.

    Args:
        gallery: the gallery.
        pictures: path of its pictures.
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
        """Estimate the time from a few pictures, without changing the gallery."""
        size = images_per_batch(self.embedder.processor, self.embedder.device)
        tried, started = self.remaining[:IMAGES_TRIED].tolist(), time.perf_counter()
        embedded = list(embed_rows(self.embedder, self.dataset, tried, size, bad=BadSamples(1.0, len(tried))))
        count = sum(len(embeds.cpu()) for _, embeds in embedded)
        return (time.perf_counter() - started) / max(count, 1) * self.items

    def run(self) -> Added:
        """Replace old embeddings by new ones, in the order of :attr:`remaining`, until the budget is spent.

        Returns:
            The counts.

        Raises:
            XcompatError: another process writes, or too many pictures cannot be read.
        """
        rows = from_main_process(lambda: self.remaining[: self.items])
        return add_pictures(self.gallery, self.dataset, self.embedder, replace=True, rows=rows)


def remaining_rows(gallery: Gallery, dataset: hf.Dataset, embedder: Embedder) -> NDArray[np.int64]:
    """Return the pictures of a gallery that another model embedded, ordered by hashes of their ids.

    That order does not depend on what the pictures show, and is the same in every call: the next call continues where this one
    stops. Search standardises scores per version, so re-embedded pictures should be a random sample of all. Orders that choose
    (folder by folder, hubs, worst mapped first) make two versions that differ, and find less
    (``benchmarks/studies/mixed_gallery.py``).

    Args:
        gallery: the gallery.
        dataset: its pictures, perhaps among others.
        embedder: the newer model.

    Returns:
        Row numbers of the data set.

    Raises:
        XcompatError: none of the pictures is in the gallery.
    """
    ids = dataset[ID][:]
    rows = np.flatnonzero([origin not in (None, embedder.fingerprint) for origin in origins_of(gallery, ids)])
    return rows[np.argsort(id_hashes([ids[row] for row in rows.tolist()]), kind="stable")]
