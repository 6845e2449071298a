"""Check of a faiss index file, run as a script by path to import only faiss."""

from __future__ import annotations

import sys
from contextlib import suppress

import faiss
import numpy as np

SAMPLED, QUERIES = 10_000, 4
FOUND = 3
"""Exit code of the script for an unusable index."""


def read_mapped(path: str) -> faiss.Index:
    """Map an index into memory. A separate file with its lists may have moved with it.

    Args:
        path: the file, absolute.

    Raises:
        RuntimeError: faiss cannot read it.
    """
    beside = faiss.IO_FLAG_READ_ONLY | faiss.IO_FLAG_ONDISK_SAME_DIR
    try:
        return faiss.read_index(path, beside | faiss.IO_FLAG_MMAP_IFC)
    except RuntimeError as error:
        if "IO_FLAG_ONDISK_SAME_DIR" not in str(error):
            raise
    try:  # the lists are in another file, which faiss maps itself
        return faiss.read_index(path, beside)
    except RuntimeError:
        with suppress(RuntimeError):
            return faiss.read_index(path, faiss.IO_FLAG_READ_ONLY)
        raise


def check_index(path: str, vectors: bool) -> str:
    """Read an index, check its parts for consistency, and search it.

    Args:
        path: the file.
        vectors: whether to reconstruct vectors too.

    Returns:
        The problem found; empty if none.
    """
    try:
        index = read_mapped(path)
    except (RuntimeError, MemoryError) as error:
        return _short_message(error)
    wrong = _contradiction(index)
    if wrong or not index.ntotal:
        return wrong
    inner = _inner(index)
    if not inner.is_trained:
        return "it is not trained"
    queries_Qd = np.random.default_rng(0).normal(size=(QUERIES, index.d)).astype(np.float32)
    try:
        if (ivf := faiss.try_extract_index_ivf(inner)) is not None:
            ivf.nprobe = ivf.nlist
        inner.search(queries_Qd, min(10, inner.ntotal))
    except (RuntimeError, MemoryError) as error:
        return _short_message(error)
    return _take_out(inner) if vectors else ""


def _take_out(index: faiss.Index) -> str:
    """Reconstruct some vectors; return the problem, if any."""
    ivf = faiss.try_extract_index_ivf(index)
    if ivf is not None and isinstance(faiss.downcast_index(ivf), faiss.IndexIVFFlatDedup):
        return ""  # it returns no vectors; callers report that
    packed = ivf is not None and isinstance(
        faiss.downcast_index(ivf), faiss.IndexIVFPQFastScan | faiss.IndexIVFAdditiveQuantizerFastScan
    )
    if packed and not isinstance(index, faiss.IndexRefine):
        return ""  # faiss would crash here; xcompat decodes these codes itself
    rows_n = np.unique(np.linspace(0, index.ntotal - 1, SAMPLED).astype(np.int64))
    with suppress(RuntimeError):  # some indexes cannot reconstruct; callers report that
        if ivf is not None:
            try:
                ivf.make_direct_map()
            except RuntimeError:  # it stores ids
                return _take_out_of_lists(ivf)
        index.reconstruct_batch(rows_n)
    return ""


def _take_out_of_lists(ivf: faiss.IndexIVF) -> str:
    """Reconstruct each list's first and last vector."""
    vector_d = np.empty(ivf.d, np.float32)
    with suppress(RuntimeError):
        for number in range(ivf.nlist):
            size = ivf.invlists.list_size(number)
            for offset in {0, size - 1} if size else ():
                ivf.reconstruct_from_offset(number, offset, faiss.swig_ptr(vector_d))
    return ""


def _short_message(error: Exception) -> str:
    return " ".join(str(error).split(": ", 1)[-1].split())[:200]


def _inner(index: faiss.Index) -> faiss.Index:
    index = faiss.downcast_index(index)
    return faiss.downcast_index(index.index) if isinstance(index, faiss.IndexIDMap | faiss.IndexIDMap2) else index


def _contradiction(index: faiss.Index) -> str:
    """Return inconsistent parts, including nested indexes."""
    index = faiss.downcast_index(index)
    if index.metric_type not in (faiss.METRIC_INNER_PRODUCT, faiss.METRIC_L2):
        return f"it uses faiss metric {index.metric_type}, but only inner product and L2 are supported"
    if index.d < 1 or index.ntotal < 0:
        return f"it claims {index.ntotal} vectors of {index.d} dimensions"
    for kind, look_into in _PARTS.items():
        if isinstance(index, getattr(faiss, kind)) and (wrong := look_into(index)):
            return wrong
    return ""


def _check_inner_index(index: faiss.Index) -> str:
    inner = index.index
    if inner.ntotal != index.ntotal:
        return f"it claims {index.ntotal} vectors, but its inner index has {inner.ntotal}"
    return _contradiction(inner)


def _ids(index: faiss.Index) -> str:
    if index.id_map.size() != index.ntotal:
        return f"it has {index.id_map.size()} ids, but {index.ntotal} vectors"
    if index.index.d != index.d:
        return f"it claims {index.d} dimensions, but its inner index has {index.index.d}"
    return _check_inner_index(index)


def _transforms(index: faiss.Index) -> str:
    dim = index.d
    for place in range(index.chain.size()):
        step = index.chain.at(place)
        if step.d_in != dim:
            return f"transform {place} takes {step.d_in} dimensions, but gets {dim}"
        dim = step.d_out
    if dim != index.index.d:
        return f"its transforms output {dim} dimensions, but its inner index has {index.index.d}"
    return _check_inner_index(index)


def _graph(index: faiss.Index) -> str:
    if index.storage is None or index.storage.ntotal != index.ntotal or not _is_graph(index.hnsw, index.ntotal):
        return "the links of its graph do not match its vectors"
    return _contradiction(index.storage)


def _is_graph(hnsw: faiss.HNSW, rows: int) -> bool:
    """Return whether levels, offsets and links are consistent."""
    levels_N, offsets = faiss.vector_to_array(hnsw.levels), faiss.vector_to_array(hnsw.offsets).astype(np.int64)
    links, steps = faiss.vector_to_array(hnsw.neighbors), faiss.vector_to_array(hnsw.cum_nneighbor_per_level)
    if not rows:
        return not len(levels_N)
    if len(levels_N) != rows or len(offsets) != rows + 1 or not -1 < hnsw.entry_point < rows:
        return False
    if levels_N.min() < 1 or levels_N.max() >= len(steps) or hnsw.max_level != levels_N[hnsw.entry_point] - 1:
        return False
    fits = offsets[0] == 0 and offsets[-1] == len(links) and np.array_equal(np.diff(offsets), steps[levels_N])
    return bool(fits and links.min(initial=-1) >= -1 and links.max(initial=-1) < rows)


def _lists(index: faiss.Index) -> str:
    lists, rows = index.invlists, index.ntotal
    if index.quantizer is None or index.quantizer.ntotal != index.nlist or lists is None or lists.nlist != index.nlist:
        return "its numbers of lists and centroids differ"
    packed = isinstance(index, faiss.IndexIVFFastScan)
    if index.quantizer.d != index.d or (lists.code_size != index.code_size and not packed):
        return "the dimension of its lists differs"
    held = sum(lists.list_size(number) for number in range(lists.nlist))
    stores_once = isinstance(index, faiss.IndexIVFFlatDedup)
    if held > rows or (held < rows and not stores_once):
        return f"its lists hold {held} of {rows} vectors"
    return _contradiction(index.quantizer)


def _codes(index: faiss.Index) -> str:
    wanted = index.ntotal * index.code_size
    held = index.codes.size()
    return f"it holds {held} bytes, but {index.ntotal} vectors take {wanted}" if held != wanted else ""


_PARTS = {
    "IndexIDMap": _ids,
    "IndexIDMap2": _ids,
    "IndexPreTransform": _transforms,
    "IndexHNSW": _graph,
    "IndexIVF": _lists,
    "IndexFlatCodes": _codes,
}

if __name__ == "__main__":
    if found := check_index(sys.argv[1], vectors=len(sys.argv) > 2):
        sys.stderr.write(f"{found}\n")
        sys.exit(FOUND)
