"""Construction of faiss indexes from factory strings."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from xcompat.core.distributed import copy_to_gpus
from xcompat.core.errors import XcompatError, nearest
from xcompat.core.lazy import faiss
from xcompat.retrieval.faiss_index import FaissIndex, reason_of
from xcompat.retrieval.manifest import Metric

EXACT = "Flat"
PER_CENTROID = 39  # faiss warns about poor clusters if it has fewer samples per centroid
TRAINED_ON = 200_000  # vectors
ANY_DIM = 64  # to read a factory string before the dimension is known


def build_faiss(
    factory: str, dim: int, metric: Metric, chunks: Iterable[NDArray[np.float32]], rows: int
) -> tuple[FaissIndex, str]:
    """Build an index: train it on the first vectors, then add all.

    With too few vectors to train, the index is exact until a compaction. With faiss for GPUs, GPUs find an inverted file's
    centroids and assign vectors.

    Args:
        factory: faiss factory string, e.g. ``Flat``, ``HNSW32``, ``IVF1024,Flat`` or ``IVF1024,PQ64``.
        dim: d.
        metric: how vectors are compared.
        chunks: blocks of vectors (n, d).
        rows: total number of vectors.

    Returns:
        The index and the factory string used.

    Raises:
        XcompatError: faiss does not know the string for this dimension.
    """
    index = make_index(factory, dim, metric)
    used = factory
    if rows < fewest_vectors(index):
        index, used = make_index(EXACT, dim, metric), EXACT
    pending: list[NDArray[np.float32]] = []
    waiting = 0
    add: Callable[[NDArray[np.float32]], None] | None = None
    for chunk in chunks:
        if not index.is_trained:
            pending.append(chunk)
            waiting += len(chunk)
            if waiting < min(rows, TRAINED_ON):
                continue
            chunk, pending = np.concatenate(pending), []
            _train(index, chunk)
        add = add or _adding(index)
        add(chunk)
    return FaissIndex(index, metric), used


def _train(index: faiss.Index, vectors_nd: NDArray[np.float32]) -> None:
    """Train an index; GPUs find an inverted file's centroids."""
    ivf = faiss.try_extract_index_ivf(index) if faiss.get_num_gpus() else None
    if ivf is None:
        index.train(vectors_nd)
        return
    nearest = copy_to_gpus(faiss.IndexFlat(ivf.d, ivf.metric_type))  # keep a reference: faiss stores only a pointer
    ivf.clustering_index = nearest
    index.train(vectors_nd)
    ivf.clustering_index = None


def _adding(index: faiss.Index) -> Callable[[NDArray[np.float32]], None]:
    """Return a function that adds vectors; GPUs, if any, assign them to lists.

    The CPU encodes, because a GPU copy would need memory and a copy back.
    """
    # other kinds pack their lists differently, and faiss does not check it
    if not faiss.get_num_gpus() or type(index) not in (faiss.IndexIVFFlat, faiss.IndexIVFScalarQuantizer, faiss.IndexIVFPQ):
        return index.add
    from faiss.contrib.ivf_tools import add_preassigned

    centroids = copy_to_gpus(index.quantizer)

    def add(vectors_nd: NDArray[np.float32]) -> None:
        vectors_nd = np.ascontiguousarray(vectors_nd)
        add_preassigned(index, vectors_nd, centroids.assign(vectors_nd, 1).ravel())

    return add


def make_index(factory: str, dim: int, metric: Metric) -> faiss.Index:
    """Create an empty faiss index from a factory string.

    Raises:
        XcompatError: unknown metric, or faiss does not know the string for this dimension.
    """
    if metric not in get_args(Metric):
        raise XcompatError(f"unknown metric {metric!r}; {nearest(metric, get_args(Metric))}")
    try:
        return faiss.index_factory(dim, factory, faiss.METRIC_L2 if metric == "l2" else faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as error:
        raise XcompatError(f"faiss cannot create index {factory!r} with {dim} dimensions: {reason_of(error)}") from None


def require_factory(factory: str) -> None:
    """Raise if faiss cannot read a factory string for any dimension."""
    try:
        faiss.index_factory(ANY_DIM, factory)
    except RuntimeError as error:
        if "could not parse" in str(error):
            raise XcompatError(f"--index {factory} is not a faiss factory string; use e.g. HNSW32 or IVF1024,PQ64") from None


def is_lossless(factory: str) -> bool:
    """Return whether an index returns its vectors unchanged and in order.

    Example:
        >>> is_lossless("Flat"), is_lossless("HNSW32"), is_lossless("IVF256,Flat"), is_lossless("IVF256,PQ16")
        (True, True, False, False)
    """
    # IVF stores rows by list: reading them in order would read the whole file for each block
    return factory == EXACT or (factory.startswith("HNSW") and ("," not in factory or factory.endswith(",Flat")))


def fewest_vectors(index: faiss.Index) -> int:
    """Return an empty index's minimum number of training vectors."""
    if index.is_trained:
        return 0
    ivf = faiss.try_extract_index_ivf(index)
    lists = ivf.nlist if ivf is not None else 0
    return max(PER_CENTROID * lists, PER_CENTROID * 256)  # product quantisers have 256 centroids
