"""Old embeddings in faiss indexes and galleries."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xcompat.core.arrays import read_lines
from xcompat.core.errors import XcompatError
from xcompat.vectors import Columns, Vectors
from xcompat.vectors.formats import SUFFIXES
from xcompat.vectors.spool import BLOCK, Spool

if TYPE_CHECKING:
    from xcompat.retrieval.faiss_index import FaissIndex

_MAGIC = b"I"
"""First byte of a faiss index of float vectors: IxFI, IwFl, IHNf and others."""


class Reading(NamedTuple):
    """How stored embeddings are read.

    Args:
        ids: file with a row id per line; None to use the ids in the file.
        columns: column names.
    """

    ids: Path | None = None
    columns: Columns = Columns()


READ_AS_IT_IS = Reading()
"""Ids and columns are found by their names."""


def is_gallery(path: Path) -> bool:
    """Return whether a path is a gallery's folder."""
    from xcompat.retrieval.manifest import CURRENT

    return path.is_dir() and (path / CURRENT).is_file()


def is_index(path: Path) -> bool:
    """Return whether a path is a faiss index, by its name and first byte."""
    if path.name.endswith(SUFFIXES) or not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(1) == _MAGIC


def read_index(path: Path, ids: Path | None) -> Vectors:
    """Reconstruct a faiss index's vectors.

    Args:
        path: any index from which faiss can reconstruct vectors.
        ids: file with an id per line, in index order; None to use the index's own ids, if any.

    Raises:
        XcompatError: faiss cannot read the index or reconstruct its vectors, or the ids do not match.
    """
    from xcompat.retrieval.adoption import wrap_index
    from xcompat.retrieval.faiss_index import map_faiss
    from xcompat.retrieval.own_ids import match_names, read_own_ids
    from xcompat.retrieval.probing import require_readable

    require_readable(path)
    raw = map_faiss(path)
    own = read_own_ids(raw, path)
    index = wrap_index(raw, own.labels_N, path)
    rows_ND = _spool(index)
    if ids is None and own.names_N is None:
        return Vectors(rows_ND)
    names = read_lines(ids) if ids is not None else None
    return Vectors(rows_ND, match_names(names, own, index.rows, path))


def read_vectors_of_index(index: Any) -> NDArray[np.float32]:  # noqa: ANN401 - faiss has no types
    """Reconstruct a faiss index's vectors in memory, in the order of its ids or rows.

    Raises:
        XcompatError: the index is empty.
    """
    from xcompat.retrieval.adoption import wrap_index
    from xcompat.retrieval.own_ids import read_own_ids

    name = Path(type(index).__name__)  # for messages
    return _spool(wrap_index(index, read_own_ids(index, name).labels_N, name))


def _spool(index: FaissIndex) -> NDArray[np.float32]:
    spool = Spool(np.float32)
    for start in range(0, index.rows, BLOCK):
        spool.add(index.vectors(np.arange(start, min(start + BLOCK, index.rows))))
    return spool.map_rows()


def read_gallery(path: Path) -> Vectors:
    """Read the items of a gallery's oldest version.

    Raises:
        XcompatError: the gallery is empty or damaged.
    """
    from xcompat.retrieval import Gallery

    with Gallery.open(path) as gallery, gallery.reading():
        segments = [(segment, rows_n) for segment in gallery.segments if len(rows_n := segment.present())]
        if not segments:
            raise XcompatError(f"{path} is empty: add items first")
        oldest = segments[0][0].record.version
        spool, ids = Spool(np.float32), list[str]()
        for segment, rows_n in segments:
            if segment.record.version != oldest:
                continue
            ids += segment.ids(rows_n)
            for start in range(0, len(rows_n), BLOCK):
                spool.add(segment.vectors(rows_n[start : start + BLOCK]))
    return Vectors(spool.map_rows(), ids)


def describe_gallery_model(path: Path) -> dict[str, Any]:
    """Describe the model of a gallery's oldest version, for a map's configuration."""
    from xcompat.models.config import describe_old
    from xcompat.retrieval import Gallery

    with Gallery.open(path) as gallery:
        version = gallery.manifest.versions[0]
    return describe_old(version.fingerprint, version.dim)
