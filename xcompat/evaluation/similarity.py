"""Linear centred kernel alignment (CKA) of two models' embeddings."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from xcompat.core.errors import XcompatError
from xcompat.evaluation.scores import Embeddings, as_rows, blocks, require_matrix

_ROWS = 4096
_CONSTANT = 1e-12  # smallest relative deviation from the mean that float64 can resolve


def linear_cka(x_ND: Embeddings, y_Ne: Embeddings, device: torch.device | None = None) -> float:
    """Return linear CKA, the similarity of two models' embeddings.

    Kornblith et al. 2019, section 3.3: CKA = ‖YᵀX‖² / (‖XᵀX‖ ‖YᵀY‖), Frobenius norms of the centred X and Y. It is invariant to
    rotation, scale and shift. Rows are not normalised. They are read in blocks and multiplied in float64; memory is that of the
    (D, e), (D, D) and (e, e) products.

    Args:
        x_ND: ``(N, D)`` embeddings by the first model.
        y_Ne: ``(N, e)`` embeddings of the same items by the other.
        device: CUDA device to multiply on; None for that of the embeddings.

    Returns:
        A number in [0, 1], 1 for the same geometry.

    Raises:
        XcompatError: invalid input, or all rows of a model are equal.

    Example:
        >>> x = np.array([[1.0, 0.0], [0.0, 1.0], [-1.0, -1.0]])
        >>> linear_cka(x, x @ [[0, 3], [-3, 0]] + 7), round(linear_cka(x, x[:, :1]), 3)
        (1.0, 0.791)
    """
    place = _device_of(x_ND, y_Ne, device)
    x, y = _Rows(x_ND, "x", place), _Rows(y_Ne, "y", place)
    if len(x) != len(y):
        raise XcompatError(f"x has {len(x)} rows but y has {len(y)}; embed the same items in the same order with both models")
    products: list[Any] = [0.0, 0.0, 0.0]
    x.centre()
    y.centre()
    for rows in blocks(len(x), _ROWS):
        x_BD, y_Be = x.block(rows), y.block(rows)
        products = [total + part for total, part in zip(products, (x_BD.T @ x_BD, y_Be.T @ y_Be, y_Be.T @ x_BD), strict=True)]
    xx_DD, yy_ee, yx_eD = (np.asarray(each.cpu() if place is not None else each) for each in products)
    for what, gram in (("x", xx_DD), ("y", yy_ee)):
        if math.sqrt(np.trace(gram) / len(x)) < _CONSTANT:
            raise XcompatError(f"all rows of {what} are equal, so there is no geometry to compare; embed different items")
    return min(1.0, float(np.square(yx_eD).sum() / (np.linalg.norm(xx_DD) * np.linalg.norm(yy_ee))))


def _device_of(x_ND: Embeddings, y_Ne: Embeddings, device: torch.device | None) -> torch.device | None:
    """Return the CUDA device to multiply on, or None to multiply with NumPy."""
    if device is not None:
        return device if device.type == "cuda" else None
    return next((each.device for each in (x_ND, y_Ne) if isinstance(each, torch.Tensor) and each.is_cuda), None)


class _Rows:
    """Embeddings that are read block by block in float64, as NumPy arrays or as tensors on a CUDA device.

    Args:
        rows_ND: embeddings.
        what: name in messages.
        place: CUDA device, or None for NumPy.
    """

    def __init__(self, rows_ND: Embeddings, what: str, place: torch.device | None) -> None:
        is_there = isinstance(rows_ND, torch.Tensor) and rows_ND.device == place
        self.rows_ND = rows_ND if is_there else as_rows(rows_ND, what)
        require_matrix(self.rows_ND, what)
        self.what, self.place = what, place
        self.scale, self.mean_D = 1.0, 0.0

    def __len__(self) -> int:
        return len(self.rows_ND)

    def block(self, rows: slice) -> Any:  # noqa: ANN401 - an array or a tensor
        """Return rows, divided by the scale, minus the mean."""
        block_BD = self._read(rows)
        return (block_BD.double() if self.place is not None else np.asarray(block_BD, np.float64)) / self.scale - self.mean_D

    def centre(self) -> None:
        """Set the scale to the largest absolute number, against overflow, and the mean to that of the divided rows."""
        largest = [float(abs(self._read(rows)).max()) for rows in blocks(len(self), _ROWS)]
        if not np.isfinite(largest).all():
            raise XcompatError(
                f"{self.what} contains NaN or infinite numbers: the model diverged or overflowed; fix the model and re-embed"
            )
        self.scale = max(largest) or 1.0
        self.mean_D = sum(self.block(rows).sum(0) for rows in blocks(len(self), _ROWS)) / len(self)

    def _read(self, rows: slice) -> Any:  # noqa: ANN401
        if isinstance(self.rows_ND, torch.Tensor):
            return self.rows_ND[rows].detach()
        block_BD = self.rows_ND[rows]
        return block_BD if self.place is None else torch.from_numpy(np.array(block_BD)).to(self.place)
