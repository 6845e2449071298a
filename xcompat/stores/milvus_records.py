"""Records of xcompat in Milvus, in a collection of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pymilvus import DataType, MilvusClient

from xcompat.stores.milvus_client import lite_file, plain_errors
from xcompat.stores.milvus_lite import load_collection
from xcompat.stores.uri import StoreUri

COLLECTION = "xcompat_records"
"""Collection with the records."""
IN_PLACE = "in_place"
"""Key in the record of a migration in place, with a :class:`~xcompat.stores.milvus_fields.Change`."""


class Records:
    """Records about one collection.

    Args:
        uri: address, for messages.
        client: open client.
        about: collection or alias, as in the address.
    """

    def __init__(self, uri: StoreUri, client: MilvusClient, about: str) -> None:
        self.uri, self.client, self.about = uri, client, about
        if self._exist():
            with plain_errors(uri):
                load_collection(client, COLLECTION, lite_file(uri))

    def _exist(self) -> bool:
        with plain_errors(self.uri):
            return bool(self.client.has_collection(COLLECTION))

    def read(self, key: str) -> dict[str, Any] | None:
        """Return a record, or None."""
        if not self._exist():
            return None
        with plain_errors(self.uri):
            found = self.client.get(COLLECTION, [f"{self.about}/{key}"], output_fields=["value"], consistency_level="Strong")
        return dict(found[0]["value"]) if found else None

    def write(self, key: str, value: Mapping[str, object] | None) -> None:
        """Write a record, or delete it with None."""
        exist = self._exist()
        with plain_errors(self.uri):
            if not exist:
                self._create()
            if value is None:
                self.client.delete(COLLECTION, ids=[f"{self.about}/{key}"])
            else:
                self.client.upsert(COLLECTION, [{"key": f"{self.about}/{key}", "value": value, "vector": [0.0, 0.0]}])

    def _create(self) -> None:
        schema, index = MilvusClient.create_schema(), MilvusClient.prepare_index_params()
        schema.add_field("key", DataType.VARCHAR, max_length=1024, is_primary=True)
        schema.add_field("value", DataType.JSON)
        schema.add_field("vector", DataType.FLOAT_VECTOR, dim=2)  # required by Milvus
        index.add_index("vector", "FLAT", metric_type="L2")
        self.client.create_collection(COLLECTION, schema=schema, index_params=index, consistency_level="Strong")
