"""Lists of class names in label order."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from xcompat.core.arrays import read_lines
from xcompat.core.errors import MissingPathError, XcompatError, nearest
from xcompat.data.schema import pick_column
from xcompat.data.text_files import require_table

if TYPE_CHECKING:
    import pandas as pd

LISTED = 20  # maximum number of classes in a message
NAME_COLUMNS = ("words", "name", "names", "class", "class_name", "label")


def load_classes(path: str | Path, column: str | None = None) -> list[str]:
    """Read class names in label order.

    Args:
        path: text file with a name per line (line 1 is label 0), or name and label (``/a/airfield 0``, Places-365). Or a
            ``.tsv`` or ``.csv`` table with a header and an optional label column ``index``.
        column: table column with the names, detected by default. If a table with ``index`` has no usual name, leading columns
            that are unique together are joined (``alphabet, character`` gives "Balinese character01").

    Returns:
        The names by label.

    Raises:
        XcompatError: the file is missing or empty, a name is blank, or the indices are not 0 to n - 1.
    """
    import pandas as pd

    path = Path(path)
    if not path.is_file():
        raise MissingPathError(f"{path} does not exist; give a file with a class name per line, or a .tsv with a header")
    require_table(path)
    if path.suffix.lower() not in (".tsv", ".csv"):
        names = [line.strip() for line in read_lines(path)]
        while names and not names[-1]:
            names.pop()  # ignore trailing blank lines
        names = _without_labels(names)
    else:
        separator = "\t" if path.suffix.lower() == ".tsv" else ","
        try:
            table = pd.read_csv(path, sep=separator, dtype=str, keep_default_na=False, encoding="utf-8-sig")
        except ValueError as error:
            raise XcompatError(f"{path} cannot be read ({str(error).splitlines()[0]}); it needs a header") from error
        if "index" in table:
            order = pd.to_numeric(table["index"], errors="coerce")
            if sorted(order) != list(range(len(table))):
                raise XcompatError(f"{path}: the column index must contain each of 0 to {len(table) - 1} once")
            table = table.iloc[order.argsort()]
        names = [text.strip() for text in _name_column(table, column, str(path))] if len(table) else []
    if not names:
        raise XcompatError(f"{path} contains no class names; write a class name on each line")
    if not all(names):
        raise XcompatError(f"{path}: class {names.index('')} has a blank name; name it or delete the line")
    return names


def _without_labels(lines: list[str]) -> list[str]:
    """Return names sorted by trailing labels if these are exactly 0 to n - 1, else the lines."""
    parts = [line.rsplit(maxsplit=1) for line in lines]
    if not all(len(part) == 2 and part[1].isdecimal() for part in parts):
        return lines
    names = {int(label): name for name, label in parts}
    whole = sorted(names) == list(range(len(lines))) and len(set(names.values())) == len(lines)  # else "route 0" is a name
    return [names[label] for label in range(len(lines))] if whole else lines


def _name_column(table: pd.DataFrame, column: str | None, where: str) -> pd.Series:
    columns = [name for name in table.columns if name != "index"]
    if column is None and "index" in table and not set(NAME_COLUMNS) & set(columns):
        for count in range(1, len(columns) + 1):
            joined = table[columns[:count]].agg(" ".join, axis=1)
            if joined.is_unique:
                return joined
    return table[pick_column(column, NAME_COLUMNS, list(table.columns), "column", where)]


def nearest_class(name: str, classes: Collection[str]) -> str:
    """Return a hint for an unknown class.

    Args:
        name: the unknown name.
        classes: the known names.

    Returns:
        The nearest name (``"did you mean 'cat'?"``), or known names.
    """
    meant = nearest(name, classes)
    return meant if meant.startswith("did you") or len(classes) <= LISTED else f"known are {len(classes)}, first {min(classes)!r}"
