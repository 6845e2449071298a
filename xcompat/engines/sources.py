"""Input tables, split into the same parts for every worker."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from xcompat.vectors.formats import PARQUET

if TYPE_CHECKING:
    import pyarrow as pa

PART_ROWS = 65_536
"""Approximate rows per part."""


@dataclass(frozen=True)
class Part:
    """Consecutive rows for an output file.

    Args:
        number: part number, from 0.
        file: input file or table.
        first: index of the first row in it.
        rows: number of rows.
        groups: first row group and end, if any.
        state: size and time of the file, empty if the source has versions.
    """

    number: int
    file: str
    first: int
    rows: int
    groups: Sequence[int] = ()
    state: str = ""

    @property
    def name(self) -> str:
        """Return the name of the output file."""
        return f"part-{self.number:06}{PARQUET}"


class Reader(Protocol):
    """Reader of parts. It pickles for workers."""

    def blocks(self, part: Part, wanted: Callable[[Sequence[str]], list[str]], rows: int) -> Iterator[pa.RecordBatch]:
        """Read a part, always in the same blocks.

        Args:
            part: the part.
            wanted: selects from the available column names.
            rows: maximum rows per block.

        Yields:
            Blocks with the selected columns, in order.

        Raises:
            XcompatError: the source is unreadable or has changed.
        """
        ...


@dataclass(frozen=True)
class Source:
    """Table split into parts.

    Args:
        uri: address, with the version if any.
        schema: schema of the rows.
        parts: parts in order.
        digest: identifies the rows, e.g. by file names, sizes and times.
        reader: reads the rows.
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


def split_into_parts(number: int, file: str, state: str, pieces: Iterable[int]) -> Iterator[Part]:
    """Group row groups into parts of about :data:`PART_ROWS` rows.

    Args:
        number: number of the first part.
        file: file with the rows.
        state: size and time of the file.
        pieces: rows per row group. They are not split.

    Yields:
        Non-empty parts in order.
    """
    begun, first, rows, piece = 0, 0, 0, -1
    for piece, more in enumerate(pieces):
        if rows and rows + more > PART_ROWS:
            yield Part(number, file, first, rows, (begun, piece), state)
            number, begun, first, rows = number + 1, piece, first + rows, 0
        rows += more
    if rows:
        yield Part(number, file, first, rows, (begun, piece + 1), state)
