"""Build a faiss index from a factory string: train it on the first vectors, and add all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xcompat.errors import XcompatError
from xcompat.retrieval.faiss_index import FaissIndex, reason_of
from xcompat.retrieval.manifest import Metric

EXACT = "Flat"
PER_CENTROID = 39  # faiss warns about poor clusters if it has fewer samples per centroid
TRAINED_ON = 200_000  # vectors


def build_faiss(
    factory: str, dim: int, metric: Metric, chunks: Iterable[NDArray[np.float32]], rows: int
) -> tuple[FaissIndex, str]:
    """Build an index; too few vectors to train it get an exact one, until a compaction joins them with others.

    Args:
        factory: faiss factory string, such as ``Flat``, ``HNSW32``, ``IVF1024,Flat`` or ``IVF1024,PQ64``.
        dim: d.
        metric: how vectors are compared.
        chunks: blocks of vectors (n, d).
        rows: number of all vectors.

    Returns:
        The index, and the factory string that was used.

    Raises:
        XcompatError: faiss does not know the string for this dimension.
    """
    index = make_index(factory, dim, metric)
    used = factory
    if not index.is_trained and rows < _fewest(index):
        index, used = make_index(EXACT, dim, metric), EXACT
    pending: list[NDArray[np.float32]] = []
    waiting = 0
    for chunk in chunks:
        if not index.is_trained:
            pending.append(chunk)
            waiting += len(chunk)
            if waiting < min(rows, TRAINED_ON):
                continue
            chunk, pending = np.concatenate(pending), []
            index.train(chunk)
        index.add(chunk)
    return FaissIndex(index, metric), used


def make_index(factory: str, dim: int, metric: Metric) -> Any:  # noqa: ANN401 - faiss has no types
    """Make an empty faiss index from a factory string.

    Raises:
        XcompatError: faiss does not know the string for this dimension.
    """
    import faiss

    try:
        return faiss.index_factory(dim, factory, faiss.METRIC_L2 if metric == "l2" else faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as error:
        raise XcompatError(f"faiss makes no index {factory!r} of {dim} dimensions: {reason_of(error)}") from None


def is_lossless(factory: str) -> bool:
    """Return whether an index returns its vectors unchanged and in order, so that no copy of them is needed.

    Example:
        >>> is_lossless("Flat"), is_lossless("HNSW32"), is_lossless("IVF256,Flat"), is_lossless("IVF256,PQ16")
        (True, True, False, False)
    """
    # IVF stores rows by list: streaming them in order would read the whole file for each block
    return factory == EXACT or (factory.startswith("HNSW") and ("," not in factory or factory.endswith(",Flat")))


def _fewest(index: Any) -> int:  # noqa: ANN401
    """Return the fewest vectors that train an index."""
    import faiss

    ivf = faiss.try_extract_index_ivf(index)
    lists = ivf.nlist if ivf is not None else 0
    return max(PER_CENTROID * lists, PER_CENTROID * 256)  # product quantisers have 256 centroids
