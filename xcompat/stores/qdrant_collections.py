"""Connections to Qdrant: errors in one line, the vector of a collection, and collections made like another one."""

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
from xcompat.retrieval.manifest import Metric
from xcompat.stores.base import LostConnectionError
from xcompat.stores.uri import StoreUri

OLDEST = (1, 16)
"""The first version whose collections have metadata."""
SECONDS = 60
"""How long a server may take to answer."""
STATE = "xcompat_state"
"""The payload key of what was copied: a hash of the point it was made from."""
METRICS: dict[models.Distance, Metric] = {
    models.Distance.COSINE: "cosine",
    models.Distance.DOT: "ip",
    models.Distance.EUCLID: "l2",
}


def connect(uri: StoreUri) -> tuple[QdrantClient, str, bool]:
    """Open a server or a folder.

    Args:
        uri: ``qdrant://host:6333/items``, ``qdrants://…`` by https, or ``qdrant:///folder/items`` for the client's local mode.

    Returns:
        The client, the name of the collection or alias, and whether it is a folder that this process has for itself.
    """
    folder, _, name = unquote(uri.parts.path).rpartition("/")
    if not name or (uri.parts.hostname and folder):
        raise XcompatError(f"{uri} names no collection; write qdrant://host:6333/COLLECTION or qdrant:///folder/COLLECTION")
    if uri.parts.username or uri.parts.password:
        raise XcompatError(f"{uri}: Qdrant knows no users; give the API key in the environment variable QDRANT_API_KEY")
    if uri.parts.hostname is None:
        return _local(uri, Path(folder or "/")), name, True
    scheme = "https" if uri.parts.scheme == "qdrants" else "http"
    key = uri.options.get("api_key") or os.environ.get("QDRANT_API_KEY")
    address = f"{scheme}://{uri.parts.netloc}"
    with explained(uri):
        client = QdrantClient(address, api_key=key, timeout=SECONDS, check_compatibility=False)
        version = client.info().version
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        raise XcompatError(f"{uri} is Qdrant {version}, whose collections hold no metadata; 1.16 is the first that can be used")
    return client, name, False


def _local(uri: StoreUri, folder: Path) -> QdrantClient:
    if not (folder / "meta.json").is_file():  # the client would make one
        raise XcompatError(f"{uri}: {folder} is no folder of Qdrant's local mode")
    try:
        return QdrantClient(path=str(folder))
    except RuntimeError as error:
        raise XcompatError(f"{uri} is open in another process; close it there, or use a server") from error
    except OSError as error:
        raise XcompatError(f"{uri} cannot be opened: {error.strerror}") from error


@contextmanager
def explained(uri: StoreUri) -> Iterator[None]:
    """Turn the errors of the client into one line."""
    try:
        yield
    except ResponseHandlingException as error:
        said = " ".join(str(error.source).split())
        raise LostConnectionError(f"{uri} does not answer ({said}); run it again once it does, and it continues") from error
    except UnexpectedResponse as error:
        raise XcompatError(f"{uri}: {_said(error)}") from error
    except (ResourceExhaustedResponse, ValueError, RuntimeError) as error:  # the last two: the local mode
        raise XcompatError(f"{uri}: {' '.join(str(error).split())}") from error


def _said(error: UnexpectedResponse) -> str:
    """Return what the server said, or a proxy before it."""
    try:
        return str(error.structured()["status"]["error"])
    except (ValueError, KeyError, TypeError):
        return f"{error.status_code} {error.reason_phrase}"


def vector_of(uri: StoreUri, info: models.CollectionInfo) -> str:
    """Return the name of the vector that is searched: the one of the address, or the only one; empty if it has no name."""
    found = dense(info)
    given = uri.options.get("vector")
    if given is None and len(found) == 1:
        return next(iter(found))
    if given is None or given not in found:
        known = ", ".join(name or "an unnamed one" for name in found) or "none"
        what = "name one with vector=" if given is None else f"{given!r} is none of them; {nearest(given, found)}"
        raise XcompatError(f"{uri}: single dense vectors are searched, and the collection has {known}; {what}")
    return given


def dense(info: models.CollectionInfo) -> dict[str, models.VectorParams]:
    """Return the single dense vectors of a collection by name."""
    known = info.config.params.vectors or {}
    named = {"": known} if isinstance(known, models.VectorParams) else known
    return {name: params for name, params in named.items() if params.multivector_config is None}


def metric_of(uri: StoreUri, params: models.VectorParams) -> Metric:
    """Return how vectors are compared, which the address must not contradict."""
    if params.distance not in METRICS:
        raise XcompatError(f"{uri} compares by {params.distance} distance; Cosine, Dot and Euclid can be searched and migrated")
    found, given = METRICS[params.distance], uri.options.get("metric")
    if given not in (None, found):
        raise XcompatError(f"{uri}: the collection compares by {params.distance}, which is metric={found}; leave metric= out")
    return found


def made_like(info: models.CollectionInfo, vector: str, dim: int, dtype: str) -> dict[str, Any]:
    """Return what makes a collection like another one, but for the dimension and the numbers of one vector."""
    params, config = info.config.params, info.config
    new = dense(info)[vector].model_copy(update={"size": dim, "datatype": models.Datatype(dtype)})
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
    """A point of a collection.

    Args:
        rest: the point without the searched vector and without our own key: what is copied as it is.
        vector_D: (D,) float32; None if it has none.
        state: a hash of all of that.
    """

    rest: models.Record | models.ScoredPoint
    vector_D: NDArray[np.float32] | None
    state: str


def point_of(found: models.Record | models.ScoredPoint, vector: str, metric: Metric) -> Point:
    """Take the searched vector out of a point that was read.

    Under cosine, states know directions alone: the client's local mode brings vectors to length 1 only when it searches.
    """
    vectors = found.vector if isinstance(found.vector, dict) else {} if found.vector is None else {"": found.vector}
    own_D = np.asarray(vectors.pop(vector, []), np.float64)
    found.vector = vectors  # type: ignore[assignment]
    found.payload = {key: value for key, value in (found.payload or {}).items() if key != STATE}
    hashed_D = own_D / (np.linalg.norm(own_D) or 1) if metric == "cosine" else own_D
    digest = xxhash.xxh3_64(hashed_D.astype(np.float32).tobytes())
    digest.update(json.dumps([found.payload, vectors], sort_keys=True, default=lambda value: value.model_dump()).encode())
    return Point(found, own_D.astype(np.float32) if own_D.size else None, digest.hexdigest())


def point_id(text: str | None) -> models.ExtendedPointId | None:
    """Return an id as the client takes it: a number or a UUID."""
    return int(text) if text is not None and text.isdigit() else text


def with_vector(point: Point, vector: str, vector_D: NDArray[np.float32] | None) -> models.PointStruct:
    """Return a point as it is written: with another vector, and the state of what it was made from."""
    others = dict(point.rest.vector or {})  # type: ignore[arg-type]
    vectors = others if vector_D is None else {**others, vector: vector_D.tolist()}
    return models.PointStruct(id=point.rest.id, vector=vectors, payload={**(point.rest.payload or {}), STATE: point.state})


def numbers_in(point: Point) -> int:
    """Count the numbers of the vectors that are copied, of any kind."""
    vectors: Any = (point.rest.vector or {}).values()  # type: ignore[union-attr]
    return sum(_numbers(vector) for vector in vectors)


def _numbers(vector: Any) -> int:  # noqa: ANN401
    if isinstance(vector, models.SparseVector):
        return 2 * len(vector.indices)
    return len(vector) * (len(vector[0]) if vector and isinstance(vector[0], list) else 1)
