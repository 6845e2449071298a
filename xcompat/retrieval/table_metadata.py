"""Metadata of stored vectors: the other columns of their table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import repeat
from pathlib import Path
from typing import Any

from xcompat.core.errors import XcompatError, nearest
from xcompat.core.json_values import JsonColumns
from xcompat.data.sources import has_suffix
from xcompat.data.table_rows import JSON_SUFFIXES, PARQUET_SUFFIXES, TABLE_SUFFIXES, read_rows
from xcompat.vectors import Columns
from xcompat.vectors.formats import EMBEDDING_COLUMNS, SCALE, first_object, list_shards
from xcompat.vectors.tables import column_names

NESTED = ("payload", "metadata", "properties", "_source")
"""Fields of exported items with columns of their own."""


def read_metadata(path: Path | None, columns: Columns, kept: bool | list[str]) -> Iterator[dict[str, object]] | None:
    """Yield the metadata of each row of a table of embeddings, in its order.

    Args:
        path: file or folder of embeddings; None for other places, which have no columns.
        columns: columns of ids and embeddings.
        kept: columns to keep; True for all but ids and embeddings, False for none.

    Returns:
        The rows; None for other formats, and if nothing is kept.

    Raises:
        XcompatError: a column in ``kept`` does not exist.
    """
    files = [] if path is None else list_shards(path) or [path]
    if not files or not all(map(_has_a_row_per_vector, files, repeat(columns))):
        if isinstance(kept, list):
            raise XcompatError("--metadata needs a table with a vector per row (Parquet, CSV or JSON lines); remove it")
        return None
    return _rows(files, columns, kept) if kept else None


def _has_a_row_per_vector(file: Path, columns: Columns) -> bool:
    """Return whether each row or line holds one vector. A line of JSON can be a page of items, or an answer of a service."""
    if not has_suffix(file, JSON_SUFFIXES):
        return has_suffix(file, (*PARQUET_SUFFIXES, *TABLE_SUFFIXES))
    return columns.find_vector(list(_flatten(first_object(file) or {}))) is not None


def _rows(files: list[Path], columns: Columns, kept: bool | list[str]) -> Iterator[dict[str, object]]:
    converter, is_first = JsonColumns(), True
    for file in files:
        names = column_names(file)
        vectors = {columns.find_vector(names), SCALE, *EMBEDDING_COLUMNS}
        for where, row in read_rows(file, tuple(name for name in names if name not in vectors)):
            flat = _flatten(row)
            if is_first and isinstance(kept, list) and (missing := next((name for name in kept if name not in flat), None)):
                raise XcompatError(f"{where} has no column {missing!r}; {nearest(missing, list(flat))}")
            is_first, unread = False, {columns.find_id(list(flat)), *vectors}
            wanted = (
                kept if isinstance(kept, list) else [name for name in flat if name not in unread and not _is_vector(flat[name])]
            )
            yield converter.convert({name: flat.get(name) for name in wanted})
    converter.report()


def _flatten(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with the columns within it."""
    within = {name: row[name] for name in NESTED if isinstance(row.get(name), Mapping)}
    own = {name: value for name, value in row.items() if name not in within}
    return {name: value for each in (own, *within.values()) for name, value in each.items()}


def _is_vector(value: object) -> bool:
    """Return whether a value is a list of numbers, e.g. another embedding."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], int | float)
