"""Vectors where they already are: databases that are searched, and brought to a new model, in place."""

from __future__ import annotations

import re
from importlib import import_module

from xcompat.core.errors import XcompatError, nearest
from xcompat.stores.base import Rows, Space, Store
from xcompat.stores.uri import split

KINDS = {
    "postgresql": "pgvector",
    "postgres": "pgvector",
    "chroma": "chroma",
    "file": "gallery",
    "lancedb": "lancedb",
    "milvus": "milvus",
    "qdrant": "qdrant",
    "qdrants": "qdrant",
}
"""Scheme of a URI, up to ``+`` -> the module of this package whose ``open_store`` opens it; also the extra with its client."""


def require_kind(uri: str) -> str:
    """Return the scheme of an address, up to ``+``, before the client of its store is imported.

    Raises:
        XcompatError: there is no such kind of store, or the address cannot be split.
    """
    scheme = split(uri).scheme.partition("+")[0]
    if "://" not in uri and scheme in KINDS:
        raise XcompatError(f"{scheme}: is not followed by //; begin the address with {scheme}://")
    if scheme not in KINDS or "://" not in uri:
        what = scheme if "://" in uri else (uri if re.fullmatch(r"[\w./-]+", uri) else "the address")  # it may hold a password
        raise XcompatError(f"{what} is no kind of store; {nearest(scheme, KINDS)}")
    return scheme


def open(uri: str) -> Store:  # noqa: A001 - as shelve.open and gzip.open
    """Open a store by its address.

    Args:
        uri: ``postgresql://user@host/db?table=items&column=embedding&id=id``: a table with a vector column;
            ``qdrant://host:6333/items``, ``milvus://host/db?collection=items``, ``chroma:///folder?collection=items``: a
            collection; ``lancedb:///folder?table=items``: a table; ``file:///folder``: a gallery. docs/stores.md has them all.

    Returns:
        The store; nothing of it is changed or read yet but what its tables are.

    Raises:
        XcompatError: the address is incomplete, its client is not installed, or nothing answers there.

    Example:
        ``xcompat.stores.open("postgresql://db/shop?table=products").search(view, top_k=5, filter="price < 50")``
    """
    scheme = require_kind(uri)
    try:
        module = import_module(f"xcompat.stores.{KINDS[scheme]}")
    except ModuleNotFoundError as missing:
        raise XcompatError(
            f"{scheme}:// needs {missing.name}; install it with `pip install xcompat[{KINDS[scheme]}]`"
        ) from missing
    store: Store = module.open_store(uri)
    return store


__all__ = ["KINDS", "Rows", "Space", "Store", "open"]
