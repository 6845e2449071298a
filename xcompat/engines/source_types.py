"""Choice of the reader for an address."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import ModuleType

from xcompat.data.image_files import images_below
from xcompat.engines import lance
from xcompat.engines.filesystems import ICEBERG
from xcompat.engines.sources import Source
from xcompat.vectors.formats import PARQUET

KINDS = {lance.SUFFIX: "lance", ICEBERG: "iceberg"}
"""Suffix of an address -> its reader module. Parquet is the default."""


def is_image_folder(uri: str) -> bool:
    """Return whether a path is a folder with images and without Parquet files."""
    folder = Path(uri)
    return folder.is_dir() and next(folder.rglob(f"*{PARQUET}"), None) is None and next(images_below(folder), None) is not None


def require_source(uri: str) -> None:
    """Raise if an address has no table, before loading a model.

    Raises:
        XcompatError: the table or its reader is missing.
    """
    _module(uri).require(uri)


def read_source(uri: str) -> Source:
    """Return the Parquet, Lance or Iceberg table at an address.

    Raises:
        XcompatError: it is unreadable or empty.
    """
    found: Source = _module(uri).read(uri)
    return found


def _module(uri: str) -> ModuleType:
    place = uri.partition(lance.VERSION)[0].rstrip("/")
    kind = next((kind for end, kind in KINDS.items() if place.endswith(end)), "parquet")
    return import_module(f"xcompat.engines.{kind}")
