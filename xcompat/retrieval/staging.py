"""What one writer prepares for the next generation: new segments, and removed rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
"""Bytes of embeddings and metadata that wait in memory before they are written to a segment."""


class Staging:
    """Uncommitted changes to a gallery. While this object lives, no other process can write.

    The changes apply to :attr:`base`, the last committed state, which may be newer than the state a reader opened.

    Raises:
        XcompatError: another process is writing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = lock_writer(folder)
        try:
            self.base = Snapshot(folder, read_manifest(folder))
            with suppress(XcompatError, OSError):  # the next writer tries again to delete leftovers
                clear(folder, self.base.backend)
        except BaseException:
            self.release()
            raise
        self.manifest, self.backend = self.base.manifest, self.base.backend
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
        """Whether nothing waits for a commit."""
        return not (self._pending_ids or self._written or self._removed)

    def present(self) -> list[VersionRecord]:
        """Return the versions that would have embeddings after a commit."""
        left = {
            segment.record.version
            for name, segment in self._segments.items()
            if len(np.intersect1d(segment.present(), self._removed.get(name, []))) < len(segment)
        }
        left |= {digest for digest, items in self._pending.items() if len(items)}
        return [version for digest, version in self._versions.items() if digest in left]

    def release(self) -> None:
        """Let other processes write."""
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
            version: the model that made their embeddings.
            items: one block.
            replace: whether to replace items that have the same id.
            model: that model, which has to search what stays in the gallery; None for no such check.
            same_originals: whether replaced items were embedded from the same originals, whose new embeddings stay valid.

        Raises:
            XcompatError: an id is in the gallery already, or the version has another dimension there.
            FingerprintMismatchError: without ``replace``, the model does not search all present embeddings. With ``replace``,
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
            raise XcompatError(f"{name!r}{more} in the gallery already; leave them out, or replace them (--replace)")
        for segment, (_, rows) in taken.items():
            self.remove_rows(segment, rows)
        if not same_originals:
            self._other_originals += [items.ids[place] for positions, _ in taken.values() for place in positions.tolist()]
        self.put(version, items)
        self.flush_if_large()

    def _require_like_sides(self, version: VersionRecord, items: Items) -> None:
        """Refuse side-information unlike that of the version's other embeddings."""
        known, waiting = self._versions[version.digest], self._pending.get(version.digest)
        have = {each.side_dim for each in self._segments.values() if each.record.version == version.digest}
        have |= {waiting.side_dim} if waiting is not None else set()
        if not have:
            self._versions[version.digest] = version
        else:
            require_like_sides(known, have, items.side_dim, version.side_info)

    def put(self, version: VersionRecord, items: Items) -> None:
        """Prepare items whose ids are known to be free, such as those of rows that the same commit drops."""
        self._versions.setdefault(version.digest, version)
        waiting = self._pending.setdefault(version.digest, Items())
        waiting.embeds += items.embeds
        waiting.ids += items.ids
        waiting.metadata += items.metadata
        waiting.side_info += items.side_info
        self._pending_ids.update(items.ids)
        self._pending_bytes += items.nbytes

    def flush_if_large(self, fewest: int = 0) -> list[SegmentRecord]:
        """Write waiting items if they take much memory, and are as many as ``fewest``; return the new segments."""
        is_large = self._pending_bytes >= FLUSH_BYTES and sum(map(len, self._pending.values())) >= fewest
        return self.flush() if is_large else []

    def _find(self, ids: Sequence[str]) -> dict[str, tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Return where ids are, segment -> (positions in ``ids``, rows), after a flush if one of them is still waiting."""
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
        """Prepare the removal of items.

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
        """Prepare the removal of rows of a segment."""
        self._removed[segment] = np.union1d(self._removed.get(segment, np.empty(0, np.int64)), rows_n)

    def flush(self) -> list[SegmentRecord]:
        """Write waiting items; return the new segments."""
        written = [
            write_segment(self.folder, items, digest, self.backend) for digest, items in self._pending.items() if len(items)
        ]
        self._pending, self._pending_ids, self._pending_bytes = {}, set(), 0
        self.take(written)
        return written

    def take(self, records: Iterable[SegmentRecord], versions: Iterable[VersionRecord] = ()) -> None:
        """Prepare segments that are already on disk."""
        self._versions.update({version.digest: version for version in versions})
        for record in records:
            self._written.append(record)
            self._segments[record.name] = Segment(self.folder, record, self.backend)

    def commit(self, by: str, dropped: Iterable[str] = ()) -> Manifest:
        """Publish all changes as the next generation.

        Args:
            by: the operation that made the generation.
            dropped: names of segments to leave out.

        Returns:
            The manifest; the current one if nothing changed.

        Raises:
            FingerprintMismatchError: no one model could search all items afterwards; the changes still wait.
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
        """Refuse a new version whose model does not search everything that stays."""
        present = {version.digest: version for version in self.present()}
        for digest in present.keys() & self._made_by.keys() - {version.digest for version in self.manifest.present()}:
            others = [version for other, version in present.items() if other != digest]
            require_common_search(self._made_by[digest], others, self.folder)

    def publish(self, by: str, **state: Any) -> Manifest:  # noqa: ANN401 - fields of a manifest
        """Write the next generation, made by an operation, with some fields of the manifest changed; return its manifest."""
        update = {**state, "generation": self.manifest.generation + 1, "by": by}
        self.manifest = write_manifest(self.folder, self.manifest.model_copy(update=update))
        return self.manifest

    def roll_back(self, generation: int | None) -> Manifest:
        """Publish an earlier state as the next generation, and return its manifest.

        Args:
            generation: number of the state; None for the one before the current state.

        Raises:
            XcompatError: that state is not kept, or a file that it names is gone.
        """
        if generation is None:
            generation = previous_generation(kept_manifests(self.folder))
        if generation is None:
            raise GenerationGoneError(
                f"{self.folder} keeps no state before this one; `xcompat gallery rollback {self.folder} --list` shows the states "
                "that it keeps"
            )
        wanted = read_state(self.folder, generation)
        missing = [line for record in wanted.segments for line in Segment(self.folder, record, self.backend).missing()]
        if missing:
            raise XcompatError(
                f"cannot return to generation {generation} of {self.folder}: {'; '.join(missing)}; put that back, or choose "
                f"another generation with --to"
            )
        state = {
            name: getattr(wanted, name) for name in Manifest.model_fields if name not in ("generation", "by", "made", "checksum")
        }
        forget_since(self.folder, generation, self.manifest.generation + 1)
        return self.publish(f"rollback to {generation}", **state)
