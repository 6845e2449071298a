"""Recovery of Milvus Lite files after a killed process."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pymilvus import MilvusClient


def load_collection(client: MilvusClient, collection: str, file: Path | None) -> None:
    """Load a collection; rebuild indexes if Milvus Lite cannot read them.

    Milvus Lite writes indexes in the background. If the process dies meanwhile, a partial index file prevents loading. The
    vectors are intact, and Milvus Lite rebuilds missing indexes.

    Args:
        client: client for the file or server.
        collection: name or alias.
        file: the Milvus Lite file; None for a server.

    Raises:
        MilvusException: the collection cannot be loaded for another reason.
    """
    from pymilvus.exceptions import MilvusException

    try:
        client.load_collection(collection)
    except MilvusException:
        if file is None:
            raise
        folder = file / "collections" / client.describe_collection(collection)["collection_name"]
        indexes = [*folder.glob("partitions/*/indexes/*.idx"), *folder.glob("partitions/*/indexes/*.sidx")]
        if not indexes:
            raise
        for index in indexes:
            index.unlink()
        client.load_collection(collection)
