"""Embeddings of the same items by the old and the new model, from folders or bare arrays."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xcompat.arrays import map_array, read_lines
from xcompat.errors import XcompatError

EMBEDDINGS, IDS, LABELS = "image_embeds.npy", "image_ids.txt", "labels.txt"
UNIT = 1e-2
"""How far from 1 the length of an embedding may be: float16 rounds by less."""
_CHECKED = 65536  # rows at once


@dataclass(frozen=True)
class PairedEmbeddings:
    """What both models made of the same items.

    Args:
        new_ND: float embeddings of the new model, L2-normalised.
        old_Nd: float embeddings of the old model, row by row of the same items.
        labels_N: int64 class of each item; None where they are not known.
        notes: what a reader must know of how they were brought together, one sentence each.
    """

    new_ND: NDArray[Any]
    old_Nd: NDArray[Any]
    labels_N: NDArray[np.int64] | None = None
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        """Return N."""
        return len(self.new_ND)

    @property
    def n_classes(self) -> int:
        """Return C; 0 without labels."""
        return int(self.labels_N.max()) + 1 if self.labels_N is not None else 0

    def take(self, rows_R: NDArray[np.int64]) -> PairedEmbeddings:
        """Return some of the items."""
        labels_R = self.labels_N[rows_R] if self.labels_N is not None else None
        return PairedEmbeddings(self.new_ND[rows_R], self.old_Nd[rows_R], labels_R)


@dataclass(frozen=True)
class _Side:
    """What one model made: ``ids`` is None where rows stand for items, ``labels`` where no classes are known."""

    path: Path
    embeds_ND: NDArray[Any]
    ids: list[str] | None = None
    labels: list[str] | None = None


def load_paired(old: Path, new: Path) -> PairedEmbeddings:
    """Read what both models made, and bring it into one order.

    Args:
        old: a folder with ``image_embeds.npy``, ``image_ids.txt`` (an id a line) and perhaps ``labels.txt`` (a class a line), or
            a bare ``.npy`` whose rows are those of the other.
        new: likewise; classes that either side knows count.

    Returns:
        The items that both have, in the order of the old side.

    Raises:
        XcompatError: a file is missing or unusable, the sides share no item, or their classes contradict each other.
    """
    sides = {"old": _read_side(old), "new": _read_side(new)}
    old_rows_N, new_rows_N, notes = _same_items(sides["old"], sides["new"])
    labels = _same_classes(sides["old"], sides["new"], old_rows_N, new_rows_N)
    labels_N = np.unique(labels, return_inverse=True)[1].astype(np.int64) if labels is not None else None
    new_ND, old_Nd = _picked(sides["new"].embeds_ND, new_rows_N), _picked(sides["old"].embeds_ND, old_rows_N)
    return PairedEmbeddings(new_ND, old_Nd, labels_N, notes)


def _read_side(path: Path) -> _Side:
    if path.is_file():
        return _Side(path, _embeddings(path))
    if not path.is_dir():
        raise XcompatError(f"{path} does not exist; name a folder with {EMBEDDINGS} and {IDS}, or a .npy file")
    for name in (EMBEDDINGS, IDS):
        if not (path / name).is_file():
            raise XcompatError(f"{path} lacks {name}; it holds {EMBEDDINGS}, {IDS} and perhaps {LABELS}")
    embeds_ND, ids = _embeddings(path / EMBEDDINGS), read_lines(path / IDS)
    labels = read_lines(path / LABELS) if (path / LABELS).is_file() else None
    for name, lines in ((IDS, ids), (LABELS, labels)):
        if lines is not None and len(lines) != len(embeds_ND):
            raise XcompatError(f"{path / name} has {len(lines):,} lines, but {EMBEDDINGS} has {len(embeds_ND):,} rows")
    if len(set(ids)) < len(ids):
        twice = next(name for name, count in Counter(ids).items() if count > 1)
        raise XcompatError(f"{path / IDS} names {twice!r} more than once; an id is that of one item")
    return _Side(path, embeds_ND, ids, labels)


def _embeddings(path: Path) -> NDArray[Any]:
    """Map embeddings into memory and look at each once."""
    embeds_ND = map_array(path)
    if embeds_ND.ndim != 2 or not embeds_ND.size or embeds_ND.dtype.kind != "f":
        raise XcompatError(f"{path} holds {embeds_ND.dtype} of shape {embeds_ND.shape}; embeddings are floats, N x D")
    for start in range(0, len(embeds_ND), _CHECKED):
        with np.errstate(over="ignore", invalid="ignore"):
            lengths_B = np.linalg.norm(np.asarray(embeds_ND[start : start + _CHECKED], np.float64), axis=1)
        wrong = np.flatnonzero(~(np.abs(lengths_B - 1) < UNIT))  # NaN too
        if len(wrong):
            row, length = start + int(wrong[0]), lengths_B[wrong[0]]
            what = f"is of length {length:.4g}, not 1" if np.isfinite(length) else "holds values that are not finite"
            mend = "divide embeddings by their norm, here and in your service" if np.isfinite(length) else "leave such items out"
            raise XcompatError(f"row {row} of {path} {what}; {mend}")
    return embeds_ND


def _same_items(old: _Side, new: _Side) -> tuple[NDArray[np.int64], NDArray[np.int64], tuple[str, ...]]:
    """Return the rows of the items that both sides have, in the order of the old one."""
    if (old.ids is None) != (new.ids is None):
        bare = old if old.ids is None else new
        raise XcompatError(f"{bare.path} has rows without ids, the other side has ids; give two .npy files, or two folders")
    if old.ids is None or new.ids is None:
        if len(old.embeds_ND) != len(new.embeds_ND):
            raise XcompatError(
                f"{old.path} has {len(old.embeds_ND):,} rows and {new.path} {len(new.embeds_ND):,}; rows without ids stand for "
                "the same items in the same order"
            )
        rows_N = np.arange(len(old.embeds_ND))
        return rows_N, rows_N, ()
    places = {name: row for row, name in enumerate(new.ids)}
    old_rows_N = np.array([row for row, name in enumerate(old.ids) if name in places], np.int64)
    if not len(old_rows_N):
        raise XcompatError(
            f"{old.path} and {new.path} share no id ({old.ids[0]!r}, {new.ids[0]!r}); an item has the same id on both sides"
        )
    new_rows_N = np.array([places[old.ids[row]] for row in old_rows_N.tolist()], np.int64)
    if len(old_rows_N) == len(old.ids) == len(new.ids):
        return old_rows_N, new_rows_N, ()
    note = f"Both sides have {len(old_rows_N):,} items; {len(old.ids):,} old and {len(new.ids):,} new ones were given."
    return old_rows_N, new_rows_N, (note,)


def _same_classes(
    old: _Side, new: _Side, old_rows_N: NDArray[np.int64], new_rows_N: NDArray[np.int64]
) -> NDArray[np.str_] | None:
    """Return the class of each item, as the side that knows it says."""
    found = [np.array(side.labels)[rows_N] for side, rows_N in ((old, old_rows_N), (new, new_rows_N)) if side.labels is not None]
    if len(found) == 2 and (found[0] != found[1]).any():
        row = int(np.flatnonzero(found[0] != found[1])[0])
        name = old.ids[int(old_rows_N[row])] if old.ids is not None else f"row {row}"
        first, second = (str(classes[row]) for classes in found)
        raise XcompatError(f"{name} is {first!r} in {old.path / LABELS} and {second!r} in {new.path / LABELS}")
    return found[0] if found else None


def _picked(embeds_ND: NDArray[Any], rows_N: NDArray[np.int64]) -> NDArray[Any]:
    """Return rows; all in their order are left on disk."""
    return embeds_ND if np.array_equal(rows_N, np.arange(len(embeds_ND))) else embeds_ND[rows_N]
