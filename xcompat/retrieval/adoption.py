"""Adoption of existing faiss indexes, and of vectors added to them later."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from xcompat.core.checksums import FileRecord, file_record
from xcompat.core.errors import XcompatError
from xcompat.core.files import atomic_path, write_array
from xcompat.core.lazy import faiss
from xcompat.core.progress import advance_bar, progress_bar
from xcompat.retrieval.adopted_index import inspect_file, read_labels, stamp_of
from xcompat.retrieval.faiss_index import FaissIndex, map_faiss
from xcompat.retrieval.items import Items, as_json, check_ids
from xcompat.retrieval.leftovers import create_in_folder, is_unreported, require_empty
from xcompat.retrieval.manifest import (
    SEGMENTS,
    AdoptedRecord,
    Manifest,
    Metric,
    SegmentRecord,
    VersionRecord,
    read_manifest,
    write_manifest,
)
from xcompat.retrieval.own_ids import LABELS_FILE, OwnIds, match_names, name_rows, read_own_ids, strip_id_map
from xcompat.retrieval.probing import require_readable
from xcompat.retrieval.segment import Segment, removed_rows, write_rows
from xcompat.retrieval.snapshot import Snapshot
from xcompat.retrieval.staging import Staging
from xcompat.retrieval.versions import stored_version

if TYPE_CHECKING:
    from xcompat.retrieval.versions import Model

SIGNATURES_FILE = "signatures.npy"
"""One number per vector to recognise it: its projection on a random direction."""
LOOKED_AT_ONCE = 16384
Known: TypeAlias = tuple[FileRecord, AdoptedRecord]
_UNIT, _SHORTENED = 0.05, 0.5  # largest rounding error of length 1; smallest length of unit vectors after quantisation
_SAME = 1e-5  # largest relative rounding difference of signatures between processors


@dataclass(frozen=True)
class IndexFacts:
    """Facts about all vectors in an index.

    Args:
        kind: faiss class.
        dim: d.
        metric: metric for a gallery.
        lengths: minimum, median and maximum length of nonzero vectors.
        unit: whether the vectors had length 1 before quantisation.
        zeros: number of zero vectors.
        signatures_N: (N,) float32, see :data:`SIGNATURES_FILE`.
    """

    kind: str
    dim: int
    metric: Metric
    lengths: tuple[float, float, float]
    unit: bool
    zeros: int
    signatures_N: NDArray[np.float32]

    @property
    def length(self) -> float:
        """Length to which queries and new embeddings are scaled."""
        return 1.0 if self.unit else self.lengths[1]


def require_index(file: Path) -> None:
    """Raise if the index file does not exist."""
    if not file.is_file():
        raise XcompatError(f"the faiss index {file} does not exist; check the path")


def adopt_faiss(
    folder: Path,
    index_file: Path,
    ids: Sequence[str] | None,
    model_or_fingerprint: Model,
    metadata: Sequence[Mapping[str, object] | None] | Callable[[Sequence[str]], Sequence[Mapping[str, object] | None]] | None,
    original_ids: Sequence[str] = (),
    numbers_rows: bool = False,
) -> tuple[Manifest, IndexFacts]:
    """Create a gallery from a faiss index file (:meth:`xcompat.retrieval.gallery.Gallery.from_faiss`).

    Args:
        folder: see there.
        index_file: see there.
        ids: see there.
        model_or_fingerprint: see there.
        metadata: see there; or a function of the ids.
        original_ids: see :func:`~xcompat.retrieval.own_ids.name_rows`.
        numbers_rows: whether to use row numbers as ids if there are no others.
    """
    if not is_unreported(folder):
        require_empty(folder)
    require_index(index_file)
    path = index_file.resolve()
    require_readable(path)
    known = inspect_file(path)
    raw = map_faiss(path)
    own = read_own_ids(raw, index_file)
    index = wrap_index(raw, own.labels_N, path)
    ids = name_rows(ids, own, index.rows, index_file, original_ids, numbers_rows)
    check_ids(ids)
    if callable(metadata):
        metadata = metadata(ids)
    version = stored_version(model_or_fingerprint, index.dim)
    if version.dim != index.dim:
        raise XcompatError(
            f"{version.fingerprint} makes embeddings of {version.dim} dimensions, but {index_file} has {index.dim}"
        )
    look = inspect_vectors(index, path, known, ids)
    version = version.model_copy(update={"length": look.length})
    items = Items(ids=ids, metadata=as_json(ids, metadata))
    if is_unreported(folder) and (there := _find_same_gallery(folder, path, known, items, version, look)) is not None:
        return there, look
    with create_in_folder(folder):
        segment = _write(folder, path, known, items, version, look, own.labels_N)
        return write_manifest(folder, Manifest(metric=look.metric, versions=(version,), segments=(segment,), by="adopt")), look


def _find_same_gallery(
    folder: Path, path: Path, known: Known, items: Items, version: VersionRecord, look: IndexFacts
) -> Manifest | None:
    """Return the existing manifest if adopting now gives the same."""
    there = read_manifest(folder)
    wanted = there.model_copy(update={"generation": 0, "metric": look.metric, "versions": (version,), "by": "adopt"})
    if there != wanted:
        return None
    (record,) = there.segments
    segment, rows_N = Segment(folder, record, there.metric), np.arange(record.rows)
    same = (record.adopted, record.adopted_file) == (str(path), known[0])
    same = same and segment.ids(rows_N) == list(items.ids) and segment.metadata_text(rows_N) == list(items.metadata)
    return there if same else None


def resync_faiss(staging: Staging, ids: Sequence[str] | None, metadata: Sequence[Mapping[str, object] | None] | None) -> None:
    """Accept vectors added to an adopted index (:meth:`xcompat.retrieval.gallery.Gallery.resync`)."""
    gallery, manifest = staging.base, staging.base.manifest
    segment = next((segment for segment in gallery.segments if segment.record.adopted is not None), None)
    if segment is None:
        raise XcompatError(f"{gallery.path} holds no adopted index; add new items with `xcompat gallery add`")
    old = segment.record
    path, version = Path(str(old.adopted)), manifest.version(old.version)
    known = inspect_file(path)
    if known == (old.adopted_file, old.adopted_seen) and known[1].rows == old.rows:
        return
    require_readable(path)
    own, labels_N = _follow_ids(map_faiss(path), segment, path)
    index = FaissIndex(map_faiss(path), manifest.metric, labels_N=labels_N)
    look = inspect_vectors(index, path, known, None)
    _require_first(index, look, segment, version, path)
    if index.rows == old.rows:
        new = old.model_copy(update={"adopted_file": known[0], "adopted_seen": known[1]})
    else:
        names = _all_names(gallery, segment, ids, own, index.rows, path)
        items = Items(ids=names, metadata=_all_metadata(segment, names, metadata))
        new = _write(gallery.path, path, known, items, version, look, labels_N)
        assert old.adopted_file is not None
        new = new.model_copy(update={"extends": (old.adopted_file.xxh3, *old.extends)})
        if segment.kept_mask is not None:
            extended, gone = Segment(gallery.path, new, gallery.metric), np.flatnonzero(~segment.kept_mask)
            new = removed_rows(extended, manifest.generation + 1, gone)
    staging.publish("resync", segments=tuple(new if record is old else record for record in manifest.segments))


def inspect_vectors(index: FaissIndex, path: Path, known: Known, ids: Sequence[str] | None) -> IndexFacts:
    """Read every vector of an index once, to check and measure it.

    Args:
        index: the opened index.
        path: its file.
        known: record of the file from before it was opened.
        ids: the vectors' ids, for messages.

    Raises:
        XcompatError: vectors are not finite, all zero or unreadable, or the file changes meanwhile.
    """
    direction_d = np.random.default_rng(0).choice([-1.0, 1.0], index.dim) / np.sqrt(index.dim)
    lengths_N, signatures_N = np.empty(index.rows), np.empty(index.rows, np.float32)
    with progress_bar() as bar:
        task = bar.add_task(f"looking through {path.name}", total=index.rows, unit="vectors")
        for start in range(0, index.rows, LOOKED_AT_ONCE):
            rows_n = np.arange(start, min(start + LOOKED_AT_ONCE, index.rows))
            vectors_nd = _vectors(index, rows_n, path).astype(np.float64)
            lengths_N[rows_n] = np.linalg.norm(vectors_nd, axis=1)
            signatures_N[rows_n] = vectors_nd @ direction_d
            advance_bar(bar, task, len(rows_n))
    if stamp_of(path) != (known[0].size, known[1].mtime_ns):
        raise XcompatError(f"{path} is being written; wait until it is complete, and try again")
    bad = np.flatnonzero(~np.isfinite(lengths_N))
    if bad.size:
        which = f"vector {bad[0]}" + (f" ({ids[bad[0]]!r})" if ids is not None else "")
        more = f", like {bad.size - 1} more" if bad.size > 1 else ""
        raise XcompatError(f"{which} of {path} is not finite{more}; remove the vector from the index, or re-embed its item")
    some_N = lengths_N[lengths_N > 0]
    if not some_N.size:
        raise XcompatError(f"all {index.rows} vectors of {path} are zero; rebuild the index")
    least, median, most = float(some_N.min()), float(np.median(some_N)), float(some_N.max())
    unit = max(1 - least, most - 1) < _UNIT
    if not unit and not _exact(index.index):  # centroids of quantisers are shorter than 1
        unit = _SHORTENED < median < 1 + _UNIT
    metric: Metric = "l2" if index.metric == "l2" else "cosine" if unit else "ip"
    zeros = index.rows - some_N.size
    return IndexFacts(type(index.index).__name__, index.dim, metric, (least, median, most), unit, zeros, signatures_N)


def wrap_index(raw: faiss.Index, labels_N: NDArray[np.int64] | None, path: Path) -> FaissIndex:
    """Wrap a faiss index with its metric; raise if it is empty."""
    if not raw.ntotal:
        raise XcompatError(f"{path} holds no vectors; there is nothing to read")
    return FaissIndex(raw, "l2" if strip_id_map(raw).metric_type == faiss.METRIC_L2 else "ip", labels_N=labels_N)


def _follow_ids(raw: faiss.Index, segment: Segment, path: Path) -> tuple[OwnIds, NDArray[np.int64] | None]:
    """Sort the ids inside an index like the gallery's rows, then new ones.

    Returns:
        The sorted ids, and row labels; None for 0, 1, 2 and so on.
    """
    own, old_N = read_own_ids(raw, path), read_labels(segment.record, segment.gallery)
    if own.labels_N is None and old_N is None:
        return own, None
    labels_N = own.labels_N if own.labels_N is not None else np.arange(raw.ntotal)
    old_N = np.asarray(old_N) if old_N is not None else np.arange(segment.record.rows)
    gone_N = np.setdiff1d(old_N, labels_N)
    if gone_N.size:
        raise XcompatError(
            f"{path} no longer holds {gone_N.size} of the gallery's vectors, e.g. id {gone_N[0]}; "
            "restore the original index, or adopt it again in another folder"
        )
    order_N = np.concatenate([old_N, np.setdiff1d(labels_N, old_N)])
    own_names_N = labels_N if own.names_N is None else own.names_N
    return own._replace(names_N=own_names_N[np.searchsorted(labels_N, order_N)], labels_N=order_N), order_N


def _vectors(index: FaissIndex, rows_n: NDArray[np.int64], path: Path) -> NDArray[np.float32]:
    try:
        return index.vectors(rows_n)
    except RuntimeError as error:
        reason = " ".join(str(error).rsplit(": ", 1)[-1].split())[:120]
        raise XcompatError(
            f"faiss cannot return the vectors of {path} ({reason}): some were not finite, or this index type does not store "
            "them; build the index again"
        ) from None


def _exact(index: faiss.Index) -> bool:
    """Return whether an index stores vectors unquantised."""
    index = faiss.downcast_index(index)
    kind = type(index).__name__
    return kind.startswith("IndexFlat") or (kind.endswith("Flat") and "Refine" not in kind)


def _write(
    folder: Path,
    path: Path,
    known: Known,
    items: Items,
    version: VersionRecord,
    look: IndexFacts,
    labels_N: NDArray[np.int64] | None,
) -> SegmentRecord:
    name = secrets.token_hex(8)
    with atomic_path(folder / SEGMENTS / name) as temporary:
        temporary.mkdir()
        write_rows(temporary, items)
        write_array(temporary / SIGNATURES_FILE, look.signatures_N)
        if labels_N is not None:
            write_array(temporary / LABELS_FILE, labels_N)
        files = {file.name: file_record(file) for file in sorted(temporary.iterdir())}
    return SegmentRecord(
        name=name,
        version=version.digest,
        rows=len(items),
        index=look.kind,
        files=files,
        adopted=str(path),
        adopted_file=known[0],
        adopted_seen=known[1].model_copy(update={"rows": len(items)}),
    )


def _require_first(index: FaissIndex, look: IndexFacts, segment: Segment, version: VersionRecord, path: Path) -> None:
    """Raise if the index does not begin with the adopted vectors."""
    back = "restore the original index, or adopt it again in another folder"
    if index.dim != version.dim or index.rows < segment.record.rows:
        raise XcompatError(
            f"{path} holds {index.rows} vectors of {index.dim} dimensions, but the gallery knows {segment.record.rows} of "
            f"{version.dim}; after removals, ids no longer match: {back}"
        )
    old_N = np.load(segment.folder / SIGNATURES_FILE, allow_pickle=False)
    same_N = np.isclose(look.signatures_N[: len(old_N)], old_N, rtol=_SAME, atol=_SAME * version.length)
    if not same_N.all():
        first = np.flatnonzero(~same_N)
        name = segment.ids(first[:1])[0]
        raise XcompatError(
            f"{first.size} of the first {len(old_N)} vectors of {path} differ from the adopted ones, the first being "
            f"{name!r}: vectors were removed, altered or reordered; {back}"
        )


def _all_names(gallery: Snapshot, segment: Segment, ids: Sequence[str] | None, own: OwnIds, rows: int, path: Path) -> list[str]:
    """Return all ids in a grown index; known vectors keep theirs."""
    old_ids, more = segment.ids(np.arange(segment.record.rows)), rows - segment.record.rows
    if ids is None and own.names_N is not None:
        own_names = [str(name) for name in own.names_N.tolist()]
        ids = own_names if own_names[: len(old_ids)] == old_ids else None
    if ids is None or (own.labels_N is None and len(ids) != rows):
        raise XcompatError(
            f"{more} vectors were added to {path}: set the ids of all {rows}, in order, with --ids, as when it was adopted; "
            f"got {len(ids or [])}"
        )
    names = match_names(ids, own, rows, path)
    for row, (name, old) in enumerate(zip(names, old_ids, strict=False)):
        if name != old:
            raise XcompatError(
                f"id {row + 1} is {name!r}, but this vector is stored as {old!r}; list the ids in the index's order"
            )
    added = names[len(old_ids) :]
    check_ids(added)
    present = [name for name, version in zip(added, gallery.find(added), strict=True) if version is not None]
    if present:
        raise XcompatError(
            f"{present[0]!r} was added to {path}, but is in the gallery already; remove this item from the gallery first"
        )
    return names


def _all_metadata(segment: Segment, names: list[str], metadata: Sequence[Mapping[str, object] | None] | None) -> list[str | None]:
    if metadata is not None:
        return list(as_json(names, metadata))
    known = segment.metadata_text(np.arange(segment.record.rows))
    return [*known, *[None] * (len(names) - len(known))]
