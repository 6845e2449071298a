"""A gallery: embeddings of one or several models on disk, searched by any model that is compatible with all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from xcompat.errors import XcompatError
from xcompat.fingerprint import Fingerprint
from xcompat.retrieval.adopted import read_state
from xcompat.retrieval.backend import check_place, open_backend
from xcompat.retrieval.items import check_items
from xcompat.retrieval.leftovers import making, require_empty
from xcompat.retrieval.manifest import Manifest, Metric, kept_manifests, require_generation, write_manifest
from xcompat.retrieval.merging import Merge
from xcompat.retrieval.searching import Hit, Search
from xcompat.retrieval.segment import Segment, id_hashes
from xcompat.retrieval.staging import Staging
from xcompat.retrieval.versions import stored_embeddings, stored_version

if TYPE_CHECKING:
    from xcompat.models.base import CompatModel
    from xcompat.retrieval.fallback import OldQueries
    from xcompat.retrieval.versions import Model


class Gallery:
    """A folder of embeddings; make one with :meth:`create`, read one with :meth:`open`.

    What is added or removed becomes visible with :meth:`commit`, to this object and to everyone who opens the gallery later. A
    process that is killed leaves the last committed state. Any number of processes may read while one writes.

    Args:
        path: the folder.
        manifest: a committed state.

    Example:
        >>> import tempfile
        >>> made = Gallery.create(tempfile.mkdtemp() + "/g", Fingerprint.from_string("clip"), dim=3)
        >>> made.add(np.eye(3, dtype=np.float32), ids=["x", "y", "z"])
        >>> _ = made.commit()
        >>> [[hit.id for hit in hits] for hits in made.search([[0.1, 1.0, 0.2]], Fingerprint.from_string("clip"), top_k=2)]
        [['y', 'z']]
    """

    def __init__(self, path: str | Path, manifest: Manifest) -> None:
        self.path = Path(path)
        self._staging: Staging | None = None
        self.show(manifest)

    def show(self, manifest: Manifest) -> None:
        """Show a committed state from now on."""
        self.manifest = manifest
        self.backend = open_backend(manifest)
        self.segments = [Segment(self.path, record, self.backend) for record in manifest.segments]
        self._samples: dict[str, NDArray[np.float32]] = {}

    @classmethod
    def create(
        cls,
        path: str | Path,
        model_or_fingerprint: Model,
        dim: int | None = None,
        metric: Metric = "cosine",
        index: str = "Flat",
        milvus: str | None = None,
    ) -> Self:
        """Make an empty gallery.

        Args:
            path: a folder that does not exist or is empty.
            model_or_fingerprint: whose embeddings :meth:`add` takes unless told otherwise.
            dim: of these; a model knows its own.
            metric: ``cosine``, ``ip`` or ``l2``.
            index: faiss factory string: ``Flat``, ``HNSW32``, ``IVF1024,Flat``, ``IVF1024,PQ64``, ``SQ8`` ...
            milvus: URI of a Milvus (a file for milvus-lite, or ``http://host:19530``) that holds the vectors; None for faiss.

        Returns:
            The gallery.

        Raises:
            XcompatError: something is there already, the dimension is not known, faiss knows no such index, or no Milvus answers.
        """
        folder = Path(path)
        require_empty(folder)
        version = stored_version(model_or_fingerprint, dim)
        if dim is not None and dim != version.dim:
            raise XcompatError(f"{version.fingerprint} stores {version.dim} dimensions, not {dim}; leave dim out")
        milvus = check_place(metric, index, version.dim, milvus)
        manifest = Manifest(metric=metric, index=index, milvus=milvus, versions=(version,))
        with making(folder):
            return cls(folder, write_manifest(folder, manifest))

    @classmethod
    def from_faiss(
        cls,
        path: str | Path,
        index: str | Path,
        ids: Sequence[str],
        model_or_fingerprint: Model,
        metadata: Sequence[dict[str, Any] | None] | None = None,
    ) -> Self:
        """Adopt a faiss index that exists already: it stays where it is, and no vector is copied.

        Args:
            path: folder of the gallery; it must not exist or be empty.
            index: the index file. Once it changes it is refused; what is only added to it is taken over by :meth:`resync`.
            ids: the id of each vector, in the order in which they were added to the index.
            model_or_fingerprint: the model that made the vectors.
            metadata: of each vector.

        Returns:
            The gallery.

        Raises:
            XcompatError: the index cannot be read, is of another dimension, holds what is not finite, or a vector has no id.
        """
        from xcompat.retrieval.adoption import adopt_faiss

        return cls(path, adopt_faiss(Path(path), Path(index), ids, model_or_fingerprint, metadata)[0])

    def resync(self, ids: Sequence[str] | None = None, metadata: Sequence[dict[str, Any] | None] | None = None) -> int:
        """Take over vectors that were added to the adopted index; what was removed here stays so.

        Args:
            ids: of all its vectors, in order; None where none was added, as after a copy of the file.
            metadata: of all of them; None for what is known, and none of the new ones.

        Returns:
            The generation's number; the one before if nothing changed.

        Raises:
            XcompatError: vectors that are known were removed, altered or moved, ids do not fit, or another process writes.
        """
        from xcompat.retrieval.adoption import resync_faiss

        with self:
            self.show(resync_faiss(self, ids, metadata))
        return self.generation

    @classmethod
    def open(cls, path: str | Path, generation: int | None = None) -> Self:
        """Open a gallery; nothing but its manifest is read before it is needed.

        Args:
            path: its folder.
            generation: an earlier state to look into; None for the current one.

        Returns:
            The gallery.
        """
        return cls(path, read_state(Path(path), generation))

    # ------------------------------------------------------------------------------------------------------- content

    def __len__(self) -> int:
        """Return the number of items."""
        return self.manifest.rows

    @property
    def generation(self) -> int:
        """Number of the state that this object shows."""
        return self.manifest.generation

    @property
    def metric(self) -> Metric:
        """How embeddings are compared."""
        return self.backend.metric

    @property
    def versions(self) -> list[Fingerprint]:
        """The models whose embeddings are there, or the one it was made for while it is empty."""
        return [version.fingerprint for version in self.manifest.present() or self.manifest.versions[:1]]

    def counts(self) -> dict[Fingerprint, int]:
        """Return how many items there are of each version."""
        totals = dict.fromkeys(self.versions, 0)
        for record in self.manifest.segments:
            totals[self.manifest.version(record.version).fingerprint] += record.rows - record.n_removed
        return totals

    def find(self, ids: Sequence[str]) -> list[Fingerprint | None]:
        """Return which model embedded each of some items; None for ids that are not there."""
        found: list[Fingerprint | None] = [None] * len(ids)
        hashes_N = id_hashes(ids)
        for segment in self.segments:
            version = self.manifest.version(segment.record.version).fingerprint
            with self.reading():
                for position in segment.rows_of(ids, hashes_N)[0].tolist():
                    found[position] = version
        return found

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Say of what cannot be read that this state was compacted away, where it was (:class:`GenerationGoneError`)."""
        try:
            yield
        except (XcompatError, OSError):
            require_generation(self.path, self.generation)
            raise

    # ------------------------------------------------------------------------------------------------------- writing

    def staging(self) -> Staging:
        """Return the changes that wait for a commit, taking the writer's lock with the first."""
        if self._staging is None:
            self._staging = Staging(self.path, self.backend)
        return self._staging

    def begin(self) -> Staging:
        """Commit what waits, take the writer's lock and show the newest state: for changes of all that is there."""
        self.commit()
        staging = self.staging()
        self.show(staging.manifest)
        return staging

    def add(
        self,
        embeds_ND: ArrayLike,
        ids: Sequence[str],
        metadata: Sequence[dict[str, Any] | None] | None = None,
        version: Model | None = None,
        side_info_NS: ArrayLike | None = None,
        replace: bool = False,
    ) -> None:
        """Add items; they are there after :meth:`commit`.

        Args:
            embeds_ND: (N, D) what the model makes of them; with a fingerprint, embeddings as they shall be stored. Vectors do not
                show which model made them: of another's of as many dimensions only `xcompat gallery doctor` knows.
            ids: N strings, none of which is in the gallery.
            metadata: N JSON objects, for filters and for whoever reads the hits.
            version: the model that made the embeddings; the one the gallery was made for unless given.
            side_info_NS: (N, S) side-information, for methods that map galleries with it.
            replace: whether items whose ids are there take their place.

        Raises:
            XcompatError: see :func:`~xcompat.retrieval.items.check_items`; an id is there already; another process writes.
        """
        record, stored_ND = stored_embeddings(version, embeds_ND, self.manifest.versions)
        items = check_items(stored_ND, ids, metadata, side_info_NS, self.metric)
        if len(items):
            self._change(lambda staging: staging.add(record, items, replace))

    def remove(self, ids: Sequence[str]) -> None:
        """Remove items; they are gone after :meth:`commit`, and back after a rollback.

        Args:
            ids: which.

        Raises:
            XcompatError: one is not there, or another process writes.
        """
        self._change(lambda staging: staging.remove(list(ids)))

    def _change(self, change: Callable[[Staging], None]) -> None:
        """Prepare a change; one that is refused leaves what was prepared before, and no lock where that is nothing."""
        staging = self.staging()
        try:
            change(staging)
        finally:
            if staging.is_empty:
                self.close()

    def commit(self, by: str = "add") -> int:
        """Publish all changes since the last commit as one generation.

        Args:
            by: what made it, for ``xcompat gallery info``.

        Returns:
            The generation's number.
        """
        if self._staging is not None:
            self.show(self._staging.commit(by))
            self.close()
        return self.generation

    def publish(self, by: str, dropped: Sequence[str]) -> None:
        """Commit new segments in the place of others (see :meth:`Staging.commit`)."""
        self.show(self.staging().commit(by, dropped))
        self.close()

    def close(self) -> None:
        """Forget changes that were not committed, and let others write."""
        if self._staging is not None:
            self._staging.release()
            self._staging = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def rollback(self, generation: int) -> int:
        """Return to an earlier state, as a new generation; what came between can be returned to as well.

        Args:
            generation: which.

        Returns:
            The new generation's number.

        Raises:
            XcompatError: it is not kept, or another process writes.
        """
        self.close()
        with self:
            self.show(self.staging().roll_back(generation))
        return self.generation

    def upgrade(self, model: CompatModel, batch_size: int = 65536) -> int:
        """Map stored embeddings towards a newer model, without images; the old ones can be returned to until a compaction.

        Mapped are those of the model's old one, and those that compatible models stored in the old one's space.

        Args:
            model: one that maps galleries, such as FCT.
            batch_size: embeddings in memory at a time.

        Returns:
            How many were mapped.

        Raises:
            XcompatError: the model maps no galleries, nothing that it maps is here, or another process writes.
            FingerprintMismatchError: something is here that it neither maps nor searches.
        """
        from xcompat.retrieval.upgrading import upgrade_gallery

        with self:
            return upgrade_gallery(self, model, batch_size)

    def compact(self) -> int:
        """Join small segments, drop removed rows, and forget every earlier generation.

        Returns:
            Bytes that were freed.
        """
        from xcompat.retrieval.compaction import compact_gallery

        with self:
            return compact_gallery(self)

    def generations(self) -> list[Manifest]:
        """Return every state that can be opened or rolled back to, the oldest first."""
        return kept_manifests(self.path)

    def verify(self) -> None:
        """Read every file and compare it with what was written.

        Raises:
            XcompatError: naming each that is missing, truncated or altered. Vectors in a Milvus are counted, not compared.
        """
        if wrong := self.damage():
            raise XcompatError(f"{self.path} is damaged: {'; '.join(wrong)}; roll back, or restore these files from a copy")

    def damage(self) -> list[str]:
        """Return what :meth:`verify` finds, one line for each file; empty when the gallery is whole."""
        from xcompat.retrieval.damage import find_damage

        return find_damage(self)

    # ----------------------------------------------------------------------------------------------------- searching

    def search(
        self,
        embeds_QD: ArrayLike,
        model_or_fingerprint: Model,
        top_k: int = 10,
        where: dict[str, Any] | None = None,
        merge: Merge = "standardised",
        parameters: str | None = None,
        old_queries: OldQueries | None = None,
    ) -> list[list[Hit]]:
        """Find the nearest items of each query, in the view that the query's model shares with each stored version.

        Args:
            embeds_QD: (Q, D) what the model makes of the queries.
            model_or_fingerprint: the query model; a fingerprint stands for vectors that are compared as they are.
            top_k: most hits for each query.
            where: keys and values (or lists of values) that an item's metadata must have.
            merge: how versions become one ranking, see :func:`~xcompat.retrieval.merging.merge_candidates`.
            parameters: how hard approximate indexes look, such as ``nprobe=32,efSearch=128``.
            old_queries: what is asked instead where the model is not sure.

        Returns:
            Hits for each query, the best first.

        Raises:
            FingerprintMismatchError: the model is not compatible with a version that is stored here.
            XcompatError: a query is zero or not finite, or of another dimension, or ``top_k`` is less than 1.
        """
        search = Search(self.segments, self.manifest, self._samples)
        with self.reading():
            return search.find(embeds_QD, model_or_fingerprint, top_k, where, merge, parameters, old_queries)
