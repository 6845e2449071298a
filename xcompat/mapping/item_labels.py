"""Classes of items from a text file, a table, or labelled images, matched with embeddings by id or row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from xcompat.core.arrays import read_lines
from xcompat.core.errors import XcompatError
from xcompat.data import LabelledSource, load_labelled
from xcompat.data.ids import match_file_names
from xcompat.data.image_lists import is_image_list, read_image_list
from xcompat.data.schema import IMAGE_COLUMNS, LABEL_COLUMNS, is_blank
from xcompat.data.sources import TEXT_SUFFIXES, has_suffix
from xcompat.data.table_rows import ROW_SUFFIXES, read_rows
from xcompat.data.texts import ID_COLUMNS


@dataclass(frozen=True)
class ItemLabels:
    """Classes of items.

    Args:
        path: their source.
        classes: class of each row; None if unknown.
        ids: id of each row; None if rows are in the order of the items.
    """

    path: Path
    classes: list[str | None]
    ids: list[str] | None = None

    def of_items(self, ids: Sequence[str] | None, count: int, where: object) -> list[str | None]:
        """Return the class of each item, None if unknown.

        Ids are matched by file names if no id is equal, as those of images are.

        Args:
            ids: the items' ids, or None.
            count: number of items.
            where: source of the items, for messages.

        Raises:
            XcompatError: the counts differ, or no item has a class.
        """
        if self.ids is None:
            if len(self.classes) != count:
                raise XcompatError(
                    f"{self.path} has {len(self.classes):,} classes, but {where} has {count:,} items; write a class per item, or "
                    "a table with ids and classes"
                )
            return self.classes
        if ids is None:
            raise XcompatError(f"{where} has no ids to match with {self.path}; add them with --ids, or write a class per line")
        class_of = dict(zip(match_file_names(self.ids, ids) or self.ids, self.classes, strict=True))
        found = [class_of.get(name) for name in ids]
        if all(label is None for label in found):
            raise XcompatError(
                f"{self.path} has no class for any item of {where} ({self.ids[0]!r}, {ids[0]!r}); use the same ids"
            )
        return found


def read_item_labels(path: Path) -> ItemLabels:
    """Read the classes of items.

    Args:
        path: text file with a class per line, table with a class column and optionally ids, or labelled images as in
            :class:`~xcompat.data.LabelledSource`, e.g. a folder per class.

    Raises:
        XcompatError: the source is missing or damaged, a line has no class, or an id has two classes.
    """
    if path.is_file() and has_suffix(path, TEXT_SUFFIXES):
        if not is_image_list(path):
            return ItemLabels(path, list(read_labels(path)))
        listed = list(read_image_list(path))
        if all(label is None for _, label in listed):
            raise XcompatError(f"{path} lists images without classes; write the class after each path")
        return _without_repeats(path, [label for _, label in listed], [name for name, _ in listed])
    if path.is_file() and has_suffix(path, ROW_SUFFIXES):
        return _read_table(path)
    images = load_labelled(LabelledSource(path=str(path)))
    return ItemLabels(path, list(images.class_names()), list(images.dataset["id"]))


def read_labels(file: Path) -> list[str]:
    """Return the class on each line of a file.

    Raises:
        XcompatError: a line is blank.
    """
    labels = read_lines(file)
    if blank := [number for number, label in enumerate(labels, 1) if not label.strip()]:
        raise XcompatError(
            f"{file}: {len(blank):,} of {len(labels):,} lines are blank, first line {blank[0]:,}; give each image a class, "
            "or remove images without one"
        )
    return labels


def _read_table(path: Path) -> ItemLabels:
    first = next(read_rows(path), None)
    if first is None:
        raise XcompatError(f"{path} has no rows; write an id and a class per item")
    names = list(first[1])
    label = next((each for each in LABEL_COLUMNS if each in names), None)
    if label is None:
        raise XcompatError(
            f"{path} has no column label or class (it has {', '.join(names)}); write label in the first line, above the classes"
        )
    name = next((each for each in (*ID_COLUMNS, *IMAGE_COLUMNS) if each in names), None)
    if name is None and len(names) > 1:
        raise XcompatError(
            f"{path} has no column id (it has {', '.join(names)}); write id in the first line, above the ids, or remove the "
            f"columns other than {label} if rows are in the order of the items"
        )
    classes, ids = list[str | None](), list[str]()
    for _, row in read_rows(path, (label,) if name is None else (name, label)):
        value = row.get(label)
        classes.append(None if is_blank(value) else str(value))
        if name is not None:
            ids.append(str(row.get(name)))
    return ItemLabels(path, classes) if name is None else _without_repeats(path, classes, ids)


def _without_repeats(path: Path, classes: list[str | None], ids: list[str]) -> ItemLabels:
    """Return the classes, or raise if an id has two."""
    known: dict[str, str | None] = {}
    for name, label in zip(ids, classes, strict=True):
        if known.setdefault(name, label) != label:
            raise XcompatError(f"{path} has two classes of {name!r}: {known[name]!r} and {label!r}; keep one of them")
    return ItemLabels(path, list(known.values()), list(known))
