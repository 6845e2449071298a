"""Read-only view of a committed gallery state."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from xcompat.core.errors import XcompatError, nearest
from xcompat.core.fingerprint import Fingerprint
from xcompat.retrieval.manifest import CURRENT, Manifest, Metric, is_current_whole, require_generation
from xcompat.retrieval.searching import Hit, HitOrder, Merge, Search
from xcompat.retrieval.segment import Segment, id_hashes

if TYPE_CHECKING:
    from xcompat.retrieval.fallback import OldQueries
    from xcompat.retrieval.versions import Model


SAMPLED, FACET_VALUES = 2000, 50
"""Items to read per segment for filter values, and the most values of a key."""


class Snapshot:
    """A committed gallery state. It never changes, but a compaction may delete it.

    Args:
        path: the gallery folder.
        manifest: the state.
    """

    def __init__(self, path: str | Path, manifest: Manifest) -> None:
        self.path = Path(path)
        self.manifest = manifest
        self.segments = [Segment(self.path, record, manifest.metric) for record in manifest.segments]
        self._search = Search(self.segments, manifest, self.path)

    def __len__(self) -> int:
        return self.manifest.rows

    @property
    def generation(self) -> int:
        """Number of the committed state."""
        return self.manifest.generation

    @property
    def metric(self) -> Metric:
        """How embeddings are compared."""
        return self.manifest.metric

    @property
    def versions(self) -> list[Fingerprint]:
        """The models with embeddings; for an empty gallery, its first model."""
        return [version.fingerprint for version in self.manifest.present() or self.manifest.versions[:1]]

    def counts(self) -> dict[Fingerprint, int]:
        """Count the items per version."""
        totals = dict.fromkeys(self.versions, 0)
        for record in self.manifest.segments:
            totals[self.manifest.version(record.version).fingerprint] += record.rows - record.n_removed
        return totals

    def find(self, ids: Sequence[str]) -> list[Fingerprint | None]:
        """Return the model that embedded each item; None for unknown ids."""
        found: list[Fingerprint | None] = [None] * len(ids)
        hashes_N = id_hashes(ids)
        for segment in self.segments:
            version = self.manifest.version(segment.record.version).fingerprint
            with self.reading():
                for position in segment.rows_of(ids, hashes_N)[0].tolist():
                    found[position] = version
        return found

    def metadata(self, ids: Sequence[str]) -> list[dict[str, Any] | None]:
        """Return the items' metadata; None if unknown."""
        found: list[dict[str, Any] | None] = [None] * len(ids)
        hashes_N = id_hashes(ids)
        for segment in self.segments:
            with self.reading():
                positions, rows = segment.rows_of(ids, hashes_N)
                for position, about in zip(positions.tolist(), segment.metadata(rows), strict=True):
                    found[position] = about
        return found

    def vectors(self, ids: Sequence[str]) -> dict[str, NDArray[np.float32]]:
        """Return stored vectors, id -> (d,), without unknown ids."""
        found: dict[str, NDArray[np.float32]] = {}
        hashes_N = id_hashes(ids)
        for segment in self.segments:
            with self.reading():
                positions, rows = segment.rows_of(ids, hashes_N)
                if len(rows):
                    found.update(zip([ids[place] for place in positions.tolist()], segment.vectors(rows), strict=True))
        return found

    def facets(self, sample: int = SAMPLED, most: int = FACET_VALUES) -> dict[str, list[object]]:
        """Return metadata keys with repeated values, with their values, most frequent first.

        Args:
            sample: items to read per segment, evenly spaced.
            most: keys with more values are excluded.
        """
        seen: dict[str, Counter[str]] = {}
        for segment in self.segments:
            present = segment.present()
            rows = present[np.unique(np.linspace(0, len(present) - 1, min(sample, len(present))).astype(np.int64))]
            with self.reading():
                for about in segment.metadata(rows):
                    for key, value in (about or {}).items():
                        seen.setdefault(key, Counter())[json.dumps(value)] += 1
        kept = {key: counts for key, counts in seen.items() if len(counts) <= most and max(counts.values()) > 1}
        return {key: [json.loads(value) for value, _ in counts.most_common()] for key, counts in sorted(kept.items())}

    def require_keys(self, wanted: Iterable[str]) -> None:
        """Raise for filter keys missing from all items. It reads every item.

        Raises:
            XcompatError: names the key and the nearest existing keys.
        """
        known: set[str] = set()
        for segment in self.segments:
            with self.reading():
                known |= segment.keys()
        for key in wanted if len(self) else ():
            if key not in known:
                there = nearest(key, known) if known else "they have no metadata"
                raise XcompatError(f"no item of {self.path} has the key {key!r}; {there}")

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Raise :class:`GenerationGoneError` for failed reads after a compaction."""
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
        where: Mapping[str, object] | None = None,
        merge: Merge = "calibrated",
        parameters: str | None = None,
        old_queries: OldQueries | None = None,
        group_by: str | None = None,
        rerank: HitOrder | None = None,
        rerank_queries: ArrayLike | None = None,
    ) -> list[list[Hit]]:
        """Find each query's nearest items, in every stored version.

        Args:
            embeds_QD: (Q, D) query embeddings as output by the model.
            model_or_fingerprint: the query model; with a fingerprint, embeddings are compared unchanged.
            top_k: largest number of hits per query.
            where: metadata filter: key -> value, or accepted values (list, tuple, set or array).
            merge: how to rank several versions' hits (:func:`~xcompat.retrieval.searching.merge_candidates`).
            parameters: search effort for approximate indexes, e.g. ``nprobe=32,efSearch=128``.
            old_queries: the old model's queries, to use for low confidence.
            group_by: metadata key, e.g. ``document``: only the best item per value is a hit; items without the key are single
                hits. At most the 16,384 nearest items are grouped.
            rerank: a :class:`~xcompat.retrieval.reranking.Reranker`, which rescores the first hits.
            rerank_queries: (Q, E) queries as output by the re-ranking model; None if it is the query model.

        Returns:
            Hits for each query, best first.

        Raises:
            FingerprintMismatchError: the model is not compatible with a stored version.
            XcompatError: a query is zero, not finite or has another dimension, ``top_k`` is less than 1, or ``where`` is invalid.
        """
        depth = top_k if rerank is None else max(top_k, rerank.candidates)
        with self.reading():
            hits = self._search.find(embeds_QD, model_or_fingerprint, depth, where, merge, parameters, old_queries, group_by)
        if rerank is None:
            return hits
        ordered = rerank.order(embeds_QD if rerank_queries is None else rerank_queries, hits, self)
        return [each[:top_k] for each in ordered]

    def verify(self) -> None:
        """Compare every file with its checksum.

        Raises:
            XcompatError: lists each damaged file.
        """
        if wrong := self.damage():
            raise XcompatError(f"{self.path} is damaged: {'; '.join(wrong)}; roll back, or restore these files from a copy")

    def damage(self) -> list[str]:
        """Return a line per damaged file, even while other processes write.

        Raises:
            GenerationGoneError: a compaction deleted this state meanwhile.
        """
        wrong = []
        with self.reading():
            if not is_current_whole(self.path):
                wrong.append(f"{self.path / CURRENT} has changed since it was committed")
            for segment in self.segments:
                try:
                    wrong += segment.find_damage()
                except XcompatError as error:
                    wrong.append(str(error))
        if wrong:
            require_generation(self.path, self.generation)
        return wrong
