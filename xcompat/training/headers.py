"""Comment header of a recipe: paper, data layout, results."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path

from xcompat.core.errors import XcompatError

_KEY = re.compile(r"# (paper|table|row|published|data|needs|differs|ours): (.*)")
_CONTINUED = "#   "


@dataclass(frozen=True)
class Header:
    """Lines ``# key: value`` at the top of a recipe.

    Args:
        said: key -> values in order; continuation lines start with three spaces.
    """

    said: dict[str, list[str]] = field(default_factory=dict)

    def first_value(self, key: str) -> str:
        """Return the first value of a key, or an empty string."""
        return self.said.get(key, [""])[0]

    def rows(self) -> Iterator[tuple[str, str]]:
        """Yield table rows with the paper's results."""
        yield from zip(self.said.get("row", []), self.said.get("published", []), strict=True)


def read_header(file: Path) -> Header:
    r"""Read the header of a recipe.

    Args:
        file: YAML file.

    Example:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp()) / "recipe.yaml"
        >>> _ = file.write_text("# A table.\n# data: photos/train,\n#   a folder per class\nmethod: oca\n")
        >>> read_header(file).first_value("data")
        'photos/train, a folder per class'
    """
    said: dict[str, list[str]] = {}
    last: list[str] | None = None
    for line in takewhile(lambda line: line.startswith("#"), file.read_text(encoding="utf-8").splitlines()):
        if found := _KEY.fullmatch(line):
            last = said.setdefault(found[1], [])
            last.append(found[2])
        elif last is not None and line.startswith(_CONTINUED) and last is not said.get("ours"):
            last[-1] += f" {line.removeprefix(_CONTINUED)}"
        else:
            last = None
    return Header(said)


def expected_layout(file: Path) -> str:
    """Return file name and data layout of a recipe, or an empty string."""
    layout = read_header(file).first_value("data")
    return f"{file.name} expects {layout}" if layout else ""


@contextmanager
def add_layout_to_errors(expected: str) -> Iterator[None]:
    """Append the expected data layout to errors.

    Args:
        expected: from :func:`expected_layout`.
    """
    try:
        yield
    except XcompatError as error:
        *others, last = error.args
        raise XcompatError(*others, f"{last}. {expected}" if expected else last) from None
