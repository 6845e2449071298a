"""Row readers for tables of any size: JSON lines, CSV, Parquet and plain text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xcompat.core.errors import XcompatError
from xcompat.core.surrogates import Surrogates, decode_utf8
from xcompat.data.delimited import csv_options
from xcompat.data.sources import TEXT_SUFFIXES, has_suffix
from xcompat.data.text_files import UNREADABLE, json_lines, text_lines

if TYPE_CHECKING:
    import pyarrow as pa

LINE = "line"
"""Column name of plain text."""
BLOCK = 4096
JSON_SUFFIXES = (".jsonl", ".jsonl.gz", ".ndjson", ".ndjson.gz")
TABLE_SUFFIXES = (".csv", ".csv.gz", ".tsv", ".tsv.gz")
PARQUET_SUFFIXES = (".parquet",)
ROW_SUFFIXES = (*JSON_SUFFIXES, *TABLE_SUFFIXES, *PARQUET_SUFFIXES, *TEXT_SUFFIXES)
"""Suffixes supported by :func:`read_rows`."""

Row = dict[str, Any]


def read_rows(file: Path, columns: tuple[str, ...] | None = None) -> Iterator[tuple[str, Row]]:
    """Read the rows of a file.

    Args:
        file: JSON lines, CSV or TSV with a header, Parquet, or plain text; all but Parquet can be gzip.
        columns: columns to read; None for all. JSON rows may lack some.

    Yields:
        The location of each row for messages, and its values by column (strings for CSV).

    Raises:
        XcompatError: the file is damaged, or its suffix is not in :data:`ROW_SUFFIXES`.
    """
    rows: Iterator[tuple[str, Row]]
    if has_suffix(file, JSON_SUFFIXES):
        rows = ((f"{file} line {number}", row) for number, row in json_lines(file))
    elif has_suffix(file, PARQUET_SUFFIXES):
        rows = _parquet_rows(file, columns)
    elif has_suffix(file, TABLE_SUFFIXES):
        rows = _csv_rows(file)
    elif has_suffix(file, TEXT_SUFFIXES):
        rows = ((f"{file} line {number}", {LINE: text}) for number, text in text_lines(file))
    else:
        raise XcompatError(f"{file} cannot be read as a table; supported suffixes: {', '.join(ROW_SUFFIXES)}")
    return rows if columns is None else ((where, {name: row[name] for name in columns if name in row}) for where, row in rows)


def _csv_rows(file: Path) -> Iterator[tuple[str, Row]]:
    """Read a table as strings, which keeps leading zeros of ids."""
    import pandas as pd

    try:
        number = 0
        with pd.read_csv(file, chunksize=BLOCK, **csv_options(file)) as blocks:
            for block in blocks:
                if not isinstance(block.index, pd.RangeIndex):  # pandas turns surplus fields into an index
                    raise XcompatError(
                        f"{file} has rows with more fields than its header; quote texts that contain the separator"
                    )
                for row in block.to_dict("records"):
                    number += 1
                    yield f"{file} row {number}", {str(name): value for name, value in row.items()}
    except XcompatError:
        raise
    except (ValueError, *UNREADABLE) as error:  # pandas' parser errors are ValueErrors
        raise XcompatError(
            f"{file} cannot be read ({str(error).splitlines()[0][:200]}); fix the row named in this error, or save the file again"
        ) from error


def _parquet_rows(file: Path, columns: tuple[str, ...] | None) -> Iterator[tuple[str, Row]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.ParquetFile(file, page_checksum_verification=True)
        wanted = None if columns is None else [name for name in columns if name in table.schema_arrow.names]
        number, replaced = 0, Surrogates()
        for batch in table.iter_batches(batch_size=BLOCK, columns=wanted):
            for row, is_whole in _batch_rows(batch):
                number += 1
                if not is_whole:
                    replaced.add(f"{file} row {number}")
                yield f"{file} row {number}", row
        replaced.report()
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise XcompatError(f"{file} cannot be read ({str(error).splitlines()[0]}); fetch or write it again") from error


def _batch_rows(batch: pa.RecordBatch) -> Iterator[tuple[Row, bool]]:
    """Yield each row, and whether its texts are valid UTF-8. Invalid bytes become U+FFFD."""
    import pyarrow as pa

    try:
        yield from ((row, True) for row in batch.to_pylist())
    except UnicodeDecodeError:
        is_text = [pa.types.is_string(field.type) or pa.types.is_large_string(field.type) for field in batch.schema]
        columns = [
            column.cast(pa.large_binary()).to_pylist() if text else column.to_pylist()
            for column, text in zip(batch.columns, is_text, strict=True)
        ]
        for values in zip(*columns, strict=True):
            decoded = [
                decode_utf8(value) if text and value is not None else value for value, text in zip(values, is_text, strict=True)
            ]
            whole = all(
                not text or value is None or each.encode() == value
                for value, each, text in zip(values, decoded, is_text, strict=True)
            )
            yield dict(zip(batch.schema.names, decoded, strict=True)), whole
