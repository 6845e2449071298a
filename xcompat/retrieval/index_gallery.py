"""Galleries of bare faiss indexes, cached and rebuilt after the index has changed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from filelock import FileLock

from xcompat.core.errors import XcompatError
from xcompat.core.fingerprint import Fingerprint
from xcompat.core.ownership import read_marker
from xcompat.core.progress import notice
from xcompat.models.base import CompatModel
from xcompat.retrieval.adopted_index import open_adopted, read_head
from xcompat.retrieval.adoption import adopt_faiss, require_index
from xcompat.retrieval.commands import read_ids
from xcompat.retrieval.faiss_index import map_faiss
from xcompat.retrieval.gallery import Gallery
from xcompat.retrieval.manifest import CURRENT
from xcompat.retrieval.own_ids import name_rows, read_own_ids
from xcompat.retrieval.probing import require_readable
from xcompat.retrieval.versions import identity

if TYPE_CHECKING:
    from xcompat.models.embedder import Embedder
    from xcompat.retrieval.originals import Originals
    from xcompat.retrieval.versions import Model

IDS_BESIDE = ("{}.ids.txt", "{}_ids.txt", "ids.txt")
"""Names of a file with the ids of an index, beside it; {} is the name of the index without suffix."""


def open_index(
    index: Path,
    model: Model,
    ids: Path | None = None,
    old: Embedder | None = None,
    originals: Originals | None = None,
) -> Gallery:
    """Open a faiss index as a gallery. The index stays as it is.

    The user's cache folder stores ids and metadata, for use until the index, its ids or the model change.

    Args:
        index: the index file.
        model: the query model: a map for this index, or the model that made the vectors.
        ids: file with an id per line; None to use a file in :data:`IDS_BESIDE`, or else the ids in the index.
        old: the model that made the vectors; None to use the map's old model.
        originals: the vectors' images or texts, see :func:`~xcompat.retrieval.own_ids.name_rows`.

    Raises:
        XcompatError: the index cannot be adopted, or the map belongs to another dimension.
    """
    require_index(index)
    maker, alias = _model_of_vectors(index, model, old)
    if ids is None and (ids := find_ids(index)) is not None:
        notice(f"the ids of {index} come from {ids}")
    names = read_ids(ids) if ids is not None else None
    folder = _folder(index, names, (identity(maker), alias), originals)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f"{folder.name}.lock")):
        if not _is_current(folder):
            shutil.rmtree(folder, ignore_errors=True)
            if ids is None and originals is None:
                notice(f"hits are named by the ids or row numbers in {index}; set file names or other ids with --ids")
            if old is None and not _is_recorded(index, maker):
                notice(f"{index} does not record its model; its vectors are read as those of {identity(maker)}")
            describe = partial(_metadata_of, originals) if originals is not None else None
            adopt_faiss(folder, index, names, maker, describe, originals.ids if originals is not None else (), numbers_rows=True)
    gallery = Gallery.open(folder)
    if alias is not None and alias.digest not in gallery.manifest.versions[0].shares:
        gallery.add_alias(alias)
    if originals is not None and all(version is None for version in gallery.find(originals.ids)):
        notice(f"no id of {index} is one of the {originals.kind}, whose first id is {originals.ids[0]!r}; set --ids")
    return gallery


def require_ids(index: Path, ids: Path | None = None, originals: Originals | None = None) -> None:
    """Raise if the index, its ids and the originals do not fit together, before a model is loaded.

    Use the arguments of :func:`open_index`.
    """
    require_index(index)
    require_readable(index)
    raw = map_faiss(index)
    own = read_own_ids(raw, index)
    named = ids or find_ids(index)
    known = originals.ids if originals is not None else ()
    name_rows(read_ids(named) if named is not None else None, own, raw.ntotal, index, known, numbers_rows=True)


def find_ids(index: Path) -> Path | None:
    """Return the ids file beside an index, or None."""
    names = (name.format(index.stem) for name in IDS_BESIDE)
    return next((file for name in names if (file := index.with_name(name)).is_file()), None)


def _model_of_vectors(index: Path, model: Model, old: Embedder | None) -> tuple[Model, Fingerprint | None]:
    """Return the model that made the vectors, and the map's name for it if the map knows only a name."""
    if not isinstance(model, CompatModel):
        head = read_head(index)
        if old is None and not isinstance(model, Fingerprint) and head is not None and head[0] != model.dim:
            raise XcompatError(
                f"{index} has {head[0]} dimensions, but {identity(model)} makes {model.dim}; to search it with a new model, fit "
                "a map with `xcompat map`"
            )
        return (model if old is None else old), None
    if model.maps_galleries:
        raise XcompatError(
            f"{identity(model)} maps stored vectors and not queries; adopt {index} with `xcompat gallery adopt`, and map "
            "it with `xcompat gallery upgrade`"
        )
    if not model.compatible_with:
        return (model if old is None else old), None
    searched, dim = model.config.versions[0]
    head = read_head(index)
    if head is not None and head[0] != dim:
        raise XcompatError(
            f"{index} has {head[0]} dimensions, but {identity(model)} searches the {dim} of {searched}; use the index that the "
            "map was fitted for"
        )
    if old is None:
        return searched, None
    return old, searched if searched.is_name_only else None


def _is_recorded(index: Path, maker: Model) -> bool:
    """Return whether an export recorded the model of its vectors beside the index."""
    marker, digest = read_marker(index), str(identity(maker)).rpartition("@")[2]
    return marker is not None and marker.about.get("vectors", "").rpartition("@")[2] == digest  # names differ between folders


def _folder(index: Path, names: list[str] | None, models: Iterable[Fingerprint | None], originals: Originals | None) -> Path:
    """Return the cache folder for an index with these ids, models and originals."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    known = originals.ids if originals is not None else None
    content = [str(index.resolve()), names, known, *(model.digest for model in models if model is not None)]
    digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    return cache / "xcompat" / "indexes" / f"{index.stem}-{digest[:16]}"


def _metadata_of(originals: Originals, ids: Sequence[str]) -> list[dict[str, object] | None]:
    """Return each item's metadata, None for items without an original."""
    rows = {name: row for row, name in enumerate(originals.ids)}
    places_n = np.array([place for place, name in enumerate(ids) if name in rows], np.int64)
    metadata: list[dict[str, Any] | None] = [None] * len(ids)
    if len(places_n):
        found = originals.metadata(np.array([rows[ids[place]] for place in places_n.tolist()], np.int64))
        for place, about in zip(places_n.tolist(), found, strict=True):
            metadata[place] = about
    return metadata


def _is_current(folder: Path) -> bool:
    """Return whether a gallery exists and its index has not changed since."""
    if not (folder / CURRENT).is_file():
        return False
    try:
        gallery = Gallery.open(folder)
        for segment in gallery.segments:
            open_adopted(segment.record, gallery.metric, folder)
    except XcompatError:
        return False
    return True
