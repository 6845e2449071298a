"""Arrays and id lists from users. Error messages are single lines with the file name."""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xcompat.core.errors import XcompatError, describe_error

_ROWS_PER_READ = 256  # rows; a page fault may map 2 MiB around each


def map_array(path: Path) -> NDArray[np.number]:
    """Map a ``.npy`` file of integers or floats into memory.

    Raises:
        XcompatError: the file is damaged or has another type.
    """
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
        kind = array.dtype.kind
    except OSError:
        raise
    except Exception as error:  # the header is a Python literal: Python's tokenizer and NumPy's types raise many kinds of errors
        raise XcompatError(
            f"{path} is not a .npy array of numbers ({describe_error(error)}); recreate it with the command that wrote it"
        ) from None
    if kind not in "iuf":
        raise XcompatError(f"{path} contains no embeddings (shape {array.shape}, {array.dtype}); re-embed the items")
    return array


def read_lines(path: Path) -> list[str]:
    r"""Return the lines of a UTF-8 file. A byte order mark is skipped.

    Lines end only at ``\n``, ``\r\n`` or ``\r``. Ids may contain a form feed, U+0085 or U+2028.

    Raises:
        XcompatError: the file is not UTF-8.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise XcompatError(f"{path} is not UTF-8 text; convert it ({error.reason} at byte {error.start})") from None
    return lines if lines[-1] else lines[:-1]


def number_strings(names: Iterable[str]) -> tuple[list[str], NDArray[np.int64]]:
    """Return numbers of strings in sorted order. ``np.unique`` would pad each to the longest length.

    Args:
        names: N strings.

    Returns:
        The distinct strings, sorted, and the index of each string among them (N,).

    Example:
        >>> distinct, places_N = number_strings(["b", "a", "b"])
        >>> distinct, places_N.tolist()
        (['a', 'b'], [1, 0, 1])
    """
    names = list(names)
    distinct = sorted(set(names))
    place = {name: number for number, name in enumerate(distinct)}
    return distinct, np.fromiter((place[name] for name in names), np.int64, len(names))


def copy_rows(array: Any, rows_R: NDArray[np.int64]) -> NDArray[Any]:  # noqa: ANN401 - an array, or what is read like one
    """Copy array rows. Mapped arrays are read in ascending order, with few pages in memory.

    Args:
        array: embeddings, read by row numbers.
        rows_R: the rows, in any order.

    Returns:
        (R, D), in the given order.
    """
    order = np.argsort(rows_R, kind="stable")
    copied: NDArray[Any] | None = None
    for start in range(0, len(order), _ROWS_PER_READ):
        places = order[start : start + _ROWS_PER_READ]
        part = np.asarray(array[rows_R[places]])
        copied = np.empty((len(order), *part.shape[1:]), part.dtype) if copied is None else copied
        copied[places] = part
        forget_pages(array)
    return copied if copied is not None else np.asarray(array[rows_R])


@dataclass(frozen=True)
class RowSelection:
    """Rows of embeddings that need not fit into memory. Each access reads them with :func:`copy_rows`.

    Args:
        array: all embeddings, read by row numbers.
        rows_R: the selected rows, in order.
    """

    array: Any
    rows_R: NDArray[np.int64]

    @property
    def shape(self) -> tuple[int, ...]:
        """Return (R, D)."""
        return len(self), *self.array.shape[1:]

    def __len__(self) -> int:
        return len(self.rows_R)

    def __getitem__(self, rows: NDArray[np.int64] | slice, /) -> NDArray[Any]:
        """Return the selection's rows by number, in the given order."""
        return copy_rows(self.array, self.rows_R[rows])


def forget_pages(array: object) -> None:
    """Release a mapped array's pages, which count as memory of this process. The system may still cache them."""
    mapped = getattr(array, "_mmap", None)
    if mapped is not None and hasattr(mmap, "MADV_DONTNEED"):
        mapped.madvise(mmap.MADV_DONTNEED)


def row_lengths(rows_ND: NDArray[np.number]) -> NDArray[np.float64]:
    """Return the Euclidean length of each row. Squares neither overflow nor vanish, for any dtype.

    Example:
        >>> [f"{length:.2e}" for length in row_lengths(np.array([[3e30, 4e30], [3e-22, 4e-22]], np.float32))]
        ['5.00e+30', '5.00e-22']
    """
    wide_ND, peak_N1 = _wide_rows(rows_ND)
    scaled_ND = wide_ND / peak_N1
    return np.sqrt(np.einsum("nd,nd->n", scaled_ND, scaled_ND)) * peak_N1[:, 0]


def normalise_rows(rows_ND: NDArray[np.number]) -> NDArray[np.float32]:
    """Return rows divided by their length in float64. Zero rows stay as they are, and rows with NaN become NaN.

    Example:
        >>> normalise_rows(np.array([[3e30, 4e30], [3e-22, 4e-22], [0, 0]], np.float32)).round(3).tolist()
        [[0.6000000238418579, 0.800000011920929], [0.6000000238418579, 0.800000011920929], [0.0, 0.0]]
    """
    wide_ND, peak_N1 = _wide_rows(rows_ND)
    scaled_ND = wide_ND / peak_N1
    length_N1 = np.sqrt(np.einsum("nd,nd->n", scaled_ND, scaled_ND))[:, None]
    with np.errstate(invalid="ignore"):  # infinite rows become NaN too
        return (scaled_ND / np.where(length_N1 == 0, 1, length_N1)).astype(np.float32)


def _wide_rows(rows_ND: NDArray[np.number]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return rows in float64, and their largest absolute numbers (N, 1) as divisors."""
    wide_ND = np.asarray(rows_ND, np.float64)
    peak_N1 = np.abs(wide_ND).max(axis=1, initial=0, keepdims=True)
    return wide_ND, np.where(np.isfinite(peak_N1) & (peak_N1 > 0), peak_N1, 1)
