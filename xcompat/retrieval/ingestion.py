"""Put pictures into a gallery: embedded by all processes, committed as it goes on, continued where it stopped."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import datasets as hf
import numpy as np
import torch

from xcompat.data import BadSamples, PairSource, load_pairs
from xcompat.data.schema import CAPTION, ID, captions_of
from xcompat.distributed import barrier, from_main_process, gather_objects, is_main_process, process_state, rank, world_size
from xcompat.embedding import embed_rows, images_per_batch
from xcompat.errors import XcompatError
from xcompat.fingerprint import Fingerprint
from xcompat.models.embedder import Embedder
from xcompat.progress import Waiting, progress_bar, rate_of
from xcompat.retrieval.gallery import Gallery

ADDED_AT_ONCE, ADDED_BY_A_GPU = 64, 1024  # it waits for one copy after so many
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
        The counts, on every process; the first writes, and others see what was added when they open the gallery again.

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
    """Embed some rows of a data set, on all processes, and add them on the first (see :func:`add_pictures`)."""
    process_state()  # a launcher's processes deal rows only among those who meet
    wanted = np.asarray(rows, dtype=np.int64)
    todo = from_main_process(lambda: _missing(gallery, dataset[ID][:], wanted, embedder, replace))
    bad = BadSamples(total=len(wanted))
    with progress_bar() as bar:
        task = bar.add_task(f"embedding images with {embedder.name}", total=len(todo), rate="")
        committed, waiting = time.monotonic(), Waiting()
        for kept, embeds in _embedded(embedder, dataset, todo, bad, waiting):
            rate_of(bar, task, len(kept), "images", waiting)
            if is_main_process():
                gallery.add(embeds, *_described(dataset, kept), version=embedder, replace=replace)
                if time.monotonic() - committed > COMMIT_EVERY:
                    gallery.commit()
                    committed = time.monotonic()
    if is_main_process():
        gallery.commit()
    barrier()
    return Added(len(todo) - len(bad.reasons), len(wanted) - len(todo), len(bad.reasons))


def _missing(gallery: Gallery, ids: Sequence[str], wanted: np.ndarray, embedder: Embedder, replace: bool) -> np.ndarray:
    """Return which of the wanted rows this model has not embedded."""
    place = gallery.find([ids[row] for row in wanted.tolist()])
    if not replace:
        foreign = [
            row for row, version in zip(wanted.tolist(), place, strict=True) if version not in (None, embedder.fingerprint)
        ]
        if foreign:
            raise XcompatError(
                f"{ids[foreign[0]]!r} and {len(foreign) - 1} more are in the gallery already, embedded by another model; "
                "leave them out, or replace their embeddings (--replace)"
            )
    return wanted[np.array([version != embedder.fingerprint for version in place], dtype=bool)]


def _embedded(
    embedder: Embedder, dataset: hf.Dataset, rows: np.ndarray, bad: BadSamples, waiting: Waiting
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Embed rows on all processes, each a part in turn; every one yields what all have made, in the order of the rows."""
    size = images_per_batch(embedder.processor, embedder.device)
    batches = -(-(ADDED_AT_ONCE if embedder.device.type == "cpu" else ADDED_BY_A_GPU) // size)
    parts = [rows[start : start + batches * size] for start in range(0, len(rows), batches * size)]
    mine = np.concatenate([rows[:0], *parts[rank() :: world_size()]])
    embedded = embed_rows(embedder, dataset, mine.tolist(), size, bad=bad, waiting=waiting)
    while True:
        made = list(islice(embedded, batches))
        kept = np.concatenate([rows[:0], *(kept for kept, _ in made)])
        embeds = torch.cat([embeds for _, embeds in made]).numpy(force=True) if made else np.empty((0, embedder.dim), np.float32)
        gathered = gather_objects((kept, embeds), shared=True)
        bad.share()
        if not any(len(kept) for kept, _ in gathered):
            return
        yield from ((kept, embeds) for kept, embeds in gathered if len(kept))


def _described(dataset: hf.Dataset, rows: np.ndarray) -> tuple[list[str], list[dict[str, str] | None]]:
    """Return ids and metadata of rows."""
    columns = dataset.select_columns([name for name in (ID, CAPTION) if name in dataset.column_names])[rows]
    captions = columns.get(CAPTION, [None] * len(rows))
    return columns[ID], [{CAPTION: texts[0]} if (texts := captions_of(value)) else None for value in captions]


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


def origins_of(gallery: Gallery, ids: Sequence[str]) -> list[Fingerprint | None]:
    """Return which model embedded each of the pictures of a folder; refuse a folder of which none is in the gallery."""
    origins = gallery.find(ids)
    if all(origin is None for origin in origins):
        raise XcompatError(
            f"none of the {len(ids)} pictures is in {gallery.path}: ids are the paths below the folder that the gallery was "
            f"built from, and the first one here is {ids[0]!r}"
        )
    return origins
