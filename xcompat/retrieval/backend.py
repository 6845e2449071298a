"""Where the vectors of segments are stored and searched: in faiss index files, or in a Milvus."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, get_args

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from xcompat.core.errors import XcompatError, nearest
from xcompat.retrieval.adopted_index import open_adopted
from xcompat.retrieval.faiss_building import EXACT, build_faiss, fewest_vectors, is_lossless, make_index
from xcompat.retrieval.faiss_index import open_faiss, write_faiss
from xcompat.retrieval.filtered_search import Found, ReadRows
from xcompat.retrieval.manifest import Manifest, Metric, SegmentRecord

INDEX_FILE = "index.faiss"


class VectorIndex(Protocol):
    """The vectors of one segment, numbered from 0."""

    @property
    def rows(self) -> int:
        """Number of vectors."""

    @property
    def dim(self) -> int:
        """Dimension of the vectors."""

    def search(self, queries_Qd: NDArray[np.float32], k: int, kept_N: NDArray[np.bool_] | None = None) -> Found:
        """Return (Q, k) scores, the best first, and (Q, k) rows, -1 where there are no more; only kept rows are found."""

    def vectors(self, rows_n: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return stored vectors (n, d)."""

    @property
    def is_exact(self) -> bool:
        """Whether every vector is compared, so that there is no parameter to set."""

    def set_parameters(self, parameters: str) -> None:
        """Set the search effort."""


class Backend(Protocol):
    """Builds, opens and drops the vector indexes of a gallery."""

    metric: Metric

    def build(self, name: str, folder: Path, blocks: Sequence[NDArray[np.float32]], rows: int, dim: int) -> str:
        """Store the vectors of a segment; return the name of the index that searches them."""

    def open(self, record: SegmentRecord, folder: Path, as_added: ReadRows | None) -> VectorIndex:
        """Open the vectors of a segment; ``as_added`` reads those that lie beside an index that does not keep them."""

    def fewest(self, dim: int) -> int:
        """Return the fewest vectors of which a segment has the gallery's index, and not an exact one."""

    def keeps(self, index: str) -> bool:
        """Return whether an index returns its vectors unchanged, so that no copy of them is needed."""

    def drop(self, name: str) -> None:
        """Delete vectors outside the folder of a segment that no generation names any more."""

    def damaged(self, record: SegmentRecord) -> list[str]:
        """Return one line if vectors outside the segment's files are missing."""


class FaissBackend(Backend):
    """Index files inside the gallery's folder, compared by ``metric``; ``factory`` is the faiss string of new ones."""

    def __init__(self, metric: Metric, factory: str) -> None:
        self.metric, self.factory = metric, factory

    @override
    def build(self, name: str, folder: Path, blocks: Sequence[NDArray[np.float32]], rows: int, dim: int) -> str:
        index, used = build_faiss(self.factory, dim, self.metric, blocks, rows)
        write_faiss(index.index, folder / INDEX_FILE)
        return used

    @override
    def open(self, record: SegmentRecord, folder: Path, as_added: ReadRows | None) -> VectorIndex:
        if record.adopted is not None:
            return open_adopted(record, self.metric, folder.parent.parent)
        return open_faiss(folder / INDEX_FILE, self.metric, as_added)

    @override
    def fewest(self, dim: int) -> int:
        return fewest_vectors(make_index(self.factory, dim, self.metric))

    @override
    def keeps(self, index: str) -> bool:
        return is_lossless(index)

    @override
    def drop(self, name: str) -> None:
        """Do nothing: the index file is deleted with its folder."""

    @override
    def damaged(self, record: SegmentRecord) -> list[str]:
        """Return nothing: the index is one of the segment's files."""
        return []


def check_place(metric: Metric, index: str, dim: int, milvus: str | None) -> str | None:
    """Check, before a gallery is made, that its vectors can be stored.

    Args:
        metric: how vectors are compared.
        index: faiss factory string.
        dim: d.
        milvus: URI of a Milvus; None for faiss.

    Returns:
        The URI as :func:`milvus_uri` returns it; None for faiss.

    Raises:
        XcompatError: there is no such metric, faiss knows no such index, the URI holds a password, or no Milvus answers.
    """
    if metric not in get_args(Metric):
        raise XcompatError(f"there is no metric {metric!r}; {nearest(metric, get_args(Metric))}")
    if milvus is None:
        make_index(index, dim, metric)
        return None
    if index != EXACT:
        raise XcompatError(f"{index} is an index of faiss, and Milvus chooses its own; leave index out")
    from xcompat.retrieval.milvus_index import connect

    uri = milvus_uri(milvus)
    connect(uri)
    return uri


def milvus_uri(place: str) -> str:
    """Return the URI of a Milvus as a gallery keeps it; a file's path becomes absolute: it opens from any working folder.

    Raises:
        XcompatError: it holds a user or a password, which everybody could read who reads the gallery.
    """
    if "://" not in place:
        return str(Path(place).resolve())
    if "@" in place:
        raise XcompatError(
            "a gallery keeps the URI of its Milvus, so no user or password may be in it; write http://host:19530, and put "
            "USER:PASSWORD or a token into the environment variable MILVUS_TOKEN"
        )
    return place


def open_backend(manifest: Manifest) -> Backend:
    """Return the backend that a manifest names."""
    if manifest.milvus is not None:
        from xcompat.retrieval.milvus_index import MilvusBackend

        return MilvusBackend(manifest.metric, manifest.milvus)
    return FaissBackend(manifest.metric, manifest.index)
