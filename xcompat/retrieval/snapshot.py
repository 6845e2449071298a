"""One committed state of a gallery, as it is read: what is there, what is nearest to a query, what is damaged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import ArrayLike

from xcompat.errors import XcompatError
from xcompat.fingerprint import Fingerprint
from xcompat.retrieval.backend import open_backend
from xcompat.retrieval.manifest import CURRENT, Manifest, Metric, is_current_whole, require_generation
from xcompat.retrieval.searching import Hit, Merge, Search
from xcompat.retrieval.segment import Segment, id_hashes

if TYPE_CHECKING:
    from xcompat.retrieval.fallback import OldQueries
    from xcompat.retrieval.versions import Model


class Snapshot:
    """One committed state of a gallery; it changes no more, but a compaction may delete it.

    Args:
        path: the gallery's folder.
        manifest: the state.
    """

    def __init__(self, path: str | Path, manifest: Manifest) -> None:
        self.path = Path(path)
        self.manifest = manifest
        self.backend = open_backend(manifest)
        self.segments = [Segment(self.path, record, self.backend) for record in manifest.segments]
        self._search = Search(self.segments, manifest)

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
            merge: how versions become one ranking, see :func:`~xcompat.retrieval.searching.merge_candidates`.
            parameters: how hard approximate indexes look, such as ``nprobe=32,efSearch=128``.
            old_queries: what is asked instead where the model is not sure.

        Returns:
            Hits for each query, the best first.

        Raises:
            FingerprintMismatchError: the model is not compatible with a version that is stored here.
            XcompatError: a query is zero or not finite, or of another dimension, or ``top_k`` is less than 1.
        """
        with self.reading():
            return self._search.find(embeds_QD, model_or_fingerprint, top_k, where, merge, parameters, old_queries)

    def verify(self) -> None:
        """Read every file and compare it with what was written.

        Raises:
            XcompatError: naming each that is missing, truncated or altered. Vectors in a Milvus are counted, not compared.
        """
        if wrong := self.damage():
            raise XcompatError(f"{self.path} is damaged: {'; '.join(wrong)}; roll back, or restore these files from a copy")

    def damage(self) -> list[str]:
        """Return what :meth:`verify` finds, one line for each file, while others write; empty when the gallery is whole.

        Raises:
            GenerationGoneError: the state was compacted away meanwhile.
        """
        wrong = []
        with self.reading():
            if not is_current_whole(self.path):
                wrong.append(f"{self.path / CURRENT} has changed since it was committed")
            for segment in self.segments:
                try:
                    wrong += segment.damaged()
                except XcompatError as error:
                    wrong.append(str(error))
        if wrong:
            require_generation(self.path, self.generation)
        return wrong
