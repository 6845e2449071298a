"""Make one tidy generation of a gallery, and forget how it came about."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from xcompat.progress import progress_bar, rate_of
from xcompat.retrieval.manifest import GENERATIONS, REMOVED, SEGMENTS, Manifest, known_generations
from xcompat.retrieval.segment import BLOCK, Segment
from xcompat.retrieval.staging import FLUSH_BYTES

if TYPE_CHECKING:
    from xcompat.retrieval.gallery import Gallery


def compact_gallery(gallery: Gallery) -> int:
    """Join small segments, drop removed rows, and delete whatever only earlier generations name.

    Args:
        gallery: the gallery.

    Returns:
        Bytes that were freed.
    """
    before = _size(gallery.path)
    staging = gallery.staging()
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
    earlier = {record.name: record for manifest in gallery.generations() for record in manifest.segments}
    manifest = staging.commit("compact", [segment.record.name for segment in untidy])
    for record in earlier.values():
        if record.name not in {kept.name for kept in manifest.segments}:
            gallery.backend.drop(record)
    _clear(gallery.path, manifest)
    gallery.publish("compact", [])
    return before - _size(gallery.path)


def _untidy(gallery: Gallery) -> list[Segment]:
    """Return the segments that are worth writing anew: with removed rows, of another index, or small ones beside others."""
    found = []
    for segment in gallery.segments:
        record = segment.record
        small = record.rows * gallery.manifest.version(record.version).dim * 4 < FLUSH_BYTES
        same = [other for other in gallery.segments if other.record.version == record.version]
        makeshift = record.adopted is None and record.index != gallery.manifest.index and gallery.manifest.milvus is None
        if record.n_removed or (small and len(same) > 1) or (makeshift and len(same) > 1):
            found.append(segment)
    return found


def _clear(folder: Path, manifest: Manifest) -> None:
    """Delete what the generation does not name; the generations that do go first, so that none is left without its files."""
    for number in known_generations(folder):
        if number != manifest.generation:
            (folder / GENERATIONS / f"{number:08d}.json").unlink()
    named = {record.name for record in manifest.segments}
    for segment in (folder / SEGMENTS).glob("*"):
        if segment.name not in named:
            shutil.rmtree(segment)
    removed = {record.removed for record in manifest.segments}
    for file in (folder / REMOVED).glob("*"):
        if file.name not in removed:
            file.unlink()


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
