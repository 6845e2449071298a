"""Embedding gallery on disk. Use any model compatible with all its embeddings to search it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Self

from numpy.typing import ArrayLike

from xcompat.core.errors import XcompatError
from xcompat.core.parallel import Executor, run_locally
from xcompat.retrieval.adopted_index import read_state
from xcompat.retrieval.adoption import adopt_faiss, resync_faiss
from xcompat.retrieval.compaction import compact_gallery, folder_size
from xcompat.retrieval.faiss_building import make_index
from xcompat.retrieval.items import check_items
from xcompat.retrieval.leftovers import create_in_folder, require_empty
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
    """A folder of embeddings. Use :meth:`create` or :meth:`open`.

    The object shows one committed state: the opened state, or the state after its own last commit. A killed process leaves
    the last committed state. Many processes can read while another writes.

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
        """Switch this object to a committed state."""
        super().__init__(self.path, manifest)

    @classmethod
    def create(
        cls,
        path: str | Path,
        model_or_fingerprint: Model,
        dim: int | None = None,
        metric: Metric | None = None,
        index: str = "Flat",
    ) -> Self:
        """Create an empty gallery.

        Args:
            path: an empty or new folder.
            model_or_fingerprint: the default model for :meth:`add`.
            dim: the model's embedding dimension; required with a fingerprint.
            metric: ``cosine``, ``ip`` or ``l2``. By default the model's own, or cosine for a fingerprint.
            index: faiss factory string, e.g. ``Flat``, ``HNSW32``, ``IVF1024,Flat``, ``IVF1024,PQ64`` or ``SQ8``.

        Raises:
            XcompatError: the folder is not empty, or the dimension, metric or index is unknown.
        """
        folder = Path(path)
        require_empty(folder)
        version = stored_version(model_or_fingerprint, dim)
        if dim is not None and dim != version.dim:
            raise XcompatError(f"{version.fingerprint} stores {version.dim} dimensions, not {dim}; remove dim")
        metric = metric or own_metric(model_or_fingerprint)
        require_metric(model_or_fingerprint, metric)
        make_index(index, version.dim, metric)  # raises for an unknown index or metric
        manifest = Manifest(metric=metric, index=index, versions=(version,))
        with create_in_folder(folder):
            return cls(folder, write_manifest(folder, manifest))

    @classmethod
    def from_faiss(
        cls,
        path: str | Path,
        index: str | Path,
        ids: Sequence[str] | None,
        model_or_fingerprint: Model,
        metadata: Sequence[Mapping[str, object] | None] | None = None,
    ) -> Self:
        """Adopt an existing faiss index in place, without copying vectors.

        Args:
            path: the gallery folder, empty or new.
            index: the index file. The gallery refuses a changed file; :meth:`resync` accepts added vectors.
            ids: an id per vector, in the order of addition; None to use the ids in the index. For an inverted file with its own
                ids, item N is the vector with id N. If the given ids equal the index's ids, each belongs to the vector
                with this id.
            model_or_fingerprint: the model that made the vectors.
            metadata: a JSON object or None per vector.

        Raises:
            XcompatError: the index cannot be read, has another dimension or non-finite vectors, or ids are missing.
        """
        return cls(path, adopt_faiss(Path(path), Path(index), ids, model_or_fingerprint, metadata)[0])

    def resync(self, ids: Sequence[str] | None = None, metadata: Sequence[Mapping[str, object] | None] | None = None) -> int:
        """Accept vectors added to the adopted index. Removed items stay removed.

        Args:
            ids: ids for all vectors of the index, in order; None if no vector was added, e.g. for a copied file.
            metadata: metadata for all vectors of the index; None to keep the known metadata.

        Returns:
            The generation number.

        Raises:
            XcompatError: known vectors changed, ids do not match, or another process writes.
        """
        with self._rewriting() as staging:
            resync_faiss(staging, ids, metadata)
        return self.generation

    @classmethod
    def open(cls, path: str | Path, generation: int | None = None) -> Self:
        """Open a gallery. Only the manifest is read.

        Args:
            path: its folder.
            generation: number of an earlier state; None to use the current state.
        """
        return cls(path, read_state(Path(path), generation))

    # ------------------------------------------------------------------------------------------------------- writing

    def staging(self) -> Staging:
        """Return the uncommitted changes; the first call takes the writer lock."""
        if self._staging is None:
            self._staging = Staging(self.path)
        return self._staging

    @contextmanager
    def _rewriting(self) -> Iterator[Staging]:
        """Commit pending changes, hold the writer lock, and show the result."""
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
        metadata: Sequence[Mapping[str, object] | None] | None = None,
        version: Model | None = None,
        side_info_NS: ArrayLike | None = None,
        replace: bool = False,
        side_info_by: Model | None = None,
        same_originals: bool = False,
    ) -> None:
        """Add items; they become visible after :meth:`commit`.

        Args:
            embeds_ND: (N, D) embeddings as output by the model; with a fingerprint, as stored. To check the
                model, use `xcompat gallery doctor`.
            ids: N new strings.
            metadata: N JSON objects or Nones, for filters and hits.
            version: the embeddings' model; by default the gallery's first.
            side_info_NS: (N, S) side-information, for methods that map galleries with it.
            replace: whether to replace items with the same id.
            side_info_by: the model of the side-information; maps for other models are then refused.
            same_originals: whether replaced items have the same originals, so that their cached new embeddings stay valid.

        Raises:
            XcompatError: see :func:`~xcompat.retrieval.items.check_items`; an id exists; side-information is incomplete or from
                different models; another process writes.
            FingerprintMismatchError: no single model could search all embeddings. With ``replace``, :meth:`commit` checks it.
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
        """Remove items after :meth:`commit`; a rollback restores them.

        Args:
            ids: the items' ids.

        Raises:
            XcompatError: an id is not in the gallery, or another process writes.
        """
        self._change(lambda staging: staging.remove(list(ids)))

    def _change(self, change: Callable[[Staging], None]) -> None:
        """Prepare a change; if it fails, keep earlier ones, or release the lock."""
        staging = self.staging()
        try:
            change(staging)
        finally:
            if staging.is_empty:
                self.close()

    def commit(self, by: str = "add") -> int:
        """Publish all changes as one generation.

        Args:
            by: operation name, shown by ``xcompat gallery info``.

        Returns:
            The generation number.

        Raises:
            FingerprintMismatchError: no single model could search all items. Also replace the items of other models, or
                discard the changes with :meth:`close`.
        """
        if self._staging is not None:
            self.show(self._staging.commit(by))
            self.close()
        return self.generation

    def close(self) -> None:
        """Discard uncommitted changes and release the writer lock."""
        if self._staging is not None:
            self._staging.release()
            self._staging = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def rollback(self, generation: int | None = None) -> int:
        """Return to an earlier state as a new generation; later states are kept.

        Args:
            generation: state number; None to undo the last change. Repeat to go further back.

        Returns:
            The new generation number.

        Raises:
            XcompatError: the state no longer exists, or another process writes.
        """
        self.close()
        with self:
            self.show(self.staging().roll_back(generation))
        return self.generation

    def add_alias(self, alias: Fingerprint) -> Fingerprint:
        """Record another fingerprint for the stored embeddings' model, so maps for either fit.

        Args:
            alias: the other fingerprint, e.g. ``Fingerprint.from_string("clip-b32")``.

        Returns:
            The version with the alias.

        Raises:
            XcompatError: the alias fits several versions, the weights differ, or another process writes.
        """
        with self._rewriting() as staging:
            version = aliased_version(staging.manifest.present() or staging.manifest.versions, alias)
            if alias.digest not in (version.digest, *version.shares):
                shared = version.model_copy(update={"shares": (*version.shares, alias.digest)})
                versions = [shared if each.digest == version.digest else each for each in staging.manifest.versions]
                staging.publish("alias", versions=tuple(versions))
        return version.fingerprint

    def upgrade(self, model: CompatModel, batch_size: int = 65536, spread: Executor = run_locally) -> int:
        """Map stored embeddings to a newer model's space, without images. A rollback undoes the upgrade until a compaction.

        Embeddings by the old model are mapped, and embeddings that compatible models stored in the old space.

        Args:
            model: a model that maps galleries, e.g. FCT.
            batch_size: embeddings in memory at a time; with workers, a few times as many.
            spread: where to run; by default in this process.

        Returns:
            The number of mapped embeddings.

        Raises:
            XcompatError: the model maps no galleries, or no embedding of this gallery, or another process writes.
            FingerprintMismatchError: the model can neither map nor search some embeddings.
        """
        with self:
            segments_to_map(self, model)  # refuse before waiting changes are committed
            with self._rewriting() as staging:
                return upgrade_gallery(staging, model, batch_size, spread)

    def compact(self) -> int:
        """Join small segments, drop removed rows and earlier generations; return the bytes freed."""
        before = folder_size(self.path)
        with self._rewriting() as staging:
            compact_gallery(staging)
        return before - folder_size(self.path)

    def generations(self) -> list[Manifest]:
        """Return all states that can be opened or restored, oldest first."""
        return kept_manifests(self.path)
