"""Store for Qdrant."""

from __future__ import annotations

from xcompat.stores.qdrant_collections import connect
from xcompat.stores.qdrant_store import QdrantStore
from xcompat.stores.uri import StoreUri

OPTIONS = ("vector", "metric", "api_key")


def open_store(uri: str) -> QdrantStore:
    """Open a collection by its address."""
    parsed = StoreUri.parse(uri, OPTIONS)
    return QdrantStore(parsed, connect(parsed))
