"""Vector indexes in Milvus: a local file (milvus-lite) or a cluster."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cache, wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from xcompat.core.errors import XcompatError
from xcompat.retrieval.filtered_search import Found, ReadRows
from xcompat.retrieval.manifest import Metric, SegmentRecord
from xcompat.retrieval.milvus_lite import load_collection

INDEX = "AUTOINDEX"
ROWS_PER_CALL = 4096  # messages stay far below Milvus's limit of 64 MB
FOUND_AT_MOST = 16384  # Milvus's limit of hits per query
TOKEN = "MILVUS_TOKEN"
"""Environment variable with a token, or ``USER:PASSWORD``."""
_METRICS: dict[Metric, str] = {"cosine": "IP", "ip": "IP", "l2": "L2"}  # vectors for cosine have length 1


P = ParamSpec("P")
R = TypeVar("R")


def _explain_errors(asking: Callable[P, R]) -> Callable[P, R]:
    """Turn pymilvus errors into a one-line :class:`XcompatError`."""

    @wraps(asking)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return asking(*args, **kwargs)
        except Exception as error:
            if not type(error).__module__.startswith("pymilvus"):
                raise
            said = " ".join(str(error).split())[:200]
            raise XcompatError(f"Milvus failed ({said}); make sure it is running, and try again") from error

    return call


class MilvusBackend:
    """Backend with a collection per segment; ids and metadata stay in the gallery folder.

    Args:
        metric: how vectors are compared.
        uri: a file for milvus-lite, or ``http://host:19530``.
    """

    def __init__(self, metric: Metric, uri: str) -> None:
        self.metric, self.uri = metric, uri

    @_explain_errors
    def build(self, name: str, folder: Path, blocks: Sequence[NDArray[np.float32]], rows: int, dim: int) -> str:
        """Store a segment's vectors in a new collection; return the index name."""
        from pymilvus import DataType, MilvusClient

        client = connect(self.uri)
        schema = MilvusClient.create_schema(auto_id=False, enable_dynamic_field=False)
        schema.add_field("row", DataType.INT64, is_primary=True)
        schema.add_field("vector", DataType.FLOAT_VECTOR, dim=dim)
        index = client.prepare_index_params()
        index.add_index("vector", index_type=INDEX, metric_type=_METRICS[self.metric])
        collection = _collection(name)
        client.create_collection(collection, schema=schema, index_params=index, consistency_level="Strong")
        row = 0
        for block in blocks:
            for start in range(0, len(block), ROWS_PER_CALL):
                piece = block[start : start + ROWS_PER_CALL]
                client.insert(collection, [{"row": number, "vector": vector} for number, vector in enumerate(piece, row)])
                row += len(piece)
        client.flush(collection)
        return INDEX

    @_explain_errors
    def open(self, record: SegmentRecord, folder: Path, as_added: ReadRows | None) -> MilvusIndex:
        """Open a segment's collection."""
        return MilvusIndex(self.uri, record, self.metric)

    def fewest(self, dim: int) -> int:
        """Return 0: Milvus trains its own index."""
        return 0

    def keeps(self, index: str) -> bool:
        """Return True: a collection returns its vectors unchanged."""
        return True

    @_explain_errors
    def drop(self, name: str) -> None:
        """Drop a segment's collection that no generation uses."""
        client, collection = connect(self.uri), _collection(name)
        if client.has_collection(collection):
            client.drop_collection(collection)

    def find_damage(self, record: SegmentRecord) -> list[str]:
        """Return a line if a collection is missing or has a wrong number of vectors."""
        try:
            rows = MilvusIndex(self.uri, record, self.metric).rows
        except XcompatError as error:
            return [str(error)]
        held = f"Milvus holds {rows} vectors in {_collection(record.name)} instead of {record.rows}"
        return [held] if rows != record.rows else []


class MilvusIndex:
    """A segment's collection.

    Raises:
        XcompatError: the collection does not exist.
    """

    @_explain_errors
    def __init__(self, uri: str, record: SegmentRecord, metric: Metric) -> None:
        self.client, self.record, self.metric = connect(uri), record, metric
        self.collection = _collection(record.name)
        if not self.client.has_collection(self.collection):
            raise XcompatError(f"Milvus has no collection {self.collection}; point the gallery to the Milvus it was built with")
        load_collection(self.client, self.collection, Path(uri) if Path(uri).exists() else None)

    @property
    @_explain_errors
    def rows(self) -> int:
        """Number of vectors."""
        return int(self.client.query(self.collection, filter="", output_fields=["count(*)"])[0]["count(*)"])

    @property
    @_explain_errors
    def dim(self) -> int:
        """Vector dimension."""
        fields = self.client.describe_collection(self.collection)["fields"]
        return int(next(field for field in fields if field["name"] == "vector")["params"]["dim"])

    is_exact = False

    def set_parameters(self, parameters: str) -> None:
        """Raise: Milvus chooses its own parameters."""
        raise XcompatError(f"search parameters {parameters!r} are for faiss, but Milvus chooses parameters itself; remove them")

    @_explain_errors
    def search(self, queries_Qd: NDArray[np.float32], k: int, kept_N: NDArray[np.bool_] | None = None) -> Found:
        """Return (Q, k) scores, best first, and (Q, k) kept rows padded with -1."""
        if k > FOUND_AT_MOST:
            raise XcompatError(f"Milvus finds at most {FOUND_AT_MOST} items per query, but top_k needs {k}; lower top_k")
        chosen: dict[str, Any] = {}
        if kept_N is not None:
            few = kept_N.sum() <= (~kept_N).sum()
            listed = np.flatnonzero(kept_N if few else ~kept_N).tolist()
            chosen = {"filter": f"row {'in' if few else 'not in'} {listed}"}
        scores_Qk = np.full((len(queries_Qd), k), -np.inf, np.float32)
        rows_Qk = np.full((len(queries_Qd), k), -1, np.int64)
        for start in range(0, len(queries_Qd), ROWS_PER_CALL):
            block = queries_Qd[start : start + ROWS_PER_CALL]
            for query, hits in enumerate(self.client.search(self.collection, data=block.tolist(), limit=k, **chosen), start):
                scores_Qk[query, : len(hits)] = [hit["distance"] for hit in hits]
                rows_Qk[query, : len(hits)] = [hit["row"] for hit in hits]
        scores_Qk = -scores_Qk if self.metric == "l2" else scores_Qk
        order_Qk = np.lexsort((rows_Qk, np.where(rows_Qk < 0, np.inf, -scores_Qk)))  # ties: lowest row first
        return np.take_along_axis(scores_Qk, order_Qk, 1), np.take_along_axis(rows_Qk, order_Qk, 1)

    @_explain_errors
    def vectors(self, rows_n: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return stored vectors (n, d)."""
        found_nd = np.empty((len(rows_n), self.dim), np.float32)
        for start in range(0, len(rows_n), ROWS_PER_CALL):
            rows = rows_n[start : start + ROWS_PER_CALL].tolist()
            place = {row: start + number for number, row in enumerate(rows)}
            for entity in self.client.get(self.collection, ids=rows, output_fields=["row", "vector"]):
                found_nd[place[entity["row"]]] = entity["vector"]
        return found_nd


@cache
def connect(uri: str) -> Any:  # noqa: ANN401 - pymilvus has no types
    """Return a URI's client, one per process, because milvus-lite cannot open a file twice.

    Credentials come from ``MILVUS_TOKEN``, or in old galleries from the URI.

    Raises:
        XcompatError: pymilvus is not installed, or no Milvus answers.
    """
    try:
        from pymilvus import MilvusClient
        from pymilvus.exceptions import MilvusException
    except ImportError:
        raise XcompatError(
            'a gallery in Milvus needs pymilvus; install it with `pip install -e ".[milvus]"` in a clone of xcompat'
        ) from None
    token = os.environ.get(TOKEN, "") if "://" in uri and "@" not in uri else ""
    try:
        return MilvusClient(uri, token=token)
    except (MilvusException, OSError) as error:
        said = " ".join(str(error).split())[:200]
        raise XcompatError(f"no Milvus answers at {uri} ({said}); use a .db file or a URI, e.g. http://host:19530") from None


def _collection(name: str) -> str:
    return f"xcompat_{name}"
