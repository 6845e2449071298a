"""Compact a gallery: join small segments, drop removed rows, and delete earlier generations."""

from __future__ import annotations

from pathlib import Path

from xcompat.files import files_below
from xcompat.progress import progress_bar, rate_of
from xcompat.retrieval.leftovers import clear
from xcompat.retrieval.manifest import forget_earlier
from xcompat.retrieval.segment import BLOCK, Segment
from xcompat.retrieval.snapshot import Snapshot
from xcompat.retrieval.staging import FLUSH_BYTES, Staging


def compact_gallery(staging: Staging) -> None:
    """Join small segments, drop removed rows, and delete earlier generations with the files that only they name."""
    gallery = staging.base
    untidy = _untidy(gallery)
    with progress_bar() as bar:
        task = bar.add_task(f"compacting {gallery.path.name}", total=sum(map(len, untidy)), rate="")
        for version in gallery.manifest.versions:
            for segment in (segment for segment in untidy if segment.record.version == version.digest):
                for rows_n, items in segment.blocks(BLOCK):
                    staging.put(version, items)
                    rate_of(bar, task, len(rows_n), "embeddings")
                    staging.flush_if_large()
            staging.flush()
    forget_earlier(gallery.path, staging.commit("compact", [segment.record.name for segment in untidy]).generation)
    clear(gallery.path, gallery.backend)


def _untidy(gallery: Snapshot) -> list[Segment]:
    """Return the segments to rewrite: those with removed rows, and small or differently indexed ones that can join others."""
    found = []
    for segment in gallery.segments:
        record = segment.record
        small = record.rows * gallery.manifest.version(record.version).dim * 4 < FLUSH_BYTES
        same = [other for other in gallery.segments if other.record.version == record.version]
        makeshift = record.adopted is None and record.index != gallery.manifest.index and gallery.manifest.milvus is None
        if record.n_removed or (small and len(same) > 1) or (makeshift and len(same) > 1):
            found.append(segment)
    return found


def folder_size(folder: Path) -> int:
    """Return the size of all files of a gallery in bytes."""
    return sum(path.stat().st_size for path in files_below(folder) if path.is_file())
