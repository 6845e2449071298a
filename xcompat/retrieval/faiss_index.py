"""The default index of a segment: any faiss index that a factory string names, read from disk without being loaded."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xcompat.errors import XcompatError
from xcompat.retrieval.manifest import Metric

EXACT = "Flat"
PER_CENTROID = 39  # below so many samples for each centroid faiss itself warns that clusters mean little
TRAINED_ON = 200_000
WRITTEN_AT_ONCE = 1 << 22  # bytes
_DAMAGED = "it is damaged: bring it back as it was, or write it again"


class FaissIndex:
    """A faiss index, its rows numbered from 0.

    Args:
        index: the index; one with an ``IndexIDMap`` around it is used without it.
        metric: how scores are made: the higher, the nearer.
    """

    def __init__(self, index: Any, metric: Metric) -> None:  # noqa: ANN401 - faiss has no types
        import faiss

        self._owner = index  # what faiss hands out of it is gone when it is
        index = faiss.downcast_index(index)
        if isinstance(index, faiss.IndexIDMap | faiss.IndexIDMap2):
            index = faiss.downcast_index(index.index)
        self.index, self.metric = index, metric
        expected = faiss.METRIC_L2 if metric == "l2" else faiss.METRIC_INNER_PRODUCT
        if index.metric_type != expected:
            kind = "L2" if index.metric_type == faiss.METRIC_L2 else "inner products"
            raise XcompatError(
                f"the faiss index compares by {kind}, the gallery by {metric}; create it with the metric of the index"
            )
        ivf = faiss.try_extract_index_ivf(index)
        if ivf is not None and ivf.nprobe == 1:  # faiss's own default finds little
            ivf.nprobe = max(1, round(math.sqrt(ivf.nlist)))

    @property
    def rows(self) -> int:
        """Number of vectors."""
        return int(self.index.ntotal)

    @property
    def dim(self) -> int:
        """Dimension of the vectors."""
        return int(self.index.d)

    @property
    def is_exact(self) -> bool:
        """Whether every vector is compared."""
        import faiss

        return isinstance(faiss.downcast_index(self.index), faiss.IndexFlat)

    def set_parameters(self, parameters: str) -> None:
        """Set how hard the index looks, such as ``nprobe=32`` or ``efSearch=128``.

        Args:
            parameters: as faiss's ``ParameterSpace`` reads them, separated by commas.

        Raises:
            XcompatError: faiss does not know them for this index.
        """
        import faiss

        try:
            faiss.ParameterSpace().set_index_parameters(self.index, parameters)
        except RuntimeError as error:
            raise XcompatError(f"search parameters {parameters!r} do not fit the index: {_reason(error)}") from None
        self.__dict__.pop("_searched", None)  # a copy on GPUs is made anew with them

    def search(
        self, queries_Qd: NDArray[np.float32], k: int, kept_N: NDArray[np.bool_] | None = None
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Find the nearest rows.

        Args:
            queries_Qd: (Q, d) float32.
            k: how many.
            kept_N: which rows may be found; None for all.

        Returns:
            (Q, k) scores, the best first, and (Q, k) rows, -1 where there are no more.

        Raises:
            XcompatError: the index is damaged, in a way that shows in nothing but a search.
        """
        try:
            scores_Qk, rows_Qk = self._find(np.ascontiguousarray(queries_Qd), k, kept_N)
        except (RuntimeError, IndexError) as error:
            raise XcompatError(f"faiss cannot search the index: {_reason(error)}; if memory is enough, {_DAMAGED}") from None
        if rows_Qk.max(initial=-1) >= self.index.ntotal:
            raise XcompatError(f"faiss found rows that are not in the index; {_DAMAGED}")
        return (-scores_Qk if self.metric == "l2" else scores_Qk), rows_Qk

    def _find(
        self, queries_Qd: NDArray[np.float32], k: int, kept_N: NDArray[np.bool_] | None
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Return what faiss says of the nearest rows."""
        if kept_N is None:
            scores_Qk, rows_Qk = self._searched.search(queries_Qd, k)
        else:
            # faiss.contrib.torch_utils, which other libraries import, puts a search without `params` in the place of faiss's own
            search = getattr(self.index, "search_numpy", self.index.search)
            try:
                scores_Qk, rows_Qk = search(queries_Qd, k, params=_selecting(self.index, kept_N))
            except RuntimeError:  # some, such as plain product quantisers, cannot leave rows out while they look
                scores_Qk, rows_Qk = self._search_and_drop(queries_Qd, k, kept_N)
        return scores_Qk, rows_Qk

    @cached_property
    def _searched(self) -> Any:  # noqa: ANN401 - faiss has no types
        """The index on all GPUs, where faiss-gpu is installed and has kernels for its kind; else the index itself."""
        import faiss

        if not faiss.get_num_gpus():
            return self.index
        try:
            return faiss.index_cpu_to_all_gpus(self.index)
        except RuntimeError:  # HNSW, for one, and more vectors than fit
            return self.index

    def _search_and_drop(
        self, queries_Qd: NDArray[np.float32], k: int, kept_N: NDArray[np.bool_]
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Find so many rows that k are left when those not kept are dropped."""
        scores_QK, rows_QK = self.index.search(queries_Qd, min(self.rows, k + int((~kept_N).sum())))
        dropped_QK = ~kept_N[rows_QK] | (rows_QK < 0)
        order_Qk = np.argsort(dropped_QK, axis=1, kind="stable")[:, :k]
        rows_QK[dropped_QK] = -1
        return np.take_along_axis(scores_QK, order_Qk, 1), np.take_along_axis(rows_QK, order_Qk, 1)

    def vectors(self, rows_n: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return stored vectors, as well as the index keeps them.

        Args:
            rows_n: which.

        Returns:
            (n, d) float32.
        """
        import faiss

        ivf = faiss.try_extract_index_ivf(self.index)
        if isinstance(ivf, faiss.IndexIVFFastScan):
            raise RuntimeError("of a fast-scan IVF faiss gives none back")  # the process would end
        if ivf is not None and ivf.direct_map.type == faiss.DirectMap.NoMap:
            ivf.make_direct_map()  # else each call looks through every list
        return self.index.reconstruct_batch(rows_n)

    def as_stored(self, vectors_nd: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return what the index would give back of vectors (n, d): quantised where it quantises."""
        import faiss

        index = faiss.downcast_index(self.index.storage) if isinstance(self.index, faiss.IndexHNSW) else self.index
        try:
            return index.sa_decode(index.sa_encode(np.ascontiguousarray(vectors_nd)))
        except RuntimeError:  # one that is no codec, such as those that refine
            return vectors_nd

    def write(self, path: Path) -> None:
        """Write the index to a file."""
        write_faiss(self.index, path)


def build_faiss(
    factory: str, dim: int, metric: Metric, chunks: Iterable[NDArray[np.float32]], rows: int
) -> tuple[FaissIndex, str]:
    """Make an index of vectors; too few for a trained one are searched exactly until a compaction joins them with others.

    Args:
        factory: faiss factory string, such as ``Flat``, ``HNSW32``, ``IVF1024,Flat`` or ``IVF1024,PQ64``.
        dim: d.
        metric: how vectors are compared.
        chunks: blocks of vectors (n, d).
        rows: how many there are in all.

    Returns:
        The index, and the factory string it was made by.

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
    """Make an empty faiss index.

    Args:
        factory: faiss factory string.
        dim: d.
        metric: how vectors are compared.

    Returns:
        The index.

    Raises:
        XcompatError: faiss does not know the string for this dimension.
    """
    import faiss

    try:
        return faiss.index_factory(dim, factory, faiss.METRIC_L2 if metric == "l2" else faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as error:
        raise XcompatError(f"faiss makes no index {factory!r} of {dim} dimensions: {_reason(error)}") from None


def open_faiss(path: Path, metric: Metric) -> FaissIndex:
    """Open an index file, mapped into memory.

    Args:
        path: as faiss wrote it.
        metric: how the gallery compares.

    Returns:
        The index.

    Raises:
        XcompatError: it is missing or damaged.
    """
    if not path.is_file():
        raise XcompatError(f"{path} does not exist; put the faiss index back, or roll back")
    return FaissIndex(map_faiss(path), metric)


def map_faiss(path: Path) -> Any:  # noqa: ANN401 - faiss has no types
    """Map an index file into memory, whatever its metric.

    Args:
        path: as faiss wrote it.

    Returns:
        faiss's own index.

    Raises:
        XcompatError: it is missing or damaged.
    """
    import faiss

    if not path.is_file():
        raise XcompatError(f"the faiss index {path} does not exist")
    try:
        return faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC)
    except RuntimeError as error:
        raise XcompatError(f"{path} is no readable faiss index: {_reason(error)}") from None


def write_faiss(index: Any, path: Path) -> None:  # noqa: ANN401 - faiss has no types
    """Write an index through a file of Python's: faiss's own prints what goes wrong when it is closed, and goes on.

    Args:
        index: faiss's own.
        path: the file.

    Raises:
        OSError: it cannot be written, such as to a full disk.
    """
    import faiss

    with path.open("wb") as file:
        faiss.write_index(index, faiss.PyCallbackIOWriter(file.write, WRITTEN_AT_ONCE))


def is_lossless(factory: str) -> bool:
    """Return whether an index gives back the vectors it was given, so that they need not be kept beside it.

    Example:
        >>> is_lossless("Flat"), is_lossless("HNSW32"), is_lossless("IVF256,Flat"), is_lossless("IVF256,PQ16")
        (True, True, False, False)
    """
    # IVF keeps rows by list: to stream them in order would read the whole file for each block
    return factory == EXACT or (factory.startswith("HNSW") and ("," not in factory or factory.endswith(",Flat")))


def _fewest(index: Any) -> int:  # noqa: ANN401
    """Return how many vectors it takes to train an index."""
    import faiss

    ivf = faiss.try_extract_index_ivf(index)
    lists = ivf.nlist if ivf is not None else 0
    return max(PER_CENTROID * lists, PER_CENTROID * 256)  # product quantisers have 256 centroids


def _selecting(index: Any, kept_N: NDArray[np.bool_]) -> Any:  # noqa: ANN401
    """Return the search parameters by which an index finds only some rows."""
    import faiss

    packed = np.packbits(kept_N, bitorder="little")
    selector = faiss.IDSelectorBitmap(len(packed), faiss.swig_ptr(packed))
    selector.packed = packed  # faiss keeps a pointer alone
    return _parameters(index, selector)


def _parameters(index: Any, selector: Any) -> Any:  # noqa: ANN401
    import faiss

    index = faiss.downcast_index(index)
    if isinstance(index, faiss.IndexPreTransform):
        inner = _parameters(index.index, selector)
        return faiss.SearchParametersPreTransform(index_params=inner)
    if isinstance(index, faiss.IndexIVF):
        return faiss.SearchParametersIVF(sel=selector, nprobe=index.nprobe)
    if isinstance(index, faiss.IndexHNSW):
        return faiss.SearchParametersHNSW(sel=selector, efSearch=index.hnsw.efSearch)
    return faiss.SearchParameters(sel=selector)


def _reason(error: Exception) -> str:
    """Return what faiss says without the place in its source."""
    return " ".join(str(error).split(": ", 1)[-1].split())[:200]
