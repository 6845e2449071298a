"""Ingestion of images and texts on all processes, with regular commits and restarts."""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from xcompat.core.distributed import from_main_process, gather_objects, is_main_process, process_state
from xcompat.core.interrupts import Interrupts
from xcompat.core.parallel import Executor
from xcompat.core.progress import Waiting, advance_bar, progress_bar
from xcompat.data import BadSamples
from xcompat.models.embedder import Embedder
from xcompat.retrieval.gallery import Gallery
from xcompat.retrieval.original_checks import select_missing
from xcompat.retrieval.originals import Originals, embed_on_processes, embed_on_workers

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
    todo = from_main_process(lambda: select_missing(gallery, originals, wanted, embedder, replace, side_info))
    bad = BadSamples(originals.max_bad_share, len(wanted), what=originals.kind, raised_by="--max-bad-share")
    before = embedder.processor.count_truncated
    with progress_bar() as bar, Interrupts() as interrupts:
        task = bar.add_task(f"embedding {originals.kind} with {embedder.name}", total=len(todo), unit=originals.kind)
        committed, waiting = time.monotonic(), Waiting()
        if spread is not None:
            embedded = embed_on_workers(embedder, originals, todo, bad, spread)
        else:
            embedded = embed_on_processes(embedder, originals, todo, bad, waiting, side_info)
        for kept, embeds, side in embedded:
            advance_bar(bar, task, len(kept), waiting)
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
