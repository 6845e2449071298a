"""Counts of gallery items at or above each positive: ranks without sorting."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from xcompat.evaluation.labelled import LabelledPairs
from xcompat.evaluation.scores import SCORE_BITS, blocks, sort_keys, sorted_keys, true_places

_MOST_ROWS = 2 ** (62 - SCORE_BITS)
_TILE = {"cpu": 2**18, "cuda": 2**22}  # scores per step: fits a core's cache, or fills a GPU
_BUCKETS_PER_POSITIVE = 32
_BUCKETS = (64, 16384)


def count_at_least(
    pairs: LabelledPairs,
    rows_B: np.ndarray,
    scores_N: torch.Tensor,
    owners_N: torch.Tensor,
    positives_B: torch.Tensor,
    scores_BG: torch.Tensor | None = None,
) -> torch.Tensor:
    """Count the gallery items that score at least as high as each positive does for its query.

    Args:
        pairs: queries and gallery.
        rows_B: query rows.
        scores_N: float64 exact scores of their positives, by query, then ascending.
        owners_N: int64 query of each positive, as a position in ``rows_B``, ascending.
        positives_B: int64 positives per query, at least 1.
        scores_BG: the queries' :meth:`~xcompat.evaluation.labelled.LabelledPairs.whole_tile`, if computed.

    Returns:
        int64 ``(N,)``, including the positive itself.
    """
    ends = [0, *positives_B.cumsum(0).tolist()]
    fewest, most = _BUCKETS
    n_buckets = max(fewest, min(most, _BUCKETS_PER_POSITIVE * int(positives_B.max())))
    counts_N = torch.zeros_like(owners_N)
    whole = slice(0, len(rows_B)), slice(0, pairs.n_gallery)
    for rows, columns, scores_RC in pairs.tiles(rows_B) if scores_BG is None else [(*whole, scores_BG)]:
        n_rows = max(1, min(_MOST_ROWS, _TILE[pairs.device.type] // (columns.stop - columns.start)))
        for part in blocks(len(scores_RC), n_rows):
            first = rows.start + part.start
            its = slice(ends[first], ends[rows.start + part.stop])
            counts_N[its] += _count_in_tile(scores_RC[part], scores_N[its], owners_N[its] - first, n_buckets)
    return counts_N


def _count_in_tile(scores_RC: torch.Tensor, positives_N: torch.Tensor, owners_N: torch.Tensor, n_buckets: int) -> torch.Tensor:
    """Count the scores at or above each positive of its row, without sorting the row.

    Each row is cut into equal buckets from its lowest to its highest positive. Only scores in the bucket of a positive, a few per
    cent, are sorted; buckets decide the others.
    """
    n_rows, n_columns = scores_RC.shape
    n_R = torch.bincount(owners_N, minlength=n_rows)
    last_R = n_R.cumsum(0)
    lowest_R, highest_R = positives_N[last_R - n_R], positives_N[last_R - 1]
    width_R = ((highest_R - lowest_R) / (n_buckets - 4)).ceil().clamp(min=1)
    origin_R = lowest_R - 2 * width_R  # so scores below all positives share no bucket with one
    first_R = torch.arange(0, n_rows * n_buckets, n_buckets, dtype=torch.int32, device=scores_RC.device)

    def buckets(scores: torch.Tensor, rows: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        # Each step is monotonic in a row and rounds equal scores alike; a fused kernel might not.
        steps = (scores - rows(origin_R)).mul_(rows(1 / width_R)).clamp_(0, n_buckets - 1)
        return steps.to(torch.int32).add_(rows(first_R))

    bucket_N = buckets(positives_N, lambda values_R: values_R.index_select(0, owners_N))
    bucket_RC = buckets(scores_RC, lambda values_R: values_R[:, None]).view(-1)
    shared = torch.zeros(n_rows * n_buckets, dtype=torch.bool, device=scores_RC.device)
    shared.index_fill_(0, bucket_N.long(), 1)
    passed = torch.bincount(bucket_RC, minlength=len(shared)).index_fill_(0, bucket_N.long(), 0).cumsum_(0)
    above_N = passed[n_buckets - 1 :: n_buckets].index_select(0, owners_N) - passed.index_select(0, bucket_N)

    undecided = true_places(shared.index_select(0, bucket_RC))
    rows = undecided // n_columns
    keys = sort_keys(scores_RC.reshape(-1).index_select(0, undecided), rows)
    # A positive's merged position minus the positives before it counts the scores below it.
    # That includes undecided scores of earlier rows; the cumulative sum below corrects for them.
    merged = sorted_keys(torch.cat([keys * 2 + 1, sort_keys(positives_N, owners_N) * 2]))
    below_N = true_places(merged & 1 == 0) - torch.arange(len(owners_N), device=merged.device)
    return above_N + torch.bincount(rows, minlength=n_rows).cumsum_(0).index_select(0, owners_N) - below_N
