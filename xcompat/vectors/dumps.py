"""Embeddings in JSON from databases and services: exports, scrolls, and embedding API batch output."""

from __future__ import annotations

import base64
import binascii
import gzip
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xcompat.core.errors import XcompatError
from xcompat.vectors.formats import DOCUMENTS, EMBEDDING_COLUMNS, ID_COLUMNS, Columns, filled_lines

Row = tuple[str | int | None, NDArray[np.float32] | None]
"""The id and the embedding of an item; either can be missing."""
_LISTS = (
    *(("result", "points"), ("hits", "hits"), ("points",), ("objects",), ("data",), ("vectors",), ("matches",)),
    *(("documents",), ("rows",), ("records",), ("items",), ("value",), ("response", "docs")),
)
"""Where a document holds its items: Qdrant, Elasticsearch, Weaviate, OpenAI, Pinecone, and others."""
_NESTED = ("_source", "properties", "payload", "metadata", "_additional", "fields", "response", "modelOutput")
"""Fields of an item in which its vector can be."""


def read_dump(file: Path, columns: Columns) -> Iterator[Row]:
    """Yield the items of a JSON document, or of JSON lines with nested rows.

    Args:
        file: the export; a document is read into memory.
        columns: the named vector and the id to read.

    Raises:
        XcompatError: the file is not JSON or has no items, or --vector-name is missing for several vectors per item.
    """
    for number, item in enumerate(_load_items(file)):
        yield from _rows(item, f"{file}: item {number}", columns)


def _load_items(file: Path) -> Iterable[Any]:
    """Return the items of a JSON document, or the lines of JSON lines."""
    if file.name.endswith(DOCUMENTS):
        with (gzip.open if file.name.endswith(".gz") else open)(file, "rb") as opened:
            text = opened.read()
        lines = text.split(b"\n", 2)
        if len(lines) > 1 and lines[0].endswith(b"}") and lines[1].startswith(b"{"):  # as elasticdump and mongoexport write
            return (_parse(line, file, n) for n, line in enumerate(text.splitlines(), 1) if line)
        return _items(_parse(text, file, 1)) or []
    return (_parse(line, file, number) for number, line in enumerate(filled_lines(file), 1))


def parse_vector(text: str, where: object) -> NDArray[np.float32]:
    """Parse a vector from text: a list in brackets, as JSON or NumPy prints it, or base64 of float32.

    Raises:
        XcompatError: the text is none of these.

    Example:
        >>> parse_vector("[0.5, 1.0]", "row 0"), parse_vector("AAAAPwAAgD8=", "row 0")
        (array([0.5, 1. ], dtype=float32), array([0.5, 1. ], dtype=float32))
    """
    text = text.strip()
    try:
        if text.startswith(("[", "(")):
            return np.array(text.strip("[]()").replace(",", " ").split(), np.float32)
        return np.frombuffer(base64.b64decode(text, validate=True), "<f4").astype(np.float32)
    except (ValueError, binascii.Error) as error:
        raise XcompatError(f"{where} holds no vector ({text[:40]!r}); write numbers in brackets, or base64 of float32") from error


def _parse(line: bytes, file: Path, number: int) -> object:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise XcompatError(
            f"{file} line {number} is not JSON ({str(error)[:100]}); fix the line, or write the file again"
        ) from error


def _items(document: Any) -> list[Any] | None:  # noqa: ANN401 - JSON
    """Return the items of a document; None if it holds none."""
    if not isinstance(document, Mapping):
        return document if isinstance(document, list) else None
    ids = next((document[name] for name in ("ids", *ID_COLUMNS) if isinstance(document.get(name), list)), None)
    vectors = next((document[name] for name in EMBEDDING_COLUMNS if isinstance(document.get(name), list)), None)
    if ids is not None and vectors is not None and len(ids) == len(vectors):  # columns, as Chroma returns them
        return [{"id": each, "embedding": vector} for each, vector in zip(ids, vectors, strict=True)]
    if (listed := next(filter(None, (_list_at(document, path) for path in _LISTS)), None)) is not None:
        return listed
    values = list(document.values())
    if values and all(isinstance(each, list) and each and isinstance(each[0], int | float) for each in values):  # id -> vector
        return [{"id": name, "embedding": vector} for name, vector in document.items()]
    return _items(values[0]) if len(values) == 1 else None  # e.g. an answer of GraphQL


def _list_at(document: Mapping[str, object], path: tuple[str, ...]) -> list[object] | None:
    """Return the list at a path of keys, or the values there with their keys as ids."""
    found: Any = document
    for key in path:
        found = found.get(key) if isinstance(found, Mapping) else None
    if isinstance(found, Mapping) and found and all(isinstance(each, Mapping) for each in found.values()):
        inner = next(iter(found.values()))
        if len(found) > 1 or Columns().find_vector(list(inner)) or _items(inner) is None:  # else one more level
            return [{"id": name, **each} for name, each in found.items()]
    return found if isinstance(found, list) else None


def _rows(item: Any, where: str, columns: Columns) -> Iterator[Row]:  # noqa: ANN401 - JSON
    if not isinstance(item, Mapping):
        raise XcompatError(f"{where} is not an object; write objects with id and embedding")
    if "custom_id" in item and ("response" in item or "error" in item):
        yield from _answers(item, where)
        return
    levels = _levels(item)
    source = _level_with(columns.vector, levels) or next((each for each in levels if columns.find_vector(list(each))), None)
    if source is None and (page := _items(item)) is not None:  # a page of a scroll
        for number, each in enumerate(page):
            yield from _rows(each, f"{where}, item {number}", columns)
        return
    usual = next((each for each in (item, source) if each is not None and columns.find_id(list(each))), item)
    holder = _level_with(columns.id, levels) or usual
    name = columns.find_id(list(holder)) or "index"
    vector = columns.find_vector(list(source)) if source is not None else None
    value = source[vector] if source is not None and vector is not None else None
    found = holder.get(name)
    yield found.get("$oid") if isinstance(found, Mapping) else found, _vector(value, where, columns)


def field_names(file: Path) -> list[str]:
    """Return the names that can be chosen in a JSON document, or in JSON lines: fields of the first item, and named vectors.

    Raises:
        XcompatError: the file is not JSON.
    """
    return [name for name, _ in _fields(_first_item(file))]


def vector_names(file: Path) -> list[str]:
    """Return the names in :func:`field_names` with a list of numbers in the first item."""
    return [name for name, value in _fields(_first_item(file)) if _is_vector(value)]


def _first_item(file: Path) -> Mapping[str, Any]:
    item: object = next(iter(_load_items(file)), None)
    while isinstance(item, Mapping):
        is_page = not any(Columns().find_vector(list(level)) for level in _levels(item))
        if not is_page or not (page := _items(item)) or not isinstance(page[0], Mapping):
            return item
        item = page[0]
    return {}


def _fields(item: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for level in _levels(item):
        yield from level.items()
        for name in EMBEDDING_COLUMNS:
            if isinstance(level.get(name), Mapping):
                yield from level[name].items()


def _is_vector(value: object) -> bool:
    return isinstance(value, list) and len(value) > 1 and all(isinstance(each, int | float) for each in value)


def _levels(item: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the parts of an item that can have its id and its vector."""
    return [item, *(item[field] for field in _NESTED if isinstance(item.get(field), Mapping))]


def _level_with(name: str | None, levels: list[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the part of an item that has a chosen field, if any."""
    return next((each for each in levels if name is not None and name in each), None)


def _answers(item: Mapping[str, Any], where: str) -> Iterator[Row]:
    """Yield the embeddings of a batch request, which has an input or several."""
    body = (item.get("response") or {}).get("body") or {}
    answers = body.get("data") or [{}]
    for answer in answers:
        name = str(item["custom_id"]) if len(answers) == 1 else f"{item['custom_id']}/{answer.get('index')}"
        yield name, _vector(answer.get("embedding"), where, Columns())


def _vector(value: Any, where: str, columns: Columns) -> NDArray[np.float32] | None:  # noqa: ANN401 - JSON
    if isinstance(value, Mapping):
        dense = {name: each for name, each in value.items() if isinstance(each, list | str)}
        if columns.vector not in dense and len(dense) != 1:
            raise XcompatError(f"{where} has several vectors ({', '.join(dense)}); choose one with {columns.vector_option}")
        value = dense[columns.vector if columns.vector in dense else next(iter(dense))]
    if value is None or isinstance(value, str):
        return parse_vector(value, where) if value else None
    try:
        row_D = np.array([np.nan if each is None else each for each in value], np.float32)
    except (TypeError, ValueError) as error:
        raise XcompatError(f"{where} holds no list of numbers; write lists of floats") from error
    if row_D.ndim != 1:
        raise XcompatError(f"{where} holds an array of {row_D.ndim} dimensions; give a vector per item")
    return row_D if len(row_D) else None
