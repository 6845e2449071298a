"""Read embeddings that any software has stored: arrays, Parquet, JSON lines, and folders of shards of the last two."""

from __future__ import annotations

import gzip
import json
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xcompat.core.arrays import forget_pages, map_array, normalise_rows, row_lengths
from xcompat.core.errors import XcompatError

if TYPE_CHECKING:
    import pyarrow as pa
    from torch import Tensor

ID, SCALE, OFFSET = "id", "scale", "offset"
EMBEDDING_COLUMNS = ("embedding", "values", "vector")
ARRAY, PARQUET = ".npy", ".parquet"
JSON = (".jsonl", ".jsonl.gz", ".ndjson", ".ndjson.gz")
TABLES = (PARQUET, *JSON)
SUFFIXES = (ARRAY, *TABLES)
"""What :func:`read_vectors` reads, and folders of :data:`TABLES`."""
EMBEDS, IDS = "image_embeds", "image_ids.txt"
PROTOTYPES, CLASSES = "prototypes", "classes.txt"
"""Of a lost old model: its stored embeddings with their ids, or its prototypes with the names of their classes."""
UNIT = 1e-2
"""Largest deviation of an embedding's length from 1; float16 rounds by less."""
BLOCK = 8192
BAD_SHARE = 0.1
"""Default share of the rows of a file that may have no usable embedding."""
_NAMED = 3  # unusable rows that a message names
LONGEST_LINE = 2**24
"""Most bytes of a line of JSON, and bytes that are read at a time."""


CODECS = "SQ8, SQ4, SQfp16, or PQ and a number of bytes, such as PQ64"
_KNOWN = re.compile(r"SQ(4|8|fp16)|PQ[1-9][0-9]{0,3}")
AS_THEY_ARE = "float32"
"""In place of a codec's name: entries stay uncompressed, however many there are."""


@dataclass(frozen=True)
class Vectors:
    """Stored embeddings.

    Args:
        rows_ND: numbers as they are stored, mapped into memory; of int8, float16 rows of length 1.
        ids: the id of each row; None of a ``.npy`` file, which has none.
    """

    rows_ND: NDArray[Any]
    ids: list[str] | None = None


def read_vectors(path: Path) -> Vectors:
    """Map stored embeddings into memory; those of tables are first copied, block by block, into an unnamed temporary file.

    A row of int8 is multiplied by its scale and divided by its length, which quantising has changed.

    Args:
        path: a ``.npy`` file; Parquet or JSON lines (``.jsonl``, ``.jsonl.gz``) with the columns ``id`` and ``embedding``
            (``values`` and ``vector`` are read too); or a folder of these, in the order of their names. int8 needs a scale: of
            ``vectors.npy`` ``vectors_scale.npy`` (and, if zero is no zero, ``vectors_offset.npy``), one number, one for each
            dimension (1, D), or one for each row (N, 1); in Parquet a column ``scale``, one number a row.

    Returns:
        The embeddings and their ids.

    Raises:
        XcompatError: the file is damaged, or rows lack an id, an embedding or a scale, or differ in dimensions.
    """
    if path.is_dir() or not path.name.endswith(ARRAY):
        return _read_tables(_shards(path) if path.is_dir() else [path])
    rows_ND = map_array(path)
    return Vectors(_unquantised(path, rows_ND) if rows_ND.dtype == np.int8 else rows_ND)


class CheckedRows(NamedTuple):
    """Embeddings that were looked through.

    Args:
        rows_ND: the embeddings, of length 1 where they are usable.
        usable_N: (N,) bool, False for rows without a usable embedding.
        notes: sentences for the user about rows that are left out, or that were not of length 1.
    """

    rows_ND: NDArray[Any]
    usable_N: NDArray[np.bool_]
    notes: tuple[str, ...]

    def readable_rows(self) -> NDArray[Any]:
        """Return the embeddings with NaN in the place of those that are not usable."""
        if self.usable_N.all():
            return self.rows_ND
        return np.where(self.usable_N[:, None], self.rows_ND, np.float32("nan")).astype(np.float32)


def check_rows(
    rows_ND: NDArray[Any],
    where: object,
    ids: Sequence[str] | None = None,
    max_bad_share: float = BAD_SHARE,
    *,
    keep_lengths: bool = False,
    option: str = "--max-bad-share",
) -> CheckedRows:
    """Find rows without a usable embedding, and bring the others to length 1.

    A row is not usable if it is missing (NaN everywhere), holds a number that is not finite, or zeros alone.

    Args:
        rows_ND: floats as they are stored; they are not changed.
        where: the file, for messages.
        ids: the id of each row, for messages.
        max_bad_share: the share of rows that may be unusable.
        keep_lengths: whether rows keep their lengths.
        option: the option that sets the share, for messages; empty if there is none.

    Returns:
        The rows. Those that have length 1 already, up to :data:`UNIT`, stay where they are if all have.

    Raises:
        XcompatError: these are no rows of floats, or more of them are unusable; the message names the first ones.
    """
    require_floats(rows_ND, where)
    lengths_N = np.concatenate([_lengths(rows_ND, start) for start in range(0, len(rows_ND), BLOCK)])
    usable_N = np.isfinite(lengths_N) & (lengths_N > 0)
    bad, notes = np.flatnonzero(~usable_N), list[str]()
    if bad.size:
        named = "; ".join(f"row {row}{_quote(ids, row)} {_describe_row(rows_ND[row])}" for row in bad[:_NAMED].tolist())
        more = f"; and {bad.size - _NAMED:,} more" if bad.size > _NAMED else ""
        found = f"{bad.size:,} of {len(rows_ND):,} rows of {where} have no usable embedding"
        raising = f", or raise {option}" if option else ""
        if bad.size > max_bad_share * len(rows_ND) or bad.size == len(rows_ND):
            raise XcompatError(f"{found}, more than the share {max_bad_share:g}: {named}{more}; fix them{raising}")
        notes.append(f"{found} and are left out: {named}{more}.")
    other = np.flatnonzero(usable_N & ~(np.abs(lengths_N - 1) < UNIT))
    if other.size and not keep_lengths:
        row = int(other[0])
        notes.append(
            f"{other.size:,} of {len(rows_ND):,} rows of {where} are not of length 1 (row {row}{_quote(ids, row)}: "
            f"{lengths_N[row]:.3g}) and are divided by their length: do the same with the vectors in your service."
        )
        spool = _Spool(np.float32)
        for start in range(0, len(rows_ND), BLOCK):
            spool.add(normalise_rows(rows_ND[start : start + BLOCK]))
            forget_pages(rows_ND)
        rows_ND = spool.mapped()
    return CheckedRows(rows_ND, usable_N, tuple(notes))


def require_floats(rows_ND: NDArray[Any], where: object) -> None:
    """Raise unless an array is a matrix of floats with at least one row."""
    if rows_ND.ndim != 2 or not rows_ND.size or rows_ND.dtype.kind != "f":
        raise XcompatError(f"{where} holds {rows_ND.dtype} of shape {rows_ND.shape}; embeddings are floats, N x D")


def _lengths(rows_ND: NDArray[Any], start: int) -> NDArray[np.float64]:
    """Return the lengths of a block of rows; float32 sums decide where they are surely near 1."""
    rows_BD = np.asarray(rows_ND[start : start + BLOCK])
    with np.errstate(over="ignore", invalid="ignore"):
        wide_BD = rows_BD.astype(np.float32, copy=False)
        lengths_B: NDArray[np.float64] = np.sqrt(np.einsum("bd,bd->b", wide_BD, wide_BD)).astype(np.float64)
    odd_B = ~(np.abs(lengths_B - 1) < UNIT / 2)
    if odd_B.any():
        lengths_B[odd_B] = row_lengths(rows_BD[odd_B])
    forget_pages(rows_ND)
    return lengths_B


def _quote(ids: Sequence[str] | None, row: int) -> str:
    return f" ({ids[row]!r})" if ids is not None else ""


def _describe_row(row_D: NDArray[Any]) -> str:
    """Say why an embedding cannot be used."""
    if np.isnan(row_D).all():
        return "has no embedding"
    return "holds zeros alone" if np.isfinite(row_D).all() else "holds values that are not finite"


def first_not_unit(embeds_BD: Tensor) -> tuple[int, str] | None:
    """Find the first embedding that is not finite or not of length 1.

    Args:
        embeds_BD: float32 embeddings.

    Returns:
        Its row, and what is wrong and how to mend it; None if there is none.
    """
    import torch

    lengths_B = torch.linalg.vector_norm(embeds_BD, dim=1)
    wrong = torch.nonzero(~((lengths_B - 1).abs() < UNIT))  # NaN too
    if not len(wrong):
        return None
    row, length = int(wrong[0]), float(lengths_B[wrong[0]])
    what, mend = f"is of length {length:.4g}, not 1", "divide embeddings by their norm, here and in your service"
    if not embeds_BD[row].isfinite().all():
        what, mend = "holds values that are not finite", "leave such items out"
    elif not length:
        what, mend = "holds zeros alone", "leave such items out"
    return row, f"{what}; {mend}"


def column_names(path: Path) -> list[str]:
    """Return the names of the columns of a table, or of the first one of a folder of tables."""
    file = _shards(path)[0] if path.is_dir() else path
    if not file.name.endswith(PARQUET):
        return list(first_object(file) or {})
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return list(pq.read_schema(file).names)
    except (pa.ArrowException, OSError) as error:
        raise XcompatError(f"{file} cannot be read ({str(error).splitlines()[0][:200]}); fix it, or write it again") from error


def is_table(path: Path) -> bool:
    """Return whether embeddings with ids lie at a path: a table, or a folder of tables."""
    return path.name.endswith(TABLES) if path.is_file() else bool(_shards(path))


def stored_at(place: Path) -> Path | None:
    """Find embeddings by their name without suffix.

    Args:
        place: such as ``folder/image_embeds`` for ``folder/image_embeds.npy``, ``.parquet``, ``.jsonl``, or a folder of tables.

    Returns:
        The file or folder; None if there is none.

    Raises:
        XcompatError: there are several, and nothing says which of them is meant.
    """
    files = [file for suffix in SUFFIXES if (file := place.with_name(place.name + suffix)).is_file()]
    found = [*files, *([place] if _shards(place) else [])]
    if len(found) > 1:
        raise XcompatError(f"{place.parent} holds {' and '.join(each.name for each in found)}; keep the one that is meant there")
    return found[0] if found else None


def steps_beside(path: Path) -> list[Path]:
    """Return where the scale and the offset of an array of int8 lie, if it has them; those of tables are columns."""
    return [path.with_name(f"{path.stem}_{what}{ARRAY}") for what in (SCALE, OFFSET)] if path.name.endswith(ARRAY) else []


def _shards(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.name.endswith(TABLES)) if folder.is_dir() else []


def _unquantised(path: Path, rows_ND: NDArray[Any]) -> NDArray[Any]:
    if rows_ND.ndim != 2:
        raise XcompatError(f"{path} holds {rows_ND.dtype} of shape {rows_ND.shape}; embeddings are N x D")
    scale, offset = (_steps(file, rows_ND.shape) for file in steps_beside(path))
    if scale is None:
        raise XcompatError(
            f"{path} holds int8 without a scale: write what a step is worth beside it, as {path.stem}_scale.npy, of shape (1, D) "
            "for each dimension or (N, 1) for each row; 1.0 alone, if all steps are alike"
        )
    spool = _Spool(np.float16)
    for start in range(0, len(rows_ND), BLOCK):
        part = slice(start, start + BLOCK)
        values_BD = rows_ND[part] * (scale[part] if len(scale) > 1 else scale)
        spool.add(normalise_rows(values_BD + (offset[part] if len(offset) > 1 else offset) if offset is not None else values_BD))
        forget_pages(rows_ND)
    return spool.mapped()


def _steps(file: Path, shape: tuple[int, ...]) -> NDArray[np.float32] | None:
    """Read the scales or the offsets beside an array as a matrix of one or N rows and one or D columns."""
    if not file.is_file():
        return None
    steps = np.array(map_array(file), np.float32)
    if steps.ndim < 2 and steps.size in (1, shape[1]) and (steps.size == 1 or shape[0] != shape[1]):
        steps = steps.reshape(1, -1)
    if steps.ndim != 2 or any(have not in (1, want) for have, want in zip(steps.shape, shape, strict=True)):
        raise XcompatError(f"{file} has shape {steps.shape}; for {shape} embeddings it has (1, {shape[1]}), or ({shape[0]}, 1)")
    is_scale = file.stem.endswith(f"_{SCALE}")
    if not np.isfinite(steps).all() or (is_scale and not (steps > 0).all()):
        raise XcompatError(f"{file} holds {'a scale that is not above 0' if is_scale else 'values that are not finite'}")
    return steps


class _Spool:
    """Rows that are appended to an unnamed file, which the system removes with the last array that is mapped from it."""

    def __init__(self, dtype: type[np.floating[Any]]) -> None:
        self.dtype, self.shape = dtype, (0, 0)
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - the array outlives this block

    def add(self, rows_BD: NDArray[Any]) -> None:
        self._file.write(np.ascontiguousarray(rows_BD, self.dtype).data)
        self.shape = (self.shape[0] + len(rows_BD), rows_BD.shape[1])

    def mapped(self) -> NDArray[Any]:
        self._file.flush()
        rows_ND: NDArray[Any] = np.memmap(self._file, self.dtype, "r", shape=self.shape)
        self._file.close()
        return rows_ND


def _read_tables(files: list[Path]) -> Vectors:
    import pyarrow as pa

    spool: _Spool | None = None
    ids: list[str] = []
    waiting = 0  # first rows without an embedding, whose dimension is not known yet
    for file in files:
        number = 0
        try:
            for batch in _batches(file):
                rows_BD = rows_of_batch(file, number, batch, spool.shape[1] if spool is not None else None)
                if spool is None and not rows_BD.shape[1]:
                    waiting += len(rows_BD)
                else:
                    if spool is None:
                        spool = _Spool(np.float16 if rows_BD.dtype == np.float16 else np.float32)
                        spool.add(np.full((waiting, rows_BD.shape[1]), np.nan))
                    spool.add(rows_BD)
                ids += _ids(file, number, batch.column(ID))
                number += len(rows_BD)
        except (pa.ArrowException, OSError, EOFError, UnicodeDecodeError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise  # of the machine, such as a full disk
            said = str(error).splitlines()[0][:200]
            raise XcompatError(f"{file} cannot be read after row {number:,} ({said}); mend it, or write it again") from error
    if spool is None:
        raise XcompatError(f"{files[0]} holds no embeddings; it needs a row with {ID} and {EMBEDDING_COLUMNS[0]} for each item")
    return Vectors(spool.mapped(), ids)


def _batches(file: Path) -> Iterator[pa.RecordBatch]:
    """Yield blocks of the columns that are read, the embeddings as ``embedding``; blocks without rows are left out."""
    columns, batches = _parquet(file) if file.name.endswith(PARQUET) else _json_lines(file)
    for batch in batches:
        if batch.num_rows:
            yield batch.rename_columns([EMBEDDING_COLUMNS[0] if name == columns[1] else name for name in batch.schema.names])


def _parquet(file: Path) -> tuple[list[str], Iterator[pa.RecordBatch]]:
    import pyarrow.parquet as pq

    table = pq.ParquetFile(file, page_checksum_verification=True)
    columns = _columns(file, table.schema_arrow.names)
    return columns, table.iter_batches(BLOCK, columns=columns)


def _json_lines(file: Path) -> tuple[list[str], Iterator[pa.RecordBatch]]:
    """Read blocks of lines; the first one says how the columns are called, and whether ids are numbers."""
    import pyarrow as pa
    from pyarrow import json as arrow_json

    first = first_object(file)
    if first is None:
        return _columns(file, [ID, EMBEDDING_COLUMNS[0]]), iter(())
    columns = _columns(file, [name for name in first if name != SCALE])
    if not isinstance(first[columns[1]], list | None):
        raise XcompatError(_no_list(file, columns[1], type(first[columns[1]]).__name__))
    of_id = pa.int64() if isinstance(first[ID], int) else pa.string()
    schema = pa.schema([(columns[0], of_id), (columns[1], pa.list_(pa.float32()))])
    parsing = arrow_json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")
    return columns, iter(arrow_json.open_json(str(file), arrow_json.ReadOptions(block_size=LONGEST_LINE), parsing))


def first_object(file: Path) -> dict[str, Any] | None:
    """Return the first line of JSON lines that has an embedding, else the first line; None of a file without lines.

    Raises:
        XcompatError: the first line is no JSON object.
    """
    first: dict[str, Any] | None = None
    with (gzip.open if file.name.endswith(".gz") else open)(file, "rb") as lines:
        filled = (line for line in iter(lambda: lines.readline(LONGEST_LINE), b"") if line.strip())
        for line in islice(filled, BLOCK):
            try:
                found = json.loads(line)
            except (ValueError, RecursionError):
                found = None
            if isinstance(found, dict) and any(found.get(name) is not None for name in EMBEDDING_COLUMNS):
                return found
            if first is None and not isinstance(found, dict):
                raise XcompatError(
                    f'{file}: its first line is no JSON object; write lines like {{"id": "a", "embedding": [0.1, ...]}}'
                )
            first = first or found
    return first


def _columns(file: Path, names: list[str]) -> list[str]:
    """Choose the columns with the id, the embedding and, if there is one, the scale."""
    embedding = next((name for name in EMBEDDING_COLUMNS if name in names), None)
    if ID not in names or embedding is None:
        missing = ID if ID not in names else EMBEDDING_COLUMNS[0]
        raise XcompatError(f"{file} has no column {missing!r} (it has {', '.join(names)}); call it so")
    return [ID, embedding, *([SCALE] if SCALE in names else [])]


def rows_of_batch(where: object, before: int, batch: pa.RecordBatch, dim: int | None = None) -> NDArray[Any]:
    """Read the embeddings of a block of a table.

    Args:
        where: what holds the block, for messages.
        before: rows before it there.
        batch: B rows with a column ``embedding``, and ``scale`` where that is of int8.
        dim: of the embeddings; that of the first one unless given.

    Returns:
        (B, D), float16 of float16 and of int8, else float32; NaN for rows without an embedding, and for its empty places. D is 0
        if no row has an embedding and no dimension is given.

    Raises:
        XcompatError: the column holds no lists of numbers, or a row has another length.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    lists = batch.column(EMBEDDING_COLUMNS[0])
    kind = lists.type
    of_lists = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    if not of_lists or not (pa.types.is_floating(kind.value_type) or kind.value_type == pa.int8()):
        raise XcompatError(_no_list(where, EMBEDDING_COLUMNS[0], str(kind)))
    lengths_B = pc.list_value_length(lists).fill_null(0).to_numpy()
    given_B = lengths_B > 0
    if dim is None and not given_B.any():
        return np.empty((len(lists), 0), np.float32)
    dim = dim or int(lengths_B[given_B][0])
    other = np.flatnonzero(given_B & (lengths_B != dim))
    if len(other):
        row = int(other[0])
        raise XcompatError(
            f"row {before + row} of {where} has {lengths_B[row]} dimensions, those before it {dim}; remove it, or embed it again"
        )
    values = lists.flatten()
    is_float32 = not (pa.types.is_float16(kind.value_type) or kind.value_type == pa.int8())
    values_nd = values.cast(pa.float32()) if values.null_count or is_float32 else values
    rows_nd: NDArray[Any] = values_nd.to_numpy(zero_copy_only=False).reshape(-1, dim)
    if kind.value_type == pa.int8():
        rows_nd = normalise_rows(rows_nd * _scales(where, batch.filter(pa.array(given_B)))[:, None]).astype(np.float16)
    if given_B.all():
        return rows_nd
    rows_BD = np.full((len(lists), dim), np.nan, rows_nd.dtype)
    rows_BD[given_B] = rows_nd
    return rows_BD


def _scales(file: object, batch: pa.RecordBatch) -> NDArray[np.float32]:
    import pyarrow as pa
    import pyarrow.compute as pc

    if SCALE not in batch.schema.names:
        raise XcompatError(f"{file} holds int8 without a scale: add a column {SCALE!r}; 1.0 in each row, if all steps are alike")
    scales = batch.column(SCALE)
    if not (pa.types.is_floating(scales.type) or pa.types.is_integer(scales.type)):
        raise XcompatError(f"{file}: column {SCALE!r} is {scales.type}, not a number a row; scales of dimensions go with .npy")
    scales_B: NDArray[np.float32] = pc.cast(scales, pa.float32()).to_numpy(zero_copy_only=False)
    if not (np.isfinite(scales_B) & (scales_B > 0)).all():
        raise XcompatError(f"{file} holds a scale that is not above 0")
    return scales_B


def _ids(file: Path, before: int, column: pa.Array) -> list[str]:
    import pyarrow as pa
    import pyarrow.compute as pc

    if column.null_count:
        row = int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
        raise XcompatError(f"row {before + row} of {file} has no {ID}; every item needs its own")
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_integer(kind)):
        raise XcompatError(f"{file}: column {ID!r} is {kind}; an id is a string or a whole number")
    ids: list[str] = pc.cast(column, pa.string()).to_pylist()
    return ids


def _no_list(file: object, column: str, kind: str) -> str:
    return f"{file}: column {column!r} is {kind}, not a list of numbers; write lists of floats, no text that holds them"


def is_stored(name: str) -> bool:
    """Return whether a folder holds stored embeddings or prototypes in place of a model."""
    return any(stored_at(Path(name) / stem) is not None for stem in (EMBEDS, PROTOTYPES))


def check_stored(folder: Path) -> bool:
    """Return whether an old model's folder holds embeddings or prototypes, before anything is read.

    Args:
        folder: of an old model.

    Raises:
        XcompatError: it does, without a file that names the rows.
    """
    for stem, names in ((EMBEDS, IDS), (PROTOTYPES, CLASSES)):
        if (file := stored_at(folder / stem)) is not None:
            require_names(file, folder / names)
            return True
    return False


def require_names(file: Path, lines: Path) -> None:
    """Refuse stored vectors that neither name their rows nor lie beside a file that does."""
    if not is_table(file) and not lines.is_file():
        raise XcompatError(f"{file} has no {lines.name} beside it; write one line for each row")


def is_codec(name: object) -> bool:
    """Return whether this is a codec's name: 8 or 4 bits or half precision per dimension, or product quantisation."""
    return isinstance(name, str) and _KNOWN.fullmatch(name) is not None


def require_codec(name: str | None) -> None:
    """Refuse a name that is neither a codec nor :data:`AS_THEY_ARE`; None, which chooses by the number of entries, passes."""
    if name not in (None, AS_THEY_ARE) and not is_codec(name):
        raise XcompatError(f"there is no memory codec {name!r}; it is {AS_THEY_ARE}, {CODECS}")
