"""Connections to Chroma: errors in one line, and reads that others disturb."""

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
"""Reads again what was deleted between the two steps in which Chroma reads."""


def connect(uri: StoreUri) -> Any:  # noqa: ANN401 - chromadb's ClientAPI lacks close()
    """Open a folder or a server, without telemetry; what a server wants to know of us, chromadb reads from the environment."""
    if uri.parts.username or uri.parts.password:
        raise XcompatError(f"{uri}: user and password go into CHROMA_CLIENT_AUTH_CREDENTIALS, as chromadb says; leave them out")
    settings = Settings(anonymized_telemetry=False)
    tenant, database = uri.options.get("tenant", DEFAULT_TENANT), uri.options.get("database", DEFAULT_DATABASE)
    with explained(uri):
        if uri.parts.hostname is not None:
            ssl = uri.options.get("ssl", "false") == "true"
            return chromadb.HttpClient(uri.parts.hostname, uri.parts.port or 8000, ssl, None, settings, tenant, database)
        folder = Path(uri.parts.path).resolve()
        if not (folder / "chroma.sqlite3").is_file():
            raise XcompatError(f"{uri}: {folder} holds no Chroma; name the folder of a PersistentClient by its full path")
        return chromadb.PersistentClient(folder, settings, tenant, database)


@contextmanager
def explained(uri: StoreUri) -> Iterator[None]:
    """Turn the errors of Chroma into one line."""
    try:
        yield
    except XcompatError:
        raise
    except httpx.TransportError as error:
        raise LostConnectionError(f"{uri} does not answer ({error}); run it again once it does, and it continues") from error
    except (ChromaError, ValueError, httpx.HTTPError) as error:
        raise XcompatError(f"{uri}: {' '.join(str(error).split())[:300]}") from error
