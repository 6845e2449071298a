"""Exact retrieval metrics: ranks without sorting, pessimistic ties, memory bounded by the chunk size."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from xcompat.core.arrays import row_lengths
from xcompat.core.distributed import gather_objects
from xcompat.core.errors import XcompatError
from xcompat.core.precision import ieee_products
from xcompat.core.threads import cores, map_over_cores
from xcompat.evaluation.identities import Ids
from xcompat.evaluation.labelled import MATED_ROWS, Items, LabelledPairs
from xcompat.evaluation.scores import (
    UNIT,
    Embeddings,
    as_rows,
    blocks,
    pair_scores,
    rounding_error,
    to_float32,
    true_places,
)


def recall_at_k(
    queries_QD: Embeddings,
    gallery_GD: Embeddings,
    query_ids: Ids,
    gallery_ids: Ids,
    ks: Sequence[int] = (1, 5, 10),
    chunk_size: int = 1024,
) -> dict[int, float]:
    """Return the share of queries with a matching item among the first k.

    Args:
        queries_QD: ``(Q, D)`` embeddings, compared by cosine.
        gallery_GD: ``(G, D)`` embeddings.
        query_ids: Q hashables.
        gallery_ids: G hashables; equal ids match.
        ks: cut-offs, at least 1.
        chunk_size: rows per block; affects memory only.

    Returns:
        k -> fraction in [0, 1] of the queries with a match. Others are excluded; :func:`first_hit_ranks` marks them with -1.

    Raises:
        XcompatError: invalid input, or no query has a match.

    Example:
        >>> recall_at_k(np.eye(2), np.eye(2)[::-1], ["a", "b"], ["a", "b"], ks=(1, 2))
        {1: 0.0, 2: 1.0}
    """
    if not ks or any(k < 1 for k in ks):
        raise XcompatError(f"ks must be one or more cut-offs of at least 1, not {tuple(ks)}")
    ranks_Q = first_hit_ranks(queries_QD, gallery_GD, query_ids, gallery_ids, chunk_size)
    found_Q = ranks_Q[ranks_Q >= 0]
    if not found_Q.size:
        raise XcompatError("no query id occurs in the gallery; use the same ids on both sides")
    return {int(k): float((found_Q < k).mean()) for k in ks}


def first_hit_ranks(
    queries_QD: Embeddings,
    gallery_GD: Embeddings,
    query_ids: Ids,
    gallery_ids: Ids,
    chunk_size: int = 1024,
    shared: bool = False,
) -> np.ndarray:
    """Return the number of negatives before each query's best positive.

    Ties count against the query: a positive ranks after every negative with the same cosine. Other positives do not count.
    Nothing is sorted: the rank counts negatives that score at least as high, up to rounding
    (:func:`~xcompat.evaluation.scores.tie_margin`). The result is the same to the bit for every chunk size.

    Args:
        queries_QD: ``(Q, D)`` embeddings.
        gallery_GD: ``(G, D)`` embeddings.
        query_ids: Q hashables.
        gallery_ids: G hashables.
        chunk_size: rows per block.
        shared: whether all processes call this to share the work; all get the result.

    Returns:
        int64 ``(Q,)``, 0 for a first place, -1 without a match.

    Raises:
        XcompatError: invalid input.

    Example:
        >>> first_hit_ranks(np.ones((2, 3)), np.ones((4, 3)), ["a", "z"], ["a", "a", "b", "c"]).tolist()
        [2, -1]
    """
    queries, gallery = Items(queries_QD, query_ids), Items(gallery_GD, gallery_ids)
    return rank_first_hits(LabelledPairs(queries, gallery, chunk_size, label_names=("queries", "gallery")), shared)


def rank_first_hits(pairs: LabelledPairs, shared: bool = False) -> np.ndarray:
    """Return the ranks of :func:`first_hit_ranks` for labelled pairs.

    Args:
        pairs: queries and gallery, without re-ranked hits.
        shared: whether all processes call this to share the work; all get the result.
    """
    assert not pairs.is_reranked, "float32 products know no re-ranked hits; use rank"
    rows_N = pairs.mated_rows(shared)
    ranks_Q = np.full(pairs.n_queries, -1, dtype=np.int64)
    for ranked_N, ranks_N in gather_objects((rows_N, _rank(pairs, rows_N)), shared):
        ranks_Q[ranked_N] = ranks_N
    return ranks_Q


def _rank(pairs: LabelledPairs, rows_N: np.ndarray) -> np.ndarray:

    def rank(rows_B: np.ndarray) -> torch.Tensor:
        lowest_B = _best_positives(pairs, rows_B) - pairs.tie_margin
        # Without the positives that tie with the best one, only negatives remain.
        return _count_at_least(pairs, rows_B, lowest_B) - _count_positives(pairs, rows_B, lowest_B)

    if not len(rows_N):
        return np.zeros(0, dtype=np.int64)
    n_blocks = -(-len(rows_N) // (pairs.chunk_size * cores(pairs.device))) * cores(pairs.device)  # equally many per thread
    with ieee_products():
        parts = np.array_split(rows_N, min(n_blocks, len(rows_N)))
        ranks_N: np.ndarray = torch.cat(list(map_over_cores(rank, parts, pairs.device))).numpy(force=True)
        return ranks_N


def _best_positives(pairs: LabelledPairs, rows_B: np.ndarray) -> torch.Tensor:
    best_B = torch.full((len(rows_B),), -torch.inf, dtype=torch.float64, device=pairs.device)
    for part in blocks(len(rows_B), min(pairs.chunk_size, MATED_ROWS)):
        for scores_BC, positive_BC in pairs.class_tiles(rows_B[part]):
            best_B[part] = torch.maximum(best_B[part], scores_BC.masked_fill_(~positive_BC, -torch.inf).amax(dim=1))
    return best_B


def _count_positives(pairs: LabelledPairs, rows_B: np.ndarray, threshold_B: torch.Tensor) -> torch.Tensor:
    count_B = torch.zeros(len(rows_B), dtype=torch.int64, device=pairs.device)
    for part in blocks(len(rows_B), min(pairs.chunk_size, MATED_ROWS)):
        for scores_BC, positive_BC in pairs.class_tiles(rows_B[part]):
            count_B[part] += (positive_BC & (scores_BC >= threshold_B[part, None])).count_nonzero(dim=1)
    return count_B


def _count_at_least(pairs: LabelledPairs, rows_B: np.ndarray, threshold_B: torch.Tensor) -> torch.Tensor:
    """Count each query's gallery items at or above its threshold.

    A fast float32 product (not TF32) decides most pairs. Only those within its rounding error are scored exactly.
    """
    block_BD, margin = pairs.queries.block(rows_B), rounding_error(pairs.dim)
    narrow_BD = to_float32(block_BD)
    cosine_B1 = threshold_B[:, None] / UNIT
    surely_B1, maybe_B1 = (cosine_B1 + margin).float(), (cosine_B1 - margin).float()
    count_B = torch.zeros(len(block_BD), dtype=torch.int64, device=block_BD.device)
    for columns in blocks(pairs.n_gallery, pairs.chunk_size):
        items_CD = pairs.gallery.block(columns)
        scores_BC = narrow_BD @ to_float32(items_CD).T
        above_BC = scores_BC > surely_B1
        close_N = true_places(above_BC ^ (scores_BC >= maybe_B1))
        row_N, column_N = close_N // len(items_CD), close_N % len(items_CD)
        exact_N = pair_scores(block_BD, items_CD, row_N, column_N)
        among_B = torch.bincount(row_N[exact_N >= threshold_B[row_N]], minlength=len(block_BD))
        count_B += above_BC.count_nonzero(dim=1) + among_B
    return count_B


def negative_flip_rate(old_ranks_Q: np.ndarray, new_ranks_Q: np.ndarray, k: int = 1) -> float:
    """Return the share of queries that the old model answers within the first k and the new model does not.

    Negative flip rate of positive-congruent training (Yan et al. 2021), for retrieval.

    Args:
        old_ranks_Q: ``(Q,)`` from :func:`first_hit_ranks`.
        new_ranks_Q: ``(Q,)`` ranks of the same queries.
        k: cut-off of a correct answer.

    Returns:
        A fraction in [0, 1] of the queries with a match.

    Raises:
        XcompatError: the ranks belong to different queries, or no query has a match.

    Example:
        >>> negative_flip_rate(np.array([0, 0, 3, -1]), np.array([0, 1, 0, -1]))
        0.3333333333333333
    """
    old_ranks_Q, new_ranks_Q = np.asarray(old_ranks_Q), np.asarray(new_ranks_Q)
    if old_ranks_Q.shape != new_ranks_Q.shape or ((old_ranks_Q < 0) != (new_ranks_Q < 0)).any():
        raise XcompatError("old and new ranks belong to different queries or galleries; evaluate both models on the same items")
    known_Q = old_ranks_Q >= 0
    if not known_Q.any():
        raise XcompatError("no query has a match in the gallery; use the same ids on both sides")
    return float(((old_ranks_Q < k) & (new_ranks_Q >= k))[known_Q].mean())


def class_embeddings(prompt_embeds_CTD: Embeddings) -> np.ndarray:
    """Return an embedding per class: the normalised mean of its normalised prompt embeddings.

    Prompt ensembling of CLIP (Radford et al. 2021, section 3.1.4).

    Args:
        prompt_embeds_CTD: ``(C, T, D)`` T prompt embeddings ("a photo of a …") for each of C classes.

    Returns:
        float64 ``(C, D)``, L2-normalised.

    Raises:
        XcompatError: the prompts are not ``(C, T, D)``, not finite, or cancel out.

    Example:
        >>> class_embeddings(np.array([[[2.0, 0.0], [0.0, 5.0]]])).round(3).tolist()
        [[0.707, 0.707]]
    """
    if prompt_embeds_CTD.ndim != 3:
        raise XcompatError(f"prompt embeddings must be (classes, templates, dimensions), not {tuple(prompt_embeds_CTD.shape)}")
    n_classes, n_templates, dim = prompt_embeds_CTD.shape
    prompts = as_rows(prompt_embeds_CTD.reshape(n_classes * n_templates, dim), "prompt embeddings").astype(np.float64)
    norms = row_lengths(prompts)[:, None]
    if not np.isfinite(norms).all() or (norms == 0).any():
        raise XcompatError("prompt embeddings contain NaN, infinite or all-zero rows; embed the prompts again")
    means_CD = (prompts / norms).reshape(n_classes, n_templates, dim).mean(axis=1)
    lengths_C1 = np.linalg.norm(means_CD, axis=1, keepdims=True)
    if (lengths_C1 < 1e-12).any():
        raise XcompatError(f"the prompts of class {int(lengths_C1.argmin())} cancel out to zero; choose other templates")
    return means_CD / lengths_C1


def zero_shot_accuracy(image_embeds_ND: Embeddings, class_embeds_CD: Embeddings, labels_N: Ids, chunk_size: int = 1024) -> float:
    """Return the share of images nearest to their own class's embedding; ties count as wrong.

    Args:
        image_embeds_ND: ``(N, D)`` embeddings.
        class_embeds_CD: ``(C, D)`` from :func:`class_embeddings`.
        labels_N: N integers in [0, C).
        chunk_size: rows per block.

    Returns:
        A fraction in [0, 1].

    Raises:
        XcompatError: invalid input.

    Example:
        >>> zero_shot_accuracy(np.eye(3), np.eye(3), [0, 1, 1])
        0.6666666666666666
    """
    return float((zero_shot_ranks(image_embeds_ND, class_embeds_CD, labels_N, chunk_size) < 1).mean())


def zero_shot_ranks(
    image_embeds_ND: Embeddings, class_embeds_CD: Embeddings, labels_N: Ids, chunk_size: int = 1024
) -> np.ndarray:
    """Return the number of classes before each image's own, int64 ``(N,)``; arguments as in :func:`zero_shot_accuracy`."""
    ranks_N = first_hit_ranks(image_embeds_ND, class_embeds_CD, labels_N, range(len(class_embeds_CD)), chunk_size)
    if (ranks_N < 0).any():
        bad = int(np.flatnonzero(ranks_N < 0)[0])
        given = f"label {labels_N[bad]} of image {bad}"
        raise XcompatError(f"{given} is not one of the {len(class_embeds_CD)} classes; labels are integers from 0")
    return ranks_N
