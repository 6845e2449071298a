"""Connection to Milvus, with plain errors."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote

from pymilvus import MilvusClient
from pymilvus.exceptions import MilvusException

from xcompat.core.errors import XcompatError
from xcompat.stores.base import LostConnectionError
from xcompat.stores.uri import StoreUri

LOST = 2
"""Error code of pymilvus if nothing answers."""


def lite_file(uri: StoreUri) -> Path | None:
    """Return Milvus Lite's file, or None for a server."""
    return None if uri.parts.hostname is not None else Path(uri.parts.path).resolve()


def connect(uri: StoreUri) -> MilvusClient:
    """Open a file or a server."""
    logging.getLogger("pymilvus").setLevel(logging.CRITICAL)  # it prints tracebacks
    parts = uri.parts
    with plain_errors(uri):
        if (file := lite_file(uri)) is None:
            scheme = "https" if uri.options.get("ssl") == "true" else "http"
            who = {"user": unquote(parts.username or ""), "password": unquote(parts.password or "")}
            return MilvusClient(f"{scheme}://{parts.hostname}:{parts.port or 19530}", db_name=parts.path.strip("/"), **who)
        if file.suffix != ".db" or not file.exists():
            raise XcompatError(f"{uri}: {file} is not a Milvus Lite file; use the full path of a .db file")
        logging.getLogger("grpc._server").setLevel(logging.CRITICAL)  # Milvus Lite too, for unsupported calls
        try:
            return MilvusClient(str(file))
        except MilvusException as error:
            raise XcompatError(f"{uri} cannot be opened ({error.message}); close it in other processes") from error


@contextmanager
def plain_errors(uri: StoreUri) -> Iterator[None]:
    """Raise Milvus's errors as one line."""
    try:
        yield
    except MilvusException as error:
        said = " ".join(error.message.split())[:300] or "unknown error"
        if error.code == LOST:
            raise LostConnectionError(
                f"{uri} does not answer ({said}); when it does, run the command again: finished work is kept"
            ) from error
        raise XcompatError(f"{uri}: {said}") from error
