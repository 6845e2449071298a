"""Embed pictures into a gallery: all processes embed, commits come at intervals, and a second run continues a stopped one."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import datasets as hf
import numpy as np
import torch
from numpy.typing import NDArray

from xcompat.data import BadSamples, PairSource, load_pairs
from xcompat.data.schema import CAPTION, ID, captions_of
from xcompat.distributed import barrier, from_main_process, gather_objects, is_main_process, process_state, rank, world_size
from xcompat.embedding import embed_rows, images_per_batch
from xcompat.errors import XcompatError
from xcompat.fingerprint import Fingerprint
from xcompat.models.embedder import Embedder
from xcompat.progress import Waiting, progress_bar, rate_of
from xcompat.retrieval.gallery import Gallery

ADDED_AT_ONCE, ADDED_BY_A_GPU = 64, 1024  # images that a process embeds before it waits for their copy to the CPU
COMMIT_EVERY = 300.0
"""Seconds between two commits: the most work that a kill loses."""


class Added(NamedTuple):
    """Counts of pictures.

    Args:
        added: pictures that were embedded.
        present: pictures that this model had embedded before.
        unreadable: pictures that could not be read.
    """

    added: int
    present: int
    unreadable: int


def add_pictures(
    gallery: Gallery,
    pictures: hf.Dataset,
    embedder: Embedder,
    replace: bool = False,
    rows: NDArray[np.int64] | None = None,
) -> Added:
    """Embed pictures on all processes and add them under their ids on the first; skip those that this model embedded before.

    Args:
        gallery: the gallery; processes other than the first see the new items when they open it again.
        pictures: from :func:`load_pictures`; captions become metadata.
        embedder: the model.
        replace: whether to replace the embeddings of other models.
        rows: row numbers of the pictures to embed, in this order; None for all.

    Returns:
        The counts, on every process.

    Raises:
        XcompatError: another model embedded one of the pictures and ``replace`` is not set, or too many cannot be read.
    """
    process_state()  # must come first: rows are dealt only to processes that have joined the group
    wanted = np.arange(len(pictures)) if rows is None else rows
    todo = from_main_process(lambda: _missing(gallery, pictures[ID][:], wanted, embedder, replace))
    bad = BadSamples(total=len(wanted))
    with progress_bar() as bar:
        task = bar.add_task(f"embedding images with {embedder.name}", total=len(todo), rate="")
        committed, waiting = time.monotonic(), Waiting()
        for kept, embeds in _embedded(embedder, pictures, todo, bad, waiting):
            rate_of(bar, task, len(kept), "images", waiting)
            if is_main_process():
                gallery.add(embeds, *_described(pictures, kept), version=embedder, replace=replace)
                if time.monotonic() - committed > COMMIT_EVERY:
                    gallery.commit()
                    committed = time.monotonic()
    if is_main_process():
        gallery.commit()
    barrier()
    return Added(len(todo) - len(bad.reasons), len(wanted) - len(todo), len(bad.reasons))


def _missing(gallery: Gallery, ids: Sequence[str], wanted: np.ndarray, embedder: Embedder, replace: bool) -> np.ndarray:
    """Return the wanted rows that this model has not embedded."""
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
    """Deal blocks of rows to all processes in turn; every process yields the embeddings of all, in the order of the rows."""
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
    """Return ids and metadata of rows; the metadata hold the first caption."""
    columns = dataset.select_columns([name for name in (ID, CAPTION) if name in dataset.column_names])[rows]
    captions = columns.get(CAPTION, [None] * len(rows))
    return columns[ID], [{CAPTION: texts[0]} if (texts := captions_of(value)) else None for value in captions]


def load_pictures(path: str | Path) -> hf.Dataset:
    """Read pictures, with captions if the source has any.

    Args:
        path: as in :class:`~xcompat.data.PairSource`.

    Returns:
        A data set with the columns ``image`` and ``id``, and ``caption`` if there are captions.
    """
    try:
        dataset = load_pairs(PairSource(path=str(path)))
    except XcompatError:  # perhaps there are no captions; any other fault is raised again here
        dataset = load_pairs(PairSource(path=str(path), captions=False))
    assert isinstance(dataset, hf.Dataset)
    return dataset


def origins_of(gallery: Gallery, ids: Sequence[str]) -> list[Fingerprint | None]:
    """Return the model that embedded each picture of a folder; refuse a folder that has no picture of the gallery."""
    origins = gallery.find(ids)
    if all(origin is None for origin in origins):
        raise XcompatError(
            f"none of the {len(ids)} pictures is in {gallery.path}: ids are the paths below the folder that the gallery was "
            f"built from, and the first one here is {ids[0]!r}"
        )
    return origins
