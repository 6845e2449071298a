"""Text items: documents with ids, whole or split into passages, from tables, plain text and data sets."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from pydantic import Field, model_validator

from xcompat.core.errors import XcompatError, nearest
from xcompat.core.json_values import JsonColumns
from xcompat.core.lazy import datasets
from xcompat.core.progress import notice
from xcompat.data.cache import cached_dataset, file_stamps
from xcompat.data.corpora import HashSet
from xcompat.data.image_files import notice_unread
from xcompat.data.loading import load_raw
from xcompat.data.schema import ID, METADATA, TEXT
from xcompat.data.sources import DataSource, expand_folders, has_suffix, is_saved_dataset, local_files, refuse_hub_fields
from xcompat.data.table_rows import LINE, ROW_SUFFIXES, Row, read_rows

if TYPE_CHECKING:
    import pyarrow as pa

TEXT_COLUMNS = (TEXT, "passage", "content", "contents", "body", "document", "sentence", "question", "query", "caption", LINE)
ID_COLUMNS = (ID, "_id", "doc_id", "docid", "document_id", "passage_id", "pid", "query_id", "qid", "uid", "key")
DOCUMENT = "document"
"""Metadata key of a passage with the id of its document."""
BATCH = 8192


class TextSource(DataSource):
    """Source of texts with ids: :class:`DataSource` plus these fields.

    Files are JSON lines, CSV, TSV, Parquet, or plain text with an item per line. Columns are detected by their usual names
    (``text``, ``passage``, ``content`` ...; ``id``, ``_id``, ``doc_id`` ...). Without an id column, the row number is the id.
    Passages are split by words, to keep their ids independent of a tokeniser.

    Args:
        text_column: column with the text, or several, joined by a space (``[title, text]``).
        id_column: column with the id.
        metadata: further columns to keep; True for all, False for none.
        keep_text: also store the text in the metadata, as ``text``.
        words: maximum words per passage; None keeps documents whole.
        overlap: number of words shared by consecutive passages.
        limit: number of documents to use, from the start.
    """

    text_column: str | list[str] | None = None
    id_column: str | None = None
    metadata: bool | list[str] = True
    keep_text: bool = False
    words: int | None = Field(default=None, ge=1)
    overlap: int = Field(default=0, ge=0)
    limit: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _overlap_is_shorter(self) -> Self:
        if self.overlap and (self.words is None or self.overlap >= self.words):
            raise ValueError(f"overlap is {self.overlap} and words is {self.words}; overlap must be smaller than words")
        return self


def load_text_items(source: TextSource | str | Path) -> datasets.Dataset:
    """Load texts as gallery items, or as training texts of a map.

    Documents without text are skipped, with a notice.

    Args:
        source: the source, or its ``path``.

    Returns:
        A memory-mapped data set with ``id`` (unique string), ``text`` and ``metadata`` (JSON object as string, or None). Passages
        have ids ``DOCUMENT#0`` etc. and ``document`` in their metadata.

    Raises:
        XcompatError: data or a column is missing, data is empty or damaged, or an id repeats.
    """
    import pyarrow as pa

    source = source if isinstance(source, TextSource) else TextSource(path=str(source))
    raw, files = open_rows(source)
    features = datasets.Features({name: datasets.Value("string") for name in (ID, TEXT, METADATA)})

    def build(record: dict[str, Any]) -> Iterator[pa.RecordBatch]:
        record |= {"documents": 0, "items": 0, "empty": []}
        columns = JsonColumns()
        seen = HashSet()
        for items in _in_batches(_items(iterate_rows(raw, files), source, record, columns)):
            _require_unique_ids([item[ID] for item in items], seen, source)
            record["items"] += len(items)
            yield pa.RecordBatch.from_pylist(items, schema=features.arrow_schema)
        if not record["items"]:
            raise XcompatError(f"{source.path} contains no text; it needs a row with text per item")
        record["changed"] = columns.lines()

    key = {"source": source.model_dump(), "data": raw._fingerprint if raw is not None else file_stamps(files)}
    dataset, record = cached_dataset("items", key, features, build)
    for line in record.get("changed", []):
        notice(f"{line}; choose columns with --metadata COLUMN, or none with --no-metadata")
    if empty := record["empty"]:
        notice(f"{len(empty):,} of {record['documents']:,} documents have no text and are skipped, e.g. {empty[0]!r}")
    return dataset


def split_passages(text: str, words: int, overlap: int = 0) -> list[str]:
    """Split a text into passages.

    Args:
        text: any text; white space separates words.
        words: maximum words per passage.
        overlap: words shared with the previous passage, fewer than ``words``.

    Returns:
        The passages, unchanged; the last can be shorter. They cover every word, and none lies within another.

    Example:
        >>> split_passages("a b c d e", words=3, overlap=1)
        ['a b c', 'c d e']
    """
    spans = [match.span() for match in re.finditer(r"\S+", text)]
    starts = range(0, max(len(spans) - overlap, 1), words - overlap)
    parts = [spans[start : start + words] for start in starts]
    return [text[part[0][0] : part[-1][1]] for part in parts if part]


def open_rows(source: DataSource) -> tuple[datasets.Dataset | None, list[Path]]:
    """Open the rows of a source.

    Args:
        source: the source.

    Returns:
        A data set, or files, for :func:`iterate_rows`.

    Raises:
        XcompatError: no texts are found.
    """
    paths = local_files(source.path)
    if paths is None or (len(paths) == 1 and is_saved_dataset(paths[0])):
        raw: Any = load_raw(source, paths or [])
        return raw, []
    refuse_hub_fields(source.path, split=source.split, name=source.name, revision=source.revision)
    files = [file for file in expand_folders(paths) if has_suffix(file, ROW_SUFFIXES) or file in paths]
    if not files:
        raise XcompatError(f"{paths[0]} contains no texts ({', '.join(ROW_SUFFIXES)}); check the path")
    for folder in filter(Path.is_dir, paths):
        notice_unread(folder, files)
    return None, files


def iterate_rows(raw: datasets.Dataset | None, files: list[Path]) -> Iterator[tuple[str, Row]]:
    """Yield the rows from :func:`open_rows`, each with its location for messages."""
    if raw is not None:
        yield from ((f"row {number}", dict(row)) for number, row in enumerate(raw))
    for file in files:
        yield from read_rows(file)


def _items(
    rows: Iterator[tuple[str, Row]], source: TextSource, record: dict[str, Any], columns: JsonColumns
) -> Iterator[dict[str, Any]]:
    for number, (where, row) in enumerate(rows):
        if number == source.limit:
            return
        text_columns, id_column = _columns(row, source, where)
        text = " ".join(part for name in text_columns if (part := _text(row[name], name, where)))
        name = _id(row[id_column], where) if id_column is not None else str(number)
        record["documents"] += 1
        if not text:
            record["empty"].append(name)
            continue
        about = columns.convert(_metadata(row, {*text_columns, id_column}, source, where))
        parts = [text] if source.words is None else split_passages(text, source.words, source.overlap)
        for place, part in enumerate(parts):
            known = about | ({DOCUMENT: name} if source.words is not None else {}) | ({TEXT: part} if source.keep_text else {})
            item = name if source.words is None else f"{name}#{place}"
            yield {ID: item, TEXT: part, METADATA: json.dumps(known, ensure_ascii=False) if known else None}


def _columns(row: Row, source: TextSource, where: str) -> tuple[list[str], str | None]:
    """Choose the text columns, and the id column if any."""
    given = [source.text_column] if isinstance(source.text_column, str) else source.text_column
    for name in [*(given or []), *([source.id_column] if source.id_column is not None else [])]:
        if name not in row:
            raise XcompatError(f"{where} has no column {name!r}; {nearest(name, list(row))}")
    usual = next(([name] for name in TEXT_COLUMNS if name in row), None)
    if (texts := given or usual) is None:
        raise XcompatError(f"{where} has no column named text (it has {', '.join(row)}); set text_column")
    return texts, source.id_column or next((name for name in ID_COLUMNS if name in row and name not in texts), None)


def _text(value: object, column: str, where: str) -> str:
    if value is not None and not isinstance(value, str):
        raise XcompatError(f"{where}: {column} is {str(value)[:80]!r}, not text; set text_column")
    return (value or "").strip()


def _id(value: object, where: str) -> str:
    if not isinstance(value, str | int) or not str(value).strip():
        raise XcompatError(f"{where} has the id {str(value)[:80]!r}; ids must be strings or whole numbers")
    return str(value)


def _metadata(row: Row, used: set[str | None], source: TextSource, where: str) -> dict[str, Any]:
    if isinstance(source.metadata, list):
        for name in source.metadata:
            if name not in row:
                raise XcompatError(f"{where} has no column {name!r}; {nearest(name, list(row))}")
    kept = [] if source.metadata is False else [name for name in row if name not in used]
    kept = source.metadata if isinstance(source.metadata, list) else kept
    return {name: row[name] for name in kept}


def _in_batches(items: Iterator[dict[str, object]]) -> Iterator[list[dict[str, Any]]]:
    while batch := list(islice(items, BATCH)):
        yield batch


def _require_unique_ids(ids: list[str], seen: HashSet, source: TextSource) -> None:
    """Raise if an id repeats. Ids are compared by hash: two of ten million collide with probability 1e-6."""
    from pandas.util import hash_array

    new_N = seen.add(hash_array(np.array(ids, dtype=object), categorize=False))
    if not new_N.all():
        twice = ids[int(np.flatnonzero(~new_N)[0])]
        raise XcompatError(f"{source.path}: the id {twice!r} appears twice; ids must be unique: set id_column or fix the id")
