"""Arrays and their names as people bring them: whatever is wrong with a file is one line that names it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xcompat.errors import XcompatError, what_failed


def map_array(path: Path) -> NDArray[Any]:
    """Map an array of numbers on disk into memory.

    Args:
        path: a ``.npy`` file.

    Returns:
        The array, of integers or floats.

    Raises:
        XcompatError: it is damaged, or holds something else.
    """
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
        kind = array.dtype.kind
    except OSError:
        raise
    except Exception as error:  # a header is Python, and whatever Python's tokenizer and NumPy's types raise on it comes out
        raise XcompatError(f"{path} is not a .npy array of numbers ({what_failed(error)}); write it again") from None
    if kind not in "iuf":
        raise XcompatError(f"{path} holds no embeddings (shape {array.shape}, {array.dtype}); embed the items again")
    return array


def read_lines(path: Path) -> list[str]:
    """Read a text file line by line.

    Args:
        path: the file.

    Returns:
        Its lines.

    Raises:
        XcompatError: it is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise XcompatError(f"{path} is not UTF-8 text; convert it ({error.reason} at byte {error.start})") from None
