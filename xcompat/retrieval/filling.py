"""Put pictures into a gallery: embedded by a model, committed as it goes on, continued where it stopped."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import datasets as hf
import numpy as np

from xcompat.data import BadSamples, PairSource, load_pairs
from xcompat.data.schema import CAPTION, ID, captions_of
from xcompat.embedding import embed_rows
from xcompat.errors import XcompatError
from xcompat.models.embedder import Embedder
from xcompat.progress import Waiting, progress_bar, rate_of
from xcompat.retrieval.gallery import Gallery

BATCH = 64
COMMIT_EVERY = 300.0
"""Seconds between two commits: what a kill costs at most."""


class Added(NamedTuple):
    """What became of the pictures.

    Args:
        added: how many were embedded.
        present: how many were there already, embedded by this model.
        unreadable: how many could not be read.
    """

    added: int
    present: int
    unreadable: int


def add_pictures(gallery: Gallery, pictures: hf.Dataset, embedder: Embedder, replace: bool = False) -> Added:
    """Embed pictures and add them under their ids; those that this model embedded before are left as they are.

    Args:
        gallery: the gallery.
        pictures: from :func:`load_pictures`; captions become metadata.
        embedder: the model.
        replace: whether pictures that another model embedded take the new embedding.

    Returns:
        The counts.

    Raises:
        XcompatError: a picture with an id is there from another model and ``replace`` is not set, or too many cannot be read.
    """
    return add_rows(gallery, pictures, np.arange(len(pictures)), embedder, replace)


def add_rows(
    gallery: Gallery,
    dataset: hf.Dataset,
    rows: Sequence[int] | np.ndarray,
    embedder: Embedder,
    replace: bool,
) -> Added:
    """Embed some rows of a data set and add them (see :func:`add_pictures`)."""
    ids = dataset[ID][:]
    wanted = np.asarray(rows, dtype=np.int64)
    place = gallery.find([ids[row] for row in wanted.tolist()])
    there = np.array([version == embedder.fingerprint for version in place], dtype=bool)
    if not replace:
        foreign = [
            row for row, version in zip(wanted.tolist(), place, strict=True) if version not in (None, embedder.fingerprint)
        ]
        if foreign:
            raise XcompatError(
                f"{ids[foreign[0]]!r} and {len(foreign) - 1} more are in the gallery already, embedded by another model; "
                "leave them out, or replace their embeddings (--replace)"
            )
    todo = wanted[~there]
    bad = BadSamples(total=len(wanted))
    with progress_bar() as bar:
        task = bar.add_task(f"embedding images with {embedder.name}", total=len(todo), rate="")
        committed, waiting = time.monotonic(), Waiting()
        for kept, embeds, batch_ids, metadata in _embedded(dataset, todo, embedder, bad, waiting):
            gallery.add(embeds, batch_ids, metadata, version=embedder, replace=replace)
            rate_of(bar, task, len(kept), "images", waiting)
            if time.monotonic() - committed > COMMIT_EVERY:
                gallery.commit()
                committed = time.monotonic()
    gallery.commit()
    return Added(len(todo) - len(bad.reasons), int(there.sum()), len(bad.reasons))


def _embedded(
    dataset: hf.Dataset, rows: np.ndarray, embedder: Embedder, bad: BadSamples, waiting: Waiting
) -> Iterator[tuple[np.ndarray, np.ndarray, list[str], list[dict[str, str] | None]]]:
    for kept, embeds in embed_rows(embedder, dataset, rows.tolist(), BATCH, bad=bad, waiting=waiting):
        columns = dataset.select_columns([name for name in (ID, CAPTION) if name in dataset.column_names])[kept]
        captions = columns.get(CAPTION, [None] * len(kept))
        metadata = [{CAPTION: texts[0]} if (texts := captions_of(value)) else None for value in captions]
        yield kept, embeds.numpy(force=True), columns[ID], metadata


def load_pictures(path: str | Path) -> hf.Dataset:
    """Read pictures, with their captions where there are any.

    Args:
        path: as in :class:`~xcompat.data.PairSource`.

    Returns:
        A data set with the columns ``image``, ``id`` and perhaps ``caption``.
    """
    try:
        dataset = load_pairs(PairSource(path=str(path)))
    except XcompatError:  # no captions; what else is wrong is wrong without them too
        dataset = load_pairs(PairSource(path=str(path), captions=False))
    assert isinstance(dataset, hf.Dataset)
    return dataset
