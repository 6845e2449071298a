"""Read embeddings in any file format."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from xcompat.core.arrays import forget_pages, map_array, normalise_rows
from xcompat.core.errors import XcompatError
from xcompat.vectors import tables
from xcompat.vectors.formats import (
    ARCHIVE,
    ARRAY,
    EMBEDDING_COLUMNS,
    ID_COLUMNS,
    OFFSET,
    PARQUET,
    SCALE,
    TENSORS,
    Columns,
    clip_retrieval_folder,
    list_shards,
    steps_beside,
)
from xcompat.vectors.spool import BLOCK, Spool

SAVE_AGAIN, WRITE_AGAIN = "save numbers and strings with np.savez", "recreate it with the command that wrote it"
_IDS_IN_ARCHIVES = ("ids", "image_ids", "text_ids", *ID_COLUMNS)


@dataclass(frozen=True)
class Vectors:
    """Stored embeddings.

    Args:
        rows_ND: numbers as stored, mapped into memory; int8 becomes float16 rows with length 1.
        ids: the id of each row; None for files without ids.
    """

    rows_ND: NDArray[Any]
    ids: list[str] | None = None


def read_vectors(path: Path, columns: Columns | None = None) -> Vectors:
    """Read stored embeddings. Tables are first copied, block by block, into an unnamed temporary file.

    A row of int8 is multiplied by its scale and normalised.

    Args:
        path: any of

            - ``.npy``, ``.npz`` (with ``ids`` or without), ``.safetensors`` (with ids in its metadata or without);
            - Parquet, Arrow, CSV or JSON lines with columns ``id`` and ``embedding``, or names like these
              (:data:`~xcompat.vectors.formats.ID_COLUMNS`), or a folder of Parquet, Arrow or JSON lines, e.g. a saved data set.
              Vectors can be text in brackets, or base64;
            - JSON of databases and services: scrolls of Qdrant, Elasticsearch, Weaviate, Pinecone and Chroma, and batch output
              of embedding APIs;
            - a clip-retrieval folder.

            int8 needs a scale. For ``vectors.npy``, this is ``vectors_scale.npy`` (and ``vectors_offset.npy`` if zero is
            shifted): a number, a row (1, D), or a column (N, 1). Parquet needs a column ``scale``.
        columns: column names; None to use the usual names.

    Returns:
        The embeddings and their ids.

    Raises:
        XcompatError: the file is damaged, or rows lack an id or a scale, or differ in dimensions.
    """
    columns = columns or Columns()
    if (folder := clip_retrieval_folder(path)) is not None:
        return _read_clip_retrieval(path, folder, columns)
    if path.is_dir():
        return Vectors(*tables.read_tables(list_shards(path), columns))
    if path.name.endswith(ARCHIVE):
        return _read_archive(path, columns)
    if path.name.endswith(TENSORS):
        return _read_tensors(path, columns)
    if not path.name.endswith(ARRAY):
        return Vectors(*tables.read_tables([path], columns))
    rows_ND = map_array(path)
    return Vectors(_dequantise(path, rows_ND) if rows_ND.dtype == np.int8 else rows_ND)


@contextmanager
def _explain_errors(path: Path, fix: str) -> Iterator[None]:
    """Turn a library's errors about a damaged file into one line, but not the machine's errors."""
    from safetensors import SafetensorError

    try:
        yield
    except XcompatError:
        raise
    except (OSError, ValueError, BadZipFile, EOFError, SafetensorError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise XcompatError(f"cannot read {path} ({str(error)[:200]}); {fix}") from error


def _read_archive(path: Path, columns: Columns) -> Vectors:
    """Read the matrix, and the ids if stored, of a ``.npz`` file."""
    with _explain_errors(path, SAVE_AGAIN), np.load(path, allow_pickle=False) as archive:
        matrices = [name for name in archive.files if archive[name].ndim == 2]
        rows_ND = archive[_choose_matrix(path, matrices, columns)]
        names = [columns.id] if columns.id in archive.files else _IDS_IN_ARCHIVES
        ids = next((archive[name] for name in names if name in archive.files and archive[name].ndim == 1), None)
    if ids is not None and len(ids) != len(rows_ND):
        raise XcompatError(f"{path} has {len(ids):,} ids, but {len(rows_ND):,} rows; give each row an id")
    return Vectors(rows_ND, None if ids is None else [str(each) for each in ids.tolist()])


def _read_tensors(path: Path, columns: Columns) -> Vectors:
    """Read a safetensors file's matrix, and ids if its metadata has a JSON list of them."""
    from safetensors import safe_open

    with _explain_errors(path, WRITE_AGAIN), safe_open(path, framework="pt") as tensors:
        matrices = [name for name in tensors.keys() if len(tensors.get_slice(name).get_shape()) == 2]  # noqa: SIM118
        rows_ND = tensors.get_tensor(_choose_matrix(path, matrices, columns)).float().numpy()
        listed = (tensors.metadata() or {}).get("ids")
        ids = json.loads(listed) if listed is not None else None
    if ids is not None and (not isinstance(ids, list) or len(ids) != len(rows_ND)):
        raise XcompatError(f"{path} has {len(rows_ND):,} rows, but 'ids' in its metadata is not a list of this length")
    return Vectors(rows_ND, None if ids is None else [str(each) for each in ids])


def choosable_names(path: Path) -> list[str]:
    """Return the names that ``--id-column`` and ``--vector-name`` can choose in a file or folder of :func:`read_vectors`.

    Raises:
        XcompatError: the file cannot be read.
    """
    if clip_retrieval_folder(path) is not None:
        return tables.column_names(next((path / "metadata").glob(f"*{PARQUET}"), path))
    if path.name.endswith(ARCHIVE):
        with _explain_errors(path, SAVE_AGAIN), np.load(path, allow_pickle=False) as archive:
            return list(archive.files)
    if path.name.endswith(TENSORS):
        from safetensors import safe_open

        with _explain_errors(path, WRITE_AGAIN), safe_open(path, framework="np") as tensors:
            return list(tensors.keys())
    return [] if path.name.endswith(ARRAY) else tables.choosable_names(path)


def _choose_matrix(path: Path, matrices: list[str], columns: Columns) -> str:
    """Return the name of the embeddings among several arrays."""
    if columns.vector in matrices:
        return str(columns.vector)
    usual = [name for name in EMBEDDING_COLUMNS if name in matrices]
    if usual or len(matrices) == 1:
        return (usual or matrices)[0]
    holds = (
        f"holds the matrices {', '.join(matrices)}; choose one with {columns.vector_option}" if matrices else "holds no matrix"
    )
    raise XcompatError(f"{path} {holds}")


def _read_clip_retrieval(path: Path, folder: Path, columns: Columns) -> Vectors:
    """Read the numbered arrays of clip-retrieval; the ids are in its metadata."""
    arrays = sorted(folder.glob(f"*{ARRAY}"), key=_number_of)
    metadata = {_number_of(file): file for file in (path / "metadata").glob(f"*{PARQUET}")}
    spool: Spool | None = None
    ids: list[str] = []
    for file in arrays:
        rows_ND = map_array(file)
        table = metadata.get(_number_of(file))
        if table is not None:
            ids += _read_names(table, len(rows_ND), file, columns)
        elif metadata or columns.needs_ids:
            raise XcompatError(f"{file} has no table in {path / 'metadata'}; write the embeddings with metadata again")
        if spool is None:
            spool = Spool(np.float16 if rows_ND.dtype == np.float16 else np.float32)
        elif rows_ND.shape[1] != spool.shape[1]:
            raise XcompatError(f"{file} has {rows_ND.shape[1]} dimensions, the arrays before it {spool.shape[1]}")
        for start in range(0, len(rows_ND), BLOCK):
            spool.add(rows_ND[start : start + BLOCK])
    assert spool is not None, folder
    return Vectors(spool.map_rows(), ids or None)


def _read_names(table: Path, rows: int, array: Path, columns: Columns) -> list[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = pq.read_schema(table).names
    column = columns.id if columns.id in names else Columns("image_path").find_id(names)
    if column is None:
        raise XcompatError(f"{table} has no column with ids (it has {', '.join(names)}); add the column image_path")
    ids: list[str] = pq.read_table(table, columns=[column])[column].cast(pa.string()).to_pylist()
    if len(ids) != rows:
        raise XcompatError(f"{table} has {len(ids):,} rows, but {array} {rows:,}; write both again")
    return ids


def _number_of(file: Path) -> tuple[int, str]:
    numbers = re.findall(r"\d+", file.stem)
    return (int(numbers[-1]) if numbers else 0), "" if numbers else file.stem


def _dequantise(path: Path, rows_ND: NDArray[np.number]) -> NDArray[np.number]:
    if rows_ND.ndim != 2:
        raise XcompatError(f"{path} holds {rows_ND.dtype} of shape {rows_ND.shape}; embeddings are N x D")
    scale, offset = (_steps(file, rows_ND.shape) for file in steps_beside(path))
    if scale is None:
        raise XcompatError(
            f"{path} holds int8 without a scale: write the size of a step beside it, as {path.stem}_{SCALE}.npy, of shape (1, D) "
            "per dimension or (N, 1) per row; 1.0 alone, if all steps are alike"
        )
    spool = Spool(np.float16)
    for start in range(0, len(rows_ND), BLOCK):
        part = slice(start, start + BLOCK)
        values_BD = rows_ND[part] * (scale[part] if len(scale) > 1 else scale)
        spool.add(normalise_rows(values_BD + (offset[part] if len(offset) > 1 else offset) if offset is not None else values_BD))
        forget_pages(rows_ND)
    return spool.map_rows()


def _steps(file: Path, shape: tuple[int, ...]) -> NDArray[np.float32] | None:
    """Read the scales or the offsets beside an array as a matrix with 1 or N rows and 1 or D columns."""
    if not file.is_file():
        return None
    steps = np.array(map_array(file), np.float32)
    if steps.ndim < 2 and steps.size in (1, shape[1]) and (steps.size == 1 or shape[0] != shape[1]):
        steps = steps.reshape(1, -1)
    if steps.ndim != 2 or any(have not in (1, want) for have, want in zip(steps.shape, shape, strict=True)):
        raise XcompatError(f"{file} has shape {steps.shape}; for {shape} embeddings it has (1, {shape[1]}), or ({shape[0]}, 1)")
    is_scale = not file.stem.endswith(f"_{OFFSET}")
    if not np.isfinite(steps).all() or (is_scale and not (steps > 0).all()):
        raise XcompatError(f"{file} holds {'a scale that is not a positive number' if is_scale else 'NaN or infinite offsets'}")
    return steps
