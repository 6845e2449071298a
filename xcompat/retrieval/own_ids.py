"""Ids stored inside a faiss index, and their gallery rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from xcompat.core.errors import XcompatError
from xcompat.core.lazy import faiss
from xcompat.data.ids import match_file_names

LABELS_FILE = "labels.npy"
"""Ids of an adopted index for its rows, if not 0, 1, 2 and so on."""
BITS_PER_ID = 64
"""Largest number of bits per id for a bitmap; above it, a hash table is smaller."""


class RowLabels:
    """Translation between rows and ids stored in a faiss index.

    Args:
        labels_N: (N,) int64, each row's id.

    Example:
        >>> labels = RowLabels(np.array([70, 10, 40]))
        >>> labels.find_rows(np.array([[10, 70], [-1, 11]])).tolist()
        [[1, 0], [-1, -1]]
    """

    def __init__(self, labels_N: NDArray[np.int64]) -> None:
        self.labels_N = np.asarray(labels_N, np.int64)
        self._order_N = np.argsort(self.labels_N, kind="stable")
        self._sorted_N = self.labels_N[self._order_N]

    def find_rows(self, labels: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return each id's row, for any shape; -1 for unknown ids."""
        places = np.minimum(np.searchsorted(self._sorted_N, labels), len(self._sorted_N) - 1)
        return np.where(self._sorted_N[places] == labels, self._order_N[places], -1)

    def select(self, kept_N: NDArray[np.bool_]) -> faiss.IDSelector:
        """Return a faiss selector for the kept rows."""
        labels_n = self.labels_N[: len(kept_N)][kept_N]
        if len(labels_n) and labels_n.min() >= 0 and labels_n.max() < BITS_PER_ID * len(labels_n):
            bits = np.zeros(int(labels_n.max()) + 1, bool)
            bits[labels_n] = True
            return select_bits(bits)
        return faiss.IDSelectorBatch(labels_n)


def select_bits(bits: NDArray[np.bool_]) -> faiss.IDSelector:
    """Return a faiss selector for the ids whose bit is set."""
    packed = np.packbits(bits, bitorder="little")
    selector = faiss.IDSelectorBitmap(len(packed), faiss.swig_ptr(packed))
    selector.packed = packed  # keep a reference: faiss stores only a pointer
    return selector


class OwnIds(NamedTuple):
    """Ids inside an index; None for 0, 1, 2 and so on.

    Args:
        names_N: (N,) ids returned by a search.
        labels_N: (N,) the same rows' ids without the id map.
        has_map: whether an id map holds the names, in the order of addition.
        is_ordered: whether ascending ids are certainly the order of addition.
    """

    names_N: NDArray[np.int64] | None = None
    labels_N: NDArray[np.int64] | None = None
    has_map: bool = False
    is_ordered: bool = True


def strip_id_map(index: faiss.Index) -> faiss.Index:
    """Return an index without its id map; the caller keeps a reference to the original."""
    index = faiss.downcast_index(index)
    if isinstance(index, faiss.IndexIDMap | faiss.IndexIDMap2):
        return strip_id_map(index.index)
    if not isinstance(index, faiss.IndexPreTransform) or _id_map(index) is None:
        return index
    stripped = faiss.IndexPreTransform(strip_id_map(index.index))
    for place in reversed(range(index.chain.size())):
        stripped.prepend_transform(index.chain.at(place))
    return stripped


def read_own_ids(index: faiss.Index, path: Path) -> OwnIds:
    """Read the ids inside an index.

    Args:
        index: faiss index, including id maps.
        path: its file, for messages.

    Raises:
        XcompatError: an inverted file repeats an id or contains -1, or the index stores equal vectors only once.
    """
    names_N, ivf = _id_map(index), faiss.try_extract_index_ivf(strip_id_map(index))
    if ivf is None:
        return OwnIds(names_N, has_map=names_N is not None)
    if isinstance(faiss.downcast_index(ivf), faiss.IndexIVFFlatDedup):
        raise XcompatError(
            f"{path} stores equal vectors once (IndexIVFFlatDedup), and faiss returns no vectors of such an index; build an "
            f"index with all vectors, e.g. with the factory string 'IVF{ivf.nlist},Flat'"
        )
    listed_N, descents = _listed_ids(ivf)
    labels_N = np.sort(listed_N)
    if np.array_equal(labels_N, np.arange(len(labels_N))):
        return OwnIds(names_N, has_map=names_N is not None)
    twice = labels_N[1:][labels_N[1:] == labels_N[:-1]]
    if len(twice):
        raise XcompatError(
            f"{path} gives {len(np.unique(twice))} ids to more than one vector, e.g. {twice[0]}; build the index with unique ids"
        )
    if -1 in labels_N:
        raise XcompatError(f'{path} gives a vector the id -1 ("nothing found" in faiss); use another id')
    if isinstance(strip_id_map(index), faiss.IndexRefine):
        raise XcompatError(
            f"{path} refines by vectors with other ids than in its lists, because vectors were removed; build the index again"
        )
    removed = labels_N[-1] + 1 - len(labels_N)  # if ids were 0, 1, 2 ... before removals
    is_numbered = bool(labels_N[0] >= 0) and descents <= removed <= len(labels_N) and 3 * descents <= len(labels_N)
    return OwnIds(labels_N if names_N is None else names_N, labels_N, names_N is not None, descents == 0 or is_numbered)


def match_names(ids: Sequence[str] | None, own: OwnIds, rows: int, path: Path) -> list[str]:
    """Return each row's id: the given id, or the id in the index.

    If given ids equal the index's own, each goes to its vector. Others are read in index order, or, for an inverted file with its
    own ids, id N is line N (from 0).

    Args:
        ids: given ids; None to use the index's own.
        own: ids inside the index.
        rows: number of its vectors.
        path: its file, for messages.

    Raises:
        XcompatError: ids are missing, or cannot be matched to vectors.
    """
    if own.names_N is None:
        if ids is None:
            raise XcompatError(f"{path} holds no ids; use --ids with a text file with an id per line")
        return require_count(ids, rows, path)
    own_names = [str(name) for name in own.names_N.tolist()]
    if ids is None or (len(ids) >= rows and set(own_names) <= set(ids)):
        if len(set(own_names)) < rows:
            raise XcompatError(f"{path} gives several vectors the same id; use --ids with a text file with an id per line")
        return own_names
    labels_N = own.labels_N
    if labels_N is None or own.has_map:
        return require_count(ids, rows, path)
    if labels_N.min() >= 0 and labels_N.max() < len(ids):
        return [ids[label] for label in labels_N.tolist()]
    names = require_count(ids, rows, path)
    if not own.is_ordered:
        raise XcompatError(
            f"{path} has its own ids ({own_names[0]} to {own_names[-1]}), and the lines of --ids cannot be matched to them; "
            "remove --ids to use the index's ids"
        )
    return names


def name_rows(
    ids: Sequence[str] | None, own: OwnIds, rows: int, path: Path, known: Sequence[str], numbers_rows: bool
) -> list[str]:
    """Return each row's id as :func:`match_names` does, with the originals' ids if known.

    Args:
        ids: see :func:`match_names`.
        own: see :func:`match_names`.
        rows: see :func:`match_names`.
        path: see :func:`match_names`.
        known: the originals' ids. Ids are matched to image paths by file names; without ids, rows are in this order.
        numbers_rows: whether to use row numbers as ids if there are no others.

    Raises:
        XcompatError: see :func:`match_names`; or there are no ids, and the number of originals differs.
    """
    if ids is not None or own.names_N is not None:
        names = match_names(ids, own, rows, path)
        return (match_file_names(names, known) if known else None) or names
    if known:
        if len(known) != rows:
            raise XcompatError(
                f"{path} holds {rows:,} vectors without ids, but there are {len(known):,} images or texts; use --ids with a "
                "text file with an id per line"
            )
        return list(known)
    return list(map(str, range(rows))) if numbers_rows else match_names(None, own, rows, path)


def require_count(ids: Sequence[str], rows: int, path: Path) -> list[str]:
    """Return an index's ids, or raise unless there is an id per vector."""
    if len(ids) != rows:
        raise XcompatError(f"{path} holds {rows:,} vectors, but there are {len(ids):,} ids; list an id per vector, in order")
    return list(ids)


def _id_map(index: faiss.Index) -> NDArray[np.int64] | None:
    """Return the ids in an id map around an index or below its transforms."""
    index = faiss.downcast_index(index)
    if isinstance(index, faiss.IndexIDMap | faiss.IndexIDMap2):
        return np.asarray(faiss.vector_to_array(index.id_map), np.int64)
    return _id_map(index.index) if isinstance(index, faiss.IndexPreTransform) else None


def list_ids(ivf: faiss.IndexIVF, number: int) -> NDArray[np.int64]:
    """Copy the ids in an inverted list."""
    size = ivf.invlists.list_size(number)
    return faiss.rev_swig_ptr(ivf.invlists.get_ids(number), size).copy() if size else np.empty(0, np.int64)


def _listed_ids(ivf: faiss.IndexIVF) -> tuple[NDArray[np.int64], int]:
    """Return the ids in all lists, and how often an id is smaller than its predecessor."""
    lists = [list_ids(ivf, number) for number in range(ivf.nlist)]
    return np.concatenate(lists), sum(int((ids[1:] < ids[:-1]).sum()) for ids in lists if len(ids))
