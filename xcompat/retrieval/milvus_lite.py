"""What Milvus Lite leaves behind when its process is killed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pymilvus import MilvusClient


def load_collection(client: MilvusClient, collection: str, file: Path | None) -> None:
    """Load a collection, with indexes made anew where Milvus Lite cannot read those on disk.

    Milvus Lite writes the index of a committed segment in the background, and straight to its place. When the process dies
    meanwhile, half a file stays there, and the collection cannot be loaded any more. The vectors themselves are whole, in files
    of their own, and Milvus Lite indexes again what has no index.

    Args:
        client: of the file or server.
        collection: name, or an alias.
        file: of Milvus Lite; None for a server.

    Raises:
        MilvusException: it cannot be loaded for another reason.
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
