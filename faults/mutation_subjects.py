"""What is damaged, and how questions are asked."""

from __future__ import annotations

import contextlib
import io
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock


class Answer(NamedTuple):
    """What a subject says: anything that can be compared, and the lines that say that something is amiss."""

    value: Any
    said: tuple[str, ...] = ()


def complaints(printed: str) -> tuple[str, ...]:
    """Return the lines that say that something is amiss."""
    return tuple(line for line in printed.splitlines() if re.search(r"!|✗|skipped|damaged|changed since", line))


@dataclass(frozen=True)
class Subject:
    """Files that are damaged, and what is asked of them.

    Args:
        name: of its row.
        folder: everything that belongs to it, whole.
        files: glob patterns of what is damaged.
        ask: the question, put to a copy of the folder; raises XcompatError for a refusal.
        has_checksum: whether another answer than the right one is wrong; else it is that of the content as it now stands.
        weight: share of the trials.
        foreign: another folder of the same layout, whose files are put in the place of this one's.
    """

    name: str
    folder: Path
    files: tuple[str, ...]
    ask: Callable[[Path], Answer]
    has_checksum: bool = True
    weight: float = 1.0
    foreign: Path | None = None

    @property
    def place(self) -> Path:
        """Where copies lie: files that name others by their full paths were made there."""
        return self.folder.parent.parent / "copies" / self.folder.name

    def paths(self) -> list[str]:
        found = {path for pattern in self.files for path in self.folder.glob(pattern) if path.is_file()}
        return sorted(str(path.relative_to(self.folder)) for path in found)

    @contextlib.contextmanager
    def copy(self) -> Iterator[Path]:
        shutil.rmtree(self.place.parent, ignore_errors=True)
        yield Path(shutil.copytree(self.folder, self.place))
        shutil.rmtree(self.place.parent, ignore_errors=True)


def command(*arguments: object) -> Answer:
    """Type a command; a refusal becomes an XcompatError, everything that is not one line of it an error of another kind."""
    from xcompat import XcompatError, cli

    out, err = io.StringIO(), io.StringIO()
    code: Any = 0
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        mock.patch.object(sys, "argv", ["xcompat", *map(str, arguments)]),
    ):
        try:
            cli.main()
        except SystemExit as stop:
            code = stop.code or 0
    lines = [line for line in err.getvalue().splitlines() if line.strip()]
    if code == 2:
        if not lines or not lines[-1].startswith("xcompat: "):
            raise RuntimeError(f"refused without a line: {err.getvalue()}")
        raise XcompatError(lines[-1])
    return Answer((code, out.getvalue()), complaints(out.getvalue()))
