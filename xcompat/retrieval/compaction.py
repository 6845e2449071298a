"""Compaction of galleries."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from xcompat.core.progress import advance_bar, notice, progress_bar
from xcompat.retrieval.faiss_building import fewest_vectors, make_index
from xcompat.retrieval.leftovers import clear
from xcompat.retrieval.manifest import VersionRecord, forget_earlier
from xcompat.retrieval.segment import BLOCK, ROWS_FILE, SIDE_FILE, Segment
from xcompat.retrieval.snapshot import Snapshot
from xcompat.retrieval.staging import FLUSH_BYTES, Staging


def compact_gallery(staging: Staging) -> None:
    """Join small segments, drop removed rows, and delete earlier generations.

    Memory holds one new segment: ``FLUSH_BYTES``, or up to twice the number of vectors that trains the index.
    """
    gallery = staging.base
    untidy = {version.digest: _untidy(gallery, version) for version in gallery.manifest.versions}
    total = sum(len(segment) for segments in untidy.values() for segment in segments)
    with progress_bar() as bar:
        task = bar.add_task(f"compacting {gallery.path.name}", total=total, unit="embeddings")
        for version in gallery.manifest.versions:
            left, fewest = sum(map(len, untidy[version.digest])), _fewest(gallery, version)
            fewest = fewest if fewest <= left else 0
            for segment in untidy[version.digest]:
                for rows_n, items in segment.blocks(BLOCK):
                    staging.put(version, items)
                    advance_bar(bar, task, len(rows_n))
                    left -= len(rows_n)
                    if not left or left >= fewest:  # else too few would remain to train an index
                        staging.flush_if_large(fewest)
            staging.flush()
    dropped = [segment.record.name for segments in untidy.values() for segment in segments]
    forget_earlier(gallery.path, staging.commit("compact", dropped).generation)
    clear(gallery.path)


def _fewest(gallery: Snapshot, version: VersionRecord) -> int:
    """Return the minimum number of vectors to train the gallery's index type."""
    return fewest_vectors(make_index(gallery.manifest.index, version.dim, gallery.metric))


def _untidy(gallery: Snapshot, version: VersionRecord) -> list[Segment]:
    """Return segments with removed rows, and small or differently indexed segments that can be merged."""
    same = [segment for segment in gallery.segments if segment.record.version == version.digest]
    rows, fewest = sum(map(len, same)), _fewest(gallery, version)
    if 0 < rows < fewest:
        notice(
            f"{rows:,} embeddings of {version.fingerprint} are too few to train {gallery.manifest.index}, which needs "
            f"{fewest:,}: search is exact; add more, or build the gallery with an index of fewer lists"
        )
    found = []
    for segment in same:
        record = segment.record
        beside = sum(record.files[name].size for name in (ROWS_FILE, SIDE_FILE) if name in record.files)
        small = record.rows * version.dim * 4 + beside < FLUSH_BYTES or record.rows < fewest <= rows
        makeshift = record.adopted is None and record.index != gallery.manifest.index
        if record.n_removed or (small and len(same) > 1) or (makeshift and fewest <= rows and len(same) > 1):
            found.append(segment)
    if 0 < sum(map(len, found)) < fewest:  # add one more segment to train an index
        found += sorted((segment for segment in same if segment not in found and segment.record.adopted is None), key=len)[:1]
    return found


def folder_size(folder: Path) -> int:
    """Return a gallery's total file size in bytes. Other processes can delete files meanwhile: these do not count."""
    size = 0
    for place, _, names in os.walk(folder):  # skips folders that are gone
        for name in names:
            with suppress(FileNotFoundError):
                size += os.stat(os.path.join(place, name)).st_size  # noqa: PTH116, PTH118 - as os.walk gives them
    return size
