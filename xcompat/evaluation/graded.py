"""Retrieval with graded judgements (BEIR, TREC): exact nDCG@k, MRR@k, Recall@k and mAP; ties count against the query."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from xcompat.core.distributed import gather_objects, my_share
from xcompat.core.errors import XcompatError
from xcompat.evaluation.counting import count_at_least
from xcompat.evaluation.identities import Ids, as_ids
from xcompat.evaluation.labelled import Items, LabelledPairs
from xcompat.evaluation.ranking import Hits, ranks_from_counts
from xcompat.evaluation.scores import Embeddings, join_ties

Qrels = Mapping[Any, Mapping[Any, float]]
"""Query id -> item id -> gain. Items without a gain above 0 are not relevant."""

_BLOCK_JUDGED = 2**14  # most relevant items per block of queries


@dataclass(frozen=True)
class UnusableIds:
    """Ids of unusable judgements and queries.

    Args:
        unjudged: queries without judgements, which are excluded.
        without_relevant: queries without relevant items, which count 0, as in trec_eval.
        unknown_queries: judged queries missing from the queries, which are excluded.
        unknown_items: relevant items missing from the gallery, which count as not found.
    """

    unjudged: list[Hashable]
    without_relevant: list[Hashable]
    unknown_queries: list[Hashable]
    unknown_items: list[Hashable]


@dataclass(frozen=True)
class GradedQueries:
    """Results of the judged queries.

    Args:
        rows_J: int64 ``(J,)`` rows of the judged queries.
        values: metric -> float64 ``(J,)``.
        first_hit_ranks_J: int64 ``(J,)`` items before the best relevant item, 0 for a first place; G if none can be found.
        unusable: ids of unusable judgements and queries.
    """

    rows_J: np.ndarray
    values: Mapping[str, np.ndarray]
    first_hit_ranks_J: np.ndarray
    unusable: UnusableIds

    def means(self) -> dict[str, float]:
        """Return the mean of every metric over the judged queries."""
        return {metric: float(values_J.mean()) for metric, values_J in self.values.items()}


def graded_metrics(
    queries_QD: Embeddings,
    gallery_GD: Embeddings,
    query_ids: Ids,
    gallery_ids: Ids,
    qrels: Qrels,
    ks: Sequence[int] = (10,),
) -> dict[str, float]:
    """Return nDCG, MRR and Recall at each k and mAP over the judged queries, equal to trec_eval without ties.

    nDCG@k is Σ gain/log2(1 + rank) divided by the best ranking's value (Järvelin and Kekäläinen 2002). The other metrics count
    each gain above 0 as relevant. An item ranks after all others with its score and a lower gain.

    Args:
        queries_QD: ``(Q, D)`` embeddings, compared by cosine.
        gallery_GD: ``(G, D)`` embeddings.
        query_ids: Q distinct hashables.
        gallery_ids: G distinct hashables.
        qrels: query id -> item id -> gain.
        ks: cut-offs, at least 1.

    Returns:
        ``ndcg@k``, ``mrr@k`` and ``recall@k`` for each k, and ``map``, each in [0, 1].

    Raises:
        XcompatError: invalid input, or no query is judged.

    Example:
        >>> gallery = np.array([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0]])
        >>> found = graded_metrics(gallery[:1], gallery, ["q"], ["a", "b", "c"], {"q": {"b": 2, "c": 1}}, ks=(2,))
        >>> {metric: round(value, 3) for metric, value in found.items()}
        {'ndcg@2': 0.48, 'mrr@2': 0.5, 'recall@2': 0.5, 'map': 0.583}
    """
    return graded_per_query(queries_QD, gallery_GD, query_ids, gallery_ids, qrels, ks).means()


def graded_per_query(
    queries_QD: Embeddings,
    gallery_GD: Embeddings,
    query_ids: Ids,
    gallery_ids: Ids,
    qrels: Qrels,
    ks: Sequence[int] = (10,),
    *,
    chunk_size: int = 1024,
    shared: bool = False,
) -> GradedQueries:
    """Return the metrics of :func:`graded_metrics` for each judged query, for intervals and flips.

    Args:
        queries_QD: ``(Q, D)`` embeddings.
        gallery_GD: ``(G, D)`` embeddings.
        query_ids: Q distinct hashables.
        gallery_ids: G distinct hashables.
        qrels: query id -> item id -> gain.
        ks: cut-offs, at least 1.
        chunk_size: queries per block; affects memory only.
        shared: whether all processes call this to share the work; all get the result.

    Returns:
        A number of each metric per judged query.

    Raises:
        XcompatError: invalid input, or no query is judged.
    """
    pairs = LabelledPairs(Items(queries_QD, query_ids), Items(gallery_GD, gallery_ids), chunk_size, ("queries", "gallery"))
    return grade(pairs, query_ids, gallery_ids, qrels, ks, shared)


def grade(
    pairs: LabelledPairs, query_ids: Ids, gallery_ids: Ids, qrels: Qrels, ks: Sequence[int], shared: bool = False
) -> GradedQueries:
    """Return the metrics of :func:`graded_metrics` for given pairs.

    Args:
        pairs: queries and gallery.
        query_ids: Q distinct hashables.
        gallery_ids: G distinct hashables.
        qrels: query id -> item id -> gain.
        ks: cut-offs, at least 1.
        shared: as in :func:`graded_per_query`.

    Raises:
        XcompatError: invalid ids, or no query is judged.
    """
    if not ks or any(k < 1 for k in ks):
        raise XcompatError(f"ks must be one or more cut-offs of at least 1, not {tuple(ks)}")
    judged = _JudgementRows(qrels, query_ids, gallery_ids)
    place_of = {row: place for place, row in enumerate(judged.rows_J.tolist())}
    values = {metric: np.zeros(len(judged.rows_J)) for metric in _metrics(ks)}
    first_J = np.full(len(judged.rows_J), pairs.n_gallery, dtype=np.int64)
    mine = [(rows_B, *_measure(pairs, rows_B, judged, ks)) for rows_B in judged.blocks(pairs.chunk_size, shared)]
    for rows_B, first_B, found in (block for of_one in gather_objects(mine, shared) for block in of_one):
        places_B = [place_of[row] for row in rows_B.tolist()]
        first_J[places_B] = first_B
        for metric, found_B in found.items():
            values[metric][places_B] = found_B
    return GradedQueries(judged.rows_J, values, first_J, judged.unusable)


def find_unusable_ids(query_ids: Ids, gallery_ids: Ids, qrels: Qrels) -> UnusableIds:
    """Return the ids of unusable judgements and queries.

    Args:
        query_ids: Q distinct hashables.
        gallery_ids: G distinct hashables.
        qrels: query id -> item id -> gain.

    Returns:
        The ids.

    Raises:
        XcompatError: two rows have the same id, or no query is judged.
    """
    return _JudgementRows(qrels, query_ids, gallery_ids).unusable


def _rows(ids: Ids, what: str) -> dict[Hashable, int]:
    names = as_ids(ids, len(ids), what)
    rows = {name: row for row, name in enumerate(names)}
    if len(rows) != len(names):
        twice = next(name for row, name in enumerate(names) if rows[name] != row)
        raise XcompatError(f"{what}: two rows have the id {twice!r}; judgements need unique ids")
    return rows


class _JudgementRows:
    """Judgements by row: relevant gallery items of each query, and the best ranking's gains."""

    def __init__(self, qrels: Qrels, query_ids: Ids, gallery_ids: Ids) -> None:
        row_of, column_of = _rows(query_ids, "queries"), _rows(gallery_ids, "gallery")
        self.columns: dict[int, np.ndarray] = {}
        self.gains: dict[int, np.ndarray] = {}
        self.ideal: dict[int, np.ndarray] = {}
        rows, without_relevant, unknown_items = list[int](), list[Hashable](), dict[Hashable, None]()
        for name, row in row_of.items():
            if not (of_query := qrels.get(name)):
                continue
            rows.append(row)
            for item, gain in of_query.items():
                if not math.isfinite(gain):
                    raise XcompatError(f"the gain of {item!r} for the query {name!r} is {gain}; give finite numbers")
            relevant = {item: float(gain) for item, gain in of_query.items() if gain > 0}
            if not relevant:
                without_relevant.append(name)
                continue
            unknown_items |= dict.fromkeys(item for item in relevant if item not in column_of)
            there = {column_of[item]: gain for item, gain in relevant.items() if item in column_of}
            self.ideal[row] = np.array(sorted(relevant.values(), reverse=True))
            if there:
                self.columns[row], self.gains[row] = np.array(list(there), np.int64), np.array(list(there.values()))
        if not rows:
            raise XcompatError("no query has a judgement; use the same ids for queries and judgements")
        self.rows_J = np.array(rows, dtype=np.int64)
        unjudged = [name for name in row_of if not qrels.get(name)]
        unknown_queries = [name for name in qrels if name not in row_of]
        self.unusable = UnusableIds(unjudged, without_relevant, unknown_queries, list(unknown_items))

    def blocks(self, chunk_size: int, shared: bool) -> Iterator[np.ndarray]:
        """Yield rows of queries with relevant gallery items, in blocks small enough for memory."""
        block, judged = list[int](), 0
        for row in my_share(np.array(sorted(self.columns), dtype=np.int64), shared).tolist():
            if block and (len(block) == chunk_size or judged + len(self.columns[row]) > _BLOCK_JUDGED):
                yield np.array(block)
                block, judged = [], 0
            block.append(row)
            judged += len(self.columns[row])
        if block:
            yield np.array(block)


def _metrics(ks: Sequence[int]) -> list[str]:
    return [f"{metric}@{k}" for k in ks for metric in ("ndcg", "mrr", "recall")] + ["map"]


def _measure(
    pairs: LabelledPairs, rows_B: np.ndarray, judged: _JudgementRows, ks: Sequence[int]
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return first-hit ranks and metrics for a query block."""
    hits, gains_N = _rank(pairs, rows_B, judged)
    all_B = np.array([len(judged.ideal[row]) for row in rows_B.tolist()])
    discounted_N = gains_N / np.log2(1 + hits.ranks_N)

    def total(values_N: np.ndarray) -> np.ndarray:
        return np.bincount(hits.owners_N, weights=values_N, minlength=len(rows_B))

    found: dict[str, np.ndarray] = {}
    for k in ks:
        within_N = hits.ranks_N <= k
        best_B = np.array([_discounted_gain(judged.ideal[row][:k]) for row in rows_B.tolist()])
        found[f"ndcg@{k}"] = total(discounted_N * within_N) / best_B
        found[f"mrr@{k}"] = np.where(hits.first_hit_ranks_B < k, 1 / (1 + hits.first_hit_ranks_B), 0.0)
        found[f"recall@{k}"] = total(within_N.astype(float)) / all_B
    return hits.first_hit_ranks_B, found | {"map": total(hits.places_N / hits.ranks_N) / all_B}


def _discounted_gain(gains_k: np.ndarray) -> float:
    return float((gains_k / np.log2(np.arange(2, len(gains_k) + 2))).sum())


def _rank(pairs: LabelledPairs, rows_B: np.ndarray, judged: _JudgementRows) -> tuple[Hits, np.ndarray]:
    """Return the ranked relevant items and their gains, in the order of :class:`Hits`."""
    of_each = [judged.columns[row] for row in rows_B.tolist()]
    counts_B = np.array([len(columns) for columns in of_each])
    owners_N, columns_N = np.repeat(np.arange(len(rows_B)), counts_B), np.concatenate(of_each)
    gains_N = np.concatenate([judged.gains[row] for row in rows_B.tolist()])
    scores_N = join_ties(pairs.scores(rows_B, owners_N, columns_N).cpu().numpy(), owners_N, pairs.tie_margin)
    order_N = np.lexsort((-gains_N, scores_N, owners_N))  # of equal scores the lower gain ranks first
    scores_N, gains_N = scores_N[order_N], gains_N[order_N]
    on_device = (torch.from_numpy(each).to(pairs.device) for each in (scores_N - pairs.tie_margin, owners_N, counts_B))
    at_least_N = count_at_least(pairs, rows_B, *on_device).cpu().numpy()
    return ranks_from_counts(rows_B, counts_B, owners_N, scores_N, at_least_N, pairs.tie_margin), gains_N
