"""Filtered search in a faiss index.

If few rows remain, they are compared one by one. For more rows, the search effort grows with the share of excluded rows. If an
approximate index returns too few rows, all are compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from xcompat.core.lazy import faiss
from xcompat.retrieval.own_ids import RowLabels, select_bits

ReadRows: TypeAlias = Callable[[NDArray[np.int64]], NDArray[np.float32]]
Found: TypeAlias = tuple[NDArray[np.float32], NDArray[np.int64]]

READ_AT_ONCE, HITS_AT_ONCE = 2**25, 2**22
"""Largest bytes of vectors, and number of hits, in memory at once."""


def search_kept(
    index: faiss.Index,
    queries_Qd: NDArray[np.float32],
    k: int,
    kept_N: NDArray[np.bool_],
    vectors: ReadRows | None,
    labels: RowLabels | None = None,
) -> Found:
    """Find each query's nearest kept rows.

    Args:
        index: faiss index.
        queries_Qd: (Q, d) float32.
        k: rows per query.
        kept_N: (N,) bool, the allowed rows.
        vectors: reads the vectors for rows; without it, fewer rows may be returned.
        labels: ids stored in the index; None for 0, 1, 2 and so on.

    Returns:
        (Q, k) faiss distances, best first, and (Q, k) rows, padded with -1.

    Raises:
        RuntimeError: faiss cannot search the index.
    """
    rows_n = np.flatnonzero(kept_N)
    if vectors is not None and len(rows_n) <= _comparisons_per_search(index, k, len(rows_n)):
        return _compare_rows(index, queries_Qd, k, rows_n, vectors)
    # faiss.contrib.torch_utils, imported by other libraries, replaces `search` with a function without `params`
    search = getattr(index, "search_numpy", index.search)
    try:
        distances_Qk, rows_Qk = search(queries_Qd, k, params=_selecting(index, k, kept_N, labels))
        rows_Qk = rows_Qk if labels is None else labels.find_rows(rows_Qk)
    except RuntimeError:  # some indexes cannot filter rows, e.g. plain product quantisers
        if vectors is not None and 2 * len(rows_n) < len(kept_N):
            return _compare_rows(index, queries_Qd, k, rows_n, vectors)
        distances_Qk, rows_Qk = _search_and_drop(index, queries_Qd, k, kept_N, labels)
    return complete_results(index, queries_Qd, (distances_Qk, rows_Qk), rows_n, vectors)


def find_incomplete(rows_Qk: NDArray[np.int64], kept: int) -> NDArray[np.bool_]:
    """Return the mask (Q,) for queries with fewer rows than exist."""
    return (rows_Qk >= 0).sum(axis=1) < min(rows_Qk.shape[1], kept)


def complete_results(
    index: faiss.Index,
    queries_Qd: NDArray[np.float32],
    found: Found,
    rows_n: NDArray[np.int64],
    vectors: ReadRows | None,
) -> Found:
    """Compare queries with all rows if they got too few, and ``vectors`` is set."""
    distances_Qk, rows_Qk = found
    lacking_Q = find_incomplete(rows_Qk, len(rows_n))
    if vectors is not None and lacking_Q.any():
        k = rows_Qk.shape[1]
        distances_Qk[lacking_Q], rows_Qk[lacking_Q] = _compare_rows(index, queries_Qd[lacking_Q], k, rows_n, vectors)
    return distances_Qk, rows_Qk


def _comparisons_per_search(index: faiss.Index, k: int, kept: int) -> float:
    """Estimate the number of one-by-one comparisons that take as long as a filtered search."""
    outer, index = index, _searching(index)
    if isinstance(index, faiss.IndexIVF):  # a filtered search may visit every list, and read as many bytes
        return index.ntotal * index.nprobe / index.nlist * index.code_size / (4 * outer.d)
    if isinstance(index, faiss.IndexHNSW):
        # measured on 100,000 vectors of 64 and 256 dimensions, HNSW32: a step takes 3 to 4 µs, like 20 to 100 vectors in order
        return max(index.hnsw.efSearch, k) * index.ntotal / max(kept, 1) * index.hnsw.nb_neighbors(0)
    return 0  # it always compares every row


def _searching(index: faiss.Index) -> faiss.Index:
    """Return the inner index, without transforms and refinements."""
    index = faiss.downcast_index(index)
    if isinstance(index, faiss.IndexPreTransform):
        return _searching(index.index)
    return _searching(index.base_index) if isinstance(index, faiss.IndexRefine) else index


def _compare_rows(
    index: faiss.Index,
    queries_Qd: NDArray[np.float32],
    k: int,
    rows_n: NDArray[np.int64],
    vectors: ReadRows,
) -> Found:
    best = faiss.ResultHeap(len(queries_Qd), k, keep_max=index.metric_type == faiss.METRIC_INNER_PRODUCT)
    size = max(1, READ_AT_ONCE // (4 * index.d))
    for start in range(0, len(rows_n), size):
        rows_b = rows_n[start : start + size]
        distances_Qk, places_Qk = faiss.knn(queries_Qd, np.ascontiguousarray(vectors(rows_b)), k, index.metric_type)
        best.add_result(distances_Qk, np.where(places_Qk < 0, -1, rows_b[places_Qk]))
    best.finalize()
    return best.D, best.I


def _search_and_drop(
    index: faiss.Index,
    queries_Qd: NDArray[np.float32],
    k: int,
    kept_N: NDArray[np.bool_],
    labels: RowLabels | None,
) -> Found:
    more = max(k, min(index.ntotal, k + index.ntotal - int(kept_N.sum())))
    size = max(1, HITS_AT_ONCE // more)
    distances_Qk, rows_Qk = np.empty((len(queries_Qd), k), np.float32), np.empty((len(queries_Qd), k), np.int64)
    for start in range(0, len(queries_Qd), size):
        here = slice(start, start + size)
        distances_QK, rows_QK = index.search(queries_Qd[here], more)
        rows_QK = rows_QK if labels is None else labels.find_rows(rows_QK)
        dropped_QK = ~kept_N[rows_QK] | (rows_QK < 0)
        rows_QK[dropped_QK] = -1
        order_Qk = np.argsort(dropped_QK, axis=1, kind="stable")[:, :k]
        distances_Qk[here], rows_Qk[here] = (np.take_along_axis(each, order_Qk, 1) for each in (distances_QK, rows_QK))
    return distances_Qk, rows_Qk


def _selecting(index: faiss.Index, k: int, kept_N: NDArray[np.bool_], labels: RowLabels | None) -> faiss.SearchParameters:
    """Return search parameters to filter rows, with a higher effort."""
    selector = select_bits(kept_N) if labels is None else labels.select(kept_N)
    return _parameters(index, selector, k, len(kept_N) / max(int(kept_N.sum()), 1))


def _parameters(index: faiss.Index, selector: faiss.IDSelector, k: int, more: float) -> faiss.SearchParameters:
    index = faiss.downcast_index(index)
    if isinstance(index, faiss.IndexPreTransform):
        inner = _parameters(index.index, selector, k, more)
        return faiss.SearchParametersPreTransform(index_params=inner)
    if isinstance(index, faiss.IndexRefine):
        inner = _parameters(index.base_index, selector, k, more)
        return faiss.IndexRefineSearchParameters(k_factor=index.k_factor, base_index_params=inner)
    if isinstance(index, faiss.IndexIVF):
        return faiss.SearchParametersIVF(sel=selector, nprobe=min(index.nlist, math.ceil(index.nprobe * more)))
    if isinstance(index, faiss.IndexHNSW):
        effort = math.ceil(max(index.hnsw.efSearch, k) * more)
        return faiss.SearchParametersHNSW(sel=selector, efSearch=min(index.ntotal, effort))
    return faiss.SearchParameters(sel=selector)
