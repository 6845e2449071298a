"""Vectors that services padded with zeros to the width of their column."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

SAMPLE = 1_000
"""Rows that show whether a store's vectors are padded."""


class ReadsRows(Protocol):
    """A store, as far as its rows are read."""

    def rows(self, size: int, *, space: str | None = None) -> Iterator[Any]:
        """Yield blocks of rows with ``vectors_ND``."""


def is_padded(store: ReadsRows, dim: int, space: str | None = None) -> bool:
    """Return whether most vectors of a space hold only zeros after their first ``dim`` numbers.

    Args:
        store: the store; a sample of its first rows is read.
        dim: dimension of the model's vectors, smaller than that of the space.
        space: another space than the one that is searched.
    """
    for rows in store.rows(SAMPLE, space=space):
        vectors_ND = rows.vectors_ND[rows.vectors_ND.any(1)]
        return vectors_ND.shape[1] > dim and bool((~vectors_ND[:, dim:].any(1)).sum() > len(vectors_ND) / 2)
    return False


def pad_vectors(vectors_ND: NDArray[np.float32], dim: int) -> NDArray[np.float32]:
    """Append zeros to vectors (N, d) that are narrower than ``dim``; return (N, dim), or the vectors if they are not.

    Example:
        >>> pad_vectors(np.ones((1, 2), np.float32), 3).tolist()
        [[1.0, 1.0, 0.0]]
    """
    return np.pad(vectors_ND, ((0, 0), (0, max(0, dim - vectors_ND.shape[1]))))
