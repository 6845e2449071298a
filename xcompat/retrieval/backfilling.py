"""Embed the pictures of a gallery anew with a newer model, within a budget, the most useful first."""

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
from xcompat.errors import XcompatError
from xcompat.models.embedder import Embedder
from xcompat.retrieval.filling import Added, add_rows, load_pictures
from xcompat.retrieval.gallery import Gallery
from xcompat.retrieval.segment import BLOCK, Segment, id_hashes

ASKED = 10_000
"""Stored embeddings that search the gallery to find out which items are found often."""
NEIGHBOURS = 10
TRIED = 64
"""Pictures that are embedded to estimate how long all will take."""
SEED = 0


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
        tried, started = self.remaining[:TRIED].tolist(), time.perf_counter()
        embedded = list(embed_rows(self.embedder, self.dataset, tried, size, bad=BadSamples(1.0, len(tried))))
        count = sum(len(embeds.cpu()) for _, embeds in embedded)
        return (time.perf_counter() - started) / max(count, 1) * self.items

    def run(self) -> Added:
        """Put new embeddings in the place of old ones, the most useful first.

        Returns:
            The counts.

        Raises:
            XcompatError: another process writes, or too many pictures cannot be read.
        """
        return add_rows(self.gallery, self.dataset, from_main_process(self._chosen), self.embedder, replace=True)

    def _chosen(self) -> NDArray[np.int64]:
        """Return the rows to embed, those of the items that are found most often first."""
        if self.items == len(self.remaining):
            return self.remaining
        ids = self.dataset[ID][:]
        popular = popularity(self.gallery, [ids[row] for row in self.remaining.tolist()])
        return self.remaining[np.argsort(-popular, kind="stable")][: self.items]


def remaining_rows(gallery: Gallery, dataset: hf.Dataset, embedder: Embedder) -> NDArray[np.int64]:
    """Return the pictures that are in a gallery, embedded by another model.

    Args:
        gallery: the gallery.
        dataset: its pictures, perhaps among others.
        embedder: the model.

    Returns:
        Row numbers of the data set.

    Raises:
        XcompatError: none of the pictures is there.
    """
    versions = gallery.find(dataset[ID][:])
    if all(version is None for version in versions):
        raise XcompatError(
            f"none of the {len(versions)} pictures is in {gallery.path}: ids are the paths below the folder that the gallery was "
            f"built from, and the first one here is {dataset[0][ID]!r}"
        )
    return np.flatnonzero([version not in (None, embedder.fingerprint) for version in versions])


def popularity(gallery: Gallery, ids: list[str]) -> NDArray[np.int64]:
    """Count how often items are among the nearest of other items of their version (Radovanović et al. 2010, hubness).

    What is found often is worth most when it is embedded well. Stored embeddings stand in for queries; of a large gallery, a
    sample drawn with a fixed seed does.

    Args:
        gallery: the gallery.
        ids: items of it.

    Returns:
        (N,) counts.
    """
    with gallery.reading():
        return _counted(gallery, ids)


def _counted(gallery: Gallery, ids: list[str]) -> NDArray[np.int64]:
    counts: dict[str, NDArray[np.int64]] = {}
    for version in gallery.versions:
        mine = [segment for segment in gallery.segments if segment.record.version == version.digest]
        for segment, found in zip(mine, _found(mine), strict=True):
            counts[segment.record.name] = found
    popular_N = np.zeros(len(ids), np.int64)
    hashes_N = id_hashes(ids)
    for segment in gallery.segments:
        positions, rows = segment.rows_of(ids, hashes_N)
        popular_N[positions] = counts[segment.record.name][rows]
    return popular_N


def _found(segments: list[Segment]) -> list[NDArray[np.int64]]:
    """Return how often each row of each segment is among the nearest of a sample of all of them."""
    counts = [np.zeros(segment.record.rows, np.int64) for segment in segments]
    generator = np.random.default_rng(SEED)
    total = sum(map(len, segments))
    for segment in segments:
        rows = segment.present()
        asked = np.sort(generator.choice(rows, size=min(len(rows), max(1, ASKED * len(rows) // total)), replace=False))
        for _, items in segment.blocks(BLOCK, asked):
            queries = items.embeds[0]
            found = [other.index.search(queries, min(NEIGHBOURS + 1, other.record.rows), other.kept) for other in segments]
            scores = np.concatenate([scores for scores, _ in found], axis=1)
            # every query finds itself first; the place of the last neighbour that counts decides for all segments
            last = -np.sort(-scores, axis=1)[:, min(NEIGHBOURS, scores.shape[1] - 1)]
            for count, (own, places) in zip(counts, found, strict=True):
                near = (own >= last[:, None]) & (places >= 0)
                np.add.at(count, places[near], 1)
    return counts
