"""Compressed embeddings with faiss codecs, and an inverted file to read codes in place."""

from __future__ import annotations

import faiss
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xcompat.core.errors import XcompatError
from xcompat.vectors.codecs import CODECS

_LEARNED = {"SQ8": 2, "SQ4": 2, "SQfp16": 0}  # learned numbers per dimension: the start and the width of its range
_CENTROIDS = 256  # per byte of a product quantiser


class Codec:
    """Faiss codec for vectors; checkpoints store its parameters as a row of floats.

    Args:
        name: a name in :data:`CODECS`.
        dim: D; with 0 dimensions, codes and parameters are empty.

    Raises:
        XcompatError: the codec's number of bytes does not divide the dimension.
    """

    def __init__(self, name: str, dim: int) -> None:
        self.dim = dim
        if not dim:
            self.size = self.n_learned = 0
            return
        try:
            self.index = faiss.index_factory(dim, name, faiss.METRIC_INNER_PRODUCT)
        except RuntimeError:
            raise XcompatError(f"codec {name} does not fit embeddings of {dim} dimensions; use {CODECS} (a divisor)") from None
        if name.startswith("PQ"):
            self.index.do_polysemous_training = False  # takes minutes, for an unused kind of search
            self.index.pq.cp.min_points_per_centroid = 1  # the default of 39 causes a warning per byte
        self.size = int(self.index.sa_code_size())
        self.n_learned = dim * _LEARNED.get(name, _CENTROIDS)
        self.fewest = _CENTROIDS if name.startswith("PQ") else 1

    def train(self, embeds_ND: NDArray[np.float32]) -> Tensor:
        """Learn the parameters from embeddings (N, D) and return them as float32."""
        if not self.dim:
            return torch.empty(0)
        if len(embeds_ND) < self.fewest:
            raise XcompatError(f"a product quantiser needs at least {self.fewest} entries, not {len(embeds_ND)}; use SQ8")
        self.index.train(np.ascontiguousarray(embeds_ND))
        return torch.from_numpy(faiss.vector_to_array(learned_of(self.index)))

    def restore(self, learned_F: NDArray[np.float32]) -> Codec:
        """Set the learned parameters."""
        if self.dim:
            faiss.copy_array_to_vector(learned_F, learned_of(self.index))
            self.index.is_trained = True
        return self

    def encode(self, embeds_ND: NDArray[np.float32]) -> NDArray[np.uint8]:
        """Encode embeddings (N, D) as codes (N, :attr:`size`)."""
        return self.index.sa_encode(np.ascontiguousarray(embeds_ND)) if self.dim else np.empty((len(embeds_ND), 0), np.uint8)

    def decode(self, codes_NB: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Decode codes to embeddings (N, D)."""
        return self.index.sa_decode(codes_NB) if self.dim else np.empty((len(codes_NB), 0), np.float32)


def learned_of(index: faiss.Index) -> faiss.Float32Vector:
    """Return faiss's vector of learned codec parameters."""
    return index.sq.trained if hasattr(index, "sq") else index.pq.centroids


def open_lists(
    name: str, centroids_LD: NDArray[np.float32], learned_F: NDArray[np.float32], codes_KB: NDArray[np.uint8], sizes_L: list[int]
) -> faiss.IndexIVF:
    """Build an inverted file around existing codes, without training, encoding or copying.

    Args:
        name: codec for residuals (differences between embeddings and their list's centroid).
        centroids_LD: each list's centroid.
        learned_F: the codec's learned parameters.
        codes_KB: codes, list by list; the index reads them in place, so the caller must keep them alive.
        sizes_L: number of entries in each list, K in total.

    Returns:
        A faiss index with inner product; ids are the codes' rows.
    """
    assert codes_KB.flags.c_contiguous and sum(sizes_L) == len(codes_KB), "faiss would read invalid memory"
    count, dim = centroids_LD.shape
    index = faiss.index_factory(dim, f"IVF{count},{name}", faiss.METRIC_INNER_PRODUCT)
    assert index.code_size == codes_KB.shape[1]
    index.quantizer.add(np.ascontiguousarray(centroids_LD))
    faiss.copy_array_to_vector(learned_F, learned_of(index))
    index.is_trained, index.ntotal = True, len(codes_KB)
    lists, views = faiss.ArrayInvertedLists(count, 1), faiss.MaybeOwnedVectorUInt8Vector()
    start = 0
    for number, size in enumerate(sizes_L):
        lists.resize(number, size)  # ids and one placeholder byte each, replaced by the swap() below
        view = faiss.MaybeOwnedVectorUInt8()
        if size:
            faiss.rev_swig_ptr(lists.get_ids(number), size)[:] = np.arange(start, start + size)
            view.view_data = view.c_ptr = faiss.swig_ptr(codes_KB[start : start + size])
            view.view_size = view.c_size = size * index.code_size
            view.is_owned = False
        views.push_back(view)
        start += size
    lists.codes.swap(views)
    lists.code_size = index.code_size
    index.replace_invlists(lists, True)
    lists.this.disown()
    return index
