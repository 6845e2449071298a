"""Search across a gallery's versions, with one merged ranking."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from xcompat.core.errors import XcompatError, nearest
from xcompat.core.fingerprint import Fingerprint
from xcompat.core.progress import notice_once
from xcompat.retrieval.items import checked_embeddings
from xcompat.retrieval.manifest import Manifest, Metric, VersionRecord
from xcompat.retrieval.segment import Segment, plain_filter
from xcompat.retrieval.versions import (
    as_float32,
    fits,
    gallery_scales,
    notice_missing_old,
    query_confidence,
    query_views,
    takes_old_queries,
)

if TYPE_CHECKING:
    from xcompat.retrieval.fallback import OldQueries
    from xcompat.retrieval.versions import Model


Merge = Literal["calibrated", "standardised", "raw"]

SAMPLE = 2048
"""Stored embeddings per version for mean and deviation of a query's scores."""
FEWEST_SAMPLED = 64
"""Sample size below which mean and deviation are shrunk towards those of all versions."""
GROUPED_HITS, GROUPED_AT_MOST = 4, 16384
"""Hits to examine per requested group, and the maximum per query."""
HITS_AT_ONCE = 2**20
"""Largest number of hits in memory while grouping."""


class Hit(NamedTuple):
    """A search result.

    Args:
        id: the item's id.
        score: cosine, inner product, or negative squared distance: higher is nearer. Scores from several versions are scaled to
            the oldest, so a single threshold works for all.
        version: the model that made the item's embedding.
        metadata: the item's metadata.
        confidence: probability that the query finds no less than the old model's; None if unknown.
        group: value of the metadata key used for grouping.
        standing: ranking key if score scales are unknown: deviations by which the score exceeds the query's mean in this version
            (:func:`merge_candidates`). None if the score ranks the hits.
    """

    id: str
    score: float
    version: Fingerprint
    metadata: dict[str, Any] | None
    confidence: float | None = None
    group: Any = None
    standing: float | None = None


class SearchedGallery(Protocol):
    """A searched gallery, e.g. a :class:`~xcompat.retrieval.snapshot.Snapshot`."""

    path: Path
    manifest: Manifest

    @property
    def generation(self) -> int:
        """State number."""

    @property
    def metric(self) -> Metric:
        """How embeddings are compared."""

    def vectors(self, ids: Sequence[str]) -> dict[str, NDArray[np.float32]]:
        """Return the items' stored vectors."""


class HitOrder(Protocol):
    """Order of hits, e.g. by a :class:`~xcompat.retrieval.reranking.Reranker`."""

    candidates: int
    """Number of hits needed per query."""

    def order(
        self, queries_QD: ArrayLike, hits_Q: Sequence[Sequence[Hit]], gallery: SearchedGallery | None = None
    ) -> list[list[Hit]]:
        """Return each query's hits in their new order."""


class Candidates(NamedTuple):
    """A version's nearest stored embeddings.

    Args:
        scores_Qk: (Q, k) scores, best first, padded with -inf.
        segments_Qk: (Q, k) segment numbers.
        rows_Qk: (Q, k) rows in these segments, padded with -1.
        sample_QS: (Q, S) scores against a sample of the version; required for ``standardised``.
    """

    scores_Qk: NDArray[np.float32]
    segments_Qk: NDArray[np.int64]
    rows_Qk: NDArray[np.int64]
    sample_QS: NDArray[np.float32] | None = None


class Ranked(NamedTuple):
    """The nearest stored embeddings in all versions.

    Args:
        scores_Qk: (Q, k) computed scores.
        segments_Qk: (Q, k) segment numbers.
        rows_Qk: (Q, k) rows in these segments, padded with -1.
        keys_Qk: (Q, k) ranking keys, descending.
    """

    scores_Qk: NDArray[np.float32]
    segments_Qk: NDArray[np.int64]
    rows_Qk: NDArray[np.int64]
    keys_Qk: NDArray[np.float32]


class Queries(NamedTuple):
    """Queries in a version's space.

    Args:
        version: the version.
        embeds_Qd: (Q, d) float32, checked.
        sample_QS: as in :class:`Candidates`.
        scale_Q2: (Q, 2) slopes and offsets for scores; None to use raw scores.
    """

    version: VersionRecord
    embeds_Qd: NDArray[np.float32]
    sample_QS: NDArray[np.float32] | None = None
    scale_Q2: NDArray[np.float32] | None = None

    def take(self, rows: NDArray[np.int64]) -> Queries:
        """Return the queries in the given rows."""
        parts = (None if part is None else part[rows] for part in self[2:])
        return Queries(self.version, self.embeds_Qd[rows], *parts)

    def scale_scores(self, scores_Qk: NDArray[np.float32]) -> NDArray[np.float32]:
        """Scale scores (Q, k) to the oldest version."""
        return scores_Qk if self.scale_Q2 is None else scores_Qk * self.scale_Q2[:, :1] + self.scale_Q2[:, 1:]


class Search:
    """Search engine for a gallery state; caches samples from its versions."""

    def __init__(self, segments: Sequence[Segment], manifest: Manifest, place: object = "GALLERY") -> None:
        self.segments, self.manifest, self.place = segments, manifest, place
        self._samples: dict[str, NDArray[np.float32]] = {}

    def find(
        self,
        embeds_QD: ArrayLike,
        model: Model,
        top_k: int,
        where: Mapping[str, object] | None,
        merge: Merge,
        parameters: str | None,
        old_queries: OldQueries | None,
        group_by: str | None,
    ) -> list[list[Hit]]:
        """Search all versions; arguments as in :meth:`~xcompat.retrieval.snapshot.Snapshot.search`."""
        if top_k < 1:
            raise XcompatError(f"top_k is {top_k}; it must be at least 1")
        where = None if where is None else plain_filter(where)
        views = query_views(model, embeds_QD, self.manifest, self.place)
        if not any(takes_old_queries(model, version) for version, _ in views):
            old_queries = None
        elif old_queries is None:
            notice_missing_old(model)
        confidence_Q = query_confidence(model, embeds_QD, self.manifest)
        scales = self._scales(views, model, old_queries) if merge == "calibrated" and len(views) > 1 else None
        if merge == "calibrated" and scales is None:
            merge = "standardised"
        asked = []
        for number, (version, queries_Qd) in enumerate(views):
            if old_queries is not None:
                queries_Qd = old_queries.replace_or_mix(model, version, queries_Qd)
            if queries_Qd.shape[1] != version.dim:
                raise XcompatError(
                    f"the queries have {queries_Qd.shape[1]} dimensions, but the {version.fingerprint} embeddings {version.dim}"
                )
            queries_Qd = checked_embeddings(queries_Qd, self.manifest.metric, lambda row: f"query {row}")
            standardised = merge == "standardised" and len(views) > 1
            sample_QS = self._scores(queries_Qd, self._sample(version.digest)) if standardised else None
            asked.append(Queries(version, queries_Qd, sample_QS, scales[number] if scales is not None else None))
        if not asked:
            return [[] for _ in range(len(as_float32(embeds_QD)))]
        ranked = partial(self._rank_segments, where=where, merge=merge, parameters=parameters)
        hits = ranked(asked, top_k) if group_by is None else self._group_hits(ranked, asked, top_k, group_by)
        if confidence_Q is None:
            return hits
        sure = zip(hits, confidence_Q.tolist(), strict=True)
        return [[hit._replace(confidence=confidence) for hit in each] for each, confidence in sure]

    def _rank_segments(
        self, asked: list[Queries], k: int, where: Mapping[str, object] | None, merge: Merge, parameters: str | None
    ) -> list[list[Hit]]:
        found = []
        for queries in asked:
            each = self._candidates(queries.version, queries.embeds_Qd, k, where, parameters)
            found.append(each._replace(scores_Qk=queries.scale_scores(each.scores_Qk), sample_QS=queries.sample_QS))
        return self._hits(merge_candidates(found, k, merge), with_standing=len(found) > 1 and merge == "standardised")

    def _scales(
        self, views: Sequence[tuple[VersionRecord, NDArray[np.float32]]], model: Model, old_queries: OldQueries | None
    ) -> list[NDArray[np.float32]] | None:
        """Return slopes and offsets (Q, 2) per version.

        Mixed queries keep the new query's scale, which was fitted on mixed queries.
        """
        versions, count = [version for version, _ in views], len(views[0][1])
        scales = gallery_scales(model, versions, self.manifest.metric)
        if scales is None:
            return None
        scales_Q = [np.tile(np.array(scale, np.float32), (count, 1)) for scale in scales]
        if old_queries is not None and old_queries.share == 1:
            replaced_Q = old_queries.old_query_mask()
            of_old = gallery_scales(old_queries.model, versions, self.manifest.metric)
            for version, scale_Q2, scale in zip(versions, scales_Q, of_old or scales, strict=True):
                if fits(old_queries.model, version):
                    scale_Q2[replaced_Q] = scale
        return scales_Q

    def _group_hits(
        self, ranked: Callable[[list[Queries], int], list[list[Hit]]], asked: list[Queries], top_k: int, key: str
    ) -> list[list[Hit]]:
        """Return each query's best hits from different groups; search deeper until there are enough."""
        best: list[list[Hit]] = [[] for _ in asked[0].embeds_Qd]
        open_n, k, most = np.arange(len(best)), top_k, max(top_k, GROUPED_AT_MOST)
        while len(open_n):
            k, wanting = min(k * GROUPED_HITS, most), []
            for part in np.array_split(open_n, -(-len(open_n) * k // HITS_AT_ONCE)):
                found = ranked([queries.take(part) for queries in asked], k)
                for row, hits in zip(part.tolist(), found, strict=True):
                    best[row] = best_of_groups(hits, key)[:top_k]
                    if len(best[row]) < top_k and len(hits) == k:
                        wanting.append(row)
            open_n = np.array(wanting, np.int64)
            if len(open_n) and k == most:
                notice_once(
                    f"the {most:,} nearest items of a query have fewer than {top_k} values of {key!r}; the search stopped there"
                )
                break
        return best

    def _candidates(
        self,
        version: VersionRecord,
        queries_Qd: NDArray[np.float32],
        top_k: int,
        where: Mapping[str, object] | None,
        parameters: str | None,
    ) -> Candidates:
        """Find a version's nearest items; parameters apply to approximate indexes."""
        parts = []
        all_exact = parameters is not None and all(segment.index.is_exact for segment in self.segments)  # then they raise
        for number, segment in enumerate(self.segments):
            if segment.record.version != version.digest:
                continue
            effort = None if segment.index.is_exact and not all_exact else parameters
            scores_Qk, rows_Qk = segment.search(queries_Qd, top_k, where, effort)
            parts.append(Candidates(scores_Qk, np.full_like(rows_Qk, number), rows_Qk))
        joined = Candidates(*(np.concatenate([part[place] for part in parts], axis=1) for place in range(3)))
        return Candidates(*merge_candidates([joined], top_k, "raw")[:3])

    def _scores(self, queries_Qd: NDArray[np.float32], stored_Sd: NDArray[np.float32]) -> NDArray[np.float32]:
        products_QS = queries_Qd @ stored_Sd.T
        if self.manifest.metric != "l2":
            return products_QS
        return 2 * products_QS - (queries_Qd**2).sum(axis=1, keepdims=True) - (stored_Sd**2).sum(axis=1)

    def _sample(self, version: str) -> NDArray[np.float32]:
        """Return about ``SAMPLE`` evenly spaced embeddings, without removed ones."""
        if version not in self._samples:
            mine = [segment for segment in self.segments if segment.record.version == version]
            total = sum(map(len, mine))
            parts = []
            for segment in mine:
                count = max(1, round(min(SAMPLE, total) * len(segment) / total))
                places = np.unique(np.linspace(0, len(segment) - 1, count).astype(np.int64))
                parts.append(segment.vectors(segment.present()[places]))
            self._samples[version] = np.concatenate(parts)
        return self._samples[version]

    def _hits(self, ranked: Ranked, with_standing: bool) -> list[list[Hit]]:
        scores_Qk, segments_Qk, rows_Qk, keys_Qk = ranked
        ids, metadata = np.empty(rows_Qk.shape, object), np.empty(rows_Qk.shape, object)
        versions = [self.manifest.version(segment.record.version).fingerprint for segment in self.segments]
        for number in np.unique(segments_Qk[rows_Qk >= 0]).tolist():
            here = (segments_Qk == number) & (rows_Qk >= 0)
            ids[here] = self.segments[number].ids(rows_Qk[here])
            metadata[here] = self.segments[number].metadata(rows_Qk[here])
        found = (ids, scores_Qk, segments_Qk, metadata, rows_Qk, keys_Qk)
        return [
            [
                Hit(name, score, versions[segment], about, standing=key if with_standing else None)
                for name, score, segment, about, row, key in zip(*columns, strict=True)
                if row >= 0
            ]
            for columns in zip(*(array.tolist() for array in found), strict=True)
        ]


def best_of_groups(hits: Sequence[Hit], key: str) -> list[Hit]:
    """Return each group's first hit; an item without the key is its own group.

    Args:
        hits: best first.
        key: metadata key.

    Example:
        >>> about = [{"document": "a"}, {"document": "a"}, None, {"document": "b"}]
        >>> hits = [Hit(str(row), 1.0, Fingerprint("0", "m"), each) for row, each in enumerate(about)]
        >>> [(hit.id, hit.group) for hit in best_of_groups(hits, "document")]
        [('0', 'a'), ('2', None), ('3', 'b')]
    """
    seen: set[str] = set()
    best = []
    for hit in hits:
        group = (hit.metadata or {}).get(key)
        known = json.dumps(group, sort_keys=True)  # values may be lists
        if group is None or known not in seen:
            seen.add(known)
            best.append(hit._replace(group=group))
    return best


def merge_candidates(found: Sequence[Candidates], k: int, merge: Merge) -> Ranked:
    """Merge several versions' candidates into a single ranking.

    - ``calibrated`` compares scores already on a common scale (:func:`~xcompat.retrieval.versions.score_scale`).
    - ``raw`` compares scores unchanged.
    - ``standardised`` subtracts the mean of the query's scores against a sample of the version, and divides by their deviation.
      It assumes similar items in all versions. With n < 64 sampled scores, their statistics weigh n / 64, and all versions'
      statistics the rest.

    Args:
        found: candidates per version.
        k: number of hits to keep.
        merge: ``calibrated``, ``standardised`` or ``raw``.

    Raises:
        XcompatError: ``merge`` is unknown.

    Example:
        >>> one = Candidates(np.array([[0.9, 0.2]]), np.array([[0, 0]]), np.array([[5, 6]]))
        >>> other = Candidates(np.array([[0.5, 0.4]]), np.array([[1, 1]]), np.array([[7, 8]]))
        >>> merge_candidates([one, other], 3, "raw").rows_Qk.tolist()
        [[5, 7, 8]]
    """
    if merge not in get_args(Merge):
        raise XcompatError(f"unknown merge {merge!r} for scores of several versions; {nearest(merge, get_args(Merge))}")
    keys = _keys(found, merge) if len(found) > 1 else [found[0].scores_Qk]
    key_QK = np.concatenate(keys, axis=1)
    scores_QK, segments_QK, rows_QK = (np.concatenate([each[part] for each in found], axis=1) for part in range(3))
    key_QK = np.where(rows_QK < 0, -np.inf, key_QK)
    order_Qk = np.argsort(-key_QK, axis=1, kind="stable")[:, :k]
    scores_Qk, segments_Qk, rows_Qk = (np.take_along_axis(array, order_Qk, 1) for array in (scores_QK, segments_QK, rows_QK))
    return Ranked(scores_Qk, segments_Qk, rows_Qk, np.take_along_axis(key_QK, order_Qk, 1))


def _keys(found: Sequence[Candidates], merge: Merge) -> list[NDArray[np.float32]]:
    if merge != "standardised":
        return [each.scores_Qk for each in found]
    samples = [each.sample_QS for each in found if each.sample_QS is not None]
    keys = []
    for each, (mean_Q1, std_Q1) in zip(found, _means_and_deviations(samples), strict=True):
        scores_Qk = np.where(each.rows_Qk < 0, -np.inf, each.scores_Qk)  # dividing faiss's lowest float overflows
        keys.append(((scores_Qk - mean_Q1) / np.maximum(std_Q1, 1e-6)).astype(np.float32, copy=False))
    return keys


def _means_and_deviations(samples: Sequence[NDArray[np.float32]]) -> list[tuple[NDArray[np.float32], NDArray[np.float32]]]:
    """Return each sample's (Q, S) mean and deviation (Q, 1), shrunk towards all samples if small.

    No score among n exceeds the mean by more than sqrt(n - 1) deviations, so a version's only item would always score 0.
    """
    own = [(sample_QS.mean(1, keepdims=True), sample_QS.std(1, keepdims=True)) for sample_QS in samples]
    weights = [min(sample_QS.shape[1] / FEWEST_SAMPLED, 1.0) for sample_QS in samples]
    if min(weights) == 1:
        return own
    all_QS = np.concatenate(samples, axis=1)
    mean_Q1, std_Q1 = all_QS.mean(1, keepdims=True), all_QS.std(1, keepdims=True)
    return [
        each if weight == 1 else (weight * each[0] + (1 - weight) * mean_Q1, weight * each[1] + (1 - weight) * std_Q1)
        for weight, each in zip(weights, own, strict=True)
    ]
