"""Choice of the reader for an address."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import ModuleType

from xcompat.core.errors import XcompatError
from xcompat.data.image_files import images_below
from xcompat.engines import lance
from xcompat.engines.filesystems import ICEBERG
from xcompat.engines.sources import Source
from xcompat.retrieval.content import find_content
from xcompat.stores.places import holds_vectors, parse_place
from xcompat.vectors.formats import EMBEDDING_COLUMNS, PARQUET, clip_retrieval_folder

KINDS = {lance.SUFFIX: "lance", ICEBERG: "iceberg"}
"""Suffix of an address -> its reader module. Parquet is the default."""
STORED = "stored_vectors"


def is_image_folder(uri: str) -> bool:
    """Return whether a path is a folder with images and without Parquet files."""
    folder = Path(uri)
    return folder.is_dir() and not _has_parquet(folder) and next(images_below(folder), None) is not None


def holds_originals(uri: str, column: str | None = None) -> bool:
    """Return whether a path has images or texts to embed, in another format than the tables of engines.

    Raises:
        XcompatError: it also has vectors, and no column is chosen.
    """
    if "://" in uri or not Path(uri).exists():
        return False
    if is_image_folder(uri):
        return True
    is_original = _kind(uri, column) == "parquet" and not _has_parquet(Path(uri))
    if is_original and column is None and find_content(uri) == "both":
        raise XcompatError(f"{uri} has vectors, and texts or images; choose one with --column")
    return is_original


def require_source(uri: str, column: str | None = None) -> None:
    """Raise if an address has no table, before loading a model.

    Raises:
        XcompatError: the table or its reader is missing.
    """
    _module(uri, column).require(uri)


def read_source(uri: str, id_column: str | None = None, column: str | None = None) -> Source:
    """Return the Parquet, Lance or Iceberg table, or the stored vectors, at an address.

    Args:
        uri: the address.
        id_column: name of the ids, for stored vectors.
        column: name of the vectors, for stored vectors.

    Raises:
        XcompatError: it is unreadable or empty.
    """
    module, is_stored = _module(uri, column), _kind(uri, column) == STORED
    found: Source = module.read(uri, id_column, column) if is_stored else module.read(uri)
    return found


def _module(uri: str, column: str | None) -> ModuleType:
    return import_module(f"xcompat.engines.{_kind(uri, column)}")


def _kind(uri: str, column: str | None) -> str:
    place = uri.partition(lance.VERSION)[0].rstrip("/")
    if (kind := next((kind for end, kind in KINDS.items() if place.endswith(end)), None)) is not None:
        return kind
    if "://" not in uri and _has_parquet(Path(uri)):
        return "parquet"
    if uri.startswith("file://"):
        return "parquet"
    is_chosen = "://" not in uri and column in EMBEDDING_COLUMNS and find_content(uri) == "both"
    return STORED if is_chosen or holds_vectors(parse_place(uri)) else "parquet"


def _has_parquet(path: Path) -> bool:
    """Return whether a path is a Parquet file, or a folder with any, except the metadata of clip-retrieval."""
    if not path.is_dir():
        return path.name.endswith(PARQUET)
    return clip_retrieval_folder(path) is None and next(path.rglob(f"*{PARQUET}"), None) is not None
