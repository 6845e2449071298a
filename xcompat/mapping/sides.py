"""A model's stored embeddings by kind of items, with ids and classes, scaled to length 1."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xcompat.core.arrays import read_lines
from xcompat.core.errors import XcompatError
from xcompat.core.files import files_below
from xcompat.mapping.item_labels import ItemLabels, read_labels
from xcompat.stores.places import Place, Reading, StoreAddress, is_gallery, is_index, read_place
from xcompat.vectors import Columns, check_rows, read_vectors
from xcompat.vectors.checks import BAD_SHARE, require_floats
from xcompat.vectors.formats import EMBEDDING_COLUMNS, ID, KINDS, READABLE, SUFFIXES, is_table, steps_beside, stored_at

BARE = "row"
"""Kind of items in an array without ids."""
ITEM = "item"
"""Kind of items in a table, which does not record it."""
LABELS = "labels.txt"


@dataclass(frozen=True)
class Side:
    """A model's embeddings of a single kind of items; without ``ids``, both models' rows are in the same order.

    Args:
        path: file, folder or database.
        embeds_ND: the embeddings; usable ones have length 1.
        usable_N: (N,) bool, False for rows without a usable embedding, which are not paired.
        notes: sentences for the user about such rows.
        ids: id of each row.
        labels: class of each row; None for rows without a class, which are not paired.
    """

    path: Place
    embeds_ND: NDArray[Any]
    usable_N: NDArray[np.bool_]
    notes: tuple[str, ...] = ()
    ids: list[str] | None = None
    labels: Sequence[str | None] | None = None

    def are_pairable(self) -> NDArray[np.bool_]:
        """Return a mask of the rows with a usable embedding and, if there are classes, a class."""
        return self.usable_N if self.labels is None else self.usable_N & [label is not None for label in self.labels]

    def with_labels(self, given: ItemLabels) -> Side:
        """Return the same embeddings with classes, and a note if some rows have none."""
        if self.labels is not None:
            raise XcompatError(f"{self.path} has classes of its own ({LABELS}); remove --labels")
        labels = given.of_items(self.ids, len(self.embeds_ND), self.path)
        return replace(self, labels=labels, notes=(*self.notes, *note_unlabelled(labels, given.path)))

    @property
    def keys(self) -> list[tuple[str, int]]:
        """Key of each item: its id, and its number among captions with this id."""
        seen = Counter[str]()
        keys = []
        for name in self.ids or []:
            keys.append((name, seen[name]))
            seen[name] += 1
        return keys


def holds_embeddings(path: Place) -> bool:
    """Return whether a path is a file, folder or database of embeddings, not a model."""
    if isinstance(path, StoreAddress):
        return True
    is_stored = path.is_file() or is_gallery(path) or is_table(path)
    return is_stored or any(stored_at(path / f"{kind}_embeds") is not None for kind in KINDS)


def holds_one_kind(path: Place) -> bool:
    """Return whether a path holds items of a single kind that it does not record: anything but a folder with ``KIND_embeds``."""
    return holds_embeddings(path) and (isinstance(path, StoreAddress) or not kinds_in(path))


def kinds_in(folder: Path) -> list[str]:
    """Return the kinds of items in a folder, also of those without ids or embeddings."""
    return [kind for kind in KINDS if stored_at(folder / f"{kind}_embeds") or (folder / f"{kind}_ids.txt").exists()]


def read_sides(path: Place, max_bad_share: float = BAD_SHARE, reading: Reading | None = None) -> dict[str, Side]:
    """Read a model's embeddings.

    Args:
        path: a side of :func:`~xcompat.mapping.paired.load_paired`.
        max_bad_share: tolerated share of rows without a usable embedding.
        reading: column names, and a file with ids.

    Returns:
        The embeddings by item kind: images, texts and queries; :data:`BARE` rows; or the :data:`ITEM` of tables.

    Raises:
        XcompatError: a file is missing or unusable, or too many rows lack a usable embedding.
    """
    reading = reading or Reading()
    if (kinds := require_side(path)) and isinstance(path, Path):
        if reading.ids is not None:
            raise XcompatError(f"{path} has ids of its own; remove --ids")
        return {kind: _read_side(path, kind, kind != kinds[0], max_bad_share, reading.columns) for kind in kinds}
    vectors = read_place(path, reading)
    side = Side(path, *check_rows(vectors.rows_ND, path, vectors.ids, max_bad_share), vectors.ids)
    if side.ids is not None:
        _require_distinct(path, side.ids)
    return {BARE if side.ids is None else ITEM: side}


def require_side(path: Place) -> list[str]:
    """Raise if a path does not contain embeddings, judged only by file names, or an address has no known kind of store.

    Args:
        path: as in :func:`read_sides`.

    Returns:
        The kinds of items in a folder; empty for a file or table.

    Raises:
        XcompatError: a file is missing or does not contain embeddings.
    """
    if isinstance(path, StoreAddress):
        from xcompat.stores import require_kind

        require_kind(path.uri)
        return []
    if is_gallery(path) or is_index(path):
        return []
    kinds = kinds_in(path)
    if kinds or (path.is_dir() and not is_table(path)):
        kinds = kinds or [KINDS[0]]
        for kind in kinds:
            place, listed = _files_of(path, kind)
            for name in (place.name, *([] if is_table(place) else [listed])):
                if not (path / name).exists():
                    bare = "; or give both .npy files, if their rows are in the same order" if name == listed else ""
                    raise XcompatError(f"{path} lacks {name}; it needs {place.name} and {listed}, and optionally {LABELS}{bare}")
    elif not path.exists() or (path.is_file() and not path.name.endswith(SUFFIXES)):
        what = "is not a file of embeddings" if path.exists() else "does not exist"
        raise XcompatError(
            f"{path} {what}; use a faiss index, a gallery, a database's address, a folder with image_embeds.npy and "
            f"image_ids.txt, or {READABLE} with {ID} and {EMBEDDING_COLUMNS[0]}"
        )
    return kinds


def side_files(path: Place) -> list[Path]:
    """Return the files read by :func:`read_sides`, none for a database; raise as :func:`require_side` does."""
    kinds = require_side(path)
    if isinstance(path, StoreAddress):
        return []
    if is_gallery(path):
        return [file for file in path.iterdir() if file.is_file()]  # manifests name the segments and their checksums
    places = [place for kind in kinds for place in (_files_of(path, kind)[0], path / f"{kind}_ids.txt")]
    places = [*places, path / LABELS] if kinds else [path]
    places += [file for place in places for file in steps_beside(place)]
    return [file for place in places for file in (files_below(place) if place.is_dir() else [place]) if file.is_file()]


def note_unlabelled(labels: Sequence[str | None], path: Path) -> tuple[str, ...]:
    """Return a note if some items have no class."""
    known = sum(label is not None for label in labels)
    return () if known == len(labels) else (f"{known:,} of {len(labels):,} items have a class in {path}; only these are used.",)


def _files_of(folder: Path, kind: str) -> tuple[Path, str]:
    """Return the path of a kind's embeddings, existing or expected, and the name of its ids file."""
    return stored_at(folder / f"{kind}_embeds") or folder / f"{kind}_embeds.npy", f"{kind}_ids.txt"


def _read_side(path: Path, kind: str, searches: bool, max_bad_share: float, columns: Columns) -> Side:
    """Read a single kind of items. Query items have their targets' ids, and no classes."""
    place, listed = _files_of(path, kind)
    vectors = read_vectors(place, columns)
    require_floats(vectors.rows_ND, place)
    embeds_ND, ids = vectors.rows_ND, vectors.ids or read_lines(path / listed)
    labels = read_labels(path / LABELS) if not searches and (path / LABELS).is_file() else None
    for name, lines in ((listed, ids), (LABELS, labels)):
        if lines is not None and len(lines) != len(embeds_ND):
            raise XcompatError(f"{path / name} has {len(lines):,} lines, but {place.name} has {len(embeds_ND):,} rows")
    if not searches:
        _require_distinct(place if vectors.ids else path / listed, ids)
    return Side(path, *check_rows(embeds_ND, place, ids, max_bad_share), ids, labels)


def _require_distinct(file: Place, ids: list[str]) -> None:
    if len(set(ids)) < len(ids):
        twice = next(name for name, count in Counter(ids).items() if count > 1)
        raise XcompatError(f"{file} contains the id {twice!r} more than once; ids must be unique")
