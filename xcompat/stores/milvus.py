"""Stores for Milvus: migrated into a second collection, or in place."""

from __future__ import annotations

from xcompat.core.errors import XcompatError
from xcompat.stores.milvus_client import connect
from xcompat.stores.milvus_fields import MilvusFields
from xcompat.stores.milvus_records import IN_PLACE, Records
from xcompat.stores.milvus_store import MilvusStore
from xcompat.stores.uri import StoreUri

OPTIONS = ("collection", "field", "ssl", "in_place")


def open_store(uri: str) -> MilvusStore:
    """Open a collection by its address. A migration in place continues without ``in_place``."""
    parsed = StoreUri.parse(uri, OPTIONS)
    wanted, name = parsed.in_place(), parsed.require("collection")
    client = connect(parsed)
    records = Records(parsed, client, name)
    begun = records.read("migration")
    if begun is not None and IN_PLACE in begun:
        return MilvusFields(parsed, client, records)
    if wanted and begun is not None:
        raise XcompatError(f"{parsed} is already being migrated into a second collection; remove in_place=")
    return (MilvusFields if wanted else MilvusStore)(parsed, client, records)
