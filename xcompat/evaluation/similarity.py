"""Linear centred kernel alignment (CKA) of two models' embeddings."""

from __future__ import annotations

import math

import numpy as np

from xcompat.core.errors import XcompatError
from xcompat.evaluation.scores import Embeddings, as_rows, blocks

_ROWS = 4096
_CONSTANT = 1e-12  # smallest relative deviation from the mean that float64 can resolve


def linear_cka(x_ND: Embeddings, y_Ne: Embeddings) -> float:
    """Return linear CKA, the similarity of two models' embeddings.

    Kornblith et al. 2019, section 3.3: CKA = ‖YᵀX‖² / (‖XᵀX‖ ‖YᵀY‖), Frobenius norms of the centred X and Y. It is invariant to
    rotation, scale and shift. Rows are not normalised. They are read in blocks; memory is that of the (D, e), (D, D) and (e, e)
    products.

    Args:
        x_ND: ``(N, D)`` embeddings by the first model.
        y_Ne: ``(N, e)`` embeddings of the same items by the other.

    Returns:
        A number in [0, 1], 1 for the same geometry.

    Raises:
        XcompatError: invalid input, or all rows of a model are equal.

    Example:
        >>> x = np.array([[1.0, 0.0], [0.0, 1.0], [-1.0, -1.0]])
        >>> linear_cka(x, x @ [[0, 3], [-3, 0]] + 7), round(linear_cka(x, x[:, :1]), 3)
        (1.0, 0.791)
    """
    x, y = as_rows(x_ND, "x"), as_rows(y_Ne, "y")
    if len(x) != len(y):
        raise XcompatError(f"x has {len(x)} rows but y has {len(y)}; embed the same items in the same order with both models")
    (x_scale, x_mean_D), (y_scale, y_mean_e) = _scale_and_mean(x, "x"), _scale_and_mean(y, "y")
    xx_DD, yy_ee = np.zeros((x.shape[1], x.shape[1])), np.zeros((y.shape[1], y.shape[1]))
    yx_eD = np.zeros((y.shape[1], x.shape[1]))
    for rows in blocks(len(x), _ROWS):
        x_BD = np.asarray(x[rows], dtype=np.float64) / x_scale - x_mean_D
        y_Be = np.asarray(y[rows], dtype=np.float64) / y_scale - y_mean_e
        xx_DD += x_BD.T @ x_BD
        yy_ee += y_Be.T @ y_Be
        yx_eD += y_Be.T @ x_BD
    for what, gram in (("x", xx_DD), ("y", yy_ee)):
        if math.sqrt(np.trace(gram) / len(x)) < _CONSTANT:
            raise XcompatError(f"all rows of {what} are equal, so there is no geometry to compare; embed different items")
    return min(1.0, float(np.square(yx_eD).sum() / (np.linalg.norm(xx_DD) * np.linalg.norm(yy_ee))))


def _scale_and_mean(rows_ND: np.ndarray, what: str) -> tuple[float, np.ndarray]:
    """Return the largest absolute number, as a divisor against overflow, and the mean of the divided rows."""
    largest = [float(np.abs(rows_ND[rows]).max()) for rows in blocks(len(rows_ND), _ROWS)]
    if not np.isfinite(largest).all():
        raise XcompatError(
            f"{what} contains NaN or infinite numbers: the model diverged or overflowed; fix the model and re-embed"
        )
    scale = max(largest) or 1.0
    sums = [(np.asarray(rows_ND[rows], dtype=np.float64) / scale).sum(axis=0) for rows in blocks(len(rows_ND), _ROWS)]
    return scale, np.sum(sums, axis=0) / len(rows_ND)
