"""Schemas for Milvus collections that copy another collection."""

from __future__ import annotations

import uuid
from typing import Any

from pymilvus import DataType, MilvusClient

from xcompat.core.errors import XcompatError

STATE = "xcompat_state"
"""Field of a copied row: hash of its source row. Nullable, so that services can omit it."""
MARK = "xcompat.mark"
"""Property of our collections, which survives renames."""
COPIED = {DataType.FLOAT_VECTOR, DataType.SPARSE_FLOAT_VECTOR}
"""Vector types that can be copied."""
OPTIONS = ("description", "is_primary", "nullable", "element_type", "is_partition_key", "is_clustering_key")
INDEX = {"index_type", "metric_type", "field_name", "index_name", "total_rows", "indexed_rows", "pending_index_rows", "state"}
"""Keys of an index description that are not parameters."""


def mark_of(made: dict[str, Any]) -> str | None:
    """Return a collection's mark, or None if xcompat did not create it."""
    return made.get("properties", {}).get(MARK)


def require_copyable(where: str, made: dict[str, Any], partitions: list[str]) -> None:
    """Raise if a collection cannot be copied completely.

    Args:
        where: its address.
        made: description from Milvus.
        partitions: names of its partitions.

    Raises:
        XcompatError: a part cannot be copied.
    """
    if len(partitions) > 1 and not any(field.get("is_partition_key") for field in made["fields"]):
        raise XcompatError(f"{where}: a copy would lose the partitions {', '.join(partitions)}; use a partition key instead")
    if made.get("functions") or made.get("struct_array_fields"):
        raise XcompatError(f"{where}: collections with functions or structs cannot be copied")
    for field in made["fields"]:
        if "VECTOR" in DataType(field["type"]).name and field["type"] not in COPIED:
            raise XcompatError(f"{where}: {field['name']} cannot be copied; only float32 and sparse vectors are supported")


def schema_like(made: dict[str, Any], vectors: str, dim: int) -> dict[str, Any]:
    """Return the arguments to create a copy of a collection.

    Args:
        made: description from Milvus.
        vectors: field with the vectors to replace.
        dim: dimension of the new vectors.
    """
    automatic = bool(made.get("auto_id"))
    schema = MilvusClient.create_schema(
        auto_id=automatic, enable_dynamic_field=made["enable_dynamic_field"], description=made["description"]
    )
    for field in made["fields"]:
        if field["name"] != STATE:
            given = {name: field[name] for name in OPTIONS if name in field} | field["params"]
            given |= {"dim": dim} if field["name"] == vectors else {}
            if (default := field.get("default_value")) is not None:
                given["default_value"] = getattr(default, default.WhichOneof("data"))
            schema.add_field(field["name"], DataType(field["type"]), **given)
    schema.add_field(STATE, DataType.VARCHAR, max_length=64, nullable=True)
    kept = {**made["properties"], MARK: uuid.uuid4().hex}
    return {
        "schema": schema,
        "properties": kept | ({"allow_insert_auto_id": "true"} if automatic else {}),  # to keep the ids of copied rows
        "consistency_level": made["consistency_level_name"],
        "num_shards": made["num_shards"],
    }


def indexes_like(found: list[dict[str, Any]]) -> Any:  # noqa: ANN401 - pymilvus has no types
    """Return the arguments to create the same indexes."""
    indexes = MilvusClient.prepare_index_params()
    for index in found:
        metric = {"metric_type": index["metric_type"]} if index.get("metric_type", "NONE") not in ("", "NONE") else {}
        rest = {name: value for name, value in index.items() if name not in INDEX}
        indexes.add_index(index["field_name"], index["index_type"], index["index_name"], params=rest, **metric)
    return indexes
