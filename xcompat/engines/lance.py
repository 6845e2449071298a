"""A Lance table: one of its versions, on this machine or in an object store."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xcompat.core.errors import XcompatError
from xcompat.core.paths import nearest_path
from xcompat.engines import sources
from xcompat.engines.sources import Part, Source

if TYPE_CHECKING:
    import pyarrow as pa

SUFFIX = ".lance"
VERSION = "?version="


@dataclass(frozen=True)
class LanceRows:
    """Reads parts of a table, which are rows by their place in one version.

    Args:
        uri: of the table, with the version.
    """

    uri: str

    def blocks(self, part: Part, wanted: Callable[[Sequence[str]], list[str]], rows: int) -> Iterator[pa.RecordBatch]:
        """Read a part, as :class:`~xcompat.engines.sources.Reader` says.

        Each block is asked for by its place: a scan would begin a block anew with each of the table's fragments.
        """
        from xcompat.stores.lancedb_client import explained

        with explained(self.uri):
            table = _open(self.uri)
            columns = {name: _quoted(name) for name in wanted(table.schema.names)}
            end = part.first + part.rows
            for first in range(part.first, end, rows):
                count = min(rows, end - first)
                found = table.search().select(columns).offset(first).limit(count).to_arrow().combine_chunks()
                if len(found) != count:
                    raise XcompatError(f"it has {len(found):,} rows from {first + 1:,} on, and {count:,} when this began")
                yield from found.to_batches()


def require(uri: str) -> None:
    """Refuse an address without a table, or a machine without LanceDB."""
    if find_spec("lancedb") is None:
        raise XcompatError(f"{uri} is a Lance table, which LanceDB reads: pip install 'xcompat[lancedb]'")
    place, version = _split(uri)
    if version is not None and not version.isdecimal():
        raise XcompatError(f"{uri}: {version!r} is no version; write {place}{VERSION}NUMBER, or leave it out")
    if "://" not in place and not Path(place).is_dir():  # LanceDB would make the folder
        raise XcompatError(f"{place} does not exist; {nearest_path(place)}")


def read(uri: str) -> Source:
    """Look at a version of a table: the one that is named, or else the newest.

    Raises:
        XcompatError: there is no such table or version, or it holds no rows.
    """
    require(uri)
    from xcompat.stores.lancedb_client import explained

    with explained(uri):
        table = _open(uri)
        rows, version, schema = table.count_rows(), table.version, table.schema
        made = next(str(each["timestamp"]) for each in table.list_versions() if each["version"] == version)
    if not rows:
        raise XcompatError(f"{uri} holds no rows; there is nothing to embed")
    pinned = f"{_split(uri)[0]}{VERSION}{version}"
    most = sources.PART_ROWS
    parts = [Part(number, pinned, first, min(most, rows - first)) for number, first in enumerate(range(0, rows, most))]
    told = f"{pinned} {made} {rows}"
    return Source(pinned, schema, parts, hashlib.sha256(told.encode()).hexdigest(), LanceRows(pinned))


def _open(uri: str) -> Any:  # noqa: ANN401 - LanceDB's table
    import lancedb

    require(uri)
    place, version = _split(uri)
    folder, _, file = place.rpartition("/")
    try:
        table = lancedb.connect(folder).open_table(file.removesuffix(SUFFIX))
    except ValueError as error:
        if "was not found" in str(error):
            raise XcompatError(f"{place} is no Lance table, or has none of its versions") from None
        raise
    table.checkout(int(version) if version is not None else table.version)
    return table


def _split(uri: str) -> tuple[str, str | None]:
    """Return where a table is, and the version that its address names."""
    place, found, version = uri.partition(VERSION)
    place = place.rstrip("/") if "://" in place else str(Path(place).expanduser().resolve())
    return place, version if found else None


def _quoted(name: str) -> str:
    return f"`{name}`"
