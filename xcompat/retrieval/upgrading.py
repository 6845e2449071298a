"""Gallery upgrade to a newer model's space, in bounded memory and with restarts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from xcompat.core.arrays import normalise_rows
from xcompat.core.checksums import json_checksum
from xcompat.core.errors import FingerprintMismatchError, XcompatError
from xcompat.core.files import read_json, write_json
from xcompat.core.fingerprint import Fingerprint
from xcompat.core.parallel import Executor, run_locally
from xcompat.core.progress import advance_bar, progress_bar
from xcompat.retrieval.items import Items, checked_embeddings
from xcompat.retrieval.manifest import SegmentRecord
from xcompat.retrieval.segment import Segment
from xcompat.retrieval.snapshot import Snapshot
from xcompat.retrieval.staging import Staging
from xcompat.retrieval.versions import fits, identity, require_metric, upgraded_version

if TYPE_CHECKING:
    from xcompat.models.base import CompatModel

ROWS_TRIED = 4096
"""Embeddings to map for a time estimate."""


class Plan(NamedTuple):
    """Upgrade cost.

    Args:
        items: number of embeddings to map.
        seconds: estimated time.
        nbytes: estimated bytes for the new segments; the old segments stay until a compaction.
    """

    items: int
    seconds: float
    nbytes: int


class _Progress(BaseModel):
    """Upgrade journal: source segment -> first unmapped row, and the new segments.

    Valid only in its first generation, because mapped rows could be removed later.
    """

    generation: int
    done: dict[str, int] = {}
    records: list[SegmentRecord] = []
    checksum: str = ""


def plan_upgrade(gallery: Snapshot, model: CompatModel) -> Plan:
    """Estimate an upgrade's cost without changing anything.

    Raises:
        XcompatError: as :func:`segments_to_map`.
    """
    segments = segments_to_map(gallery, model)
    items = sum(map(len, segments))
    with gallery.reading():
        _, first = next(segments[0].blocks(ROWS_TRIED))
    started = time.perf_counter()
    map_block(model, _block(first, gallery, segments[0]))
    per_item = (time.perf_counter() - started) / len(first)
    return Plan(items, per_item * items, items * model.config.embedding_dim * 4)


def upgrade_gallery(staging: Staging, model: CompatModel, batch_size: int, spread: Executor = run_locally) -> int:
    """Map all embeddings in the old space, ``batch_size`` at a time, and commit; return their number.

    Raises:
        XcompatError: as :func:`segments_to_map`.
    """
    gallery = staging.base
    segments = segments_to_map(gallery, model)
    version = upgraded_version(model)
    journal = gallery.path / f"upgrade-{version.digest[:16]}.json"
    progress = _load_progress(gallery, journal)
    staging.take(progress.records, [version])
    left = [(segment, _unmapped_rows(segment, progress)) for segment in segments]
    total, to_map = sum(map(len, segments)), sum(len(rows) for _, rows in left)
    mapped = spread(map_block, model, _blocks(gallery, left, batch_size))
    with progress_bar() as bar:
        task = bar.add_task(
            f"mapping {gallery.path.name} to {version.name}", total=total, completed=total - to_map, unit="embeddings"
        )
        for segment, blocks in groupby(mapped, key=lambda each: each[0].segment):
            for (_, rows_n, items), block in blocks:
                staging.put(version, _items(block, items, gallery, model))
                advance_bar(bar, task, len(rows_n))
                if written := staging.flush_if_large():
                    _record(journal, progress, segment, int(rows_n[-1]) + 1, written)
            _record(journal, progress, segment, segment.record.rows, staging.flush())
    staging.commit(f"upgrade to {version.name}", [segment.record.name for segment in segments])
    journal.unlink(missing_ok=True)
    return total


def segments_to_map(gallery: Snapshot, model: CompatModel) -> list[Segment]:
    """Return the segments in the space of a model's old model.

    Raises:
        XcompatError: the model maps no galleries.
        FingerprintMismatchError: the model can map nothing here, or can neither map nor search some embeddings.
    """
    if not model.maps_galleries:
        raise XcompatError(
            f"{type(model).__name__} maps queries, not galleries: its queries search this gallery as it is; "
            "to store its own embeddings, re-embed with --backfill"
        )
    require_metric(model, gallery.manifest.metric)
    nearest, dim = model.compatible_with[0], model.config.old["dim"]
    mapped, left = set(), []
    for version in gallery.manifest.present():
        if nearest.digest in (version.digest, *version.shares) and version.dim == dim:
            mapped.add(version.digest)
        elif not fits(model, version):
            left.append(version.fingerprint)
    _require_side_info(gallery, model, mapped)
    if not mapped:
        found = ", ".join(map(str, gallery.versions))
        raise FingerprintMismatchError(f"{identity(model)} maps embeddings of {nearest}; this gallery holds {found}")
    if left:  # no single model could search these together with the mapped ones
        raise FingerprintMismatchError(
            f"{identity(model)} can neither map nor search the {', '.join(map(str, left))} embeddings of this gallery, only "
            f"those of {nearest}; roll back to before they were added, upgrade, and add them again"
        )
    return [segment for segment in gallery.segments if segment.record.version in mapped]


def _require_side_info(gallery: Snapshot, model: CompatModel, mapped: set[str]) -> None:
    described = getattr(model.config, "side_info", None)
    if not model.reads_side_info or described is None:
        return
    wanted = Fingerprint(described["fingerprint"], described["name"])
    for version in gallery.manifest.present():
        if version.digest in mapped and version.side_info not in (None, wanted.digest):
            raise FingerprintMismatchError(
                f"{identity(model)} was trained with side-information of {wanted}, but the {version.fingerprint} "
                "embeddings of this gallery have side-information of another model; train the map with the same model"
            )


class Block(NamedTuple):
    """Embeddings to map together.

    Args:
        embeds_nd: (n, d) float32.
        side_nS: side-information, or None.
        unit: whether they already have length 1.
    """

    embeds_nd: NDArray[np.float32]
    side_nS: NDArray[np.float32] | None = None
    unit: bool = True


def map_block(model: CompatModel, block: Block) -> Block:
    """Map embeddings to a newer model's space, and their side-information if possible."""
    import torch

    with torch.inference_mode():
        unit = block.unit or model.metric != "cosine"
        old = torch.from_numpy(block.embeds_nd if unit else normalise_rows(block.embeds_nd)).to(model.device)
        side = torch.from_numpy(block.side_nS).to(model.device) if block.side_nS is not None else None
        mapped = model.upgrade(old, side if model.reads_side_info else None)
        new_side = model.upgrade_side(old, side).float().cpu().numpy() if side is not None and model.writes_side_info else None
    return Block(mapped.float().cpu().numpy(), new_side)


class _StoredRows(NamedTuple):
    segment: Segment
    rows_n: NDArray[np.int64]
    items: Items


def _unmapped_rows(segment: Segment, progress: _Progress) -> NDArray[np.int64]:
    rows = segment.present()
    return rows[rows >= progress.done.get(segment.record.name, 0)]


def _blocks(
    gallery: Snapshot, left: list[tuple[Segment, NDArray[np.int64]]], batch_size: int
) -> Iterator[tuple[_StoredRows, Block]]:
    for segment, rows in left:
        for rows_n, items in segment.blocks(batch_size, rows):
            yield _StoredRows(segment, rows_n, items), _block(items, gallery, segment)


def _block(items: Items, gallery: Snapshot, segment: Segment) -> Block:
    unit = gallery.manifest.version(segment.record.version).length == 1  # adopted vectors may have other lengths
    return Block(items.embeds[0], items.side_info[0] if items.side_info else None, unit)


def _items(made: Block, old: Items, gallery: Snapshot, model: CompatModel) -> Items:
    name = type(model).__name__
    embeds_nd = checked_embeddings(made.embeds_nd, gallery.metric, lambda row: f"the {name} embedding of {old.ids[row]!r}")
    return Items([embeds_nd], old.ids, old.metadata, [made.side_nS] if made.side_nS is not None else [])


def _record(journal: Path, progress: _Progress, segment: Segment, row: int, written: list[SegmentRecord]) -> None:
    progress.done[segment.record.name] = row
    progress.records += written
    told = progress.model_dump(mode="json")
    write_json(journal, told | {"checksum": json_checksum(told)})


def _load_progress(gallery: Snapshot, journal: Path) -> _Progress:
    """Read a valid upgrade journal, or start a new journal."""
    fresh = _Progress(generation=gallery.generation)
    try:
        told = read_json(journal)
        found = _Progress(**told)
    except (XcompatError, TypeError, ValueError):  # missing or damaged
        return fresh
    if found.generation != gallery.generation or found.checksum != json_checksum(told):
        return fresh
    whole = not any(Segment(gallery.path, record, gallery.metric).find_damage() for record in found.records)
    return found if whole else fresh
