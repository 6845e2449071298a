"""Make one tidy generation of a gallery, and forget how it came about."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from xcompat.files import files_below
from xcompat.progress import progress_bar, rate_of
from xcompat.retrieval.leftovers import clear
from xcompat.retrieval.manifest import forget_earlier
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
    staging = gallery.begin()
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
    gallery.show(staging.commit("compact", [segment.record.name for segment in untidy]))
    forget_earlier(gallery.path, gallery.generation)
    clear(gallery.path, gallery.backend)
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


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in files_below(folder) if path.is_file())
