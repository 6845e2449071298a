"""Vector storage and search: faiss index files or Milvus."""

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
    """Vectors in a segment, numbered from 0."""

    @property
    def rows(self) -> int:
        """Number of vectors."""

    @property
    def dim(self) -> int:
        """Vector dimension."""

    def search(self, queries_Qd: NDArray[np.float32], k: int, kept_N: NDArray[np.bool_] | None = None) -> Found:
        """Return (Q, k) scores, best first, and (Q, k) kept rows padded with -1."""

    def vectors(self, rows_n: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return stored vectors (n, d)."""

    @property
    def is_exact(self) -> bool:
        """Whether every vector is compared, without a search effort."""

    def set_parameters(self, parameters: str) -> None:
        """Set the search effort."""


class Backend(Protocol):
    """Factory for a gallery's vector indexes."""

    metric: Metric

    def build(self, name: str, folder: Path, blocks: Sequence[NDArray[np.float32]], rows: int, dim: int) -> str:
        """Store a segment's vectors; return the name of the index type."""

    def open(self, record: SegmentRecord, folder: Path, as_added: ReadRows | None) -> VectorIndex:
        """Open a segment's vectors; ``as_added`` reads vectors not stored in the index."""

    def fewest(self, dim: int) -> int:
        """Return the minimum number of vectors for the gallery's index type."""

    def keeps(self, index: str) -> bool:
        """Return whether an index returns its vectors unchanged."""

    def drop(self, name: str) -> None:
        """Delete an unused segment's vectors outside its folder."""

    def find_damage(self, record: SegmentRecord) -> list[str]:
        """Return a line if vectors outside the segment's files are missing."""


class FaissBackend(Backend):
    """Index files in the gallery folder; ``factory`` is the faiss string for new files."""

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
    def find_damage(self, record: SegmentRecord) -> list[str]:
        """Return nothing: the segment's files include the index."""
        return []


def check_place(metric: Metric, index: str, dim: int, milvus: str | None) -> str | None:
    """Check that vectors can be stored.

    Args:
        metric: how vectors are compared.
        index: faiss factory string.
        dim: d.
        milvus: Milvus URI; None to use faiss.

    Returns:
        The URI from :func:`milvus_uri`; None for faiss.

    Raises:
        XcompatError: unknown metric or index, a password in the URI, or no answer from Milvus.
    """
    if metric not in get_args(Metric):
        raise XcompatError(f"unknown metric {metric!r}; {nearest(metric, get_args(Metric))}")
    if milvus is None:
        make_index(index, dim, metric)
        return None
    if index != EXACT:
        raise XcompatError(f"{index} is a kind of faiss index, but Milvus chooses the index itself; remove index")
    from xcompat.retrieval.milvus_index import connect

    uri = milvus_uri(milvus)
    connect(uri)
    return uri


def milvus_uri(place: str) -> str:
    """Return a Milvus URI for the manifest, with absolute file paths.

    Raises:
        XcompatError: it contains a user or password, visible to every reader.
    """
    if "://" not in place:
        return str(Path(place).resolve())
    if "@" in place:
        raise XcompatError(
            "the Milvus URI is stored, so it must not contain a user or password; use http://host:19530, and put "
            "USER:PASSWORD or a token into the environment variable MILVUS_TOKEN"
        )
    return place


def open_backend(manifest: Manifest) -> Backend:
    """Return a manifest's backend."""
    if manifest.milvus is not None:
        from xcompat.retrieval.milvus_index import MilvusBackend

        return MilvusBackend(manifest.metric, manifest.milvus)
    return FaissBackend(manifest.metric, manifest.index)
