"""Credible old embeddings: embeddings near their class's centre."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from xcompat.core.errors import XcompatError
from xcompat.models.old_knowledge import Rows

_ROWS = 16384
"""Embeddings per block."""


def credible_mask(embeds_ND: Rows, labels_N: NDArray[np.integer], keep: float = 0.9) -> NDArray[np.bool_]:
    """Return a mask without the old embeddings farthest from their class's centre (MixBCT §3.4, denoising).

    Embeddings are L2-normalised per sample, then each dimension over the data set; distances to the class mean are Euclidean (as
    in the authors' code). Distances are rounded to nine decimals, in units of a dimension's root mean square; ties keep the
    data's order.

    Args:
        embeds_ND: old embeddings, optionally memory-mapped. Rows with NaN are unreadable samples.
        labels_N: integer classes, any values in any order.
        keep: share of each class to keep, in (0, 1].

    Returns:
        (N,) bool, true for ⌈keep·n⌉ of the n readable samples of each class.

    Raises:
        XcompatError: lengths differ, there is no sample, or ``keep`` is out of range.

    Example:
        >>> embeds = np.array([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.0, 2.0]])
        >>> credible_mask(embeds, np.array([0, 0, 0, 1]), keep=0.6).tolist()
        [True, True, False, True]
    """
    labels = np.asarray(labels_N)
    if len(embeds_ND) != len(labels) or not len(labels):
        raise XcompatError(f"credible samples need a label per embedding; found {len(labels)} for {len(embeds_ND)} embeddings")
    if not 0 < keep <= 1:
        raise XcompatError(f"the credible share of a class must be above 0 and at most 1, not {keep}; MixBCT uses 0.9")
    codes_N = np.unique(labels, return_inverse=True)[1]
    distances_N = _distances_to_centres(embeds_ND, codes_N)
    readable_N = np.isfinite(distances_N)
    counts_C = np.bincount(codes_N, weights=readable_N).astype(np.int64)
    # 0.55 * 100 is slightly above 55, but its ceiling must be 55
    kept_C = np.ceil(np.round(keep * counts_C, 6)).astype(np.int64)
    order_N = np.lexsort((distances_N, codes_N))  # by class, then nearest first, unreadable ones last; stable
    starts_C = np.searchsorted(codes_N[order_N], np.arange(len(counts_C)))
    rank_N = np.empty(len(codes_N), dtype=np.int64)
    rank_N[order_N] = np.arange(len(codes_N)) - starts_C[codes_N[order_N]]
    return rank_N < kept_C[codes_N]


def _distances_to_centres(embeds_ND: Rows, codes_N: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return rounded distances to class centres, NaN for unreadable samples."""
    dim, classes = embeds_ND.shape[1], int(codes_N.max()) + 1
    squares_D = np.zeros(dim)
    sums_CD = torch.zeros(classes, dim, dtype=torch.float64)
    counts_C = np.zeros(classes)
    for rows, unit_BD in _unit_blocks(embeds_ND):
        readable_B = np.isfinite(unit_BD).all(axis=1)
        codes_B, unit_BD = codes_N[rows][readable_B], unit_BD[readable_B]
        squares_D += np.square(unit_BD).sum(axis=0)
        sums_CD.index_add_(0, torch.from_numpy(codes_B), torch.from_numpy(unit_BD))  # many times faster than np.add.at
        counts_C += np.bincount(codes_B, minlength=classes)
    root_mean_square_D = np.sqrt(squares_D / max(counts_C.sum(), 1))
    root_mean_square_D[root_mean_square_D == 0] = 1
    centres_CD = sums_CD.numpy() / np.maximum(counts_C, 1)[:, None]
    distances_N = np.empty(len(codes_N))
    for rows, unit_BD in _unit_blocks(embeds_ND):
        away_BD = (unit_BD - centres_CD[codes_N[rows]]) / root_mean_square_D
        distances_N[rows] = np.sqrt(np.square(away_BD).sum(axis=1))
    return np.round(distances_N, 9)


def _unit_blocks(embeds_ND: Rows) -> Iterator[tuple[slice, NDArray[np.float64]]]:
    for start in range(0, len(embeds_ND), _ROWS):
        rows = slice(start, start + _ROWS)
        rows_BD = np.asarray(embeds_ND[rows], np.float64)
        norms_B1 = np.linalg.norm(rows_BD, axis=1, keepdims=True)
        yield rows, rows_BD / np.where(norms_B1 == 0, 1, norms_B1)
