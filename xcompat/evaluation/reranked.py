"""Rankings whose first hits are re-ranked by the new model, with exact ranks."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from xcompat.core.errors import XcompatError
from xcompat.evaluation.labelled import EXCLUDED_SCORE, LabelledPairs
from xcompat.evaluation.scores import UNIT, Embeddings, ExactRows
from xcompat.score_scale import OLD_WEIGHT, combine_scores

_FEW = 1 / 64
"""Share of all pairs below which scores one by one are faster than a whole product."""
_MOST_NUMBERS = 2**24
"""Most numbers of candidate embeddings in memory at once (128 MB)."""


class FirstHits(NamedTuple):
    """First hits of each query, best first.

    Args:
        pairs: the searched pairs.
        columns_Qk: (Q, k) gallery rows, int64.
        old_Qk: (Q, k) scores in the old space, float64.
        new_Qk: (Q, k) scores in the new model's own space, float64.
    """

    pairs: LabelledPairs
    columns_Qk: torch.Tensor
    old_Qk: torch.Tensor
    new_Qk: torch.Tensor

    def rerank(self, candidates: int, old_weight: float) -> LabelledPairs:
        """Return the pairs with new scores for the first hits.

        Args:
            candidates: number of re-ranked hits per query, at most k.
            old_weight: weight of the old scores.
        """
        columns_Qk, old_Qk, new_Qk = (each[:, :candidates] for each in self[1:])
        scores_Qk = combine_scores(old_Qk / UNIT, new_Qk / UNIT, old_weight)
        return self.pairs.with_first(columns_Qk, torch.where(old_Qk > EXCLUDED_SCORE, scores_Qk, -torch.inf))


def rerank(
    pairs: LabelledPairs,
    queries_QE: Embeddings,
    gallery_GE: Embeddings,
    candidates: int,
    old_weight: float = OLD_WEIGHT,
) -> LabelledPairs:
    """Re-rank the first hits of each query with the new model's embeddings.

    The score of a candidate becomes ``(1 - w) · new + w · old``, its cosines in the new model's own space and in the old space,
    as in :class:`xcompat.retrieval.Reranker`. Candidates stay before all other items.

    Args:
        pairs: queries in the old gallery's space, and the old gallery.
        queries_QE: (Q, E) the same queries in the new model's own space.
        gallery_GE: (G, E) the same items in the new space.
        candidates: number k of re-ranked hits per query; the first rows win ties.
        old_weight: w.

    Returns:
        The same pairs with new scores.

    Raises:
        XcompatError: numbers of rows or dimensions differ.

    Example:
        >>> from xcompat.evaluation.labelled import Items
        >>> from xcompat.evaluation.ranking import rank
        >>> old, new = np.array([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0]]), np.eye(3)
        >>> pairs = LabelledPairs(Items(old[:1], "b"), Items(old, "abc"))
        >>> rank(pairs).first_hit_ranks_Q, rank(rerank(pairs, new[1:2], new, candidates=2)).first_hit_ranks_Q
        (array([1]), array([0]))
    """
    return find_first_hits(pairs, queries_QE, gallery_GE, candidates).rerank(candidates, old_weight)


def find_first_hits(pairs: LabelledPairs, queries_QE: Embeddings, gallery_GE: Embeddings, candidates: int) -> FirstHits:
    """Return the first hits of each query with both scores, to re-rank them in several ways.

    Args:
        pairs: queries in the old gallery's space, and the old gallery.
        queries_QE: (Q, E) the same queries in the new model's own space.
        gallery_GE: (G, E) the same items in the new space.
        candidates: number k of hits per query; the first rows win ties.

    Raises:
        XcompatError: numbers of rows or dimensions differ.
    """
    own_queries, own_gallery = (
        ExactRows(rows, f"the new model's {what}", pairs.device)
        for rows, what in ((queries_QE, "queries"), (gallery_GE, "gallery"))
    )
    if (len(own_queries), len(own_gallery)) != (pairs.n_queries, pairs.n_gallery) or own_queries.dim != own_gallery.dim:
        raise XcompatError(
            "the new model's own embeddings differ in number or dimension; embed the same queries and items with the new model"
        )
    k = min(candidates, pairs.n_gallery)
    columns_Qk = torch.zeros((pairs.n_queries, k), dtype=torch.int64, device=pairs.device)
    scores_Qk = torch.full((pairs.n_queries, k), EXCLUDED_SCORE, dtype=torch.float64, device=pairs.device)
    for rows_B in pairs.blocks_of(np.arange(pairs.n_queries)):
        for rows, columns, scores_RC in pairs.tiles(rows_B):
            at = slice(int(rows_B[0]) + rows.start, int(rows_B[0]) + rows.stop)
            scores_Qk[at], columns_Qk[at] = _merge(scores_Qk[at], columns_Qk[at], scores_RC, columns.start)
    size = max(1, _MOST_NUMBERS // (k * own_gallery.dim))
    new_Qk = torch.empty_like(scores_Qk)
    for start in range(0, pairs.n_queries, size):
        here = slice(start, min(start + size, pairs.n_queries))
        rows_N, places_Bk = columns_Qk[here].unique(return_inverse=True)
        asked_BE, items_NE = own_queries.block(here), own_gallery.block(rows_N.cpu().numpy())
        if k >= _FEW * len(rows_N):  # exact in any order of the sums
            new_Qk[here] = (asked_BE @ items_NE.T).gather(1, places_Bk)
        else:
            new_Qk[here] = torch.linalg.vecdot(asked_BE[:, None], items_NE[places_Bk])
    return FirstHits(pairs, columns_Qk, scores_Qk, new_Qk)


def _merge(
    scores_Rk: torch.Tensor, columns_Rk: torch.Tensor, scores_RC: torch.Tensor, start: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge candidates with a tile of items, best first; the first columns win ties."""
    k = min(scores_Rk.shape[1], scores_RC.shape[1])
    best_Rk, found_Rk = scores_RC.topk(k, dim=1)
    is_tied_R = (scores_RC == best_Rk[:, -1:]).sum(dim=1) > (best_Rk == best_Rk[:, -1:]).sum(dim=1)
    if is_tied_R.any():  # topk breaks ties arbitrarily
        ordered = scores_RC[is_tied_R].sort(dim=1, descending=True, stable=True)
        best_Rk[is_tied_R], found_Rk[is_tied_R] = ordered.values[:, :k], ordered.indices[:, :k]
    by_column = found_Rk.sort(dim=1)
    all_scores = torch.cat([scores_Rk, best_Rk.gather(1, by_column.indices)], dim=1)
    all_columns = torch.cat([columns_Rk, by_column.values + start], dim=1)
    order = all_scores.sort(dim=1, descending=True, stable=True)
    kept = order.indices[:, : scores_Rk.shape[1]]
    return order.values[:, : scores_Rk.shape[1]], all_columns.gather(1, kept)
