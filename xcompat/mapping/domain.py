"""Comparison of a map's training pairs with the searched gallery."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from xcompat.core.arrays import copy_rows, normalise_rows
from xcompat.core.errors import XcompatError
from xcompat.mapping.sides import Side, read_sides
from xcompat.models.old_knowledge import Rows
from xcompat.stores.places import Place, StoreAddress, is_gallery

FAR = 0.1
"""A larger shift draws a warning. On SciFact and Cranfield it is below 0.01 for random samples, above 0.2 for other domains."""
COMPARED = 20_000
"""Most rows to compare per side."""
SOUGHT, ALIKE = 300, 0.9
"""Gallery vectors to look for among the pairs, and the least cosine of an item with itself in an index of short codes."""
_BLOCK = 16_384


def measure_shift(pairs_Nd: Rows, gallery_Gd: Rows) -> float:
    """Return the squared distance between the means of pairs and gallery, as a share of the gallery's variance.

    Args:
        pairs_Nd: the pairs' old embeddings.
        gallery_Gd: stored gallery embeddings.

    Returns:
        About 0 for a random gallery sample, because the expected distance of such a sample is subtracted.

    Example:
        >>> gallery = np.array([[1.0, 0.2], [1.0, -0.2], [0.2, 1.0], [-0.2, 1.0]])
        >>> measure_shift(gallery, gallery) <= 0, measure_shift(gallery[:1], gallery) < measure_shift(-gallery, gallery)
        (True, True)
    """
    pairs_nd, gallery_nd = _sample(pairs_Nd), _sample(gallery_Gd)
    variance = float(gallery_nd.var(0).sum())
    distance = float(((pairs_nd.mean(0) - gallery_nd.mean(0)) ** 2).sum())
    return distance / max(variance, float(np.finfo(np.float32).tiny)) - 1 / len(pairs_nd) - 1 / len(gallery_nd)


def measure_known_share(pairs_Nd: Rows, gallery_Gd: Rows) -> float:
    """Return the share of the gallery's vectors that are among the pairs, from a sample.

    Args:
        pairs_Nd: the pairs' old embeddings.
        gallery_Gd: stored gallery embeddings.

    Example:
        >>> measure_known_share(np.eye(4)[:1], np.eye(4))
        0.25
    """
    sought_Sd = normalise_rows(copy_rows(gallery_Gd, _spread(np.arange(len(gallery_Gd)), SOUGHT)))
    nearest_S = np.full(len(sought_Sd), -1.0, np.float32)
    for start in range(0, len(pairs_Nd), _BLOCK):
        block_nd = normalise_rows(copy_rows(pairs_Nd, np.arange(start, min(start + _BLOCK, len(pairs_Nd)))))
        nearest_S = np.maximum(nearest_S, (sought_Sd @ block_nd.T).max(axis=1))
    return float((nearest_S >= ALIKE).mean())


def describe_shift(pairs_Nd: Rows, gallery_Gd: Rows, name: str) -> tuple[str, ...]:
    """Return a warning if the pairs are unlike the gallery.

    Args:
        pairs_Nd: the pairs' old embeddings.
        gallery_Gd: stored gallery embeddings.
        name: name of the gallery for the warning.

    Raises:
        XcompatError: the dimensions differ.
    """
    if pairs_Nd.shape[1] != gallery_Gd.shape[1]:
        raise XcompatError(f"{name} has {gallery_Gd.shape[1]} dimensions, and the old embeddings have {pairs_Nd.shape[1]}")
    shift = measure_shift(pairs_Nd, gallery_Gd)
    if shift < FAR:
        return ()
    return (
        f"! The pairs are unlike the vectors of {name} (shift {shift:.2f}; a random sample has about 0), so this map can find "
        "far less there: use a random sample of the gallery as pairs.",
    )


def read_gallery_vectors(path: Place) -> tuple[NDArray[np.float32], int]:
    """Read up to :data:`COMPARED` stored vectors of a gallery's oldest version, of embedding files or of a database.

    Returns:
        These vectors, and the number of all.

    Raises:
        XcompatError: the gallery is empty, or there are no embeddings.
    """
    from xcompat.retrieval import Gallery

    if isinstance(path, StoreAddress) or not is_gallery(path):
        side = next(iter(read_sides(path).values()))
        return sample_side(side), int(side.usable_N.sum())
    with Gallery.open(path) as gallery, gallery.reading():
        if not len(gallery):
            raise XcompatError(f"{path} is empty: add items first")
        filled = [(segment, rows_n) for segment in gallery.segments if len(rows_n := segment.present())]
        stored = [(segment, rows_n) for segment, rows_n in filled if segment.record.version == filled[0][0].record.version]
        total = sum(len(rows_n) for _, rows_n in stored)
        parts = [segment.vectors(_spread(rows_n, max(1, round(COMPARED / total * len(rows_n))))) for segment, rows_n in stored]
    return np.concatenate(parts), total


def sample_side(side: Side) -> NDArray[np.float32]:
    """Return up to :data:`COMPARED` usable embeddings of a side."""
    return copy_rows(side.embeds_ND, _spread(np.flatnonzero(side.usable_N)))


def _sample(rows_Nd: Rows) -> NDArray[np.float64]:
    return normalise_rows(copy_rows(rows_Nd, _spread(np.arange(len(rows_Nd))))).astype(np.float64)


def _spread(rows_N: NDArray[np.int64], most: int = COMPARED) -> NDArray[np.int64]:
    """Return evenly spread row numbers, at most ``most``."""
    return rows_N if len(rows_N) <= most else rows_N[np.linspace(0, len(rows_N) - 1, most).astype(np.int64)]
