"""The work in parts: rows that lie together become one file, the same whoever makes it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from xcompat.core.errors import XcompatError, nearest, what_failed
from xcompat.data.images import UnusableSampleError, open_image
from xcompat.data.schema import ID
from xcompat.engines.part_checksums import HashedFile, find_damage, write_checksum
from xcompat.engines.places import opened, path_in, write_to
from xcompat.engines.sources import Part, Reader
from xcompat.engines.tables import EMBEDDING, ROWS, TableModel
from xcompat.vectors import SCALE

if TYPE_CHECKING:
    import pyarrow as pa

ABOUT = b"xcompat"
"""Key of a part's metadata, which say what it was made of, and by which model."""
UNREAD = b"xcompat.unread"
"""Key of the metadata of a part that leaves pictures out: id and path of each, or no path where the table holds its bytes."""


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


class Written(NamedTuple):
    """What a part's file lacks.

    Args:
        unread: how many rows it leaves out.
        example: the id of one of these.
        can_grow: whether one of them can be read now, or may be: files of earlier releases do not say which they left out.
        damage: what is wrong with the file; None if it is whole.
    """

    unread: int
    example: str | None
    can_grow: bool
    damage: str | None = None


@dataclass(frozen=True)
class Job:
    """What makes a file of each part; it pickles, and any worker that sees the source can run it.

    Args:
        model: maps or embeds a column.
        reader: of the rows.
        out: the folder of the files that are made.
        id_column: becomes their column ``id``.
        plan: digest of all this; two plans never share a folder.
    """

    model: TableModel
    reader: Reader
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

    def written(self, part: Part) -> Written | None:
        """Return what a part's file, which exists, lacks; None if it is not what this job writes there."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            with opened(self.out, path_in(self.out, part.name)) as file:
                footer = pq.read_metadata(file)
        except (OSError, pa.ArrowException):
            return None
        about = footer.metadata or {}
        if about.get(ABOUT) != json.dumps(self.about(part), sort_keys=True).encode():
            return None
        unread = part.rows - footer.num_rows
        if (damage := find_damage(self.out, part.name)) is not None:
            return Written(unread, None, can_grow=True, damage=damage)
        if unread and UNREAD not in about:
            return Written(unread, None, can_grow=True)
        left_out = json.loads(about.get(UNREAD, b"[]"))
        can_grow = any(path is not None and _is_readable(path) for _, path in left_out)
        return Written(unread, left_out[0][0] if left_out else None, can_grow)

    def about(self, part: Part) -> dict[str, str]:
        """Return what the metadata of a part's file say."""
        made = self.model.made
        return {"plan": self.plan, "part": str(part.number), "fingerprint": made.digest, "model": made.name}

    def _make(self, part: Part) -> Done:
        import pyarrow.parquet as pq

        cut, unread = -self.model.texts_cut, list[tuple[str, str | None]]()
        kept = {ABOUT: json.dumps(self.about(part), sort_keys=True).encode()}
        with write_to(self.out, part.name) as file:
            writer, sink = None, HashedFile(file)
            for table in self._tables(part):
                made = self.model(table).select([self.id_column, EMBEDDING]).rename_columns([ID, EMBEDDING])
                read = made.column(EMBEDDING).is_valid()  # Arrow cannot read lists of fixed size where some are null
                writer = writer or pq.ParquetWriter(sink, made.schema.with_metadata(kept), write_page_checksum=True)
                writer.write_table(made.filter(read))
                left_out = table.filter(made.column(EMBEDDING).is_null())
                pictures = left_out.column(self.model.column).to_pylist()
                unread += zip(map(str, left_out.column(self.id_column)), map(_path_of, pictures), strict=True)
            assert writer is not None, "a part has rows"
            if unread:
                writer.add_key_value_metadata({UNREAD: json.dumps(unread)})
            writer.close()
            write_checksum(self.out, part.name, sink.record)  # first: a part without its checksum is made again
        example = unread[0][0] if unread else None
        return Done(part.number, part.rows, len(unread), example, cut + self.model.texts_cut)

    def _tables(self, part: Part) -> Iterator[pa.Table]:
        """Yield the columns that are read, block by block."""
        import pyarrow as pa

        before = 0
        for batch in self.reader.blocks(part, self._wanted, ROWS[self.model.reads]):
            if batch.column(self.id_column).null_count:
                raise XcompatError(f"a row after the first {before:,} has no {self.id_column}; every item needs its own")
            yield pa.Table.from_batches([batch]).replace_schema_metadata()
            before += len(batch)

    def _wanted(self, names: Sequence[str]) -> list[str]:
        """Choose the columns that are read of those that are there."""
        wanted = [self.id_column, self.model.column, *([SCALE] if SCALE in names and self.model.reads == "vectors" else [])]
        for name in wanted:
            if name not in names:
                raise XcompatError(f"there is no column {name!r}; {nearest(name, names)}")
        return wanted


def _path_of(picture: Any) -> str | None:  # noqa: ANN401 - a path, bytes, or both
    """Return where a picture lies; None if the table holds its bytes."""
    if isinstance(picture, dict):
        picture = picture.get("path") if picture.get("bytes") is None else None
    return picture if isinstance(picture, str) else None


def _is_readable(path: str) -> bool:
    try:
        open_image(path)
    except UnusableSampleError:
        return False
    return True
