"""Stores for Qdrant: migrated into a second collection, or in place."""

from __future__ import annotations

from xcompat.core.errors import XcompatError
from xcompat.stores.qdrant_collections import collection_named, connect, metadata_of, plain_errors
from xcompat.stores.qdrant_store import QdrantStore
from xcompat.stores.qdrant_vectors import RECORD, QdrantVectors
from xcompat.stores.uri import StoreUri

OPTIONS = ("vector", "metric", "api_key", "in_place")


def open_store(uri: str) -> QdrantStore:
    """Open a collection by its address. A migration in place continues without ``in_place``."""
    parsed = StoreUri.parse(uri, OPTIONS)
    wanted = parsed.in_place()
    connection = connect(parsed)
    name = collection_named(parsed, connection.client, connection.name)
    with plain_errors(parsed):
        known = metadata_of(connection.client.get_collection(name))
    if RECORD in known:
        return QdrantVectors(parsed, connection)
    if not wanted:
        return QdrantStore(parsed, connection)
    if "migration" in known or "copies" in known:
        raise XcompatError(f"{parsed} is already being migrated into a second collection; remove in_place=")
    return QdrantVectors(parsed, connection)
