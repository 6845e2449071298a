"""Lists of class names for zero-shot classification."""

from __future__ import annotations

from pathlib import Path

from xcompat.data.captions import pick_column
from xcompat.errors import XcompatError

NAME_COLUMNS = ("words", "name", "names", "class", "class_name", "label")


def load_classes(path: str | Path, column: str | None = None) -> list[str]:
    """Read class names in the order of their label indices.

    Args:
        path: a text file with one name a line (line 1 is label 0), or a ``.tsv`` or ``.csv`` table with a header; its column
            ``index``, if there is one, gives the labels.
        column: the table's column with the names; found by its name when not given.

    Returns:
        The names; ``names[label]`` is the name of a label.

    Raises:
        XcompatError: the file is missing or empty, a name is blank, or the indices are not 0 to n - 1.
    """
    import pandas as pd

    path = Path(path)
    if not path.is_file():
        raise XcompatError(f"{path} does not exist; name a file with one class name a line, or a .tsv with a header")
    if path.suffix.lower() not in (".tsv", ".csv"):
        names = [line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines()]
        while names and not names[-1]:
            names.pop()  # an empty last line is no class
    else:
        separator = "\t" if path.suffix.lower() == ".tsv" else ","
        try:
            table = pd.read_csv(path, sep=separator, dtype=str, keep_default_na=False, encoding="utf-8-sig")
        except ValueError as error:
            raise XcompatError(f"{path} cannot be read ({str(error).splitlines()[0]}); it needs a header") from error
        if "index" in table:
            order = pd.to_numeric(table["index"], errors="coerce")
            if sorted(order) != list(range(len(table))):
                raise XcompatError(f"{path}: the column index must hold 0 to {len(table) - 1}, each once")
            table = table.iloc[order.argsort()]
        name = pick_column(column, NAME_COLUMNS, list(table.columns), "column", str(path))
        names = [text.strip() for text in table[name]]
    if not names:
        raise XcompatError(f"{path} holds no class names; write one a line")
    if not all(names):
        raise XcompatError(f"{path}: class {names.index('')} has a blank name; name it or delete the line")
    return names
