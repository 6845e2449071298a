"""Sketch of a map's training items, to recognise them in a test set."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from xcompat.core.arrays import normalise_rows

KEPT = 512
"""Most hashes in a sketch: the smallest, which are a random sample of the items."""
LEAST_SHARE = 0.01
"""Smaller shares of known items draw no warning."""
_HASHED = 32  # dimensions; enough to tell items apart
_STEPS = 8  # per standard deviation; float16 rounding changes few hashes
_FACTORS = np.random.default_rng(0).integers(1 << 63, size=_HASHED)


def sketch_items(blocks: Iterable[NDArray[np.number]]) -> str:
    """Return the smallest hashes of items as hexadecimal digits.

    Args:
        blocks: blocks of the items' stored embeddings, L2-normalised.
    """
    kept_K = np.array([], np.uint32)
    for block_BD in blocks:
        kept_K = np.union1d(kept_K, _hash_items(block_BD))[:KEPT]
    return kept_K.astype(">u4").tobytes().hex()


def measure_known_items(sketch: str, rows_ND: NDArray[np.number]) -> float:
    """Return the share of rows whose items are in a sketch, estimated from those that hash as low as the sketch.

    Args:
        sketch: result of :func:`sketch_items`.
        rows_ND: embeddings by the same model, of any length.

    Example:
        >>> rows = np.random.default_rng(0).normal(size=(4, 8))
        >>> measure_known_items(sketch_items([normalise_rows(rows[:2])]), rows)
        0.5
    """
    unit_ND, kept_K = normalise_rows(rows_ND), np.frombuffer(bytes.fromhex(sketch), ">u4")
    hashes_n = _hash_items(unit_ND[np.isfinite(unit_ND[:, 0])])
    comparable_n = hashes_n[hashes_n <= kept_K[-1]] if len(kept_K) == KEPT else hashes_n
    return float(np.isin(comparable_n, kept_K).mean()) if len(comparable_n) else 0.0


def _hash_items(unit_ND: NDArray[np.number]) -> NDArray[np.uint32]:
    """Return a hash of each row, which small rounding rarely changes."""
    steps_NH = np.rint(unit_ND[:, :_HASHED] * (_STEPS * np.sqrt(unit_ND.shape[1]))).astype(np.int64)
    return ((steps_NH @ _FACTORS[: steps_NH.shape[1]]).astype(np.uint64) >> np.uint64(32)).astype(np.uint32)
