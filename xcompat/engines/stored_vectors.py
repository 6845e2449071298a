"""Reader of stored vectors in all other places: files, folders, faiss indexes, galleries and databases."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from xcompat.core.errors import XcompatError
from xcompat.core.files import files_below
from xcompat.engines import sources
from xcompat.engines.sources import Part, Source
from xcompat.stores.places import Place, Reading, parse_place, read_named, require_existing, require_reading
from xcompat.vectors import Columns
from xcompat.vectors.formats import EMBEDDING_COLUMNS, ID

if TYPE_CHECKING:
    import pyarrow as pa

    from xcompat.vectors import Vectors


@dataclass(frozen=True)
class StoredVectors:
    """Reader of rows with an id and a vector. Each process reads the place once.

    Args:
        uri: path or address.
        id_column: name of the ids there, and here; None for a usual name.
        vector: the same of the vectors.
        digest: digest of the files when the run started.
    """

    uri: str
    id_column: str | None
    vector: str | None
    digest: str

    @property
    def names(self) -> tuple[str, str]:
        """Return the names of the two columns."""
        return self.id_column or ID, self.vector or EMBEDDING_COLUMNS[0]

    @property
    def reading(self) -> Reading:
        """Return the columns to read. Messages name the option of `xcompat embed`."""
        return Reading(columns=Columns(self.id_column, self.vector, vector_option="--column"))

    def blocks(self, part: Part, wanted: Callable[[Sequence[str]], list[str]], rows: int) -> Iterator[pa.RecordBatch]:
        """Read a part, and raise if a file has changed."""
        import pyarrow as pa

        if _digest_files(parse_place(self.uri)) != self.digest:
            raise XcompatError("the file has changed since the run started; start a new run with another --out")
        vectors = _read(self)
        end = part.first + part.rows
        for first in range(part.first, end, rows):
            block = slice(first, min(first + rows, end))
            values = pa.array(np.asarray(vectors.rows_ND[block], np.float32).ravel())
            columns = [
                pa.array((vectors.ids or [])[block]),
                pa.FixedSizeListArray.from_arrays(values, vectors.rows_ND.shape[1]),
            ]
            yield pa.record_batch(columns, names=list(self.names)).select(wanted(self.names))


def require(uri: str) -> None:
    """Raise if the place does not exist."""
    require_existing(parse_place(uri))


def read(uri: str, id_column: str | None = None, vector: str | None = None) -> Source:
    """Return the vectors of a place as a table.

    Args:
        uri: path or address.
        id_column: name of the ids, or None.
        vector: name of the vectors, or None.

    Raises:
        XcompatError: they are unreadable, or have no ids.
    """
    import pyarrow as pa

    place = parse_place(uri)
    reader = StoredVectors(uri, id_column, vector, _digest_files(place))
    require_reading([place], reader.reading)
    vectors = _read(reader)
    count, most = len(vectors.rows_ND), sources.PART_ROWS
    parts = [Part(number, uri, first, min(most, count - first)) for number, first in enumerate(range(0, count, most))]
    types = (pa.string(), pa.list_(pa.float32(), vectors.rows_ND.shape[1]))
    schema = pa.schema(list(zip(reader.names, types, strict=True)))
    ids = hashlib.sha256("\n".join(vectors.ids or []).encode()).hexdigest()
    return Source(uri, schema, parts, f"{reader.digest} {ids}", reader)


@functools.lru_cache(maxsize=1)
def _read(reader: StoredVectors) -> Vectors:
    return read_named(parse_place(reader.uri), reader.reading)


def _digest_files(place: Place) -> str:
    """Return a digest of the sizes and times of files; an empty text for a database."""
    if not isinstance(place, Path):
        return ""
    files = sorted(file for file in files_below(place) if file.is_file()) if place.is_dir() else [place]
    told = [f"{file} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in files]
    return hashlib.sha256("\n".join(told).encode()).hexdigest()
