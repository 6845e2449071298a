"""Tables of embeddings: Parquet, Arrow, CSV and JSON lines, block by block."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from xcompat.core.arrays import normalise_rows
from xcompat.core.errors import XcompatError
from xcompat.vectors.dumps import Row, field_names, parse_vector, read_dump, vector_names
from xcompat.vectors.formats import (
    ARRAYS,
    ARROW,
    DELIMITED,
    DOCUMENTS,
    EMBEDDING_COLUMNS,
    ID,
    ID_COLUMNS,
    JSON_LINES,
    LONGEST_LINE,
    PARQUET,
    SCALE,
    Columns,
    delimiter_of,
    first_object,
    list_shards,
    read_header,
)
from xcompat.vectors.spool import BLOCK, Spool

if TYPE_CHECKING:
    import pyarrow as pa

EMBEDDING = EMBEDDING_COLUMNS[0]
_ITEM = {ID: ID, EMBEDDING: EMBEDDING}
"""Columns of items that are read one by one."""
_Table: TypeAlias = "tuple[dict[str, str], Iterator[pa.RecordBatch]]"
"""Column to read -> its name in the result, and the blocks of a table."""


def read_tables(files: list[Path], columns: Columns) -> tuple[NDArray[np.number], list[str] | None]:
    """Copy the embeddings of tables into an unnamed temporary file, block by block.

    Args:
        files: embedding tables with the same dimension.
        columns: column names.

    Returns:
        (N, D) rows, NaN for missing embeddings, and N ids; None for tables without ids that need none.

    Raises:
        XcompatError: a table is damaged, or rows lack an id or a scale, or differ in dimensions.
    """
    import pyarrow as pa

    spool: Spool | None = None
    ids: list[str] = []
    rows = 0
    waiting = 0  # first rows without an embedding, before the dimension is known
    for file in files:
        number = 0
        try:
            for batch in _batches(file, columns):
                rows_BD = rows_of_batch(file, number, batch, spool.shape[1] if spool is not None else None)
                if spool is None and not rows_BD.shape[1]:
                    waiting += len(rows_BD)
                else:
                    if spool is None:
                        spool = Spool(np.float16 if rows_BD.dtype == np.float16 else np.float32)
                        spool.add(np.full((waiting, rows_BD.shape[1]), np.nan))
                    spool.add(rows_BD)
                ids += _ids(file, number, batch.column(ID)) if ID in batch.schema.names else []
                number += len(rows_BD)
                rows += len(rows_BD)
        except (pa.ArrowException, OSError, EOFError, UnicodeDecodeError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise  # of the machine, such as a full disk
            cause = str(error).splitlines()[0][:200]
            raise XcompatError(f"cannot read {file} after row {number:,} ({cause}); fix it, or write it again") from error
    if spool is None:
        raise XcompatError(f"{files[0]} holds no embeddings; {_advise_on_names(files[0], columns)}")
    if ids and len(ids) < rows:
        raise XcompatError(f"only {len(ids):,} of {rows:,} rows from {files[0]} on have an {ID}; give each item an id, or none")
    return spool.map_rows(), ids or None


def _advise_on_names(file: Path, columns: Columns) -> str:
    """Return the fix for a file without embeddings under the usual names."""
    is_json = file.name.endswith((*DOCUMENTS, *JSON_LINES))
    if is_json and (names := vector_names(file)):
        return f"choose {' or '.join(names)} with {columns.vector_option}"
    return f"it needs a row with {ID} and {EMBEDDING} for each item"


def rows_of_batch(where: object, before: int, batch: pa.RecordBatch, dim: int | None = None) -> NDArray[Any]:
    """Read the embeddings in a table block.

    Args:
        where: the table, for messages.
        before: rows before the block.
        batch: B rows with a column ``embedding``, and ``scale`` if it is int8.
        dim: embedding dimension; None to use the first embedding's.

    Returns:
        (B, D), float16 from float16 and int8, else float32; NaN for missing embeddings and values. D is 0 if no row has an
        embedding and no dimension is given.

    Raises:
        XcompatError: the column holds no lists of numbers, or a row has another length.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    lists = batch.column(EMBEDDING)
    kind = lists.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        lists = _parse_texts(lists, where, before)
        kind = lists.type
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    if not is_list or not (pa.types.is_floating(kind.value_type) or kind.value_type == pa.int8()):
        raise XcompatError(f"{where}: column {EMBEDDING!r} is {kind}; it should hold lists of floats")
    lengths_B = pc.list_value_length(lists).fill_null(0).to_numpy()
    given_B = lengths_B > 0
    if dim is None and not given_B.any():
        return np.empty((len(lists), 0), np.float32)
    dim = dim or int(lengths_B[given_B][0])
    other = np.flatnonzero(given_B & (lengths_B != dim))
    if len(other):
        row = int(other[0])
        raise XcompatError(
            f"row {before + row} of {where} has {lengths_B[row]} dimensions, those before it {dim}; remove or re-embed it"
        )
    values = lists.flatten()
    is_float32 = not (pa.types.is_float16(kind.value_type) or kind.value_type == pa.int8())
    values_nd = values.cast(pa.float32()) if values.null_count or is_float32 else values
    rows_nd: NDArray[np.number] = values_nd.to_numpy(zero_copy_only=False).reshape(-1, dim)
    if kind.value_type == pa.int8():
        rows_nd = normalise_rows(rows_nd * _scales(where, batch.filter(pa.array(given_B)))[:, None]).astype(np.float16)
    if given_B.all():
        return rows_nd
    rows_BD = np.full((len(lists), dim), np.nan, rows_nd.dtype)
    rows_BD[given_B] = rows_nd
    return rows_BD


def column_names(path: Path) -> list[str]:
    """Return the column names of a table or a folder's first table.

    Raises:
        XcompatError: the table cannot be read.
    """
    file = list_shards(path)[0] if path.is_dir() and list_shards(path) else path
    if file.is_dir() or file.name.endswith(ARRAYS):
        return []
    if file.name.endswith(DELIMITED):
        return read_header(file)
    if file.name.endswith(JSON_LINES):
        return list(first_object(file) or {})
    if file.name.endswith(DOCUMENTS):
        return list(ID_COLUMNS[:1] + EMBEDDING_COLUMNS[:1])  # found anywhere in a document
    import pyarrow as pa

    try:
        return list(read_schema(file).names)
    except (pa.ArrowException, OSError) as error:
        raise XcompatError(f"cannot read {file} ({str(error).splitlines()[0][:200]}); fix it, or write it again") from error


def read_schema(file: Path) -> pa.Schema:
    """Return the schema of a Parquet or Arrow file."""
    if file.name.endswith(PARQUET):
        import pyarrow.parquet as pq

        return pq.read_schema(file)
    return _open_arrow(file)[0]


def choosable_names(path: Path) -> list[str]:
    """Return the names that ``--id-column`` and ``--vector-name`` can choose in a table or a folder of tables.

    Raises:
        XcompatError: the table cannot be read.
    """
    file = next(iter(list_shards(path)), path)
    return field_names(file) if file.name.endswith((*DOCUMENTS, *JSON_LINES)) else column_names(file)


def _batches(file: Path, columns: Columns) -> Iterator[pa.RecordBatch]:
    """Yield nonempty blocks with the columns ``embedding`` and, if stored, ``id`` and ``scale``."""
    if file.name.endswith(PARQUET):
        names, batches = _read_parquet(file, columns)
    elif file.name.endswith(ARROW):
        names, batches = _read_arrow(file, columns)
    elif file.name.endswith(DELIMITED):
        names, batches = _read_delimited(file, columns)
    elif file.name.endswith(JSON_LINES):
        names, batches = _read_json_lines(file, columns)
    else:
        names, batches = _ITEM, _as_batches(read_dump(file, columns), file, columns)
    for batch in batches:
        if batch.num_rows:
            kept = [name for name in names if name in batch.schema.names]  # items of a dump can have no ids
            yield batch.select(kept).rename_columns([names[name] for name in kept])


def _read_parquet(file: Path, columns: Columns) -> _Table:
    import pyarrow.parquet as pq

    table = pq.ParquetFile(file, page_checksum_verification=True)
    names = _choose_columns(file, table.schema_arrow.names, columns)
    return names, table.iter_batches(BLOCK, columns=list(names))


def _open_arrow(file: Path) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    """Open an Arrow file, or a stream, as data sets are saved."""
    import pyarrow as pa

    source = pa.memory_map(str(file))
    try:
        reader = pa.ipc.open_file(source)
    except pa.ArrowInvalid:
        stream = pa.ipc.open_stream(source)
        return stream.schema, iter(stream)
    return reader.schema, (reader.get_batch(number) for number in range(reader.num_record_batches))


def _read_arrow(file: Path, columns: Columns) -> _Table:
    schema, batches = _open_arrow(file)
    return _choose_columns(file, schema.names, columns), batches


def _read_delimited(file: Path, columns: Columns) -> _Table:
    """Read ids and embeddings of a CSV as text: ids can have leading zeros."""
    import pyarrow as pa
    from pyarrow import csv

    names = _choose_columns(file, [name for name in read_header(file) if name != SCALE], columns)
    reader = csv.open_csv(
        str(file),
        csv.ReadOptions(block_size=LONGEST_LINE),
        csv.ParseOptions(delimiter=delimiter_of(file), newlines_in_values=True),
        csv.ConvertOptions(
            column_types=dict.fromkeys(names, pa.string()),
            include_columns=list(names),
            strings_can_be_null=True,
            null_values=[""],
        ),
    )
    return names, iter(reader)


def _read_json_lines(file: Path, columns: Columns) -> _Table:
    """Read flat lines with the columns of the first line. Lines of a database's export are parsed one by one."""
    import pyarrow as pa
    from pyarrow import json as arrow_json

    first = first_object(file)
    if first is None:
        return _ITEM, iter(())
    if _is_nested(first, columns):
        return _ITEM, _as_batches(read_dump(file, columns), file, columns)
    names = _choose_columns(file, [name for name in first if name != SCALE], columns)
    id_column, vector = names  # a line without an id is nested
    if not isinstance(first[vector], list | None):
        raise XcompatError(f"{file}: column {vector!r} is {type(first[vector]).__name__}; it should hold lists of floats")
    of_id = pa.int64() if isinstance(first[id_column], int) else pa.string()
    schema = pa.schema([(id_column, of_id), (vector, pa.list_(pa.float32()))])
    parsing = arrow_json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")
    return names, iter(arrow_json.open_json(str(file), arrow_json.ReadOptions(block_size=LONGEST_LINE), parsing))


def _is_nested(first: dict[str, object], columns: Columns) -> bool:
    """Return whether lines like the first line are parsed singly: vectors are text, named, or deeper in the line."""
    vector = columns.find_vector(list(first))
    if vector is None:
        return any(isinstance(each, dict) for each in first.values())
    name = columns.find_id(list(first))
    return isinstance(first[vector], str | dict) or name is None or isinstance(first[name], dict)


def _as_batches(rows: Iterable[Row], file: Path, columns: Columns) -> Iterator[pa.RecordBatch]:
    """Collect single items into blocks, without ids if no item of a block has one and none are needed."""
    import pyarrow as pa

    rows, before = iter(rows), 0
    while block := list(islice(rows, BLOCK)):
        ids = [name for name, _ in block]
        has_ids = columns.needs_ids or any(name is not None for name in ids)
        if has_ids and None in ids:
            raise XcompatError(f"item {before + ids.index(None)} of {file} has no {ID}; choose its field with --id-column")
        vectors = pa.array([vector for _, vector in block], pa.list_(pa.float32()))
        named = {ID: pa.array([str(name) for name in ids])} if has_ids else {}
        yield pa.record_batch({**named, EMBEDDING: vectors})
        before += len(block)


def _parse_texts(texts: pa.Array, where: object, before: int) -> pa.Array:
    import pyarrow as pa

    parsed = [
        parse_vector(text, f"row {before + row} of {where}") if text else None for row, text in enumerate(texts.to_pylist())
    ]
    return pa.array(parsed, pa.list_(pa.float32()))


def _choose_columns(file: Path, names: list[str], columns: Columns) -> dict[str, str]:
    """Choose the columns with the id, the embedding and, if any, the scale; return column -> its name in the result."""
    id_column, embedding = columns.find_id(names), columns.find_vector(names)
    if embedding is None or (id_column is None and columns.needs_ids):
        missing, option = (EMBEDDING, "vector_name") if id_column is not None else (ID, "id_column")
        typed = f"--{option.replace('_', '-')} ({option} in a recipe)"
        raise XcompatError(f"{file} has no column {missing!r} (it has {', '.join(names)}); choose one with {typed}")
    chosen = {id_column: ID} if id_column is not None else {}
    return chosen | {embedding: EMBEDDING} | ({SCALE: SCALE} if SCALE in names else {})


def _scales(file: object, batch: pa.RecordBatch) -> NDArray[np.float32]:
    import pyarrow as pa
    import pyarrow.compute as pc

    if SCALE not in batch.schema.names:
        raise XcompatError(f"{file} holds int8 without a scale: add a column {SCALE!r}; 1.0 in each row, if all steps are alike")
    scales = batch.column(SCALE)
    if not (pa.types.is_floating(scales.type) or pa.types.is_integer(scales.type)):
        raise XcompatError(
            f"{file}: column {SCALE!r} is {scales.type}, not a number; write a number per row, or use .npy for scales per "
            "dimension"
        )
    scales_B: NDArray[np.float32] = pc.cast(scales, pa.float32()).to_numpy(zero_copy_only=False)
    if not (np.isfinite(scales_B) & (scales_B > 0)).all():
        raise XcompatError(f"{file} holds a scale that is not a positive number")
    return scales_B


def _ids(file: Path, before: int, column: pa.Array) -> list[str]:
    import pyarrow as pa
    import pyarrow.compute as pc

    if column.null_count:
        row = int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
        raise XcompatError(f"row {before + row} of {file} has no {ID}; give each item an id")
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_integer(kind)):
        raise XcompatError(f"{file}: column {ID!r} is {kind}; an id is a string or a whole number")
    ids: list[str] = pc.cast(column, pa.string()).to_pylist()
    return ids
