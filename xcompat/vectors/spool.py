"""Rows in an unnamed temporary file, for embeddings larger than memory."""

from __future__ import annotations

import tempfile
from typing import Any

import numpy as np
from numpy.typing import NDArray

BLOCK = 8192
"""Rows that are read at once."""


class Spool:
    """Unnamed file of rows. The system removes it with the last array that is mapped from it.

    Args:
        dtype: of the rows.

    Example:
        >>> spool = Spool(np.float32)
        >>> spool.add(np.ones((2, 3)))
        >>> spool.map_rows().shape
        (2, 3)
    """

    def __init__(self, dtype: type[np.floating[Any]]) -> None:
        self.dtype, self.shape = dtype, (0, 0)
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - the array outlives this block

    def add(self, rows_BD: NDArray[Any]) -> None:
        """Append rows."""
        self._file.write(np.ascontiguousarray(rows_BD, self.dtype).data)
        self.shape = (self.shape[0] + len(rows_BD), rows_BD.shape[1])

    def map_rows(self) -> NDArray[Any]:
        """Return all rows, mapped into memory; nothing can be added afterwards."""
        self._file.flush()
        rows_ND: NDArray[Any] = np.memmap(self._file, self.dtype, "r", shape=self.shape)
        self._file.close()
        return rows_ND
