"""Gallery segment: embeddings added together, in immutable files."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from xcompat.core.checksums import FileRecord, difference, file_record
from xcompat.core.errors import XcompatError
from xcompat.core.files import atomic_path, make_folder, write_array, write_blocks
from xcompat.retrieval.adopted_index import open_adopted
from xcompat.retrieval.faiss_building import build_faiss, is_lossless
from xcompat.retrieval.faiss_index import FaissIndex, open_faiss, write_faiss
from xcompat.retrieval.filtered_search import Found, ReadRows
from xcompat.retrieval.integrity import REPAIR_ADVICE, require_whole
from xcompat.retrieval.items import Items
from xcompat.retrieval.manifest import REMOVED, SEGMENTS, Manifest, Metric, SegmentRecord

if TYPE_CHECKING:
    import pyarrow as pa

INDEX_FILE = "index.faiss"
ROWS_FILE = "rows.arrow"
VECTORS_FILE = "vectors.npy"
SIDE_FILE = "side_info.npy"
HASHES_FILE = "id_hashes.npy"
ORDER_FILE = "id_order.npy"
BLOCK = 65536
FILTERS_KEPT = 8


def write_segment(folder: Path, items: Items, version: str, manifest: Manifest) -> SegmentRecord:
    """Write a segment with the manifest's metric and index type; return its record, for the next manifest."""
    name = secrets.token_hex(8)
    dim = items.embeds[0].shape[1]
    make_folder(folder / SEGMENTS)
    with atomic_path(folder / SEGMENTS / name) as temporary:
        temporary.mkdir()
        write_rows(temporary, items)
        index, used = build_faiss(manifest.index, dim, manifest.metric, items.embeds, len(items))
        write_faiss(index.index, temporary / INDEX_FILE)
        if not is_lossless(used):
            write_blocks(temporary / VECTORS_FILE, items.embeds, (len(items), dim), "<f4")
        if items.side_info:
            write_blocks(temporary / SIDE_FILE, items.side_info, (len(items), items.side_dim), "<f4")
        files = {path.name: file_record(path) for path in sorted(temporary.iterdir())}
    return SegmentRecord(name=name, version=version, rows=len(items), index=used, files=files)


def write_rows(folder: Path, items: Items) -> None:
    """Write ids, metadata and the sorted hashes for id lookup into a segment folder."""
    columns = {"id": pa.array(items.ids, pa.large_string()), "metadata": pa.array(items.metadata, pa.large_string())}
    table = pa.table(columns)
    with pa.OSFile(str(folder / ROWS_FILE), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    hashes_N = id_hashes(items.ids)
    order_N = np.argsort(hashes_N, kind="stable")
    write_array(folder / HASHES_FILE, hashes_N[order_N])
    write_array(folder / ORDER_FILE, order_N)


class Segment:
    """A segment opened for reading, with files memory-mapped on first use.

    Args:
        folder: the gallery folder.
        record: the segment's record in the manifest.
        metric: how vectors are compared.
    """

    def __init__(self, folder: Path, record: SegmentRecord, metric: Metric) -> None:
        self.gallery = folder
        self.folder = folder / SEGMENTS / record.name
        self.record = record
        self.metric = metric
        self._matched: dict[str, NDArray[np.bool_]] = {}
        self._last_tuned: tuple[str, FaissIndex] | None = None

    def __len__(self) -> int:
        """Count the embeddings, without removed rows."""
        return self.record.rows - self.record.n_removed

    @cached_property
    def index(self) -> FaissIndex:
        """Search index for the vectors."""
        return self._open()

    def _open(self) -> FaissIndex:
        if self.record.adopted is not None:
            return open_adopted(self.record, self.metric, self.gallery)
        return open_faiss(self._file(INDEX_FILE), self.metric, self._original_reader)

    @property
    def _original_reader(self) -> ReadRows | None:
        """Reader for the original vectors, if stored outside the index."""
        file = self.record.files.get(VECTORS_FILE)
        return None if file is None else partial(_read_rows, self.gallery, self.folder / VECTORS_FILE, file)

    def _open_tuned(self, parameters: str) -> FaissIndex:
        """Open another index for a search effort, because parallel searches may differ; cache the last one."""
        tuned = self._last_tuned  # read once, because another thread may replace it
        if tuned is None or tuned[0] != parameters:
            tuned = parameters, self._open()
            tuned[1].set_parameters(parameters)
            self._last_tuned = tuned
        return tuned[1]

    def _file(self, name: str) -> Path:
        """Check a file against its checksum and return its path."""
        if name not in self.record.files:
            raise XcompatError(f"{self.folder} was written without {name}; {REPAIR_ADVICE}")
        return require_whole(self.gallery, self.folder / name, self.record.files[name])

    @cached_property
    def _rows(self) -> pa.Table:
        return pa.ipc.open_file(pa.memory_map(str(self._file(ROWS_FILE)))).read_all()

    @cached_property
    def kept_mask(self) -> NDArray[np.bool_] | None:
        """Mask of rows not removed, (rows,) bool; None if none is removed."""
        if self.record.removed is None:
            return None
        file = self.gallery / REMOVED / self.record.removed
        packed = _map_file(
            file if self.record.removed_file is None else require_whole(self.gallery, file, self.record.removed_file)
        )
        return ~np.unpackbits(packed, count=self.record.rows, bitorder="little").astype(bool)

    def present(self) -> NDArray[np.int64]:
        """Return the numbers of rows not removed."""
        return np.arange(self.record.rows) if self.kept_mask is None else np.flatnonzero(self.kept_mask)

    def ids(self, rows_n: NDArray[np.int64]) -> list[str]:
        """Return the rows' ids."""
        return self._rows.column("id").take(_indices(rows_n)).to_pylist()

    def metadata(self, rows_n: NDArray[np.int64]) -> list[dict[str, Any] | None]:
        """Return the rows' metadata."""
        return [None if text is None else json.loads(text) for text in self.metadata_text(rows_n)]

    def metadata_text(self, rows_n: NDArray[np.int64]) -> list[str | None]:
        """Return the rows' metadata as JSON texts."""
        return self._rows.column("metadata").take(_indices(rows_n)).to_pylist()

    def search(
        self, queries_Qd: NDArray[np.float32], k: int, where: Mapping[str, object] | None = None, parameters: str | None = None
    ) -> Found:
        """Find the nearest rows that match a filter and are not removed.

        Args:
            queries_Qd: (Q, d) float32.
            k: largest number of rows per query.
            where: as in :meth:`matching`; None to use all rows.
            parameters: search effort; None to use the default.

        Returns:
            (Q, k) scores, best first, and (Q, k) rows, padded with -1; k is at most the segment's rows.
        """
        kept_N = self.kept_mask if where is None else self.matching(where)
        index = self.index if parameters is None else self._open_tuned(parameters)
        return index.search(queries_Qd, min(k, self.record.rows), kept_N)

    def matching(self, where: Mapping[str, object]) -> NDArray[np.bool_]:
        """Return the mask (rows,) for rows that match a filter and are not removed; caches the last few.

        Args:
            where: key -> required value, or list of accepted values, from :func:`plain_filter`.
        """
        asked, known = json.dumps(where, sort_keys=True), self._matched
        if asked in known:
            return known[asked]
        found_N = self._match(where)
        self._matched = dict([*known.items(), (asked, found_N)][-FILTERS_KEPT:])  # a new dict: other threads may read the old
        return found_N

    def _match(self, where: Mapping[str, object]) -> NDArray[np.bool_]:
        found_N = np.zeros(self.record.rows, bool)
        for start in range(0, self.record.rows, BLOCK):
            rows_n = np.arange(start, min(start + BLOCK, self.record.rows))
            found_N[rows_n] = [_matches(metadata, where) for metadata in self.metadata(rows_n)]
        return found_N if self.kept_mask is None else found_N & self.kept_mask

    def keys(self) -> set[str]:
        """Return all rows' metadata keys, without removed rows."""
        rows = self.present()
        blocks = (rows[start : start + BLOCK] for start in range(0, len(rows), BLOCK))
        return {key for block in blocks for about in self.metadata(block) for key in about or ()}

    def rows_of(self, ids: Sequence[str], hashes_N: NDArray[np.uint64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Look up ids.

        Args:
            ids: N ids.
            hashes_N: their :func:`id_hashes`.

        Returns:
            Positions found in ``ids``, and their rows.
        """
        sorted_H, order_H = _map_file(self._file(HASHES_FILE)), _map_file(self._file(ORDER_FILE))
        first_N, last_N = np.searchsorted(sorted_H, hashes_N), np.searchsorted(sorted_H, hashes_N, side="right")
        positions, rows = [], []
        for position in np.flatnonzero(first_N < last_N).tolist():
            candidates = np.asarray(order_H[first_N[position] : last_N[position]])
            for row, name in zip(candidates.tolist(), self.ids(candidates), strict=True):
                if name == ids[position] and (self.kept_mask is None or self.kept_mask[row]):
                    positions.append(position)
                    rows.append(row)
        return np.array(positions, np.int64), np.array(rows, np.int64)

    def vectors(self, rows_n: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return stored vectors (n, d)."""
        return (self._original_reader or self.index.vectors)(rows_n)

    @property
    def side_dim(self) -> int:
        """Dimension of the stored side-information; 0 without any."""
        return int(_map_file(self._file(SIDE_FILE)).shape[1]) if SIDE_FILE in self.record.files else 0

    def side_info(self, rows_n: NDArray[np.int64]) -> NDArray[np.float32] | None:
        """Return stored side-information (n, S), if any."""
        return _map_file(self._file(SIDE_FILE))[rows_n] if SIDE_FILE in self.record.files else None

    def blocks(self, size: int, rows: NDArray[np.int64] | None = None) -> Iterator[tuple[NDArray[np.int64], Items]]:
        """Yield items block by block.

        Args:
            size: rows read at a time.
            rows: the rows to read; None to read all rows not removed.

        Yields:
            Row numbers and items.
        """
        rows = self.present() if rows is None else rows
        for start in range(0, len(rows), size):
            rows_n = rows[start : start + size]
            side = self.side_info(rows_n)
            sides = [side] if side is not None else []
            yield rows_n, Items([self.vectors(rows_n)], self.ids(rows_n), self.metadata_text(rows_n), sides)

    def missing(self) -> list[str]:
        """Return a line for each missing or truncated file."""
        gone = [path for path, record in self._written_files() if not path.is_file() or path.stat().st_size != record.size]
        return [f"{path} is missing or truncated" for path in gone]

    def find_damage(self) -> list[str]:
        """Compare every file with its checksum; return a line per difference."""
        return [line for path, record in self._written_files() for line in difference(path, record)]

    def _written_files(self) -> Iterator[tuple[Path, FileRecord]]:
        for name, record in self.record.files.items():
            yield self.folder / name, record
        if self.record.removed is not None and self.record.removed_file is not None:
            yield self.gallery / REMOVED / self.record.removed, self.record.removed_file
        if self.record.adopted is not None and self.record.adopted_file is not None:
            yield Path(self.record.adopted), self.record.adopted_file


def removed_rows(segment: Segment, generation: int, rows_n: NDArray[np.int64]) -> SegmentRecord:
    """Mark rows as removed; return the segment record for the next ``generation``."""
    folder = segment.gallery / REMOVED
    kept_N = np.ones(segment.record.rows, bool) if segment.kept_mask is None else segment.kept_mask.copy()
    kept_N[rows_n] = False
    name = f"{segment.record.name}-{generation:08d}.npy"
    with atomic_path(folder / name) as temporary:
        write_array(temporary, np.packbits(~kept_N, bitorder="little"))
    written = file_record(folder / name)
    return segment.record.model_copy(update={"removed": name, "removed_file": written, "n_removed": int((~kept_N).sum())})


def id_hashes(ids: Sequence[str]) -> NDArray[np.uint64]:
    """Return each id's hash, equal in every process."""
    import pandas as pd

    try:
        return pd.util.hash_array(np.array(ids, dtype=object), categorize=False)
    except UnicodeEncodeError:  # lone surrogates, which no stored id has; bytes hash like their texts
        encoded = [name.encode("utf-8", "surrogatepass") for name in ids]
        return pd.util.hash_array(np.array(encoded, dtype=object), categorize=False)


def _read_rows(gallery: Path, path: Path, record: FileRecord, rows_n: NDArray[np.int64]) -> NDArray[np.float32]:
    """Read vectors. A module-level function, so an index does not hold a reference to its segment."""
    return _map_file(require_whole(gallery, path, record))[rows_n]


def _map_file(path: Path) -> NDArray[Any]:
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        reason = " ".join(str(error).split())[:120]
        raise XcompatError(f"{path} cannot be read ({reason}); {REPAIR_ADVICE}") from None


def _indices(rows_n: NDArray[np.int64]) -> pa.Array:
    return pa.array(np.asarray(rows_n, np.int64))


def plain_filter(where: object) -> dict[str, object]:
    """Convert a metadata filter to plain JSON values instead of tuples, sets, arrays and NumPy values.

    Args:
        where: key -> required value, or accepted values.

    Raises:
        XcompatError: the filter is not a dictionary, or has invalid values.

    Example:
        >>> plain_filter({"colour": ("red", "blue"), "year": np.int64(2020)})
        {'colour': ['red', 'blue'], 'year': 2020}
    """
    if not isinstance(where, Mapping) or not all(isinstance(key, str) for key in where):
        raise XcompatError(f"the filter {where!r} is not a dictionary of metadata keys; use e.g. {{'colour': 'red'}}")
    return {key: _plain(value, key) for key, value in where.items()}


def _plain(value: object, key: str) -> object:
    value = value.tolist() if hasattr(value, "tolist") else value  # NumPy scalars too
    if isinstance(value, list | tuple | set | frozenset | range):
        return [_plain(each, key) for each in value]
    if isinstance(value, dict):
        return {name: _plain(each, key) for name, each in value.items()}
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise XcompatError(
        f"the filter of {key!r} holds a {type(value).__name__}; give texts, numbers, True, False or None, or a list of these"
    )


def _matches(metadata: Mapping[str, object] | None, where: Mapping[str, object]) -> bool:
    found = metadata or {}
    # a missing key does not match None, else a misspelt key would match everything
    return all(key in found and found[key] in (wanted if isinstance(wanted, list) else [wanted]) for key, wanted in where.items())
