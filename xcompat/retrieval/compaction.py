"""Compact a gallery: join small segments, drop removed rows, and delete earlier generations."""

from __future__ import annotations

from pathlib import Path

from xcompat.core.files import files_below
from xcompat.core.progress import notice, progress_bar, rate_of
from xcompat.retrieval.leftovers import clear
from xcompat.retrieval.manifest import VersionRecord, forget_earlier
from xcompat.retrieval.segment import BLOCK, ROWS_FILE, SIDE_FILE, Segment
from xcompat.retrieval.snapshot import Snapshot
from xcompat.retrieval.staging import FLUSH_BYTES, Staging


def compact_gallery(staging: Staging) -> None:
    """Join small segments, drop removed rows, and delete earlier generations with the files that only they name.

    Memory holds the embeddings of one new segment: ``FLUSH_BYTES`` of them, or up to twice as many as train the index.
    """
    gallery = staging.base
    untidy = {version.digest: _untidy(gallery, version) for version in gallery.manifest.versions}
    total = sum(len(segment) for segments in untidy.values() for segment in segments)
    with progress_bar() as bar:
        task = bar.add_task(f"compacting {gallery.path.name}", total=total, rate="")
        for version in gallery.manifest.versions:
            left, fewest = sum(map(len, untidy[version.digest])), gallery.backend.fewest(version.dim)
            fewest = fewest if fewest <= left else 0
            for segment in untidy[version.digest]:
                for rows_n, items in segment.blocks(BLOCK):
                    staging.put(version, items)
                    rate_of(bar, task, len(rows_n), "embeddings")
                    left -= len(rows_n)
                    if not left or left >= fewest:  # fewer than that would be left to train no index
                        staging.flush_if_large(fewest)
            staging.flush()
    dropped = [segment.record.name for segments in untidy.values() for segment in segments]
    forget_earlier(gallery.path, staging.commit("compact", dropped).generation)
    clear(gallery.path, gallery.backend)


def _untidy(gallery: Snapshot, version: VersionRecord) -> list[Segment]:
    """Return the segments to rewrite: those with removed rows, and small or differently indexed ones that can join others."""
    same = [segment for segment in gallery.segments if segment.record.version == version.digest]
    rows, fewest = sum(map(len, same)), gallery.backend.fewest(version.dim)
    if 0 < rows < fewest:
        notice(
            f"{rows:,} embeddings of {version.fingerprint} do not train {gallery.manifest.index}, which takes {fewest:,}: "
            "they are searched exactly; add more, or build the gallery with an index of fewer lists"
        )
    found = []
    for segment in same:
        record = segment.record
        beside = sum(record.files[name].size for name in (ROWS_FILE, SIDE_FILE) if name in record.files)
        small = record.rows * version.dim * 4 + beside < FLUSH_BYTES or record.rows < fewest <= rows
        makeshift = record.adopted is None and record.index != gallery.manifest.index and gallery.manifest.milvus is None
        if record.n_removed or (small and len(same) > 1) or (makeshift and fewest <= rows and len(same) > 1):
            found.append(segment)
    if 0 < sum(map(len, found)) < fewest:  # a tidy one joins them, that they train an index
        found += sorted((segment for segment in same if segment not in found and segment.record.adopted is None), key=len)[:1]
    return found


def folder_size(folder: Path) -> int:
    """Return the size of all files of a gallery in bytes."""
    return sum(path.stat().st_size for path in files_below(folder) if path.is_file())
