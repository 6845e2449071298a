"""Connection to Chroma, with plain errors and retried reads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import chromadb
import httpx
import tenacity
from chromadb.config import DEFAULT_DATABASE, DEFAULT_TENANT, Settings
from chromadb.errors import ChromaError

from xcompat.core.errors import XcompatError
from xcompat.stores.base import LostConnectionError
from xcompat.stores.uri import StoreUri

RETRYING = tenacity.Retrying(
    retry=tenacity.retry_if_exception(lambda error: "Error finding id" in str(error)),
    wait=tenacity.wait_random_exponential(0.01, 1),
    stop=tenacity.stop_after_attempt(20),
    reraise=True,
)
"""Retries reads of rows that are deleted during the read."""


def connect(uri: StoreUri) -> Any:  # noqa: ANN401 - chromadb's ClientAPI lacks close()
    """Open a folder or a server without telemetry. Chroma reads credentials from the environment."""
    if uri.parts.username or uri.parts.password:
        raise XcompatError(f"{uri}: set CHROMA_CLIENT_AUTH_CREDENTIALS instead of a user and password in the address")
    settings = Settings(anonymized_telemetry=False)
    tenant, database = uri.options.get("tenant", DEFAULT_TENANT), uri.options.get("database", DEFAULT_DATABASE)
    with plain_errors(uri):
        if uri.parts.hostname is not None:
            ssl = uri.options.get("ssl", "false") == "true"
            return chromadb.HttpClient(uri.parts.hostname, uri.parts.port or 8000, ssl, None, settings, tenant, database)
        folder = Path(uri.parts.path).resolve()
        if not (folder / "chroma.sqlite3").is_file():
            raise XcompatError(f"{uri}: {folder} is not a Chroma folder; use the full path of a PersistentClient's folder")
        return chromadb.PersistentClient(folder, settings, tenant, database)


@contextmanager
def plain_errors(uri: StoreUri) -> Iterator[None]:
    """Raise Chroma's errors as one line."""
    try:
        yield
    except XcompatError:
        raise
    except httpx.TransportError as error:
        raise LostConnectionError(
            f"{uri} does not answer ({error}); when it does, run the command again: finished work is kept"
        ) from error
    except (ChromaError, ValueError, httpx.HTTPError) as error:
        raise XcompatError(f"{uri}: {' '.join(str(error).split())[:300]}") from error
