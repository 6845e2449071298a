"""The work in parts: some row groups of one file become one file, the same whoever makes it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from xcompat.data.schema import ID
from xcompat.engines.places import files_at, opened, path_in, write_to
from xcompat.engines.tables import EMBEDDING, ROWS, TableModel
from xcompat.errors import XcompatError, nearest, what_failed
from xcompat.threads import map_in_threads
from xcompat.vectors import PARQUET, SCALE

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq
    from pyarrow import fs

PART_ROWS = 65_536
"""Rows of a part, about: it is made of whole row groups of one file, so that none is read twice."""
FOOTERS_AT_ONCE = 16
ABOUT = b"xcompat"
"""Key of a part's metadata, which say what it was made of, and by which model."""


@dataclass(frozen=True)
class Part:
    """Row groups of one file, which become one file.

    Args:
        number: of the part, from 0.
        file: its path from :func:`~xcompat.engines.places.files_at`.
        groups: the first row group, and the one after the last.
        first: the number of its first row in the file.
        rows: how many it has.
    """

    number: int
    file: str
    groups: Sequence[int]
    first: int
    rows: int

    @property
    def name(self) -> str:
        """Return the name of the file that it becomes."""
        return f"part-{self.number:06}{PARQUET}"


@dataclass(frozen=True)
class Source:
    """Parquet files, with what their footers say.

    Args:
        uri: a file or a folder.
        schema: of all of them.
        parts: the work.
        digest: of the files' names, sizes and dates.
    """

    uri: str
    schema: pa.Schema
    parts: list[Part]
    digest: str

    @property
    def rows(self) -> int:
        """Return the number of rows."""
        return sum(part.rows for part in self.parts)

    @classmethod
    def read(cls, uri: str) -> Source:
        """Read the footers of all files.

        Raises:
            XcompatError: a file is damaged, there are no rows, or no files.
        """
        files = files_at(uri)
        footers = map_in_threads(lambda info: _footer(uri, info), files, FOOTERS_AT_ONCE)
        parts, schema = list[Part](), None
        for info, footer in zip(files, footers, strict=True):
            schema = schema or footer.schema.to_arrow_schema()
            parts += _cut(len(parts), info.path, footer)
        if not parts or schema is None:
            raise XcompatError(f"{uri} holds no rows; there is nothing to embed")
        told = "\n".join(f"{info.path} {info.size} {info.mtime_ns}" for info in files)
        return cls(uri, schema, parts, hashlib.sha256(told.encode()).hexdigest())


@dataclass(frozen=True)
class Done:
    """What became of a part.

    Args:
        number: of the part.
        rows: how many it has.
        unread: how many of them are pictures that could not be read, and were left out.
        example: the id of one of these.
        cut: how many texts lost their end.
        error: what stopped it, in one line.
    """

    number: int
    rows: int = 0
    unread: int = 0
    example: str | None = None
    cut: int = 0
    error: str | None = None


@dataclass(frozen=True)
class Job:
    """What makes a file of each part; it pickles, and any worker that sees the files can run it.

    Args:
        model: maps or embeds a column.
        source: the files.
        out: the folder of the files that are made.
        id_column: becomes their column ``id``.
        plan: digest of all this; two plans never share a folder.
    """

    model: TableModel
    source: str
    out: str
    id_column: str
    plan: str

    def __call__(self, part: Part) -> Done:
        """Read, map or embed, and write one part; what stops it is returned, as engines wrap what is raised."""
        import pyarrow as pa

        try:
            return self._make(part)
        except (XcompatError, OSError, pa.ArrowException) as error:
            said = str(error) if isinstance(error, XcompatError) else what_failed(error)
            return Done(part.number, error=f"{part.file}, {part.rows:,} rows from {part.first + 1:,} on: {said}")

    def answer(self, told: str) -> str:
        """Do the same for an engine, to which a part and what became of it are JSON."""
        return json.dumps(asdict(self(Part(**json.loads(told)))))

    def is_made(self, part: Part) -> bool:
        """Return whether a part's file, which exists, is what this job writes there."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            with opened(self.out, path_in(self.out, part.name)) as file:
                footer = pq.read_metadata(file)
        except (OSError, pa.ArrowException):
            return False
        told = json.dumps(self.about(part), sort_keys=True).encode()
        return (footer.metadata or {}).get(ABOUT) == told

    def about(self, part: Part) -> dict[str, str]:
        """Return what the metadata of a part's file say."""
        made = self.model.made
        return {"plan": self.plan, "part": str(part.number), "fingerprint": made.digest, "model": made.name}

    def _make(self, part: Part) -> Done:
        import pyarrow.parquet as pq

        cut, rows, example = -self.model.texts_cut, 0, None
        kept = {ABOUT: json.dumps(self.about(part), sort_keys=True).encode()}
        with write_to(self.out, part.name) as file:
            writer = None
            for table in self._tables(part):
                made = self.model(table).select([self.id_column, EMBEDDING]).rename_columns([ID, EMBEDDING])
                read = made.filter(made.column(EMBEDDING).is_valid())  # Arrow cannot read lists of fixed size where some are null
                if len(read) < len(made) and example is None:
                    example = str(made.filter(made.column(EMBEDDING).is_null())[ID][0])
                writer = writer or pq.ParquetWriter(file, made.schema.with_metadata(kept))
                writer.write_table(read)
                rows += len(read)
            assert writer is not None, "a part has rows"
            writer.close()
        return Done(part.number, part.rows, part.rows - rows, example, cut + self.model.texts_cut)

    def _tables(self, part: Part) -> Iterator[pa.Table]:
        """Yield the columns that are read, block by block."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        with opened(self.source, part.file) as file:
            footer = pq.ParquetFile(file, buffer_size=2**20)
            names = footer.schema_arrow.names
            wanted = [self.id_column, self.model.column, *([SCALE] if SCALE in names and self.model.reads == "vectors" else [])]
            for name in wanted:
                if name not in names:
                    raise XcompatError(f"there is no column {name!r}; {nearest(name, names)}")
            before = 0
            for batch in footer.iter_batches(ROWS[self.model.reads], range(*part.groups), wanted):
                if batch.column(self.id_column).null_count:
                    raise XcompatError(f"a row after the first {before:,} has no {self.id_column}; every item needs its own")
                yield pa.Table.from_batches([batch]).replace_schema_metadata()
                before += len(batch)


def _footer(uri: str, info: fs.FileInfo) -> pq.FileMetaData:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with opened(uri, info.path) as file:
            return pq.read_metadata(file)
    except (OSError, pa.ArrowException) as error:
        raise XcompatError(f"{info.path} cannot be read ({what_failed(error)}); mend it, or write it again") from error


def _cut(number: int, file: str, footer: pq.FileMetaData) -> Iterator[Part]:
    """Yield the parts of a file, numbered from ``number`` on."""
    begun, first, rows = 0, 0, 0
    for group in range(footer.num_row_groups):
        more = footer.row_group(group).num_rows
        if rows and rows + more > PART_ROWS:
            yield Part(number, file, (begun, group), first, rows)
            number, begun, first, rows = number + 1, group, first + rows, 0
        rows += more
    if rows:
        yield Part(number, file, (begun, footer.num_row_groups), first, rows)
