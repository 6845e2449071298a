"""Exact cosine scores: two vectors have the same score in every block, on every machine.

BLAS sums in an order that depends on its operands' shapes. So the last bits of a float score depend on the chunk size, and
copies of a gallery item may not tie. Here rows are L2-normalised and rounded to multiples of 2^-26, finer than float32 scores can
resolve. As integers, their products and partial sums stay below 2^52 (Cauchy-Schwarz). float64 holds integers up to 2^53, so no
summation order rounds.

For thresholds, a float32 product decides most scores at half the cost, as its rounding error is bounded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from xcompat.core.errors import XcompatError

Embeddings = np.ndarray | torch.Tensor
"""Rows of embeddings with any floating dtype, on any device."""

_GRID = 2.0**26
UNIT = _GRID**2
"""Score of cosine 1."""
_NORM_ROWS, _GPU_NORM_ROWS = 1024, 16384
_MOST_BYTES = 2**30  # larger embeddings go to a GPU block by block
_MOST_KEPT = 2**20  # most numbers of embeddings whose block stays in memory (8 MB)
_NOT_FINITE = "NaN or infinite numbers in {}: the model diverged or overflowed; fix the model and re-embed"
_FEW = 1 / 64  # below this share of all pairs, scoring one by one is faster than a whole product
_MOST_NUMBERS = 2**24  # most numbers gathered to score pairs one by one (128 MB)
_FARTHEST = 500
"""Largest distance of a row from the gallery's centre, in usual distances, that L2 ranking supports."""
_SPREAD = 100.0  # ratio of farthest to usual squared distance above which the tie margin shrinks
_SAMPLE = 4096  # most rows per side, evenly spread, to estimate the usual distance; also the block size
SCORE_BITS = 54
"""Bits of a signed score in a sort key. Of the others, 8 contain the row and 1 a mark."""


def as_rows(embeds_ND: Embeddings, what: str) -> np.ndarray:
    """Return embeddings as a NumPy matrix, without a copy if possible (memory-mapped files stay so).

    Args:
        embeds_ND: ``(N, D)`` numbers.
        what: name of the embeddings in messages.

    Returns:
        ``(N, D)``, N and D at least 1.

    Raises:
        XcompatError: not a matrix, or empty.
    """
    if isinstance(embeds_ND, torch.Tensor):
        tensor = embeds_ND.detach().cpu()
        rows_ND = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()  # NumPy has no bfloat16
    else:
        rows_ND = np.asarray(embeds_ND)
    require_matrix(rows_ND, what)
    return rows_ND


def require_matrix(rows_ND: Embeddings, what: str) -> None:
    """Raise if embeddings are not a matrix, or empty."""
    shape = tuple(rows_ND.shape)
    if len(shape) != 2:
        raise XcompatError(f"{what} must be a matrix with an embedding per row, not of shape {shape}; reshape them")
    if 0 in shape:
        raise XcompatError(f"{what} are empty (shape {shape}); embed at least one item")


def blocks(total: int, chunk_size: int) -> Iterator[slice]:
    """Yield slices that cut ``total`` rows into chunks of ``chunk_size``; the last may be smaller."""
    for start in range(0, total, chunk_size):
        yield slice(start, min(start + chunk_size, total))


class ExactRows:
    """Embeddings that are normalised and rounded block by block; only norms stay in memory, and a single small block.

    On a CUDA device, the embeddings stay there, and blocks have the same bits as on a CPU.

    Args:
        embeds_ND: ``(N, D)`` numbers; a row of zeros scores 0 against everything.
        what: name of the embeddings in messages.
        device: device of the blocks. CUDA devices get a copy of embeddings of up to :data:`_MOST_BYTES`.

    Raises:
        XcompatError: not a matrix, empty, or not finite.

    Example:
        >>> rows = ExactRows(np.array([[3.0, 4.0]]), "rows", torch.device("cpu"))
        >>> (rows.block(slice(0, 1)) / 2**26).round(decimals=6).tolist()
        [[0.6, 0.8]]
    """

    def __init__(self, embeds_ND: Embeddings, what: str, device: torch.device) -> None:
        self.device = device
        self._rows_ND, self._norms_N1 = self._place(embeds_ND, what)
        self._kept: torch.Tensor | None = None

    def _place(self, embeds_ND: Embeddings, what: str) -> tuple[Embeddings, Any]:
        if not _is_on_gpu(embeds_ND):
            rows_ND = as_rows(embeds_ND, what)
            if self.device.type != "cuda" or rows_ND.nbytes > _MOST_BYTES:
                return rows_ND, np.concatenate([_norms(rows_ND[rows], what) for rows in blocks(len(rows_ND), _NORM_ROWS)])
            embeds_ND = torch.from_numpy(np.array(rows_ND)).to(self.device)
        assert isinstance(embeds_ND, torch.Tensor)
        require_matrix(embeds_ND, what)
        norms_N1 = [_norms_on_gpu(embeds_ND[rows], what) for rows in blocks(len(embeds_ND), _GPU_NORM_ROWS)]
        return embeds_ND.detach(), torch.cat(norms_N1)

    def __len__(self) -> int:
        return len(self._rows_ND)

    @property
    def dim(self) -> int:
        """Dimension, D."""
        return int(self._rows_ND.shape[1])

    def block(self, rows: slice | np.ndarray) -> torch.Tensor:
        """Return rows as integers with exact dot products.

        Args:
            rows: slice or row numbers.

        Returns:
            float64 ``(B, D)`` integers, with norms of about 2^26.
        """
        if isinstance(self._rows_ND, torch.Tensor):
            here = rows if isinstance(rows, slice) else torch.from_numpy(rows).to(self._rows_ND.device)
            return (self._rows_ND[here].double() / self._norms_N1[here]).mul_(_GRID).round_().to(self.device)
        is_whole = isinstance(rows, slice) and rows == slice(0, len(self))
        if is_whole and self._kept is not None:
            return self._kept
        wide_BD = np.divide(self._rows_ND[rows], self._norms_N1[rows], dtype=np.float64)
        wide_BD *= _GRID
        block_BD = torch.from_numpy(np.rint(wide_BD, out=wide_BD)).to(self.device)
        if is_whole and self._rows_ND.size <= _MOST_KEPT:
            self._kept = block_BD  # other queries can search the same gallery
        return block_BD


def _is_on_gpu(embeds_ND: Embeddings) -> bool:
    return isinstance(embeds_ND, torch.Tensor) and embeds_ND.is_cuda


def _norms_on_gpu(rows_BD: torch.Tensor, what: str) -> torch.Tensor:
    """Return :func:`_norms` on the rows' device, with the same bits: every step is an exactly rounded operation of IEEE 754."""
    wide_BD = rows_BD.double()
    peak_B1 = wide_BD.abs().amax(dim=1, keepdim=True)
    if not peak_B1.isfinite().all():
        raise XcompatError(_NOT_FINITE.format(what))
    peak_B1 = torch.where(peak_B1 == 0, 1.0, peak_B1)
    squares_DB = (wide_BD / peak_B1).square_().T.contiguous()
    total_B = squares_DB[0].clone()
    for square_B in squares_DB[1:]:  # from left to right, as a reduction adds in its own order
        total_B += square_B
    norms_B1 = peak_B1 * total_B.sqrt_()[:, None]
    return torch.where(norms_B1 > 0, norms_B1, 1.0)


def _norms(rows_BD: np.ndarray, what: str) -> np.ndarray:
    """Return float64 ``(B, 1)`` Euclidean norms, 1 for rows of zeros; raise if not finite."""
    wide_BD = np.asarray(rows_BD, dtype=np.float64)
    peak_B1 = np.abs(wide_BD).max(axis=1, keepdims=True)
    if not np.isfinite(peak_B1).all():
        raise XcompatError(_NOT_FINITE.format(what))
    peak_B1[peak_B1 == 0] = 1.0
    # accumulate adds from left to right; the order of a plain sum depends on the block's shape
    squares_BD = wide_BD / peak_B1
    squares_BD *= squares_BD
    norms_B1 = peak_B1 * np.sqrt(np.add.accumulate(squares_BD, axis=1, out=squares_BD)[:, -1:])
    return np.where(norms_B1 > 0, norms_B1, 1.0)


def lift_rows(queries_QD: Embeddings, gallery_GD: Embeddings) -> tuple[np.ndarray, np.ndarray]:
    """Return rows whose cosines order all pairs by L2 distance, nearest first.

    Rows are centred and scaled so that ‖x‖ ≤ 1. With n = ‖x‖²/2, x ↦ (x, 1, -n, ρ, 0) and y ↦ (y, -n, 1, 0, ρ) have the product
    -‖x - y‖²/2. ρ = √(5/4 - 2n - n²) gives every row the length 3/2. Equal rows stay equal.

    Args:
        queries_QD: ``(Q, D)`` numbers.
        gallery_GD: ``(G, D)`` numbers.

    Returns:
        float64 ``(Q, D + 4)`` and ``(G, D + 4)``.

    Raises:
        XcompatError: an outlier makes the grid too coarse for the other distances.

    Example:
        >>> queries, gallery = lift_rows(np.array([[0.0, 0.0]]), np.array([[3.0, 4.0], [0.0, 1.0]]))
        >>> (queries @ gallery.T / 2.25)[0].argsort()[::-1].tolist()
        [1, 0]
    """
    sides = [np.asarray(as_rows(rows_ND, "embeddings"), dtype=np.float64) for rows_ND in (queries_QD, gallery_GD)]
    _require_no_outlier(*sides)
    sides = [rows_ND - sides[1].mean(axis=0) for rows_ND in sides]
    longest = max(float(np.square(rows_ND).sum(axis=1).max()) for rows_ND in sides) ** 0.5 or 1.0
    lifts = []
    for rows_ND, (one, half) in zip(sides, ((0, 1), (1, 0)), strict=True):
        scaled_ND = rows_ND / longest
        n_N = np.square(scaled_ND).sum(axis=1) / 2
        more_N4 = np.zeros((len(n_N), 4))
        more_N4[:, one], more_N4[:, half] = 1, -n_N
        more_N4[:, 2 + one] = np.sqrt(np.maximum(1.25 - 2 * n_N - n_N**2, 0))
        lifts.append(np.concatenate([scaled_ND, more_N4], axis=1))
    return lifts[0], lifts[1]


def _require_no_outlier(queries_QD: np.ndarray, gallery_GD: np.ndarray) -> None:
    """Raise if an outlier makes the other rows too close together to rank.

    A squared distance is rounded by about 2.7e-8 of the farthest row's. At :data:`_FARTHEST`, this is 0.7 % of the usual.
    """
    samples = [rows_ND[:: -(-len(rows_ND) // _SAMPLE)] for rows_ND in (queries_QD, gallery_GD)]
    middle_D = np.median(samples[1], axis=0)
    # queries of an incompatible model can all be far away, which does not affect ranks
    usual = max(float(np.median(np.linalg.norm(some_SD - middle_D, axis=1))) for some_SD in samples)
    for what, rows_ND in (("query", queries_QD), ("gallery", gallery_GD)):
        chunks = (rows_ND[chunk] - middle_D for chunk in blocks(len(rows_ND), _SAMPLE))
        far_N = np.concatenate([np.linalg.norm(rows_BD, axis=1) for rows_BD in chunks])
        row = int(far_N.argmax())
        if usual > 0 and far_N[row] > _FARTHEST * usual:
            raise XcompatError(
                f"{what} row {row} is {far_N[row] / usual:,.0f} times as far from the centre as usual (at most {_FARTHEST}), so "
                "other rows cannot be ranked by L2 distance; remove this row or compare by cosine"
            )


def copy_score(dim: int, are_lifted: bool = False) -> float:
    """Return the lowest score between a row of D dimensions and its own copy.

    Rounding to the grid moves this score away from :data:`UNIT` by less than √D + 1 grid steps. So two pairs of copies can have
    different scores. (Two copies of an item always tie for the same query.) Copies that are :func:`lift_rows` score 0, with the
    same rounding.
    """
    return (0 if are_lifted else UNIT) - (math.sqrt(dim) + 1) * _GRID


def tie_margin(dim: int, usual: float = 1.0) -> float:
    """Return the largest difference between two scores of a query with equal exact cosines.

    Rounding moves each number by at most half a grid step, and the score of a pair by less than √D + 1 steps. The difference of
    two scores moves by less than twice as much. Scores within this margin count as a tie.

    Args:
        dim: dimension D of the rows.
        usual: for :func:`lift_rows` rows, their usual distance from the centre, where the farthest is 1. Outliers shrink the
            margin, which therefore never spans different distances.

    Example:
        >>> tie_margin(4) / UNIT < 1e-7
        True
    """
    return 2 * (math.sqrt(dim) + 1) * _GRID * min(1.0, _SPREAD * usual**2)


def usual_distance(lifted_GD: np.ndarray) -> float:
    """Return the median distance of :func:`lift_rows` gallery rows from their centre, where the farthest is 1."""
    return math.sqrt(2 * float(np.median(-lifted_GD[:, -4])))


def join_ties(scores_N: np.ndarray, owners_N: np.ndarray, margin: float) -> np.ndarray:
    """Give tied neighbours the lowest score among them.

    Args:
        scores_N: exact scores, in any order.
        owners_N: int64 query of each.
        margin: largest difference of tied neighbours (:func:`tie_margin`).

    Example:
        >>> join_ties(np.array([3.0, 9.0, 4.0]), np.zeros(3, np.int64), 1.0).tolist()
        [3.0, 9.0, 3.0]
    """
    order_N = np.lexsort((scores_N, owners_N))
    sorted_N, owner_N = scores_N[order_N], owners_N[order_N]
    starts_N = np.append(True, (np.diff(sorted_N) > margin) | (np.diff(owner_N) != 0))
    joined_N = np.empty_like(scores_N)
    joined_N[order_N] = sorted_N[starts_N][np.cumsum(starts_N) - 1]
    return joined_N


def pair_scores(queries_RD: torch.Tensor, items_CD: torch.Tensor, row_N: torch.Tensor, column_N: torch.Tensor) -> torch.Tensor:
    """Return the exact scores of single pairs.

    Args:
        queries_RD: float64 ``(R, D)`` rows of :meth:`ExactRows.block`.
        items_CD: float64 ``(C, D)`` rows of :meth:`ExactRows.block`.
        row_N: int64 query of each pair.
        column_N: int64 item of each pair.

    Returns:
        float64 ``(N,)``.
    """
    n_rows, dim = queries_RD.shape
    if len(row_N) > min(_FEW * n_rows * len(items_CD), _MOST_NUMBERS // dim):  # e.g. a gallery full of copies
        return (queries_RD @ items_CD.T)[row_N, column_N]
    return torch.linalg.vecdot(queries_RD[row_N], items_CD[column_N])


def sort_keys(scores_N: torch.Tensor, rows_N: torch.Tensor) -> torch.Tensor:
    """Return int64 ``(N,)`` keys to sort by row, then by score.

    Args:
        scores_N: float64 exact scores.
        rows_N: int64 below 2^(62 - SCORE_BITS).
    """
    return scores_N.long() + 2 ** (SCORE_BITS - 1) + (rows_N << SCORE_BITS)


def scores_of(keys_N: torch.Tensor) -> torch.Tensor:
    """Return the float64 scores in keys of :func:`sort_keys`."""
    return ((keys_N & (2**SCORE_BITS - 1)) - 2 ** (SCORE_BITS - 1)).double()


def sorted_keys(keys_N: torch.Tensor) -> torch.Tensor:
    """Sort keys ascending. On CPU, NumPy is three times as fast as torch, which also returns indices."""
    return keys_N.sort().values if keys_N.is_cuda else torch.from_numpy(np.sort(keys_N.numpy()))


def true_places(mask: torch.Tensor) -> torch.Tensor:
    """Return the flat indices of a mask's True entries, int64 ``(N,)``, ascending. On CPU, NumPy is faster.

    Example:
        >>> true_places(torch.tensor([[True, False], [False, True]])).tolist()
        [0, 3]
    """
    if mask.is_cuda:
        return mask.reshape(-1).nonzero().squeeze(1)
    return torch.from_numpy(np.flatnonzero(mask.numpy()))


def to_float32(block_BD: torch.Tensor) -> torch.Tensor:
    """Return rows of :meth:`ExactRows.block` in float32, with norms of about 1."""
    return block_BD.float().mul_(1 / _GRID)


def rounding_error(dim: int) -> float:
    """Return a bound on the rounding error of a product of two :func:`to_float32` rows of D dimensions, in any summation order.

    The bound is γₙ = nu / (1 - nu) times the sum of the terms' sizes, at most about 1 by Cauchy-Schwarz (Higham, Accuracy and
    Stability of Numerical Algorithms, section 3.1). n counts D - 1 additions, a product and two rounded factors per term, and the
    rounded threshold.
    """
    n_u = (dim + 3) * 2.0**-24
    return 1.001 * n_u / (1 - n_u)
