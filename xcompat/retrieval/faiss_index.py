"""Memory-mapped faiss index, the default segment index."""

from __future__ import annotations

import math
from contextlib import suppress
from functools import cache, cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from xcompat.core.distributed import copy_to_gpus
from xcompat.core.errors import XcompatError
from xcompat.core.lazy import faiss
from xcompat.core.progress import notice
from xcompat.retrieval.filtered_search import Found, ReadRows, complete_results, find_incomplete, search_kept
from xcompat.retrieval.list_vectors import find_places, packs_codes, read_packed, use_places
from xcompat.retrieval.manifest import Metric
from xcompat.retrieval.own_ids import RowLabels, strip_id_map
from xcompat.retrieval.ties import Scored, compare_exactly, search_with_ties

WRITTEN_AT_ONCE = 1 << 22  # bytes
_DAMAGED = "it is damaged: restore it, or write it again"


class FaissIndex:
    """A faiss index with rows numbered from 0.

    Args:
        index: faiss index; an ``IndexIDMap`` is removed.
        metric: how vectors are compared.
        as_added: reads the original vectors; None to read them from the index.
        labels_N: (N,) each row's id in the index; None for 0, 1, 2 and so on.
    """

    def __init__(
        self,
        index: faiss.Index,
        metric: Metric,
        as_added: ReadRows | None = None,
        labels_N: NDArray[np.int64] | None = None,
    ) -> None:
        _say_if_overwritten()
        self._alone = Lock()  # one thread at a time may search on a GPU or prepare the index
        self._owner = index  # keep a reference: faiss frees the inner index together with its IndexIDMap
        index = strip_id_map(index)
        self.index, self.metric, self._as_added = index, metric, as_added
        self.labels = None if labels_N is None else RowLabels(labels_N)
        expected = faiss.METRIC_L2 if metric == "l2" else faiss.METRIC_INNER_PRODUCT
        if index.metric_type != expected:
            kind = "L2" if index.metric_type == faiss.METRIC_L2 else "inner products"
            raise XcompatError(
                f"the faiss index compares by {kind}, the gallery by {metric}; create the gallery with the metric of the index"
            )
        ivf = faiss.try_extract_index_ivf(index)
        if ivf is not None and ivf.nprobe == 1:  # faiss's default has low recall
            ivf.nprobe = max(1, round(math.sqrt(ivf.nlist)))

    @property
    def rows(self) -> int:
        """Number of vectors."""
        return int(self.index.ntotal)

    @property
    def dim(self) -> int:
        """Vector dimension."""
        return int(self.index.d)

    @property
    def is_exact(self) -> bool:
        """Whether every vector is compared."""
        return isinstance(faiss.downcast_index(self.index), faiss.IndexFlat)

    def set_parameters(self, parameters: str) -> None:
        """Set the search effort.

        Args:
            parameters: in faiss's ``ParameterSpace`` syntax, e.g. ``nprobe=32,efSearch=128``.

        Raises:
            XcompatError: faiss does not know them for this index.
        """
        try:
            faiss.ParameterSpace().set_index_parameters(self.index, parameters)
        except RuntimeError as error:
            raise XcompatError(f"search parameters {parameters!r} do not fit the index: {reason_of(error)}") from None
        self.__dict__.pop("_gpu_index", None)  # the next search copies the index to GPUs with these parameters

    def search(self, queries_Qd: NDArray[np.float32], k: int, kept_N: NDArray[np.bool_] | None = None) -> Found:
        """Find the nearest rows.

        Args:
            queries_Qd: (Q, d) float32.
            k: rows per query.
            kept_N: (N,) bool, the allowed rows; None to allow all.

        Returns:
            (Q, k) scores, best first, and (Q, k) rows, padded with -1. Ties are sorted by row.

        Raises:
            XcompatError: the index is damaged.
        """
        queries_Qd = np.ascontiguousarray(queries_Qd)
        if isinstance(faiss.downcast_index(self.index), faiss.IndexRefine):  # its results depend on k
            return self._score(queries_Qd, k, kept_N)[:2]
        return search_with_ties(partial(self._score, kept_N=kept_N), queries_Qd, k, self.rows)

    def _score(self, queries_Qd: NDArray[np.float32], k: int, kept_N: NDArray[np.bool_] | None) -> Scored:
        """Return the nearest rows, with batch-independent scores if vectors are readable."""
        try:
            distances_Qk, rows_Qk = self._find(queries_Qd, k, kept_N)
        except (RuntimeError, IndexError) as error:
            raise XcompatError(
                f"faiss cannot search the index: {reason_of(error)}; if memory is sufficient, {_DAMAGED}"
            ) from None
        if rows_Qk.max(initial=-1) >= self.index.ntotal:
            raise XcompatError(f"faiss found rows outside of the index; {_DAMAGED}")
        scores_Qk = -distances_Qk if self.metric == "l2" else distances_Qk
        if self._reads_exactly:
            return compare_exactly(queries_Qd, rows_Qk, scores_Qk, self._as_added or self.vectors, self.metric)
        return Scored(scores_Qk, rows_Qk, scores_Qk, np.zeros(len(queries_Qd), np.float32))

    @cached_property
    def _reads_exactly(self) -> bool:
        """Whether vectors can be read unchanged, without scanning lists."""
        index = faiss.downcast_index(self.index)
        is_plain = type(index) in (faiss.IndexFlat, faiss.IndexFlatIP, faiss.IndexFlatL2, faiss.IndexHNSWFlat)
        return is_plain or (type(index) is faiss.IndexIVFFlat and self._as_added is not None)

    def _find(self, queries_Qd: NDArray[np.float32], k: int, kept_N: NDArray[np.bool_] | None) -> Found:
        if kept_N is not None:  # on the CPU, because faiss-gpu ignores the filter
            return search_kept(self.index, queries_Qd, k, kept_N, self._as_added or self._own_vectors, self.labels)
        distances_Qk, rows_Qk = self._find_of_all(queries_Qd, k)
        found = distances_Qk, rows_Qk if self.labels is None else self.labels.find_rows(rows_Qk)
        if not find_incomplete(found[1], self.rows).any():
            return found
        # the visited lists hold fewer than k vectors, or a graph with many equal vectors is a dead end
        return complete_results(self.index, queries_Qd, found, np.arange(self.rows), self._as_added or self._own_vectors)

    def _find_of_all(self, queries_Qd: NDArray[np.float32], k: int) -> Found:
        if self._gpu_index is not self.index:
            with self._alone, suppress(RuntimeError):  # k or nprobe exceeds the kernels' limits, or memory is too small
                return self._gpu_index.search(queries_Qd, k)
        return self.index.search(queries_Qd, k)

    @cached_property
    def _own_vectors(self) -> ReadRows | None:
        """Reader for the index's vectors; None if unsupported or not needed."""
        if self.is_exact:
            return None
        try:
            self.vectors(np.zeros(1, np.int64))
        except RuntimeError:  # e.g. transforms without an inverse
            return None
        return self.vectors

    @cached_property
    def _gpu_index(self) -> faiss.Index:
        return copy_to_gpus(self.index)

    def vectors(self, rows_n: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return stored vectors (n, d) float32, possibly quantised."""
        with self._alone:  # only one thread may make the map
            places_N = self._places
        return self._reconstruct(self.index, rows_n, places_N)

    @cached_property
    def _places(self) -> NDArray[np.int64] | None:
        """Prepare row lookup in an inverted file; return places if faiss cannot do it."""
        ivf = faiss.try_extract_index_ivf(self.index)
        if ivf is None:
            return None
        is_hashed = ivf.direct_map.type == faiss.DirectMap.Hashtable  # its file may lack some ids
        if self.labels is None and not packs_codes(ivf) and not is_hashed:
            with suppress(RuntimeError):  # vectors with explicit ids were added later
                if ivf.direct_map.type == faiss.DirectMap.NoMap:
                    ivf.make_direct_map()
                return None
        places_N = find_places(ivf, self.labels or RowLabels(np.arange(self.rows)))
        if not packs_codes(ivf):
            use_places(ivf, places_N)
        return places_N

    def _reconstruct(
        self,
        index: faiss.Index,
        rows_n: NDArray[np.int64],
        places_N: NDArray[np.int64] | None,
    ) -> NDArray[np.float32]:
        index = faiss.downcast_index(index)
        if places_N is None or isinstance(index, faiss.IndexRefine):
            return index.reconstruct_batch(rows_n)
        if (places_N[rows_n] < 0).any():
            raise RuntimeError("the lists hold no vector for some rows")
        if isinstance(index, faiss.IndexPreTransform):
            inner = self._reconstruct(index.index, rows_n, places_N)
            vectors_nd = np.empty((len(rows_n), index.d), np.float32)
            index.reverse_chain(len(rows_n), faiss.swig_ptr(inner), faiss.swig_ptr(vectors_nd))
            return vectors_nd
        return read_packed(index, places_N[rows_n]) if packs_codes(index) else index.reconstruct_batch(rows_n)

    def as_stored(self, vectors_nd: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return vectors (n, d) as the index would store them."""
        index = faiss.downcast_index(self.index.storage) if isinstance(self.index, faiss.IndexHNSW) else self.index
        try:
            return index.sa_decode(index.sa_encode(np.ascontiguousarray(vectors_nd)))
        except RuntimeError:  # the index is not a codec, e.g. one that refines
            return vectors_nd


def open_faiss(path: Path, metric: Metric, as_added: ReadRows | None = None) -> FaissIndex:
    """Open an index file; ``as_added`` as in :class:`FaissIndex`.

    Raises:
        XcompatError: the file is missing or damaged, or the index has another metric.
    """
    if not path.is_file():
        raise XcompatError(f"{path} does not exist; restore the faiss index, or roll back")
    return FaissIndex(map_faiss(path), metric, as_added)


def map_faiss(path: Path) -> faiss.Index:
    """Map an index file into memory.

    Raises:
        XcompatError: the file is missing or damaged.
    """
    from xcompat.retrieval.faiss_probe import read_mapped

    if not path.is_file():
        raise XcompatError(f"the faiss index {path} does not exist")
    try:
        return read_mapped(str(path.resolve()))
    except RuntimeError as error:
        raise XcompatError(f"{path} is not a readable faiss index: {reason_of(error)}") from None


def write_faiss(index: faiss.Index, path: Path) -> None:
    """Write an index through a Python file, because faiss's own writer hides errors on closing.

    Raises:
        OSError: the file cannot be written, e.g. on a full disk.
    """
    with path.open("wb") as file:
        faiss.write_index(index, faiss.PyCallbackIOWriter(file.write, WRITTEN_AT_ONCE))


@cache
def _say_if_overwritten() -> None:
    """Print a notice about unused GPUs if faiss-cpu has overwritten faiss-gpu."""
    if find_spec("faiss._gpu_build") is not None and not hasattr(faiss, "StandardGpuResources"):
        notice(
            "faiss-cpu has overwritten files of faiss-gpu, so no GPU is used: "
            'run `pip uninstall -y faiss-cpu faiss-gpu && pip install -e ".[gpu]"` in a clone of xcompat'
        )


def reason_of(error: Exception) -> str:
    """Return faiss's message without its source location."""
    return " ".join(str(error).split(": ", 1)[-1].split())[:200]
