"""One model's stored embeddings by kind of items, with ids and classes, brought to length 1."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xcompat.core.arrays import read_lines
from xcompat.core.errors import XcompatError
from xcompat.core.files import files_below
from xcompat.vectors import (
    BAD_SHARE,
    EMBEDDING_COLUMNS,
    ID,
    SUFFIXES,
    check_rows,
    is_table,
    read_vectors,
    require_floats,
    steps_beside,
    stored_at,
)

KINDS = ("image", "text", "query")
"""Kinds of items in a folder. Of two kinds, the second searches the first."""
BARE = "row"
"""What an array without ids holds."""
ITEM = "item"
"""What a table holds, which does not say of what kind its items are."""
LABELS = "labels.txt"


@dataclass(frozen=True)
class Side:
    """One model's embeddings of one kind of items; without ``ids`` both models' rows are in the same order.

    Args:
        path: the file or folder.
        embeds_ND: the embeddings, of length 1 where they are usable.
        usable_N: (N,) bool, False for rows without a usable embedding, which no pair gets.
        notes: sentences for the user about such rows.
        ids: the id of each row.
        labels: the class of each row.
    """

    path: Path
    embeds_ND: NDArray[Any]
    usable_N: NDArray[np.bool_]
    notes: tuple[str, ...] = ()
    ids: list[str] | None = None
    labels: list[str] | None = None

    @property
    def keys(self) -> list[tuple[str, int]]:
        """Return the key of each item: its id, and its number among captions with the same id."""
        seen = Counter[str]()
        keys = []
        for name in self.ids or []:
            keys.append((name, seen[name]))
            seen[name] += 1
        return keys


def holds_embeddings(path: Path) -> bool:
    """Return whether :func:`read_sides` is what a path is for: a file, or a folder of embeddings, and no model."""
    return path.is_file() or is_table(path) or any(stored_at(path / f"{kind}_embeds") is not None for kind in KINDS)


def read_sides(path: Path, max_bad_share: float = BAD_SHARE) -> dict[str, Side]:
    """Read one model's embeddings.

    Args:
        path: as :func:`~xcompat.mapping.paired.load_paired` takes each side.
        max_bad_share: the share of rows that may have no usable embedding.

    Returns:
        The embeddings by kind of items: images, texts, queries, or several; :data:`BARE` rows; or the :data:`ITEM` of tables.

    Raises:
        XcompatError: a file is missing or unusable, or too many rows have no usable embedding.
    """
    if kinds := require_side(path):
        return {kind: _read_side(path, kind, kind != kinds[0], max_bad_share) for kind in kinds}
    vectors = read_vectors(path)
    side = Side(path, *check_rows(vectors.rows_ND, path, vectors.ids, max_bad_share), vectors.ids)
    if side.ids is not None:
        _require_distinct(path, side.ids)
    return {BARE if side.ids is None else ITEM: side}


def require_side(path: Path) -> list[str]:
    """Refuse what is no embeddings, by the names of the files alone.

    Args:
        path: as :func:`read_sides` takes it.

    Returns:
        The kinds of items in a folder; none of a file or table.

    Raises:
        XcompatError: a file is missing, or is none of embeddings.
    """
    kinds = [kind for kind in KINDS if stored_at(path / f"{kind}_embeds") is not None or (path / f"{kind}_ids.txt").exists()]
    if kinds or (path.is_dir() and not is_table(path)):
        kinds = kinds or [KINDS[0]]
        for kind in kinds:
            place, listed = _files_of(path, kind)
            for name in (place.name, *([] if is_table(place) else [listed])):
                if not (path / name).exists():
                    bare = "; or give both .npy files, if their rows are in one order" if name == listed else ""
                    raise XcompatError(f"{path} lacks {name}; it should hold {place.name}, {listed} and perhaps {LABELS}{bare}")
    elif not path.exists() or (path.is_file() and not path.name.endswith(SUFFIXES)):
        what = "is no file of embeddings" if path.exists() else "does not exist"
        raise XcompatError(
            f"{path} {what}; name a folder with image_embeds.npy and image_ids.txt, or a .npy file, or Parquet or JSON lines "
            f"with the columns {ID} and {EMBEDDING_COLUMNS[0]}"
        )
    return kinds


def side_files(path: Path) -> list[Path]:
    """Return the files that :func:`read_sides` reads, which :func:`require_side` has looked for."""
    kinds = require_side(path)
    places = [place for kind in kinds for place in (_files_of(path, kind)[0], path / f"{kind}_ids.txt")]
    places = [*places, path / LABELS] if kinds else [path]
    places += [file for place in places for file in steps_beside(place)]
    return [file for place in places for file in (files_below(place) if place.is_dir() else [place]) if file.is_file()]


def read_labels(file: Path) -> list[str]:
    """Return the class that each line of a file names.

    Raises:
        XcompatError: a line is blank; images without a class are no class of their own.
    """
    labels = read_lines(file)
    if blank := [number for number, label in enumerate(labels, 1) if not label.strip()]:
        raise XcompatError(
            f"{file}: {len(blank):,} of {len(labels):,} lines are blank, first line {blank[0]:,}; name the class of each image, "
            "or leave out images without one"
        )
    return labels


def _files_of(folder: Path, kind: str) -> tuple[Path, str]:
    """Return where embeddings of a kind lie, or would, and the name of the file with their ids."""
    return stored_at(folder / f"{kind}_embeds") or folder / f"{kind}_embeds.npy", f"{kind}_ids.txt"


def _read_side(path: Path, kind: str, searches: bool, max_bad_share: float) -> Side:
    """Read one kind of items; those that search others have the ids of what they should find, and no classes."""
    place, listed = _files_of(path, kind)
    vectors = read_vectors(place)
    require_floats(vectors.rows_ND, place)
    embeds_ND, ids = vectors.rows_ND, vectors.ids or read_lines(path / listed)
    labels = read_labels(path / LABELS) if not searches and (path / LABELS).is_file() else None
    for name, lines in ((listed, ids), (LABELS, labels)):
        if lines is not None and len(lines) != len(embeds_ND):
            raise XcompatError(f"{path / name} has {len(lines):,} lines, but {place.name} has {len(embeds_ND):,} rows")
    if not searches:
        _require_distinct(place if vectors.ids else path / listed, ids)
    return Side(path, *check_rows(embeds_ND, place, ids, max_bad_share), ids, labels)


def _require_distinct(file: Path, ids: list[str]) -> None:
    if len(set(ids)) < len(ids):
        twice = next(name for name, count in Counter(ids).items() if count > 1)
        raise XcompatError(f"{file} names {twice!r} more than once; an id is that of one item")
