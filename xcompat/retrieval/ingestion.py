"""Ingestion of images and texts on all processes, with regular commits and restarts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from xcompat.core.distributed import from_main_process, gather_objects, is_main_process, process_state, rank, world_size
from xcompat.core.errors import XcompatError
from xcompat.core.interrupts import Interrupts
from xcompat.core.parallel import Executor
from xcompat.core.progress import Waiting, advance_bar, notice, progress_bar
from xcompat.data import BadSamples
from xcompat.embeddings.embed import embed_contents
from xcompat.models.embedder import Embedder
from xcompat.retrieval.gallery import Gallery
from xcompat.retrieval.original_checks import find_changed_originals
from xcompat.retrieval.originals import Originals, Parts
from xcompat.retrieval.versions import require_like_sides

COMMIT_EVERY = 300.0
"""Seconds between commits, the largest loss of a killed process."""


class IngestCounts(NamedTuple):
    """Counts of originals.

    Args:
        added: embedded now.
        present: embedded before by this model.
        unreadable: unreadable.
        truncated: texts truncated to the model's limit.
        cached: embedded before by re-ranked searches.
    """

    added: int
    present: int
    unreadable: int
    truncated: int = 0
    cached: int = 0


class _Part(NamedTuple):
    rows: NDArray[np.int64]
    embeds_ND: NDArray[np.float32]
    side_NS: NDArray[np.float32] | None


def ingest(
    gallery: Gallery,
    originals: Originals,
    embedder: Embedder,
    replace: bool = False,
    rows: NDArray[np.int64] | None = None,
    spread: Executor | None = None,
    side_info: Embedder | None = None,
    by: str = "add",
    same_originals: bool = False,
) -> IngestCounts:
    """Embed originals on all processes, add them on the main process, and skip known originals.

    Args:
        gallery: the gallery; other processes must open it again.
        originals: images or texts.
        embedder: the model.
        replace: whether to replace other models' embeddings, and those of changed originals.
        rows: rows to embed, in this order; None to embed all.
        spread: engine workers that embed instead of the processes.
        side_info: the model for side-information to store.
        by: operation name in the history.
        same_originals: as in :meth:`~xcompat.retrieval.gallery.Gallery.add`.

    Returns:
        The counts, on every process.

    Raises:
        XcompatError: an id exists without ``replace``, too many originals are unreadable, or the model cannot embed them.
    """
    process_state()  # must come first: only processes that have joined the group get rows
    for model in (embedder, *([side_info] if side_info is not None else [])):
        originals.require(model)
    wanted = np.arange(len(originals.ids)) if rows is None else rows
    todo = from_main_process(lambda: _missing(gallery, originals, wanted, embedder, replace, side_info))
    bad = BadSamples(originals.max_bad_share, len(wanted), what=originals.kind, raised_by="--max-bad-share")
    before = embedder.processor.count_truncated
    with progress_bar() as bar, Interrupts() as interrupts:
        task = bar.add_task(f"embedding {originals.kind} with {embedder.name}", total=len(todo), rate="")
        committed, waiting = time.monotonic(), Waiting()
        if spread is None:
            embedded = _embed_parts(embedder, originals, todo, bad, waiting, side_info)
        else:
            embedded = _embedded_by_workers(embedder, originals, todo, bad, spread)
        for kept, embeds, side in embedded:
            advance_bar(bar, task, len(kept), originals.kind, waiting)
            if is_main_process():
                ids = [originals.ids[row] for row in kept.tolist()]
                gallery.add(embeds, ids, originals.metadata(kept), embedder, side, replace, side_info, same_originals)
                if time.monotonic() - committed > COMMIT_EVERY:
                    gallery.commit(by)
                    committed = time.monotonic()
            if any(gather_objects(interrupts.asked, shared=True)):  # save finished embeddings
                if is_main_process():
                    gallery.commit(by)
                raise KeyboardInterrupt
    if is_main_process():
        gallery.commit(by)
    truncated = sum(gather_objects(embedder.processor.count_truncated - before, shared=True))  # waits for the commit
    return IngestCounts(len(todo) - len(bad.reasons), len(wanted) - len(todo), len(bad.reasons), truncated)


def _missing(
    gallery: Gallery,
    originals: Originals,
    wanted: NDArray[np.int64],
    embedder: Embedder,
    replace: bool,
    side_info: Embedder | None,
) -> NDArray[np.int64]:
    """Return rows not embedded by this model; with ``replace`` also changed originals."""
    originals.require_same(gallery)
    ids = originals.ids
    place = gallery.find([ids[row] for row in wanted.tolist()])
    if not replace:
        foreign = [
            row for row, version in zip(wanted.tolist(), place, strict=True) if version not in (None, embedder.fingerprint)
        ]
        if foreign:
            raise XcompatError(
                f"{ids[foreign[0]]!r} and {len(foreign) - 1} more are in the gallery already, embedded by another model; "
                "remove them from the input, or replace their embeddings (--replace)"
            )
    missing_n = np.array([version != embedder.fingerprint for version in place], dtype=bool)
    if (found := find_changed_originals(gallery, originals, wanted[~missing_n], embedder)) is not None:
        if found.on_side and not replace:
            notice(
                f"{gallery.path} holds {found.named} on their side, as embedded before EXIF orientation was applied; "
                "run xcompat gallery add --replace to re-embed them"
            )
        elif not replace:
            raise XcompatError(
                f"{gallery.path} has other {originals.kind} under the same ids: {found.named}; {originals.tell_apart}, or "
                "replace the stored ones (xcompat gallery add --replace)"
            )
        else:
            missing_n |= np.isin(wanted, found.rows)
    missing = wanted[missing_n]
    if len(missing) or side_info is not None:  # else there is nothing to add
        _require_sides(gallery, embedder, side_info)
    return missing


def _require_sides(gallery: Gallery, embedder: Embedder, side_info: Embedder | None) -> None:
    """Raise before hours of embedding if side-information differs from the gallery's."""
    digest = embedder.fingerprint.digest
    have = {segment.side_dim for segment in gallery.segments if segment.record.version == digest}
    known = next((version for version in gallery.manifest.versions if version.digest == digest), None)
    if have and known is not None:
        by = side_info.fingerprint.digest if side_info is not None else None
        require_like_sides(known, have, side_info.dim if side_info is not None else 0, by)


def _embed_parts(
    embedder: Embedder,
    originals: Originals,
    rows: NDArray[np.int64],
    bad: BadSamples,
    waiting: Waiting,
    side_info: Embedder | None,
) -> Iterator[_Part]:
    """Distribute parts over all processes; each yields all embeddings, in row order."""
    size = originals.part(embedder)
    parts = [rows[start : start + size] for start in range(0, len(rows), size)]
    mine = np.concatenate([rows[:0], *parts[rank() :: world_size()]])
    embedded = _with_sides(originals, originals.embed(embedder, mine, bad, waiting), side_info)
    nothing = _Part(rows[:0], np.empty((0, embedder.dim), np.float32), None)
    while True:
        gathered = gather_objects(next(embedded, nothing), shared=True)
        bad.merge_processes()
        if not any(len(part.rows) for part in gathered):
            return
        yield from (part for part in gathered if len(part.rows))


def _with_sides(originals: Originals, parts: Parts, side_info: Embedder | None) -> Iterator[_Part]:
    """Also embed the rows with the side-information model."""
    for kept, embeds in parts:
        if side_info is None:
            yield _Part(kept, embeds, None)
            continue
        made = list(originals.embed(side_info, kept))
        places = np.argsort(np.concatenate([rows for rows, _ in made]))  # texts come back sorted by length
        order = np.empty_like(places)
        order[np.argsort(kept)] = places
        yield _Part(kept, embeds, np.concatenate([sides for _, sides in made])[order])


def _embedded_by_workers(
    embedder: Embedder, originals: Originals, rows: NDArray[np.int64], bad: BadSamples, spread: Executor
) -> Iterator[_Part]:
    """Let workers embed the parts, and yield the embeddings."""
    size = originals.part(embedder)
    parts = (rows[start : start + size] for start in range(0, len(rows), size))
    for part, made in spread(embed_contents, embedder, ((part, originals.contents(part)) for part in parts)):
        for name, reason in made.unread.items():
            bad.add(name, reason)
        embedder.processor.count_truncated += made.truncated  # counted in another process
        read = np.isfinite(made.embeds_ND[:, 0])
        if read.any():
            yield _Part(part[read], made.embeds_ND[read], None)
