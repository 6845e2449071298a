"""Adopt a faiss index that is in use already."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from xcompat.checksums import file_record
from xcompat.errors import XcompatError
from xcompat.files import atomic_path
from xcompat.retrieval.faiss_index import FaissIndex, open_faiss
from xcompat.retrieval.leftovers import making, require_empty
from xcompat.retrieval.manifest import SEGMENTS, Manifest, Metric, SegmentRecord, write_manifest
from xcompat.retrieval.segment import Items, as_json, check_ids, write_rows
from xcompat.retrieval.versions import stored_version

if TYPE_CHECKING:
    from xcompat.retrieval.versions import Model

LOOKED_AT = 256
"""Vectors whose length says whether inner products are cosines."""


def adopt_faiss(
    folder: Path,
    index_file: Path,
    ids: Sequence[str],
    model_or_fingerprint: Model,
    metadata: Sequence[dict[str, Any] | None] | None,
) -> Manifest:
    """Make a gallery around an index file (see :meth:`xcompat.retrieval.gallery.Gallery.from_faiss`)."""
    require_empty(folder)
    if not index_file.is_file():
        raise XcompatError(f"the faiss index {index_file} does not exist; name its file")
    index, metric = _open(index_file.resolve())
    ids = list(ids)
    if len(ids) != index.rows:
        raise XcompatError(f"{index_file} holds {index.rows} vectors, and there are {len(ids)} ids; give one for each, in order")
    check_ids(ids)
    version = stored_version(model_or_fingerprint, index.dim)
    if version.dim != index.dim:
        raise XcompatError(f"{version.fingerprint} makes embeddings of {version.dim} dimensions, {index_file} holds {index.dim}")
    with making(folder):
        name = secrets.token_hex(8)
        with atomic_path(folder / SEGMENTS / name) as temporary:
            temporary.mkdir()
            write_rows(temporary, Items(ids=ids, metadata=as_json(ids, metadata)))
            files = {path.name: file_record(path) for path in sorted(temporary.iterdir())}
        segment = SegmentRecord(
            name=name,
            version=version.digest,
            rows=index.rows,
            index=type(index.index).__name__,
            files=files,
            adopted=str(index_file.resolve()),
            adopted_file=file_record(index_file),
        )
        return write_manifest(folder, Manifest(metric=metric, versions=(version,), segments=(segment,), by="adopt"))


def _open(path: Path) -> tuple[FaissIndex, Metric]:
    """Open an index by its own metric; inner products of vectors of length 1 are cosines."""
    try:
        index = open_faiss(path, "ip")
    except XcompatError as error:
        if "compares by L2" not in str(error):
            raise
        return open_faiss(path, "l2"), "l2"
    if not index.rows:
        raise XcompatError(f"{path} holds no vectors; there is nothing to adopt")
    first = index.vectors(np.arange(min(LOOKED_AT, index.rows)))
    unit = np.abs(np.linalg.norm(first, axis=1) - 1).max() < 0.05  # quantised ones are nearly so
    return index, "cosine" if unit else "ip"
