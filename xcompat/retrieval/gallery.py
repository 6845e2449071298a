"""A gallery: embeddings of one or several models on disk, searchable with any model that is compatible with all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from numpy.typing import ArrayLike

from xcompat.core.errors import XcompatError
from xcompat.core.parallel import Spread, here
from xcompat.retrieval.adopted_index import read_state
from xcompat.retrieval.adoption import adopt_faiss, resync_faiss
from xcompat.retrieval.backend import check_place
from xcompat.retrieval.compaction import compact_gallery, folder_size
from xcompat.retrieval.items import check_items
from xcompat.retrieval.leftovers import making, require_empty
from xcompat.retrieval.manifest import Manifest, Metric, kept_manifests, write_manifest
from xcompat.retrieval.snapshot import Snapshot
from xcompat.retrieval.staging import Staging
from xcompat.retrieval.upgrading import segments_to_map, upgrade_gallery
from xcompat.retrieval.versions import (
    aliased_version,
    identity,
    own_metric,
    require_metric,
    stored_embeddings,
    stored_version,
)

if TYPE_CHECKING:
    from xcompat.core.fingerprint import Fingerprint
    from xcompat.models.base import CompatModel
    from xcompat.retrieval.versions import Model


class Gallery(Snapshot):
    """A folder of embeddings; make one with :meth:`create`, read one with :meth:`open`.

    The object shows one committed state: the one it opened, and after each of its own commits the new one.

    Changes become visible with :meth:`commit`, to this object and to everyone who opens the gallery later. A process that is
    killed leaves the last committed state. Any number of processes may read while one writes.

    Args:
        path: the folder.
        manifest: a committed state.

    Example:
        >>> import numpy as np, tempfile
        >>> from xcompat import Fingerprint
        >>> made = Gallery.create(tempfile.mkdtemp() + "/g", Fingerprint.from_string("clip"), dim=3)
        >>> made.add(np.eye(3, dtype=np.float32), ids=["x", "y", "z"])
        >>> _ = made.commit()
        >>> [[hit.id for hit in hits] for hits in made.search([[0.1, 1.0, 0.2]], Fingerprint.from_string("clip"), top_k=2)]
        [['y', 'z']]
    """

    def __init__(self, path: str | Path, manifest: Manifest) -> None:
        super().__init__(path, manifest)
        self._staging: Staging | None = None

    def show(self, manifest: Manifest) -> None:
        """Show a committed state from now on."""
        super().__init__(self.path, manifest)

    @classmethod
    def create(
        cls,
        path: str | Path,
        model_or_fingerprint: Model,
        dim: int | None = None,
        metric: Metric | None = None,
        index: str = "Flat",
        milvus: str | None = None,
    ) -> Self:
        """Make an empty gallery.

        Args:
            path: a folder that does not exist or is empty.
            model_or_fingerprint: the model whose embeddings :meth:`add` takes by default.
            dim: dimension of its embeddings; needed with a fingerprint only.
            metric: ``cosine``, ``ip`` or ``l2``; None for how the model's embeddings are compared, by cosine if only its
                fingerprint is known.
            index: faiss factory string: ``Flat``, ``HNSW32``, ``IVF1024,Flat``, ``IVF1024,PQ64``, ``SQ8`` ...
            milvus: URI of a Milvus (a file for milvus-lite, or ``http://host:19530``) that holds the vectors; None for faiss.

        Returns:
            The gallery.

        Raises:
            XcompatError: the folder is not empty, the dimension is unknown, faiss knows no such index, or no Milvus answers.
        """
        folder = Path(path)
        require_empty(folder)
        version = stored_version(model_or_fingerprint, dim)
        if dim is not None and dim != version.dim:
            raise XcompatError(f"{version.fingerprint} stores {version.dim} dimensions, not {dim}; leave dim out")
        metric = metric or own_metric(model_or_fingerprint)
        require_metric(model_or_fingerprint, metric)
        milvus = check_place(metric, index, version.dim, milvus)
        manifest = Manifest(metric=metric, index=index, milvus=milvus, versions=(version,))
        with making(folder):
            return cls(folder, write_manifest(folder, manifest))

    @classmethod
    def from_faiss(
        cls,
        path: str | Path,
        index: str | Path,
        ids: Sequence[str] | None,
        model_or_fingerprint: Model,
        metadata: Sequence[dict[str, Any] | None] | None = None,
    ) -> Self:
        """Adopt an existing faiss index: it stays where it is, and no vector is copied.

        Args:
            path: folder of the gallery; it must not exist or be empty.
            index: the index file. The gallery refuses it once it has changed; :meth:`resync` takes over vectors added to it.
            ids: the id of each vector, in the order in which they were added to the index; None for the ids inside an index
                that has its own. For an inverted file with ids of its own, item N is the vector with the id N, and ids that
                are its own go to their vectors.
            model_or_fingerprint: the model that made the vectors.
            metadata: one JSON object or None per vector.

        Returns:
            The gallery.

        Raises:
            XcompatError: the index cannot be read, has another dimension or a vector that is not finite, or ids are missing.
        """
        return cls(path, adopt_faiss(Path(path), Path(index), ids, model_or_fingerprint, metadata)[0])

    def resync(self, ids: Sequence[str] | None = None, metadata: Sequence[dict[str, Any] | None] | None = None) -> int:
        """Take over vectors that were added to the adopted index; items removed from the gallery stay removed.

        Args:
            ids: ids of all its vectors, in order; None if no vector was added, for example after copying the file.
            metadata: metadata of all its vectors; None to keep the known ones and give new vectors none.

        Returns:
            The generation's number; unchanged if nothing was added.

        Raises:
            XcompatError: known vectors were removed, altered or moved, ids do not fit, or another process writes.
        """
        with self._rewriting() as staging:
            resync_faiss(staging, ids, metadata)
        return self.generation

    @classmethod
    def open(cls, path: str | Path, generation: int | None = None) -> Self:
        """Open a gallery; only its manifest is read at once.

        Args:
            path: its folder.
            generation: number of an earlier state; None for the current one.

        Returns:
            The gallery.
        """
        return cls(path, read_state(Path(path), generation))

    # ------------------------------------------------------------------------------------------------------- writing

    def staging(self) -> Staging:
        """Return the changes that wait for a commit; the first call takes the writer's lock."""
        if self._staging is None:
            self._staging = Staging(self.path)
        return self._staging

    @contextmanager
    def _rewriting(self) -> Iterator[Staging]:
        """Commit waiting changes, hold the writer's lock while the caller rewrites the gallery, and show the result."""
        with self:
            self.commit()
            staging = self.staging()
            try:
                yield staging
            finally:
                self.show(staging.manifest)

    def add(
        self,
        embeds_ND: ArrayLike,
        ids: Sequence[str],
        metadata: Sequence[dict[str, Any] | None] | None = None,
        version: Model | None = None,
        side_info_NS: ArrayLike | None = None,
        replace: bool = False,
        side_info_by: Model | None = None,
        same_originals: bool = False,
    ) -> None:
        """Add items; they are visible after :meth:`commit`.

        Args:
            embeds_ND: (N, D) embeddings as the model outputs them; with a fingerprint, as they are to be stored. Vectors do not
                show which model made them: only `xcompat gallery doctor` detects another model's with the same dimension.
            ids: N strings, none of which is in the gallery.
            metadata: N JSON objects or Nones, for filters and in hits.
            version: the model that made the embeddings; by default the one the gallery was made for.
            side_info_NS: (N, S) side-information, for methods that map galleries with it.
            replace: whether to replace items that have the same id.
            side_info_by: the model that made the side-information; an upgrade by a map for another one is then refused.
            same_originals: whether replaced items were embedded from the same originals. New embeddings of re-ranked searches
                stay valid then.

        Raises:
            XcompatError: see :func:`~xcompat.retrieval.items.check_items`; an id is in the gallery; embeddings of one model have
                side-information of different models, or only some of them have any; another process writes.
            FingerprintMismatchError: no one model could search these embeddings and those in the gallery. With ``replace``, which
                may replace all of them, :meth:`commit` checks it.
        """
        record, stored_ND = stored_embeddings(version, embeds_ND, self.manifest.versions)
        if version is not None:
            require_metric(version, self.metric)
        if side_info_by is not None:
            record = record.model_copy(update={"side_info": identity(side_info_by).digest})
        items = check_items(stored_ND, ids, metadata, side_info_NS, self.metric)
        if not len(items):
            return
        made_by = version or record.fingerprint
        self._change(lambda staging: staging.add(record, items, replace, made_by, same_originals))

    def remove(self, ids: Sequence[str]) -> None:
        """Remove items; they are gone after :meth:`commit`, and back after a rollback.

        Args:
            ids: ids of the items.

        Raises:
            XcompatError: an id is not in the gallery, or another process writes.
        """
        self._change(lambda staging: staging.remove(list(ids)))

    def _change(self, change: Callable[[Staging], None]) -> None:
        """Prepare a change; one that is refused keeps earlier changes, and releases the lock if there are none."""
        staging = self.staging()
        try:
            change(staging)
        finally:
            if staging.is_empty:
                self.close()

    def commit(self, by: str = "add") -> int:
        """Publish all changes since the last commit as one generation.

        Args:
            by: the operation that made it, shown by ``xcompat gallery info``.

        Returns:
            The generation's number.

        Raises:
            FingerprintMismatchError: no one model could search what replaced some items beside the others. The changes still
                wait: replace the others too, or discard them with :meth:`close`.
        """
        if self._staging is not None:
            self.show(self._staging.commit(by))
            self.close()
        return self.generation

    def close(self) -> None:
        """Discard uncommitted changes, and let other processes write."""
        if self._staging is not None:
            self._staging.release()
            self._staging = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def rollback(self, generation: int | None = None) -> int:
        """Return to an earlier state by committing it as a new generation; the states in between are kept too.

        Args:
            generation: number of the earlier state. None undoes the last change; each further call goes one state further back.

        Returns:
            The new generation's number.

        Raises:
            XcompatError: that state is not kept, or another process writes.
        """
        self.close()
        with self:
            self.show(self.staging().roll_back(generation))
        return self.generation

    def add_alias(self, alias: Fingerprint) -> Fingerprint:
        """Record another identity of the model that made the stored embeddings, as a new generation.

        A map that was fitted for a name fits the model itself afterwards, and the other way round.

        Args:
            alias: the other identity, such as ``Fingerprint.from_string("clip-b32")``.

        Returns:
            The version that has the alias now.

        Raises:
            XcompatError: the gallery holds embeddings of several models that the alias could mean, or both identities are of
                weights, which differ; or another process writes.
        """
        with self._rewriting() as staging:
            version = aliased_version(staging.manifest.present() or staging.manifest.versions, alias)
            if alias.digest not in (version.digest, *version.shares):
                shared = version.model_copy(update={"shares": (*version.shares, alias.digest)})
                versions = [shared if each.digest == version.digest else each for each in staging.manifest.versions]
                staging.publish("alias", versions=tuple(versions))
        return version.fingerprint

    def upgrade(self, model: CompatModel, batch_size: int = 65536, spread: Spread = here) -> int:
        """Map stored embeddings to the space of a newer model, without images; until a compaction a rollback undoes it.

        It maps embeddings of the model's old model, and those that compatible models stored in the old model's space.

        Args:
            model: a model that maps galleries, such as FCT.
            batch_size: embeddings in memory at a time; with workers, a few times as many.
            spread: where they are mapped; in this process unless given.

        Returns:
            The number of mapped embeddings.

        Raises:
            XcompatError: the model maps no galleries, the gallery holds nothing that it maps, or another process writes.
            FingerprintMismatchError: the gallery holds embeddings that the model neither maps nor searches.
        """
        with self:
            segments_to_map(self, model)  # refuse before waiting changes are committed
            with self._rewriting() as staging:
                return upgrade_gallery(staging, model, batch_size, spread)

    def compact(self) -> int:
        """Join small segments, drop removed rows, and delete all earlier generations; return the bytes freed."""
        before = folder_size(self.path)
        with self._rewriting() as staging:
            compact_gallery(staging)
        return before - folder_size(self.path)

    def generations(self) -> list[Manifest]:
        """Return every state that can be opened or rolled back to, the oldest first."""
        return kept_manifests(self.path)
