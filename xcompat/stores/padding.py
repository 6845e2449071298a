"""Detection and creation of zero padding in vectors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

SAMPLE = 1_000
"""Rows to read to detect padding."""


class ReadsRows(Protocol):
    """Store with readable rows."""

    def rows(self, size: int, *, space: str | None = None) -> Iterator[Any]:
        """Yield row blocks with ``vectors_ND``."""


def is_padded(store: ReadsRows, dim: int, space: str | None = None) -> bool:
    """Return whether most vectors in a space have only zeros after their first ``dim`` numbers.

    Args:
        store: the store. Its first rows are read.
        dim: the model's dimension, smaller than the space's.
        space: space to read, by default the searched space.
    """
    for rows in store.rows(SAMPLE, space=space):
        vectors_ND = rows.vectors_ND[rows.vectors_ND.any(1)]
        return vectors_ND.shape[1] > dim and bool((~vectors_ND[:, dim:].any(1)).sum() > len(vectors_ND) / 2)
    return False


def pad_vectors(vectors_ND: NDArray[np.float32], dim: int) -> NDArray[np.float32]:
    """Pad vectors (N, d) with zeros to at least ``dim`` numbers.

    Example:
        >>> pad_vectors(np.ones((1, 2), np.float32), 3).tolist()
        [[1.0, 1.0, 0.0]]
    """
    return np.pad(vectors_ND, ((0, 0), (0, max(0, dim - vectors_ND.shape[1]))))
