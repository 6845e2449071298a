"""Reader of Lance tables."""

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
    """Reader for parts of a table version.

    Args:
        uri: address with the version.
    """

    uri: str

    def blocks(self, part: Part, wanted: Callable[[Sequence[str]], list[str]], rows: int) -> Iterator[pa.RecordBatch]:
        """Read a part, with a query per block.

        A scan would start a new block at each fragment.
        """
        from xcompat.stores.lancedb_client import plain_errors

        with plain_errors(self.uri):
            table = _open(self.uri)
            columns = {name: _quote(name) for name in wanted(table.schema.names)}
            end = part.first + part.rows
            for first in range(part.first, end, rows):
                count = min(rows, end - first)
                found = table.search().select(columns).offset(first).limit(count).to_arrow().combine_chunks()
                if len(found) != count:
                    raise XcompatError(f"found {len(found):,} rows from row {first + 1:,}, expected {count:,}")
                yield from found.to_batches()


def require(uri: str) -> None:
    """Raise if the table or LanceDB is missing."""
    if find_spec("lancedb") is None:
        raise XcompatError(
            f'{uri} is a Lance table and needs LanceDB; install it with `pip install -e ".[lancedb]"` in a clone of xcompat'
        )
    place, version = _split(uri)
    if version is not None and not version.isdecimal():
        raise XcompatError(f"{uri}: invalid version {version!r}; use {place}{VERSION}NUMBER or remove it")
    if "://" not in place and not Path(place).is_dir():  # LanceDB would create the folder
        raise XcompatError(f"{place} does not exist; {nearest_path(place)}")


def read(uri: str) -> Source:
    """Return a version of a table, by default the newest.

    Raises:
        XcompatError: the version is missing or empty.
    """
    require(uri)
    from xcompat.stores.lancedb_client import plain_errors

    with plain_errors(uri):
        table = _open(uri)
        rows, version, schema = table.count_rows(), table.version, table.schema
        made = next(str(each["timestamp"]) for each in table.list_versions() if each["version"] == version)
    if not rows:
        raise XcompatError(f"{uri} has no rows; there is nothing to embed")
    pinned = f"{_split(uri)[0]}{VERSION}{version}"
    most = sources.PART_ROWS
    parts = [Part(number, pinned, first, min(most, rows - first)) for number, first in enumerate(range(0, rows, most))]
    told = f"{pinned} {made} {rows}"
    return Source(pinned, schema, parts, hashlib.sha256(told.encode()).hexdigest(), LanceRows(pinned))


def _open(uri: str) -> Any:  # noqa: ANN401 - LanceDB table
    import lancedb

    require(uri)
    place, version = _split(uri)
    folder, _, file = place.rpartition("/")
    try:
        table = lancedb.connect(folder).open_table(file.removesuffix(SUFFIX))
    except ValueError as error:
        if "was not found" in str(error):
            raise XcompatError(f"{place} is not a Lance table or has no versions") from None
        raise
    table.checkout(int(version) if version is not None else table.version)
    return table


def _split(uri: str) -> tuple[str, str | None]:
    """Return the location and the version."""
    place, found, version = uri.partition(VERSION)
    place = place.rstrip("/") if "://" in place else str(Path(place).expanduser().resolve())
    return place, version if found else None


def _quote(name: str) -> str:
    return f"`{name}`"
