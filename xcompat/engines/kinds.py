"""Which kind of table an address names."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from xcompat.engines import lance
from xcompat.engines.places import ICEBERG
from xcompat.engines.sources import Source

KINDS = {lance.SUFFIX: "lance", ICEBERG: "iceberg"}
"""How an address ends -> the module that reads what it names; any other is of Parquet files."""


def require_source(uri: str) -> None:
    """Refuse an address at which nothing can be read, before anything is loaded.

    Raises:
        XcompatError: there is nothing, or what reads it is not installed.
    """
    _module(uri).require(uri)


def read_source(uri: str) -> Source:
    """Look at what an address names: Parquet files, a Lance table, or the metadata of an Iceberg table.

    Raises:
        XcompatError: it cannot be read, or has no rows.
    """
    found: Source = _module(uri).read(uri)
    return found


def _module(uri: str) -> ModuleType:
    place = uri.partition(lance.VERSION)[0].rstrip("/")
    kind = next((kind for end, kind in KINDS.items() if place.endswith(end)), "parquet")
    return import_module(f"xcompat.engines.{kind}")
