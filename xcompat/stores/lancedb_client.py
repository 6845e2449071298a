"""Connection to LanceDB, with plain errors, retried commits and index settings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import tenacity
from lancedb import index as indexes

from xcompat.core.errors import XcompatError
from xcompat.stores.base import LostConnectionError
from xcompat.stores.uri import StoreUri

RETRYING = tenacity.Retrying(
    retry=tenacity.retry_if_exception(lambda error: "Retryable commit conflict" in str(error)),
    wait=tenacity.wait_random_exponential(0.01, 1),
    stop=tenacity.stop_after_attempt(20),
    reraise=True,
)
"""Retries a change after concurrent commits."""


def resolve_location(uri: StoreUri) -> tuple[str, Path | None]:
    """Return the address for ``lancedb.connect``, and the folder if it is local."""
    inner = uri.parts.scheme.partition("+")[2]
    if inner == "db":
        raise XcompatError(f"{uri}: LanceDB Cloud cannot rename columns; use a table on disk or object storage")
    if inner:
        return f"{inner}://{uri.parts.netloc}{uri.parts.path}", None
    if uri.parts.netloc:
        raise XcompatError(f"{uri} is not an absolute path; use lancedb:///FOLDER?table=NAME with three slashes")
    folder = Path(unquote(uri.parts.path)).resolve()
    if not folder.is_dir():  # LanceDB would create it
        raise XcompatError(f"{uri}: folder {folder} does not exist")
    return str(folder), folder


@contextmanager
def plain_errors(uri: StoreUri | str) -> Iterator[None]:
    """Raise LanceDB's errors as one line."""
    try:
        yield
    except XcompatError:
        raise
    except (RuntimeError, OSError, ValueError) as error:
        plain = " ".join(str(error).split()).removeprefix("lance error: ")
        said = re.sub(r",? ?(Location \{.*|/\S+\.rs:\d+:\d+)", "", plain)[:300]
        if "RetryError" in str(error) or "HttpError" in str(error):
            raise LostConnectionError(
                f"{uri} does not answer ({said}); when it does, run the command again: finished work is kept"
            ) from error
        raise XcompatError(f"{uri}: {said}") from error


def copy_index_config(index: Any, distance: str, dim: int | None) -> Any:  # noqa: ANN401
    """Return an index's settings. LanceDB chooses the number of partitions."""
    known = index.index_details or {}
    graph, compression = known.get("hnsw") or {}, known.get("compression") or {}
    options = {
        "m": graph.get("max_connections"),
        "ef_construction": graph.get("construction_ef"),
        "num_bits": compression.get("num_bits") if compression.get("type") != "sq" else None,
        "num_sub_vectors": compression.get("num_sub_vectors"),
    }
    if options["num_sub_vectors"] and dim and dim % options["num_sub_vectors"]:
        del options["num_sub_vectors"]  # LanceDB chooses a divisor
    kind = getattr(indexes, index.index_type.replace("IvfHnsw", "Hnsw"))
    return kind(distance_type=distance, **{name: value for name, value in options.items() if value is not None})
