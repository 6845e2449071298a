"""Checks of pairs before the choice of a map: wrong pairs and exact copies."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from xcompat.core.arrays import copy_rows, forget_pages, normalise_rows

if TYPE_CHECKING:
    from xcompat.models.old_knowledge import Rows

SCANNED = 5_000
"""Most pairs to check first; if some of them are wrong, all pairs are checked."""
FEWEST = 200
"""Fewest pairs for a detection of wrong ones."""
LEAST_SHARE = 0.02
"""Share of wrong pairs below which none is dropped, because right pairs could look wrong."""
_FOLDS, _ROUNDS = 4, 4
_TAIL = 0.1
_CAUGHT, _LOST = 0.8, 0.01  # least share of wrong pairs, and most of right ones, below a threshold
_LEAST_KEPT = 0.25
_HASHED = 64  # columns
_DIMS = 512  # wider spaces are projected at random, as a rotation takes cubic time
_BLOCK = 20_000


class _Turn(NamedTuple):
    """Centred rotation from the new space to the old space, with the means of both."""

    new_D: NDArray[np.float64]
    old_d: NDArray[np.float64]
    turn_Dd: NDArray[np.float64]

    @classmethod
    def fit(cls, new_ND: NDArray[np.float32], old_Nd: NDArray[np.float32]) -> _Turn:
        new_D, old_d = new_ND.mean(0), old_Nd.mean(0)
        cross_Dd = (new_ND - new_D).T @ (old_Nd - old_d)
        with threadpool_limits(1, user_api="blas"):  # threads of a small decomposition mostly wait for each other
            left_DK, _, right_Kd = np.linalg.svd(cross_Dd, full_matrices=False)
        return cls(new_D, old_d, left_DK @ right_Kd)

    def compare(self, new_ND: NDArray[np.float32], old_Nd: NDArray[np.float32]) -> NDArray[np.float64]:
        """Return each mapped new embedding's cosine with the old embedding in its row."""
        mapped_Nd, stored_Nd = (new_ND - self.new_D) @ self.turn_Dd, old_Nd - self.old_d
        lengths_N = np.linalg.norm(mapped_Nd, axis=1) * np.linalg.norm(stored_Nd, axis=1)
        return (mapped_Nd * stored_Nd).sum(1) / np.maximum(lengths_N, 1e-12)


class _Narrow(NamedTuple):
    """A side's embeddings, with a random projection if they have many dimensions."""

    rows_ND: Rows
    along_DK: NDArray[np.float32] | None

    @classmethod
    def project(cls, rows_ND: Rows, draw: np.random.Generator) -> _Narrow:
        dim = rows_ND.shape[1]
        return cls(rows_ND, draw.standard_normal((dim, _DIMS), np.float32) if dim > _DIMS else None)

    def read(self, rows_S: NDArray[np.int64]) -> NDArray[np.float32]:
        unit_SD = normalise_rows(copy_rows(self.rows_ND, rows_S))
        return unit_SD if self.along_DK is None else unit_SD @ self.along_DK


def find_right_pairs(new_ND: Rows, old_Nd: Rows, seed: int = 0) -> NDArray[np.bool_] | None:
    """Find pairs whose old embedding fits the mapped new embedding better than another item's.

    A trimmed orthogonal Procrustes fit (Rousseeuw 1984, least trimmed squares) gives each pair's cosine by a map fitted without
    it. Cosines of shuffled rows are the null distribution; its median gives the share of wrong pairs (Storey 2002). Pairs are
    dropped below the threshold of least expected error (Efron 2004, local false discovery rates), if wrong pairs stand apart.

    Args:
        new_ND: the new model's embeddings.
        old_Nd: the old model's embeddings, row by row.
        seed: random seed for folds and shuffles.

    Returns:
        Bool (N,), False for wrong pairs; None if there are none, or they cannot be detected.
    """
    count, draw = len(new_ND), np.random.default_rng(seed)
    if count < FEWEST:
        return None
    rows_S = np.sort(draw.permutation(count)[:SCANNED])
    new, old = (_Narrow.project(side, draw) for side in (new_ND, old_Nd))
    new_SD, old_Sd = new.read(rows_S), old.read(rows_S)
    folds_S = draw.permutation(len(rows_S)) % _FOLDS
    kept_S, threshold = np.ones(len(rows_S), bool), None
    for left in reversed(range(_ROUNDS)):
        cosines_S, null_S = _cross_fitted(new_SD, old_Sd, folds_S, kept_S, draw)
        threshold = _threshold(cosines_S, null_S, is_last=not left)
        if threshold is None:
            return None
        kept_S = cosines_S > threshold
        if kept_S.mean() < _LEAST_KEPT:
            return None
    if len(rows_S) == count:
        return kept_S
    whole = _Turn.fit(new_SD[kept_S], old_Sd[kept_S])
    parts = [np.arange(start, min(start + _BLOCK, count)) for start in range(0, count, _BLOCK)]
    cosines_N = np.concatenate([whole.compare(new.read(part), old.read(part)) for part in parts])
    kept_N = cosines_N > threshold
    kept_N[rows_S] = kept_S
    return kept_N


def _cross_fitted(
    new_SD: NDArray[np.float32],
    old_Sd: NDArray[np.float32],
    folds_S: NDArray[np.int64],
    kept_S: NDArray[np.bool_],
    draw: np.random.Generator,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return each pair's cosine by a map from other folds, and the cosine with another item's old embedding."""
    cosines_S, null_S = np.empty(len(new_SD)), np.empty(len(new_SD))
    for fold in range(_FOLDS):
        others_S, rows = kept_S & (folds_S != fold), np.flatnonzero(folds_S == fold)
        turn = _Turn.fit(new_SD[others_S], old_Sd[others_S])
        cosines_S[rows] = turn.compare(new_SD[rows], old_Sd[rows])
        null_S[rows] = turn.compare(new_SD[rows], np.roll(old_Sd[rows], 1 + int(draw.integers(len(rows) - 1)), axis=0))
    return cosines_S, null_S


def _threshold(cosines_S: NDArray[np.float64], null_S: NDArray[np.float64], is_last: bool) -> float | None:
    """Return the highest cosine of wrong pairs; None if they are few, or in the last round not separate."""
    found_S, null_S = np.sort(cosines_S), np.sort(null_S)
    tail, wrong = (float((found_S <= np.quantile(null_S, q)).mean()) / q for q in (_TAIL, 0.5))
    if not LEAST_SHARE <= wrong <= 1 - LEAST_SHARE or tail < wrong / 2:  # the tail of right pairs is shorter
        return None
    below_S = np.arange(1, len(found_S) + 1) / len(found_S)  # share of pairs up to each cosine
    null_below_S = np.searchsorted(null_S, found_S, side="right") / len(null_S)
    best = int(np.argmax(2 * wrong * null_below_S - below_S))
    lost = (below_S[best] - wrong * null_below_S[best]) / (1 - wrong)
    stand_apart = null_below_S[best] >= _CAUGHT and lost <= _LOST + 2 * np.sqrt(wrong / len(found_S))
    return float(found_S[best]) if stand_apart or not is_last else None


def first_of_copies(new_ND: Rows, old_Nd: Rows, seed: int = 0) -> NDArray[np.int64] | None:
    """Return the first row of each group of pairs with equal sides; None without copies.

    Rows with equal hashes are compared number by number. A hash is the sum modulo 2^64 of random numbers times the bits of about
    64 columns per side.
    """
    draw, hashes_N = np.random.default_rng(seed), np.zeros(len(new_ND), np.uint64)
    for side in (new_ND, old_Nd):
        step = max(1, side.shape[1] // _HASHED)
        odd_D = draw.integers(1 << 63, size=len(range(0, side.shape[1], step)), dtype=np.uint64) * np.uint64(2) + np.uint64(1)
        for start in range(0, len(side), _BLOCK):
            block = np.ascontiguousarray(side[start : start + _BLOCK][:, ::step])
            hashes_N[start : start + _BLOCK] += np.einsum("nd,d->n", block.view(f"u{block.itemsize}").astype(np.uint64), odd_D)
            forget_pages(side)
    _, first_K, group_N = np.unique(hashes_N, return_index=True, return_inverse=True)
    if len(first_K) == len(new_ND):
        return None
    copies = np.setdiff1d(np.arange(len(new_ND)), first_K)
    originals = first_K[group_N[copies]]
    equal = np.ones(len(copies), bool)
    for side in (new_ND, old_Nd):
        equal &= (copy_rows(side, copies) == copy_rows(side, originals)).all(1)
    return np.sort(np.concatenate([first_K, copies[~equal]])) if equal.any() else None
