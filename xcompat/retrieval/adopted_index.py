"""Adopted faiss indexes, which are refused if they change after adoption."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray
from typing_extensions import override

from xcompat.core.checksums import FileRecord, file_record
from xcompat.core.errors import XcompatError
from xcompat.core.lazy import faiss
from xcompat.retrieval.faiss_index import FaissIndex, map_faiss
from xcompat.retrieval.filtered_search import Found
from xcompat.retrieval.integrity import require_whole
from xcompat.retrieval.manifest import (
    SEGMENTS,
    AdoptedRecord,
    Manifest,
    Metric,
    SegmentRecord,
    kept_manifests,
    read_manifest,
)
from xcompat.retrieval.own_ids import LABELS_FILE

SAMPLED, BLOCK_BYTES = 64, 4096
"""Number and size of the blocks to compare when opening a file, including its head and tail."""
_HEAD = struct.Struct("<4siq")  # head of every faiss index: type, dimension and number of vectors

Stamp = tuple[int, int]
"""Size in bytes, and time of the last write in ns."""


class AdoptedIndex(FaissIndex):
    """Index outside the gallery. A segment can use only its first rows; each access checks the file."""

    def __init__(
        self,
        index: faiss.Index,
        metric: Metric,
        record: SegmentRecord,
        stamp: Stamp,
        labels_N: NDArray[np.int64] | None = None,
    ) -> None:
        super().__init__(index, metric, labels_N=labels_N)
        assert record.adopted is not None
        self.path, self.stamp, self._known = Path(record.adopted), stamp, record.rows

    @property
    def rows(self) -> int:
        """Number of vectors that the segment uses."""
        return self._known

    @override
    def search(self, queries_Qd: NDArray[np.float32], k: int, kept_N: NDArray[np.bool_] | None = None) -> Found:
        more = int(self.index.ntotal) - self._known
        if more:
            kept_N = np.ones(self._known, bool) if kept_N is None else kept_N
            if self.labels is None:
                kept_N = np.concatenate([kept_N, np.zeros(more, bool)])
        with self._watch_file():
            return super().search(queries_Qd, k, kept_N)

    @override
    def vectors(self, rows_n: NDArray[np.int64]) -> NDArray[np.float32]:
        with self._watch_file():
            return super().vectors(rows_n)

    @contextmanager
    def _watch_file(self) -> Iterator[None]:
        """Raise if the memory-mapped file changes meanwhile."""
        self._require_same()
        yield
        self._require_same()

    def _require_same(self) -> None:
        if stamp_of(self.path) != self.stamp:
            raise XcompatError(f"{self.path} has changed while it was open; open the gallery again")


def open_adopted(record: SegmentRecord, metric: Metric, gallery: Path) -> AdoptedIndex:
    """Open a segment's adopted index.

    Raises:
        XcompatError: the index is missing or has changed; with the fix.
    """
    assert record.adopted is not None
    path = Path(record.adopted)
    stamp = stamp_of(path)
    if not _is_same(path, record, stamp):
        raise XcompatError(_change(path, record, gallery))
    index = AdoptedIndex(map_faiss(path), metric, record, stamp, read_labels(record, gallery))
    if index.index.ntotal != _rows_adopted(record):
        raise XcompatError(_change(path, record, gallery))
    return index


def read_labels(record: SegmentRecord, gallery: Path) -> NDArray[np.int64] | None:
    """Return the ids stored inside the index for a segment's rows; None if they are 0, 1, 2 and so on."""
    if LABELS_FILE not in record.files:
        return None
    path = require_whole(gallery, gallery / SEGMENTS / record.name / LABELS_FILE, record.files[LABELS_FILE])
    return np.load(path, mmap_mode="r", allow_pickle=False)


def inspect_file(path: Path) -> tuple[FileRecord, AdoptedRecord]:
    """Return an index file's size and checksum, and facts to recognise it.

    Raises:
        XcompatError: the file does not exist, or changes meanwhile.
    """
    stamp = stamp_of(path)
    seen = AdoptedRecord(mtime_ns=stamp[1], sample=sampled_checksum(path), rows=_rows_in(path) or 0)
    whole = _checksum(path, stamp)
    if stamp_of(path) != stamp:
        raise XcompatError(f"{path} is being written; wait until it is complete, and try again")
    return whole, seen


def stamp_of(path: Path) -> Stamp:
    """Return the size and last write time of a faiss index file that a gallery adopted.

    Raises:
        XcompatError: it does not exist.
    """
    try:
        stat = path.stat()
    except OSError:
        raise XcompatError(f"{path} does not exist; restore the faiss index at this path, or roll back") from None
    return stat.st_size, stat.st_mtime_ns


def sampled_checksum(path: Path) -> str:
    """Return the XXH3-128 checksum of evenly spaced file blocks."""
    digest = xxhash.xxh3_128()
    last = max(path.stat().st_size - BLOCK_BYTES, 0)
    with path.open("rb") as file:
        for place in sorted({last * number // (SAMPLED - 1) for number in range(SAMPLED)}):
            file.seek(place)
            digest.update(file.read(BLOCK_BYTES))
    return digest.hexdigest()


def read_state(folder: Path, generation: int | None) -> Manifest:
    """Read a gallery state, with the newest record of its adopted index.

    A resync leaves earlier rows unchanged, so earlier states can use the longer file.

    Args:
        folder: the gallery folder.
        generation: state number; None to use the current state.
    """
    manifest = read_manifest(folder, generation)
    if generation is None or not any(record.adopted for record in manifest.segments):
        return manifest
    known = [record for state in kept_manifests(folder) for record in state.segments]
    return manifest.model_copy(update={"segments": tuple(_newest(record, known) for record in manifest.segments)})


def _newest(record: SegmentRecord, known: list[SegmentRecord]) -> SegmentRecord:
    if record.adopted is None or record.adopted_file is None or not Path(record.adopted).is_file():
        return record
    size = Path(record.adopted).stat().st_size
    for later in reversed(known):
        knows = later.name == record.name or record.adopted_file.xxh3 in later.extends
        if knows and later.adopted_file is not None and later.adopted_file.size == size:
            return record.model_copy(update={"adopted_file": later.adopted_file, "adopted_seen": later.adopted_seen})
    return record


def _is_same(path: Path, record: SegmentRecord, stamp: Stamp) -> bool:
    """Compare in full if the time differs, e.g. for a copy."""
    seen, known = record.adopted_seen, record.adopted_file
    if known is None or known.size != stamp[0]:
        return False
    if seen is not None and seen.mtime_ns == stamp[1]:
        return seen.sample == sampled_checksum(path)
    return _checksum(path, stamp) == known


@lru_cache(maxsize=64)
def _checksum(path: Path, stamp: Stamp) -> FileRecord:
    """Return size and checksum, cached until the stamp changes."""
    return file_record(path)


def _change(path: Path, record: SegmentRecord, gallery: Path) -> str:
    rows, adopted = _rows_in(path), _rows_adopted(record)
    back = "restore the original index"
    if rows is None:
        return f"{path} is no longer a faiss index; {back}"
    if rows > adopted:
        taking = f"accept the added vectors with `xcompat gallery resync {gallery} --ids FILE`"
        return f"{path} holds {rows} vectors, but the gallery knows {adopted}: {taking}, or {back}"
    if rows < adopted:
        anew = f"or accept it with `xcompat gallery resync {gallery}`" if rows >= record.rows else "or adopt it again"
        return (
            f"{path} holds {rows} vectors, but the gallery knows {adopted}: "
            f"some were removed, and ids no longer match; {back}, {anew}"
        )
    return f"{path} still holds {rows} vectors, but its bytes have changed since adoption; {back}, or adopt it again"


def _rows_adopted(record: SegmentRecord) -> int:
    return record.rows if record.adopted_seen is None else record.adopted_seen.rows


def read_head(path: Path) -> tuple[int, int] | None:
    """Return dimension and number of vectors without faiss, which can crash on damaged files; None for other files."""
    with path.open("rb") as file:
        head = file.read(_HEAD.size)
    if len(head) < _HEAD.size or not head.startswith(b"I"):
        return None
    _, dim, rows = _HEAD.unpack(head)
    return int(dim), int(rows)


def _rows_in(path: Path) -> int | None:
    head = read_head(path)
    return head[1] if head is not None else None
