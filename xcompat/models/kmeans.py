"""k-means on a CPU or a CUDA device."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xcompat.core.distributed import device

Floats = NDArray[np.float64]
_STARTS, _ROUNDS, _TOLERANCE = 2, 300, 1e-4  # scikit-learn's, but for the starts


def find_centroids(rows_ND: Floats, count: int, seed: int, start_CD: Floats | None = None) -> Floats:
    """Return the k-means centroids (C, D): scikit-learn's on a CPU, and on a CUDA device the same up to rounding.

    Args:
        rows_ND: rows to cluster.
        count: C.
        seed: random seed of the first centroids.
        start_CD: the first centroids, or None for k-means++.

    Example:
        >>> find_centroids(np.array([[0.0], [1.0], [9.0]]), 2, 0, np.array([[0.0], [5.0]])).tolist()
        [[0.5], [9.0]]
    """
    from sklearn.cluster import KMeans, kmeans_plusplus

    starts = _STARTS if start_CD is None else 1
    if (place := device()).type != "cuda":  # others may lack float64
        first = "k-means++" if start_CD is None else start_CD
        means = KMeans(count, init=first, n_init=starts, max_iter=_ROUNDS, tol=_TOLERANCE, random_state=seed)
        return np.asarray(means.fit(rows_ND).cluster_centers_)
    mean_D, draws = rows_ND.mean(axis=0), np.random.RandomState(seed)
    centred_ND = rows_ND - mean_D
    there_ND, least_shift = torch.from_numpy(centred_ND).to(place), _TOLERANCE * float(rows_ND.var(axis=0).mean())

    def search() -> tuple[float, Floats]:
        first_CD = start_CD - mean_D if start_CD is not None else kmeans_plusplus(centred_ND, count, random_state=draws)[0]
        return _converge(there_ND, torch.from_numpy(np.array(first_CD)).to(place), least_shift)

    return min((search() for _ in range(starts)), key=lambda found: found[0])[1] + mean_D


def _converge(rows_ND: Tensor, centroids_CD: Tensor, least_shift: float) -> tuple[float, Floats]:
    """Return the sum of squared distances to the nearest centroids, and the centroids, from Lloyd's algorithm."""
    labels_N = _nearest(rows_ND, centroids_CD)
    for _ in range(_ROUNDS):
        moved_CD = _means_of_labels(rows_ND, centroids_CD, labels_N)
        shift = float((moved_CD - centroids_CD).square().sum())
        centroids_CD, before_N = moved_CD, labels_N
        labels_N = _nearest(rows_ND, centroids_CD)
        if shift <= least_shift or torch.equal(labels_N, before_N):
            break
    distances_N = (rows_ND - centroids_CD[labels_N]).square().sum(dim=1)
    return float(distances_N.sum()), centroids_CD.numpy(force=True)


def _nearest(rows_ND: Tensor, centroids_CD: Tensor) -> Tensor:
    return (centroids_CD.square().sum(dim=1) - 2 * rows_ND @ centroids_CD.T).argmin(dim=1)


def _means_of_labels(rows_ND: Tensor, centroids_CD: Tensor, labels_N: Tensor) -> Tensor:
    """Return each centroid's mean row (C, D). A centroid without rows takes one of the rows farthest from theirs."""
    sums_CD = torch.zeros_like(centroids_CD).index_add_(0, labels_N, rows_ND)
    counts_C = torch.bincount(labels_N, minlength=len(centroids_CD))
    if len(empty := (counts_C == 0).nonzero()[:, 0]):
        far = (rows_ND - centroids_CD[labels_N]).square().sum(dim=1).topk(len(empty)).indices
        sums_CD.index_add_(0, labels_N[far], rows_ND[far], alpha=-1)
        counts_C.index_add_(0, labels_N[far], torch.ones_like(far), alpha=-1)
        sums_CD[empty], counts_C[empty] = rows_ND[far], torch.ones_like(far)
    return sums_CD / counts_C[:, None].clamp(min=1)
