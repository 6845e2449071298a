"""Class files for zero-shot classification: print, write, match to labels."""

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
FIX = "use a class file with a line per label (`xcompat classes` writes public ones)"


def print_classes(name: str | None, to: Path | None) -> None:
    """Run ``xcompat classes``.

    Args:
        name: data set; None to list them.
        to: file to write, with a name per line; None to print.

    Raises:
        XcompatError: the data set is unknown, or the file exists.
    """
    if name is None:
        if to is not None:
            raise XcompatError("--to needs the name of a data set: xcompat classes NAME --to FILE")
        for each in SETS:
            console.print(f"{literal(each)}  [dim]{len(class_names(each))} classes[/]")
        return
    text = "".join(f"{each}\n" for each in class_names(name))
    if to is None:
        console.out(text, highlight=False, end="")
        return
    if to.exists() or to.is_symlink():
        raise XcompatError(f"{to} already exists; choose another file with --to, or move it")
    to.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(to) as temporary:
        temporary.write_text(text, encoding="utf-8")
    console.print(literal(to), soft_wrap=True)


def class_indices(labels: Sequence[int | str], classes: Sequence[str], is_limited: bool = False) -> NDArray[np.int64]:
    """Return the class index of each image.

    Labels are class names, indices (also as texts), or WordNet numbers, which match ``classes`` when sorted. Every class
    needs an image, as extra classes make results incomparable.

    Args:
        labels: labels of the images.
        classes: class names in file order.
        is_limited: whether images were limited, so classes may lack some.

    Returns:
        (N,) int64.

    Raises:
        XcompatError: a class has no image, or an image no class.

    Example:
        >>> class_indices(["n01443537", "n01440764"], ["tench", "goldfish"]).tolist()
        [1, 0]
    """
    distinct: dict[int | str, None] = dict.fromkeys(labels)
    names, count = {name: row for row, name in reversed(list(enumerate(classes)))}, len(classes)
    if all(re.fullmatch(WORDNET, str(label)) and label not in names for label in distinct):
        if len(distinct) != count:
            raise XcompatError(f"{count} classes, but the images are in {len(distinct)} folders; {FIX}")
        order = {label: row for row, label in enumerate(sorted(distinct, key=str))}
        return np.array([order[label] for label in labels], dtype=np.int64)
    order = {}
    for label in distinct:
        index = names.get(str(label), int(label) if str(label).isdigit() else count)
        if index >= count:
            raise XcompatError(f"label {label!r} is not among the {count} classes; {nearest(str(label), classes)}")
        order[label] = index
    present = {classes[index] for index in order.values()}  # by name, as a name may have two lines
    missing = [name for name in classes if name not in present]
    if missing and not is_limited:
        also, have = (f" and {len(missing) - 1:,} more", "have") if len(missing) > 1 else ("", "has")
        raise XcompatError(f"{missing[0]!r}{also} of {count:,} classes {have} no image; {FIX}")
    return np.array([order[label] for label in labels], dtype=np.int64)
