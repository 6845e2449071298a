"""Vector databases: search and migrate them in place."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import import_module

from xcompat.core.errors import XcompatError, nearest
from xcompat.core.plugins import entry_point_names, load_entry_point
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
    "sqlite": "sqlite",
}
"""Scheme of a URI, up to ``+`` -> module of this package with ``open_store``. It is also the name of the extra."""
GROUP = "xcompat.stores"
"""Entry points of installed packages: scheme -> ``open_store``."""


def is_kind(uri: str) -> bool:
    """Return whether an address has the scheme of a known store."""
    scheme = uri.partition("://")[0].partition("+")[0]
    return "://" in uri and (scheme in KINDS or scheme in entry_point_names(GROUP))


def require_kind(uri: str) -> str:
    """Return the scheme of an address, up to ``+``. The client is not imported.

    Raises:
        XcompatError: the address is invalid, or the store kind is unknown.
    """
    scheme = split(uri).scheme.partition("+")[0]
    if "://" not in uri and scheme in KINDS:
        raise XcompatError(f"the address has {scheme}: without //; start it with {scheme}://")
    known = KINDS if scheme in KINDS else {*KINDS, *entry_point_names(GROUP)}
    if "://" not in uri or scheme not in known:
        what = scheme if "://" in uri else (uri if re.fullmatch(r"[\w./-]+", uri) else "the address")  # it may hold a password
        raise XcompatError(f"{what} is not a kind of store; {nearest(scheme, known)}")
    return scheme


def open(uri: str, where: str | None = None) -> Store:  # noqa: A001 - as shelve.open and gzip.open
    """Open a store by its address.

    Args:
        uri: ``postgresql://user@host/db?table=items&column=embedding&id=id``: a table with a vector column;
            ``qdrant://host:6333/items``, ``milvus://host/db?collection=items``, ``chroma:///folder?collection=items``: a
            collection; ``lancedb:///folder?table=items``, ``sqlite:///file.db?table=items``: a table; ``file:///folder``: a
            gallery. See docs/stores.md.
        where: SQL condition for a PostgreSQL table. The store then reads, searches and migrates only these rows.

    Returns:
        The store. Opening it reads only the schema and changes nothing.

    Raises:
        XcompatError: the address is incomplete, the client is not installed, the server does not answer, the condition is
            invalid, or an installed package's store fails.

    Example:
        ``xcompat.stores.open("postgresql://db/shop?table=products").search(queries, top_k=5, filter="price < 50")``
    """
    store = _open_function(require_kind(uri))(uri)
    store.restrict(where)
    return store


def _open_function(scheme: str) -> Callable[[str], Store]:
    """Return a scheme's ``open_store``."""
    if scheme not in KINDS:
        return load_entry_point(GROUP, scheme)
    try:
        return import_module(f"xcompat.stores.{KINDS[scheme]}").open_store
    except ModuleNotFoundError as missing:
        raise XcompatError(
            f'{scheme}:// needs {missing.name}; install it with `pip install -e ".[{KINDS[scheme]}]"` in a clone of xcompat'
        ) from missing


__all__ = ["KINDS", "Rows", "Space", "Store", "open"]
