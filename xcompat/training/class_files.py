"""Class files for zero-shot classification: written, and compared with the labels of the images."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from xcompat.core.errors import XcompatError, nearest
from xcompat.core.files import atomic_path
from xcompat.core.progress import console, literal
from xcompat.encoders.class_names import SETS, class_names

WORDNET = r"n\d{8}"
MEND = "name a file with a line for each label (`xcompat classes` writes public ones)"


def print_classes(name: str | None, to: Path | None) -> None:
    """Do what ``xcompat classes`` is asked to.

    Args:
        name: of a data set; None to list those whose class names are known.
        to: the file to write, a name a line; None to print them.

    Raises:
        XcompatError: no such names are known, or the file exists.
    """
    if name is None:
        if to is not None:
            raise XcompatError("--to writes the names of one data set; name it: xcompat classes NAME --to FILE")
        for each in SETS:
            console.print(f"{literal(each)}  [dim]{len(class_names(each))} classes[/]")
        return
    text = "".join(f"{each}\n" for each in class_names(name))
    if to is None:
        console.out(text, highlight=False, end="")
        return
    if to.exists() or to.is_symlink():
        raise XcompatError(f"{to} exists and is not overwritten; choose another file with --to, or move it away")
    to.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(to) as temporary:
        temporary.write_text(text, encoding="utf-8")
    console.print(literal(to), soft_wrap=True)


def class_indices(labels: Sequence[int | str], classes: Sequence[str], is_limited: bool = False) -> NDArray[np.int64]:
    """Return which class of a file each image is of.

    Labels are names of classes, indices (as texts too), or numbers of WordNet, as ImageNet's folders are called: these stand in
    sorted order for the lines. Every class needs an image: each name more than there are classes makes the task harder, and the
    numbers would be compared with those of another task.

    Args:
        labels: of the images.
        classes: names, in the order of the file.
        is_limited: whether the images are not all that there are, so that classes may be missing.

    Returns:
        (N,) int64.

    Raises:
        XcompatError: a class has no image, or an image has no class.

    Example:
        >>> class_indices(["n01443537", "n01440764"], ["tench", "goldfish"]).tolist()
        [1, 0]
    """
    distinct: dict[int | str, None] = dict.fromkeys(labels)
    names, count = {name: row for row, name in reversed(list(enumerate(classes)))}, len(classes)
    if all(re.fullmatch(WORDNET, str(label)) and label not in names for label in distinct):
        if len(distinct) != count:
            raise XcompatError(f"{count} classes, and the images are in {len(distinct)} folders; {MEND}")
        order = {label: row for row, label in enumerate(sorted(distinct, key=str))}
        return np.array([order[label] for label in labels], dtype=np.int64)
    order = {}
    for label in distinct:
        index = names.get(str(label), int(label) if str(label).isdigit() else count)
        if index >= count:
            raise XcompatError(f"the label {label!r} is none of the {count} classes; {nearest(str(label), classes)}")
        order[label] = index
    present = {classes[index] for index in order.values()}  # a name that stands twice is asked for by either of its lines
    missing = [name for name in classes if name not in present]
    if missing and not is_limited:
        also, have = (f" and {len(missing) - 1:,} more", "have") if len(missing) > 1 else ("", "has")
        raise XcompatError(f"{missing[0]!r}{also} of {count:,} classes {have} no image; {MEND}")
    return np.array([order[label] for label in labels], dtype=np.int64)
