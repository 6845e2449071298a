"""What is read: a table of any kind, in parts that every worker reads alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from xcompat.vectors import PARQUET

if TYPE_CHECKING:
    import pyarrow as pa

PART_ROWS = 65_536
"""Rows of a part, about."""


@dataclass(frozen=True)
class Part:
    """Rows that lie together, and become one file.

    Args:
        number: of the part, from 0.
        file: what they are in: a file of the source, or a table.
        first: the number of its first row in there.
        rows: how many it has.
        groups: the first row group and the one after the last, where the file has such.
        state: what tells the file from a later one in its place; empty where the source keeps versions.
    """

    number: int
    file: str
    first: int
    rows: int
    groups: Sequence[int] = ()
    state: str = ""

    @property
    def name(self) -> str:
        """Return the name of the file that it becomes."""
        return f"part-{self.number:06}{PARQUET}"


class Reader(Protocol):
    """Reads the rows of parts; it pickles, and any worker that sees the source can use it."""

    def blocks(self, part: Part, wanted: Callable[[Sequence[str]], list[str]], rows: int) -> Iterator[pa.RecordBatch]:
        """Read a part, always in the same blocks.

        Args:
            part: what is read.
            wanted: chooses columns by the names of those that are there.
            rows: of a block, at most.

        Yields:
            Blocks in order, with the columns that were chosen.

        Raises:
            XcompatError: the source has changed, or cannot be read.
        """
        ...


@dataclass(frozen=True)
class Source:
    """A table, and the work that it is.

    Args:
        uri: by which the very same rows are found again, if the source keeps versions.
        schema: of the rows.
        parts: the work.
        digest: of what tells these rows from others, such as names, sizes and dates of files.
        reader: of the rows.
    """

    uri: str
    schema: pa.Schema
    parts: list[Part]
    digest: str
    reader: Reader

    @property
    def rows(self) -> int:
        """Return the number of rows."""
        return sum(part.rows for part in self.parts)


def cut(number: int, file: str, state: str, pieces: Iterable[int]) -> Iterator[Part]:
    """Cut what is read as a whole into parts of about :data:`PART_ROWS` rows.

    Args:
        number: of the first part.
        file: what the rows are in.
        state: of the file.
        pieces: rows of each piece, of which none is cut: row groups.

    Yields:
        Parts that have rows, in order.
    """
    begun, first, rows, piece = 0, 0, 0, -1
    for piece, more in enumerate(pieces):
        if rows and rows + more > PART_ROWS:
            yield Part(number, file, first, rows, (begun, piece), state)
            number, begun, first, rows = number + 1, piece, first + rows, 0
        rows += more
    if rows:
        yield Part(number, file, first, rows, (begun, piece + 1), state)
