"""Vectors in inverted files that faiss cannot look up by row."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from xcompat.core.lazy import faiss
from xcompat.retrieval.own_ids import RowLabels, list_ids

OFFSET_BITS = 32
"""A place packs list number and offset in one integer, as in faiss."""


def packs_codes(ivf: faiss.IndexIVF) -> bool:
    """Return whether an inverted file has fast-scan codes, which crash faiss's `reconstruct`."""
    return isinstance(faiss.downcast_index(ivf), faiss.IndexIVFPQFastScan | faiss.IndexIVFAdditiveQuantizerFastScan)


def find_places(ivf: faiss.IndexIVF, labels: RowLabels) -> NDArray[np.int64]:
    """Return each row's place in an inverted file."""
    places_N = np.full(len(labels.labels_N), -1, np.int64)
    for number in range(ivf.nlist):
        rows_n = labels.find_rows(list_ids(ivf, number))
        known_n = rows_n >= 0
        places_N[rows_n[known_n]] = (number << OFFSET_BITS) | np.flatnonzero(known_n)
    return places_N


def use_places(ivf: faiss.IndexIVF, places_N: NDArray[np.int64]) -> None:
    """Make an inverted file look up vectors by row instead of by id."""
    faiss.copy_array_to_vector(places_N, ivf.direct_map.array)
    ivf.direct_map.type = faiss.DirectMap.Array


def read_packed(ivf: faiss.IndexIVF, places_n: NDArray[np.int64]) -> NDArray[np.float32]:
    """Decode vectors (n, d) from an inverted file with fast-scan codes."""
    packer = ivf.get_CodePacker()
    lists_n, offsets_n = places_n >> OFFSET_BITS, places_n & ((1 << OFFSET_BITS) - 1)
    blocks_2B, which_n = np.unique(np.stack([lists_n, offsets_n // packer.nvec]), axis=1, return_inverse=True)
    unpacked = np.empty((blocks_2B.shape[1], packer.nvec, packer.code_size), np.uint8)
    for place, (number, block) in enumerate(blocks_2B.T.tolist()):
        size = -(-ivf.invlists.list_size(number) // packer.nvec) * packer.block_size
        codes = faiss.rev_swig_ptr(ivf.invlists.get_codes(number), size)
        packer.unpack_all(faiss.swig_ptr(codes[block * packer.block_size :]), faiss.swig_ptr(unpacked[place]))
    quantiser = ivf.pq if isinstance(ivf, faiss.IndexIVFPQFastScan) else ivf.aq
    codes_nc = np.ascontiguousarray(unpacked[which_n.ravel(), offsets_n % packer.nvec, : quantiser.code_size])
    vectors_nd = quantiser.decode(codes_nc)
    return vectors_nd + ivf.quantizer.reconstruct_batch(lists_n) if ivf.by_residual else vectors_nd
