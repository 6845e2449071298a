"""A writer's uncommitted changes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from xcompat.core.errors import GenerationGoneError, XcompatError
from xcompat.retrieval.adopted_index import read_state
from xcompat.retrieval.items import Items
from xcompat.retrieval.leftovers import clear
from xcompat.retrieval.lock import lock_writer
from xcompat.retrieval.manifest import (
    Manifest,
    SegmentRecord,
    VersionRecord,
    kept_manifests,
    previous_generation,
    read_manifest,
    write_manifest,
)
from xcompat.retrieval.new_embeddings import forget_items, forget_since
from xcompat.retrieval.segment import Segment, id_hashes, removed_rows, write_segment
from xcompat.retrieval.snapshot import Snapshot
from xcompat.retrieval.versions import require_common_search, require_like_sides

if TYPE_CHECKING:
    from xcompat.retrieval.versions import Model

FLUSH_BYTES = 2**27
"""Bytes of embeddings and metadata to collect before writing a segment."""


class Staging:
    """Uncommitted changes to a gallery. No other process can write while it lives.

    Changes apply to :attr:`base`, the last committed state, which may be newer than the opened one.

    Raises:
        XcompatError: another process is writing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = lock_writer(folder)
        try:
            self.base = Snapshot(folder, read_manifest(folder))
            with suppress(XcompatError, OSError):  # the next writer retries
                clear(folder)
        except BaseException:
            self.release()
            raise
        self.manifest = self.base.manifest
        self._pending: dict[str, Items] = {}
        self._pending_ids: set[str] = set()
        self._pending_bytes = 0
        self._versions: dict[str, VersionRecord] = {version.digest: version for version in self.manifest.versions}
        self._made_by: dict[str, Model] = {}
        self._written: list[SegmentRecord] = []
        self._removed: dict[str, NDArray[np.int64]] = {}
        self._other_originals: list[str] = []
        self._segments = {segment.record.name: segment for segment in self.base.segments}

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to commit."""
        return not (self._pending_ids or self._written or self._removed)

    def present(self) -> list[VersionRecord]:
        """Return the versions with embeddings after a commit."""
        left = {
            segment.record.version
            for name, segment in self._segments.items()
            if len(np.intersect1d(segment.present(), self._removed.get(name, []))) < len(segment)
        }
        left |= {digest for digest, items in self._pending.items() if len(items)}
        return [version for digest, version in self._versions.items() if digest in left]

    def release(self) -> None:
        """Release the writer lock."""
        self._lock.release()

    def add(
        self,
        version: VersionRecord,
        items: Items,
        replace: bool,
        model: Model | None = None,
        same_originals: bool = False,
    ) -> None:
        """Prepare checked items.

        Args:
            version: their embeddings' model.
            items: a block of items.
            replace: whether to replace items with the same id.
            model: the same model, to check if it can search the remaining gallery; None to skip the check.
            same_originals: whether replaced items have the same originals, so their new embeddings stay valid.

        Raises:
            XcompatError: an id exists, or the version has another dimension.
            FingerprintMismatchError: without ``replace``, the model cannot search all embeddings. With ``replace``,
                :meth:`commit` checks it.
        """
        if model is not None and not replace:
            present = self.present()
            if version.digest not in [other.digest for other in present]:
                require_common_search(model, present, self.folder)
        if model is not None:
            self._made_by[version.digest] = model
        known = self._versions.setdefault(version.digest, version)
        if known.dim != version.dim:
            raise XcompatError(f"embeddings of {version.fingerprint} have {known.dim} dimensions, these have {version.dim}")
        self._require_like_sides(version, items)
        taken = self._find(items.ids)
        if taken and not replace:
            name = items.ids[min(int(positions[0]) for positions, _ in taken.values())]
            count = sum(len(rows) for _, rows in taken.values())
            more = f" and {count - 1} more ids are" if count > 1 else " is"
            raise XcompatError(f"{name!r}{more} in the gallery already; remove them from the input, or replace them (--replace)")
        for segment, (_, rows) in taken.items():
            self.remove_rows(segment, rows)
        if not same_originals:
            self._other_originals += [items.ids[place] for positions, _ in taken.values() for place in positions.tolist()]
        self.put(version, items)
        self.flush_if_large()

    def _require_like_sides(self, version: VersionRecord, items: Items) -> None:
        known, waiting = self._versions[version.digest], self._pending.get(version.digest)
        have = {each.side_dim for each in self._segments.values() if each.record.version == version.digest}
        have |= {waiting.side_dim} if waiting is not None else set()
        if not have:
            self._versions[version.digest] = version
        else:
            require_like_sides(known, have, items.side_dim, version.side_info)

    def put(self, version: VersionRecord, items: Items) -> None:
        """Prepare items with free ids, e.g. for rows that the same commit drops."""
        self._versions.setdefault(version.digest, version)
        waiting = self._pending.setdefault(version.digest, Items())
        waiting.embeds += items.embeds
        waiting.ids += items.ids
        waiting.metadata += items.metadata
        waiting.side_info += items.side_info
        self._pending_ids.update(items.ids)
        self._pending_bytes += items.nbytes

    def flush_if_large(self, fewest: int = 0) -> list[SegmentRecord]:
        """Write pending items if large, and at least ``fewest``; return the new segments."""
        is_large = self._pending_bytes >= FLUSH_BYTES and sum(map(len, self._pending.values())) >= fewest
        return self.flush() if is_large else []

    def _find(self, ids: Sequence[str]) -> dict[str, tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Return segment -> (positions in ``ids``, rows); flush if an id is pending."""
        if not self._pending_ids.isdisjoint(ids):
            self.flush()
        hashes_N = id_hashes(ids)
        found = {}
        for name, segment in self._segments.items():
            positions, rows = segment.rows_of(ids, hashes_N)
            gone = np.isin(rows, self._removed.get(name, np.empty(0, np.int64)))
            if not gone.all():
                found[name] = positions[~gone], rows[~gone]
        return found

    def remove(self, ids: Sequence[str]) -> None:
        """Prepare to remove items.

        Raises:
            XcompatError: an id is not in the gallery.
        """
        found = self._find(ids)
        missing = set(range(len(ids))) - {int(position) for positions, _ in found.values() for position in positions}
        if missing:
            raise XcompatError(f"{ids[min(missing)]!r} is not in the gallery ({len(missing)} of {len(ids)} ids are not)")
        for segment, (_, rows) in found.items():
            self.remove_rows(segment, rows)
        self._other_originals += ids

    def remove_rows(self, segment: str, rows_n: NDArray[np.int64]) -> None:
        """Prepare to remove a segment's rows."""
        self._removed[segment] = np.union1d(self._removed.get(segment, np.empty(0, np.int64)), rows_n)

    def flush(self) -> list[SegmentRecord]:
        """Write pending items; return the new segments."""
        pending = [(items, digest) for digest, items in self._pending.items() if len(items)]
        written = [write_segment(self.folder, items, digest, self.manifest) for items, digest in pending]
        self._pending, self._pending_ids, self._pending_bytes = {}, set(), 0
        self.take(written)
        return written

    def take(self, records: Iterable[SegmentRecord], versions: Iterable[VersionRecord] = ()) -> None:
        """Prepare segments already on disk."""
        self._versions.update({version.digest: version for version in versions})
        for record in records:
            self._written.append(record)
            self._segments[record.name] = Segment(self.folder, record, self.manifest.metric)

    def commit(self, by: str, dropped: Iterable[str] = ()) -> Manifest:
        """Publish all changes as the next generation.

        Args:
            by: operation name.
            dropped: names of segments to drop.

        Returns:
            The manifest, unchanged without changes.

        Raises:
            FingerprintMismatchError: no single model could search all items; the changes stay pending.
        """
        self._require_common_search()
        self.flush()
        gone = set(dropped)
        if not (self._written or self._removed or gone):
            return self.manifest
        generation = self.manifest.generation + 1
        records = []
        for record in (*self.manifest.segments, *self._written):
            rows = self._removed.get(record.name)
            if rows is not None and len(rows):
                record = removed_rows(self._segments[record.name], generation, rows)
            if record.name not in gone and record.n_removed < record.rows:
                records.append(record)
        forget_items(self.folder, self._other_originals, generation)
        self.publish(by, versions=tuple(self._versions.values()), segments=tuple(records))
        self._written, self._removed, self._other_originals = [], {}, []
        return self.manifest

    def _require_common_search(self) -> None:
        present = {version.digest: version for version in self.present()}
        for digest in present.keys() & self._made_by.keys() - {version.digest for version in self.manifest.present()}:
            others = [version for other, version in present.items() if other != digest]
            require_common_search(self._made_by[digest], others, self.folder)

    def publish(self, by: str, **state: object) -> Manifest:
        """Write the next generation's manifest with changed fields."""
        update = {**state, "generation": self.manifest.generation + 1, "by": by}
        self.manifest = write_manifest(self.folder, self.manifest.model_copy(update=update))
        return self.manifest

    def roll_back(self, generation: int | None) -> Manifest:
        """Publish an earlier state as the next generation; return its manifest.

        Args:
            generation: state number; None to use the previous state.

        Raises:
            XcompatError: the state, or a file it needs, no longer exists.
        """
        if generation is None:
            generation = previous_generation(kept_manifests(self.folder))
        if generation is None:
            raise GenerationGoneError(
                f"{self.folder} has no earlier state; run `xcompat gallery rollback {self.folder} --list` to see the states"
            )
        wanted = read_state(self.folder, generation)
        missing = [line for record in wanted.segments for line in Segment(self.folder, record, self.manifest.metric).missing()]
        if missing:
            raise XcompatError(
                f"cannot return to generation {generation} of {self.folder}: {'; '.join(missing)}; restore the files, or choose "
                f"another generation with --to"
            )
        state = {
            name: getattr(wanted, name) for name in Manifest.model_fields if name not in ("generation", "by", "made", "checksum")
        }
        forget_since(self.folder, generation, self.manifest.generation + 1)
        return self.publish(f"rollback to {generation}", **state)
