"""Reader of Parquet files in Arrow's file systems."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from xcompat.core.errors import XcompatError, describe_error
from xcompat.engines.filesystems import list_parquet_files, open_file, state_of
from xcompat.engines.sources import Part, Source, split_into_parts

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq
    from pyarrow import fs

FOOTERS_AT_ONCE = 16


@dataclass(frozen=True)
class ParquetFiles:
    """Reader of row groups.

    Args:
        uri: address in the file system to use.
    """

    uri: str

    def blocks(self, part: Part, wanted: Callable[[Sequence[str]], list[str]], rows: int) -> Iterator[pa.RecordBatch]:
        """Read a part, and raise if its file has changed."""
        self._require_unchanged(part)
        with open_file(self.uri, part.file) as file:
            content = pq.ParquetFile(file, buffer_size=2**20, page_checksum_verification=True)
            yield from content.iter_batches(rows, range(*part.groups), wanted(content.schema_arrow.names))
        self._require_unchanged(part)

    def _require_unchanged(self, part: Part) -> None:
        if state_of(self.uri, part.file) != part.state:
            raise XcompatError("the file has changed since the run started; start a new run with another --out")


def require(uri: str) -> None:
    """Raise if there are no Parquet files."""
    list_parquet_files(uri)


def read(uri: str) -> Source:
    """Return the Parquet files at a path or URI as a table.

    Raises:
        XcompatError: a file is damaged, or there are no rows.
    """
    return read_files(uri, list_parquet_files(uri))


def read_files(uri: str, files: Sequence[fs.FileInfo], check: Callable[[str, pa.Schema], None] | None = None) -> Source:
    """Return files as a single table.

    Args:
        uri: address of the table.
        files: files in the order of their parts.
        check: raises for an unsuitable path and schema.

    Returns:
        The table.

    Raises:
        XcompatError: a file is damaged or unsuitable, or there are no rows.
    """
    from xcompat.core.threads import map_in_threads  # it imports torch: report a missing file first

    footers = map_in_threads(lambda info: _footer(uri, info.path), files, FOOTERS_AT_ONCE)
    parts, schema = list[Part](), None
    for info, (state, footer) in zip(files, footers, strict=True):
        own = footer.schema.to_arrow_schema()
        if check is not None:
            check(info.path, own)
        schema = schema or own
        groups = (footer.row_group(group).num_rows for group in range(footer.num_row_groups))
        parts += split_into_parts(len(parts), info.path, state, groups)
    if not parts or schema is None:
        raise XcompatError(f"{uri} has no rows; there is nothing to embed")
    told = "\n".join(f"{info.path} {info.size} {info.mtime_ns}" for info in files)
    return Source(uri, schema, parts, hashlib.sha256(told.encode()).hexdigest(), ParquetFiles(uri))


def _footer(uri: str, path: str) -> tuple[str, pq.FileMetaData]:
    try:
        state = state_of(uri, path)
        with open_file(uri, path) as file:
            return state, pq.read_metadata(file)
    except (OSError, pa.ArrowException) as error:
        raise XcompatError(f"{path} cannot be read ({describe_error(error)}); fix or replace it") from error
