"""Files of embeddings: their names, columns and places."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import IO, Any, NamedTuple

from xcompat.core.errors import XcompatError
from xcompat.core.files import read_json
from xcompat.vectors.spool import BLOCK

ID, SCALE, OFFSET = "id", "scale", "offset"
ID_COLUMNS = (
    *(ID, "_id", "doc_id", "docid", "document_id", "passage_id", "pid", "query_id", "qid", "item_id", "uid", "uuid", "key"),
    *("custom_id", "recordId", "image_path", "filename", "url"),
)
EMBEDDING_COLUMNS = ("embedding", "values", "vector", "embeddings", "vectors", "emb")
"""Columns that are read without an option, in this order."""
ARRAY, ARCHIVE, TENSORS, PARQUET = ".npy", ".npz", ".safetensors", ".parquet"
ARROW = (".arrow", ".feather")
JSON_LINES = (".jsonl", ".jsonl.gz", ".ndjson", ".ndjson.gz")
DELIMITED = (".csv", ".csv.gz", ".tsv", ".tsv.gz")
DOCUMENTS = (".json", ".json.gz")
SHARDS = (PARQUET, *ARROW, *JSON_LINES)
"""Tables of which a folder can hold several."""
TABLES = (*SHARDS, *DELIMITED, *DOCUMENTS)
ARRAYS = (ARRAY, ARCHIVE, TENSORS)
SUFFIXES = (*ARRAYS, *TABLES)
"""Files that :func:`~xcompat.vectors.read_vectors` reads."""
READABLE = "NumPy (.npy, .npz), safetensors, Parquet, Arrow, CSV, JSON lines or JSON"
EMBEDS, IDS = "image_embeds", "image_ids.txt"
KINDS = ("image", "text", "query")
"""Kinds of items in a folder. If there are two, the second kind searches the first."""
PROTOTYPES, CLASSES = "prototypes", "classes.txt"
"""Of an old model that is gone: its stored embeddings with their ids, or its prototypes with the names of their classes."""
CLIP_RETRIEVAL = ("img_emb", "text_emb")
"""Folders of arrays that clip-retrieval writes beside ``metadata``."""
LONGEST_LINE = 2**24
"""Maximum bytes of a JSON line, and bytes that are read at a time."""
_DATASET, _SPLITS = "state.json", "dataset_dict.json"


class Columns(NamedTuple):
    """Names of the columns, fields or arrays to read.

    Args:
        id: column with ids; None for the first of :data:`ID_COLUMNS`.
        vector: column, named vector or array with embeddings; None for the first of :data:`EMBEDDING_COLUMNS`.
        needs_ids: whether rows without an id are an error. Otherwise files without ids are read in row order.
        vector_option: option of the command that chooses ``vector``, for messages.
    """

    id: str | None = None
    vector: str | None = None
    needs_ids: bool = True
    vector_option: str = "--vector-name"

    def find_id(self, names: Sequence[str]) -> str | None:
        """Return the column with ids, if any."""
        return self.id if self.id in names else next((name for name in ID_COLUMNS if name in names), None)

    def find_vector(self, names: Sequence[str]) -> str | None:
        """Return the column with embeddings, if any."""
        return self.vector if self.vector in names else next((name for name in EMBEDDING_COLUMNS if name in names), None)


def is_table(path: Path) -> bool:
    """Return whether a path holds embeddings with ids: a table, a table folder, or a clip-retrieval folder."""
    return path.name.endswith(TABLES) if path.is_file() else bool(list_shards(path)) or clip_retrieval_folder(path) is not None


def list_shards(folder: Path) -> list[Path]:
    """Return the tables in a folder, sorted by name; those of a saved data set in its order.

    Raises:
        XcompatError: the folder holds several splits of a data set.
    """
    if not folder.is_dir():
        return []
    if (folder / _DATASET).is_file() and isinstance(state := read_json(folder / _DATASET), dict) and "_data_files" in state:
        return [folder / str(file["filename"]) for file in state["_data_files"]]
    if (folder / _SPLITS).is_file():
        splits = read_json(folder / _SPLITS)["splits"]
        raise XcompatError(f"{folder} holds the splits {', '.join(splits)}; choose one, e.g. {folder / splits[0]}")
    return sorted(file for file in folder.iterdir() if file.name.endswith(SHARDS))


def clip_retrieval_folder(path: Path) -> Path | None:
    """Return the array folder in a clip-retrieval folder: image arrays, else text arrays."""
    folders = (path / name for name in CLIP_RETRIEVAL)
    return next((folder for folder in folders if folder.is_dir() and any(folder.glob(f"*{ARRAY}"))), None)


def stored_at(place: Path) -> Path | None:
    """Find embeddings by their path without suffix.

    Args:
        place: e.g. ``folder/image_embeds`` for ``folder/image_embeds.npy``, ``.parquet``, ``.jsonl``, or a folder of tables.

    Returns:
        The file or folder; None if there is none.

    Raises:
        XcompatError: there are several.
    """
    files = [file for suffix in SUFFIXES if (file := place.with_name(place.name + suffix)).is_file()]
    found = [*files, *([place] if list_shards(place) else [])]
    if len(found) > 1:
        raise XcompatError(f"{place.parent} holds {' and '.join(each.name for each in found)}; keep one and delete the others")
    return found[0] if found else None


def steps_beside(path: Path) -> list[Path]:
    """Return the scale and offset paths of an int8 array; tables have columns for them."""
    return [path.with_name(f"{path.stem}_{kind}{ARRAY}") for kind in (SCALE, OFFSET)] if path.name.endswith(ARRAY) else []


def is_stored(name: str) -> bool:
    """Return whether a folder holds stored embeddings or prototypes in place of a model."""
    return any(stored_at(Path(name) / stem) is not None for stem in (EMBEDS, PROTOTYPES))


def check_stored(folder: Path) -> bool:
    """Return whether an old model's folder holds embeddings or prototypes, by the names of its files.

    Args:
        folder: folder of an old model.

    Raises:
        XcompatError: it does, without a file with row names.
    """
    for stem, names in ((EMBEDS, IDS), (PROTOTYPES, CLASSES)):
        if (file := stored_at(folder / stem)) is not None:
            require_names(file, folder / names)
            return True
    return False


def require_names(file: Path, lines: Path) -> None:
    """Raise unless stored vectors name their rows, or a file beside them does."""
    if not is_table(file) and not lines.is_file():
        raise XcompatError(f"{file} has no {lines.name} beside it; write a line for each row")


def open_text(file: Path) -> IO[str]:
    """Open a text file, which can be compressed by gzip."""
    opened = gzip.open if file.name.endswith(".gz") else open
    return opened(file, "rt", encoding="utf-8-sig", newline="")


def delimiter_of(file: Path) -> str:
    """Return the delimiter of a table, by its name."""
    return "\t" if ".tsv" in file.name else ","


def read_header(file: Path) -> list[str]:
    """Return the first row of a delimited table."""
    with open_text(file) as lines:
        return next(csv.reader(lines, delimiter=delimiter_of(file)), [])


def first_object(file: Path) -> dict[str, object] | None:
    """Return the first JSON line with an embedding, else the first line; None for an empty file.

    Raises:
        XcompatError: the first line is not a JSON object.
    """
    first: dict[str, Any] | None = None
    for line in islice(filled_lines(file), BLOCK):
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            found = None
        if isinstance(found, dict) and any(found.get(name) is not None for name in EMBEDDING_COLUMNS):
            return found
        if first is None and not isinstance(found, dict):
            raise XcompatError(
                f'{file}: the first line is not a JSON object; write lines like {{"id": "a", "embedding": [0.1, ...]}}'
            )
        first = first or found
    return first


def filled_lines(file: Path) -> Iterator[bytes]:
    """Yield a file's non-blank lines, reading at most :data:`LONGEST_LINE` of each."""
    with (gzip.open if file.name.endswith(".gz") else open)(file, "rb") as lines:
        yield from (line for line in iter(lambda: lines.readline(LONGEST_LINE), b"") if line.strip())


def find_file(place: Path) -> Path:
    """Return the file with embeddings in a folder with ``image_embeds``, ``text_embeds`` or ``query_embeds``; others as they are.

    Raises:
        XcompatError: there are several.
    """
    files = [file for kind in KINDS if (file := stored_at(place / f"{kind}_embeds")) is not None]
    if len(files) > 1:
        raise XcompatError(f"{place} holds {' and '.join(file.name for file in files)}; choose one, e.g. {files[0]}")
    return files[0] if files else place
