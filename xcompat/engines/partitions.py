"""Parts of a table. Every worker makes the same file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from xcompat.core.checksums import FileRecord, HashedFile, stream_record
from xcompat.core.errors import XcompatError, describe_error, nearest
from xcompat.data.images import UnusableSampleError, open_image
from xcompat.data.schema import ID
from xcompat.engines.filesystems import open_file, path_in, write_to
from xcompat.engines.sources import Part, Reader
from xcompat.engines.tables import EMBEDDING, ROWS, TableModel
from xcompat.vectors.formats import SCALE

ABOUT = b"xcompat"
"""Metadata key for plan, part and model."""
UNREAD = b"xcompat.unread"
"""Metadata key for skipped images: pairs of id and path, or null for stored bytes."""


@dataclass(frozen=True)
class PartResult:
    """Result of a part.

    Args:
        number: part number.
        rows: number of rows.
        unread: number of skipped images.
        example: id of a skipped image.
        cut: number of truncated texts.
        error: reason of a failure, as a single line.
    """

    number: int
    rows: int = 0
    unread: int = 0
    example: str | None = None
    cut: int = 0
    error: str | None = None


class PartState(NamedTuple):
    """Rows that the file of a part (a slice of the source) lacks.

    Args:
        unread: number of rows whose item could not be read.
        example: id of one of them.
        can_grow: whether one of them is readable now.
        damage: damage of the file, or None.
    """

    unread: int
    example: str | None
    can_grow: bool
    damage: str | None = None


@dataclass(frozen=True)
class Job:
    """Function that makes the file of a part on any worker.

    Args:
        model: maps or embeds a column.
        reader: reads the rows.
        out: output folder.
        id_column: input column for the output column ``id``.
        plan: digest of all settings. Each folder has a single plan.
    """

    model: TableModel
    reader: Reader
    out: str
    id_column: str
    plan: str

    def __call__(self, part: Part) -> PartResult:
        """Make a part. Errors are returned: engines wrap exceptions."""
        try:
            return self._make(part)
        except (XcompatError, OSError, pa.ArrowException) as error:
            said = str(error) if isinstance(error, XcompatError) else describe_error(error)
            return PartResult(part.number, error=f"{part.file}, {part.rows:,} rows from {part.first + 1:,} on: {said}")

    def answer(self, told: str) -> str:
        """Make a part, from and to JSON."""
        return json.dumps(asdict(self(Part(**json.loads(told)))))

    def inspect_part(self, part: Part) -> PartState | None:
        """Return the gaps in an existing file, or None if it has another origin."""
        try:
            with open_file(self.out, path_in(self.out, part.name)) as file:
                footer = pq.read_metadata(file)
        except (OSError, pa.ArrowException):
            return None
        about = footer.metadata or {}
        if about.get(ABOUT) != json.dumps(self.describe_part(part), sort_keys=True).encode():
            return None
        unread = part.rows - footer.num_rows
        if (damage := _find_damage(self.out, part.name)) is not None:
            return PartState(unread, None, can_grow=True, damage=damage)
        left_out = json.loads(about.get(UNREAD, b"[]"))
        can_grow = any(path is not None and _is_readable(path) for _, path in left_out)
        return PartState(unread, left_out[0][0] if left_out else None, can_grow)

    def describe_part(self, part: Part) -> dict[str, str]:
        """Return the metadata of a part's file."""
        made = self.model.made
        return {"plan": self.plan, "part": str(part.number), "fingerprint": made.digest, "model": made.name}

    def _make(self, part: Part) -> PartResult:
        cut, unread = -self.model.texts_cut, list[tuple[str, str | None]]()
        kept = {ABOUT: json.dumps(self.describe_part(part), sort_keys=True).encode()}
        with write_to(self.out, part.name) as file:
            writer, sink = None, HashedFile(file)
            for table in self._tables(part):
                made = self.model(table).select([self.id_column, EMBEDDING]).rename_columns([ID, EMBEDDING])
                read = made.column(EMBEDDING).is_valid()  # Arrow cannot read fixed-size lists with nulls
                writer = writer or pq.ParquetWriter(sink, made.schema.with_metadata(kept), write_page_checksum=True)
                writer.write_table(made.filter(read))
                left_out = table.filter(made.column(EMBEDDING).is_null())
                images = left_out.column(self.model.column).to_pylist()
                unread += zip(map(str, left_out.column(self.id_column)), map(_path_of, images), strict=True)
            assert writer is not None, "a part has rows"
            if unread:
                writer.add_key_value_metadata({UNREAD: json.dumps(unread)})
            writer.close()
            with write_to(self.out, _checksum_name(part.name)) as checksum:  # before the part: without it the part is made again
                checksum.write(sink.record.model_dump_json().encode() + b"\n")
        example = unread[0][0] if unread else None
        return PartResult(part.number, part.rows, len(unread), example, cut + self.model.texts_cut)

    def _tables(self, part: Part) -> Iterator[pa.Table]:
        before = 0
        for batch in self.reader.blocks(part, self._columns_to_read, ROWS[self.model.reads]):
            if batch.column(self.id_column).null_count:
                raise XcompatError(f"missing {self.id_column} after row {before:,}; give every row an id")
            yield pa.Table.from_batches([batch]).replace_schema_metadata()
            before += len(batch)

    def _columns_to_read(self, names: Sequence[str]) -> list[str]:
        wanted = [self.id_column, self.model.column, *([SCALE] if SCALE in names and self.model.reads == "vectors" else [])]
        for name in wanted:
            if name not in names:
                raise XcompatError(f"there is no column {name!r}; {nearest(name, names)}")
        return wanted


def _find_damage(out: str, name: str) -> str | None:
    """Compare a part with its checksum. Return the damage as the end of a sentence, or None."""
    try:
        with open_file(out, path_in(out, _checksum_name(name))) as file:
            record = FileRecord(**json.loads(file.read()))
    except FileNotFoundError:
        return "has no checksum"
    except (ValueError, TypeError):
        return "has a damaged checksum"
    with open_file(out, path_in(out, name)) as file:
        return None if stream_record(file) == record else "has changed since it was written"


def _checksum_name(part: str) -> str:
    """Return a name with an underscore, which readers of Parquet folders skip."""
    return f"_{part}.json"


def _path_of(image: object) -> str | None:
    """Return an image path, or None if the table stores bytes."""
    if isinstance(image, dict):
        image = image.get("path") if image.get("bytes") is None else None
    return image if isinstance(image, str) else None


def _is_readable(path: str) -> bool:
    try:
        open_image(path)
    except UnusableSampleError:
        return False
    return True
