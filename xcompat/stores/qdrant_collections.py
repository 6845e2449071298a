"""Connection to Qdrant, with plain errors, and copies of collections and points."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

import numpy as np
import xxhash
from numpy.typing import NDArray
from qdrant_client import QdrantClient, models
from qdrant_client.common.client_exceptions import ResourceExhaustedResponse
from qdrant_client.http.exceptions import ResponseHandlingException, UnexpectedResponse

from xcompat.core.errors import XcompatError, nearest
from xcompat.core.fingerprint import Fingerprint
from xcompat.retrieval.manifest import Metric
from xcompat.stores.base import LostConnectionError, Space
from xcompat.stores.uri import StoreUri

OLDEST = (1, 16)
"""First version with collection metadata."""
SECONDS = 60
"""Timeout of a request."""
MARK = "xcompat_"
"""Prefix of our metadata keys."""
STATE = "xcompat_state"
"""Payload key or vector of a point: hash of the source of its new vector."""
METRICS: dict[models.Distance, Metric] = {
    models.Distance.COSINE: "cosine",
    models.Distance.DOT: "ip",
    models.Distance.EUCLID: "l2",
}


class Connection(NamedTuple):
    """Open client.

    Args:
        client: the client.
        name: name of the collection or alias.
        embedded: whether it is a local folder.
    """

    client: QdrantClient
    name: str
    embedded: bool


def connect(uri: StoreUri) -> Connection:
    """Open a server or a folder.

    Args:
        uri: ``qdrant://host:6333/items``, ``qdrants://…`` for https, or ``qdrant:///folder/items`` for the local mode.
    """
    folder, _, name = unquote(uri.parts.path).rpartition("/")
    if not name or (uri.parts.hostname and folder):
        raise XcompatError(f"{uri} has no collection; use qdrant://host:6333/COLLECTION or qdrant:///folder/COLLECTION")
    if uri.parts.username or uri.parts.password:
        raise XcompatError(f"{uri}: Qdrant has no users; set the environment variable QDRANT_API_KEY instead")
    if uri.parts.hostname is None:
        return Connection(_local(uri, Path(folder or "/")), name, embedded=True)
    scheme = "https" if uri.parts.scheme == "qdrants" else "http"
    key = uri.options.get("api_key") or os.environ.get("QDRANT_API_KEY")
    address = f"{scheme}://{uri.parts.netloc}"
    with plain_errors(uri):
        client = QdrantClient(address, api_key=key, timeout=SECONDS, check_compatibility=False)
        version = client.info().version
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        raise XcompatError(f"{uri} is Qdrant {version}, which has no collection metadata; use 1.16 or later")
    return Connection(client, name, embedded=False)


def _local(uri: StoreUri, folder: Path) -> QdrantClient:
    if not (folder / "meta.json").is_file():  # the client would create it
        raise XcompatError(f"{uri}: {folder} is not a folder of Qdrant's local mode")
    try:
        return QdrantClient(path=str(folder))
    except RuntimeError as error:
        raise XcompatError(f"{uri} is open in another process; close it there or use a server") from error
    except OSError as error:
        raise XcompatError(f"{uri} cannot be opened: {error.strerror}") from error


@contextmanager
def plain_errors(uri: StoreUri) -> Iterator[None]:
    """Raise the client's errors as one line."""
    try:
        yield
    except ResponseHandlingException as error:
        said = " ".join(str(error.source).split())
        raise LostConnectionError(
            f"{uri} does not answer ({said}); when it does, run the command again: finished work is kept"
        ) from error
    except UnexpectedResponse as error:
        raise XcompatError(f"{uri}: {_error_message(error)}") from error
    except (ResourceExhaustedResponse, ValueError, RuntimeError) as error:  # the last two from the local mode
        raise XcompatError(f"{uri}: {' '.join(str(error).split())}") from error


def _error_message(error: UnexpectedResponse) -> str:
    """Return the message from the server or a proxy."""
    try:
        return str(error.structured()["status"]["error"])
    except (ValueError, KeyError, TypeError):
        return f"{error.status_code} {error.reason_phrase}"


def collection_named(uri: StoreUri, client: QdrantClient, name: str) -> str:
    """Return the collection of a name or alias."""
    with plain_errors(uri):
        known = {alias.alias_name: alias.collection_name for alias in client.get_aliases().aliases}
        others = {found.name for found in client.get_collections().collections} if name not in known else {}
    if name not in known and name not in others:
        raise XcompatError(f"{uri}: there is no collection {name!r}; {nearest(name, sorted({*known, *others}))}")
    return known.get(name, name)


def metadata_of(info: models.CollectionInfo) -> dict[str, Any]:
    """Return xcompat's metadata in a collection."""
    found = info.config.metadata or {}
    return {key.removeprefix(MARK): value for key, value in found.items() if key.startswith(MARK)}


def vector_of(uri: StoreUri, info: models.CollectionInfo) -> str:
    """Return the vector name in the address, or the only vector's name. It can be empty."""
    found = dense_vectors(info)
    given = uri.options.get("vector")
    if given is None and len(found) == 1:
        return next(iter(found))
    if given is None or given not in found:
        known = ", ".join(name or "an unnamed one" for name in found) or "none"
        fix = "remove vector=" if list(found) == [""] else nearest(given or "", found)
        what = "choose one with vector=" if given is None else f"{given!r} is not one of them; {fix}"
        raise XcompatError(f"{uri}: the collection has these single dense vectors: {known}; {what}")
    return given


def dense_vectors(info: models.CollectionInfo) -> dict[str, models.VectorParams]:
    """Return a collection's single dense vectors by name."""
    known = info.config.params.vectors or {}
    named = {"": known} if isinstance(known, models.VectorParams) else known
    return {name: params for name, params in named.items() if params.multivector_config is None}


def metric_of(uri: StoreUri, params: models.VectorParams) -> Metric:
    """Return the metric, and raise if the address has another."""
    if params.distance not in METRICS:
        raise XcompatError(f"{uri} has {params.distance} distance; only Cosine, Dot and Euclid are supported")
    found, given = METRICS[params.distance], uri.options.get("metric")
    if given not in (None, found):
        raise XcompatError(f"{uri}: the collection has {params.distance} distance (metric={found}); remove metric=")
    return found


def space_of(name: str, params: models.VectorParams, model: dict[str, str] | None) -> Space:
    """Return the space of a vector, and its recorded model."""
    dtype = params.datatype or models.Datatype.FLOAT32
    return Space(name, params.size, dtype.value, Fingerprint(**model) if model else None)


def made_like(info: models.CollectionInfo, vector: str, dim: int, dtype: str) -> dict[str, Any]:
    """Return the arguments to copy a collection with another dimension and dtype."""
    params, config = info.config.params, info.config
    new = dense_vectors(info)[vector].model_copy(update={"size": dim, "datatype": models.Datatype(dtype)})
    whole = isinstance(params.vectors, models.VectorParams)
    made = {
        "vectors_config": new if whole else {**(params.vectors or {}), vector: new},  # type: ignore[dict-item]
        "sparse_vectors_config": params.sparse_vectors,
        "shard_number": params.shard_number,
        "replication_factor": params.replication_factor,
        "write_consistency_factor": params.write_consistency_factor,
        "on_disk_payload": params.on_disk_payload,
        "payload": params.payload,
        "id_tracker": params.id_tracker,
        "hnsw_config": models.HnswConfigDiff(**config.hnsw_config.model_dump()),
        "optimizers_config": models.OptimizersConfigDiff(**config.optimizer_config.model_dump()),
        "wal_config": models.WalConfigDiff(**config.wal_config.model_dump()) if config.wal_config else None,
        "quantization_config": config.quantization_config,
        "strict_mode_config": (
            models.StrictModeConfig(**config.strict_mode_config.model_dump()) if config.strict_mode_config else None
        ),
    }
    return {name: value for name, value in made.items() if value is not None}


class Point(NamedTuple):
    """A collection's point.

    Args:
        rest: the point without the searched vector and our own key, to copy unchanged.
        vector_D: searched vector (D,) float32, or None.
        state: hash of both.
    """

    rest: models.Record | models.ScoredPoint
    vector_D: NDArray[np.float32] | None
    state: str


def point_of(found: models.Record | models.ScoredPoint, vector: str, metric: Metric) -> Point:
    """Split a point into the searched vector and the rest.

    Under cosine, the state hashes only the direction, because the local mode does not store normalised vectors.
    """
    vectors = found.vector if isinstance(found.vector, dict) else {} if found.vector is None else {"": found.vector}
    own_D = np.asarray(vectors.pop(vector, []), np.float64)
    found.vector = vectors  # type: ignore[assignment]
    found.payload = {key: value for key, value in (found.payload or {}).items() if key != STATE}
    digest = hash_vector(own_D, metric)
    digest.update(json.dumps([found.payload, vectors], sort_keys=True, default=lambda value: value.model_dump()).encode())
    return Point(found, own_D.astype(np.float32) if own_D.size else None, digest.hexdigest())


def hash_vector(vector_D: NDArray[np.float64], metric: Metric) -> xxhash.xxh3_64:
    """Return a hash of a vector. Under cosine, it is the direction's."""
    hashed_D = vector_D / (np.linalg.norm(vector_D) or 1) if metric == "cosine" else vector_D
    return xxhash.xxh3_64(hashed_D.astype(np.float32).tobytes())


def point_id(text: str | None) -> models.ExtendedPointId | None:
    """Return an id for the client: a number or a UUID."""
    return int(text) if text is not None and text.isdigit() else text


def with_vector(point: Point, vector: str, vector_D: NDArray[np.float32] | None) -> models.PointStruct:
    """Return a point to write, with a new vector and its source's state."""
    others = dict(point.rest.vector or {})  # type: ignore[arg-type]
    vectors = others if vector_D is None else {**others, vector: vector_D.tolist()}
    return models.PointStruct(id=point.rest.id, vector=vectors, payload={**(point.rest.payload or {}), STATE: point.state})


def numbers_in(point: Point) -> int:
    """Count the numbers in the copied vectors."""
    vectors: Any = (point.rest.vector or {}).values()  # type: ignore[union-attr]
    return sum(_numbers(vector) for vector in vectors)


def _numbers(vector: Any) -> int:  # noqa: ANN401
    if isinstance(vector, models.SparseVector):
        return 2 * len(vector.indices)
    return len(vector) * (len(vector[0]) if vector and isinstance(vector[0], list) else 1)
