"""Embeddings on disk: sharded, memory-mapped and checked against their checksums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import override

from xcompat.core.checksums import FileRecord, difference_once, file_record
from xcompat.core.errors import XcompatError
from xcompat.core.files import atomic_path, read_json, write_array, write_json
from xcompat.core.fingerprint import Fingerprint

SCHEMA = 1
FULL = "float32"
"""Precision of caches that name none."""


class DamagedShardError(XcompatError):
    """A shard of a cache is missing or damaged."""


class MissingShardError(DamagedShardError):
    """A shard of a cache is missing."""


@dataclass(frozen=True)
class CacheInfo:
    """Content of ``cache.json``, which marks a complete cache.

    Args:
        fingerprint: digest of the embedding model.
        name: the model's display name.
        data: digest of the embedded items, in order.
        kind: ``texts`` or ``images``.
        rows: number of embeddings.
        dim: their dimension.
        shard_rows: rows of every shard but the last.
        dtype: NumPy name of the stored type.
        precision: dtype the model computed in.
        schema: version of this format.
    """

    fingerprint: str
    name: str
    data: str
    kind: str
    rows: Annotated[int, Field(ge=1)]
    dim: Annotated[int, Field(ge=1)]
    shard_rows: Annotated[int, Field(ge=1)]
    dtype: str = "float16"
    schema: int = SCHEMA
    precision: str = FULL

    @property
    def shards(self) -> int:
        """Number of shards."""
        return -(-self.rows // self.shard_rows)

    def rows_of(self, shard: int) -> range:
        """Return the rows of a shard."""
        return range(self.rows)[shard * self.shard_rows : (shard + 1) * self.shard_rows]

    def to_json(self) -> dict[str, Any]:
        """Return the fields for a file. Like older caches, caches of float32 name no precision."""
        fields = asdict(self)
        return fields if self.precision != FULL else {key: value for key, value in fields.items() if key != "precision"}


class EmbeddingCache:
    """Embeddings on disk, read by row number from memory-mapped shards.

    Each process checks a shard's checksum at first access. Shards of older versions have none, and only their shape is checked.

    Args:
        path: the cache's folder.

    Raises:
        XcompatError: the cache is missing, unfinished, damaged or of another format.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.info = read_info(self.path)
        self._shards: dict[int, NDArray[np.number]] = {}

    def __getstate__(self) -> dict[str, object]:
        """Drop the open shards."""
        return self.__dict__ | {"_shards": {}}

    def _shard(self, shard: int) -> NDArray[np.number]:
        if shard not in self._shards:
            try:
                self._shards[shard] = open_shard(self.path, shard, self.info)
            except DamagedShardError as error:
                raise XcompatError(
                    f"{error}; run the command that wrote the cache again: only this shard is re-embedded"
                ) from None
        return self._shards[shard]

    @property
    def fingerprint(self) -> Fingerprint:
        """Fingerprint of the embedding model."""
        return Fingerprint(self.info.fingerprint, self.info.name)

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, dim)."""
        return self.info.rows, self.info.dim

    def __len__(self) -> int:
        return self.info.rows

    def __getitem__(self, rows: NDArray[np.int64] | slice) -> NDArray[np.float32]:
        """Fetch rows by numbers or a slice: (len(rows), dim) float32, NaN for unreadable images.

        Raises:
            XcompatError: a number is out of range, or the index has another type, e.g. a mask.
        """
        rows_N = np.arange(*rows.indices(self.info.rows)) if isinstance(rows, slice) else np.asarray(rows)
        self._require_rows(rows_N)
        fetched = np.empty((len(rows_N), self.info.dim), dtype=np.float32)
        part_of_row, row_of_part = np.divmod(rows_N, self._part_rows)
        for part in np.unique(part_of_row).tolist():
            here = part_of_row == part
            fetched[here] = self._part(part)[row_of_part[here]]
        return fetched

    def _require_rows(self, rows_N: NDArray[np.number]) -> None:
        """Reject masks, which would read rows 0 and 1, and negative numbers."""
        if not rows_N.size:
            return
        if rows_N.dtype.kind not in "iu":
            found, fix = f"values of {rows_N.dtype}", "; convert a mask with np.flatnonzero"
        elif len(wrong := rows_N[(rows_N < 0) | (rows_N >= self.info.rows)]):
            found, fix = f"{wrong[0]}", ""
        else:
            return
        raise XcompatError(f"rows of an embedding cache are numbers from 0 to {self.info.rows - 1:,}, not {found}{fix}")

    @property
    def _part_rows(self) -> int:
        return self.info.shard_rows

    def _part(self, number: int) -> EmbeddingCache | NDArray[np.number]:
        return self._shard(number)

    def readable(self) -> NDArray[np.bool_]:
        """Return which rows are embeddings and not the NaN of an unreadable image: (rows,) bool."""
        return np.concatenate([np.isfinite(self._shard(shard)[:, 0]) for shard in range(self.info.shards)])


class StackedCaches(EmbeddingCache):
    """Concatenation of caches with equally many rows, e.g. several views of each image.

    Args:
        parts: caches with N rows each, at least 1. Row v · N + i is row i of part v.
    """

    def __init__(self, parts: Sequence[EmbeddingCache]) -> None:
        self.parts = list(parts)
        self.info = replace(parts[0].info, rows=sum(map(len, parts)))

    @property
    @override
    def _part_rows(self) -> int:
        return len(self.parts[0])

    @override
    def _part(self, number: int) -> EmbeddingCache:
        return self.parts[number]

    @override
    def readable(self) -> NDArray[np.bool_]:
        return np.concatenate([part.readable() for part in self.parts])


def read_info(folder: Path) -> CacheInfo:
    """Read the description of a finished cache.

    Raises:
        XcompatError: the cache is missing, unfinished, damaged or of another format.
    """
    file, plan = folder / "cache.json", folder / "plan.json"
    if not file.exists():
        raise XcompatError(f"{folder} is not a finished embedding cache; run `xcompat embed` again to continue it")
    fields = read_json(file)
    schema = fields.get("schema") if isinstance(fields, dict) else None
    if schema != SCHEMA:
        raise XcompatError(f"{folder} has cache format {schema}, this version reads {SCHEMA}; delete it and re-embed")
    try:
        info: CacheInfo = TypeAdapter(CacheInfo).validate_python(fields)
    except ValidationError as error:
        first = error.errors()[0]
        raise XcompatError(f"{file}: {'.'.join(map(str, first['loc']))}: {first['msg']}; delete {folder} and re-embed") from None
    if plan.exists() and _drop_name(read_json(plan)) != _drop_name(info.to_json()):
        raise XcompatError(f"{file} and plan.json differ; run the command that wrote the cache again")
    return info


def _drop_name(fields: object) -> object:
    """Drop the model's name, as a cache may be continued under another name of the same model."""
    return {key: value for key, value in fields.items() if key != "name"} if isinstance(fields, dict) else None


def _shard_path(folder: Path, shard: int) -> Path:
    return folder / f"shard-{shard:05d}.npy"


def write_shard(folder: Path, shard: int, info: CacheInfo, embeds_ND: NDArray[np.float32]) -> None:
    """Write a shard's checksum, then the shard. Rows of NaN mark unreadable images."""
    path = _shard_path(folder, shard)
    with atomic_path(path) as temporary:
        write_array(temporary, embeds_ND.astype(info.dtype))
        write_json(path.with_suffix(".json"), file_record(temporary).model_dump())


def open_shard(folder: Path, shard: int, info: CacheInfo) -> NDArray[np.number]:
    """Check a shard's checksum, and map the shard into memory, read-only.

    Raises:
        DamagedShardError: the shard is missing or damaged.
    """
    path = _shard_path(folder, shard)
    if not path.is_file():
        raise MissingShardError(f"{path} is missing")
    record = _read_record(path.with_suffix(".json"))
    if record is not None and (found := difference_once(path, record)):
        raise DamagedShardError(found[0])
    rows = len(info.rows_of(shard))
    try:
        embeds_ND: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
        if (embeds_ND.shape, str(embeds_ND.dtype)) == ((rows, info.dim), info.dtype):
            return embeds_ND
    except Exception as error:  # without a checksum, NumPy raises many kinds of errors on a damaged header
        raise DamagedShardError(f"{path} is truncated or not an array") from error
    raise DamagedShardError(f"{path} contains {embeds_ND.shape} {embeds_ND.dtype}, not {(rows, info.dim)} {info.dtype}")


def _read_record(file: Path) -> FileRecord | None:
    if not file.exists():
        return None
    try:
        return FileRecord(**read_json(file))
    except (XcompatError, TypeError, ValidationError):
        raise DamagedShardError(f"{file}, the checksum of a shard, is damaged") from None
