"""Atomic writes: a reader sees the old file or the new one, never half of one."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from xcompat.errors import XcompatError


@contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path`` that takes its place when the block succeeds.

    Args:
        path: the file (or folder) to be written. Its parent is made if missing.

    Yields:
        A path that does not exist yet, in the same folder; write a file or a folder there.

    Example:
        >>> import tempfile
        >>> target = Path(tempfile.mkdtemp()) / "a.txt"
        >>> with atomic_path(target) as temporary:
        ...     _ = temporary.write_text("whole")
        >>> target.read_text()
        'whole'
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    holder = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        temporary = holder / path.name
        yield temporary
        _sync(temporary)
        if path.is_dir():  # rename cannot replace a folder that holds files
            path.replace(holder / f"{path.name}.previous")
        temporary.replace(path)
    finally:
        shutil.rmtree(holder, ignore_errors=True)


def _sync(path: Path) -> None:
    """Flush a file, or every file of a folder, so that a power cut after the rename finds the content."""
    files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
    for file in files:
        with file.open("rb") as handle:
            os.fsync(handle.fileno())


def write_json(path: str | Path, value: Any) -> None:  # noqa: ANN401 - any JSON value
    """Write a JSON file atomically; NaN and infinities are refused, as JSON has none."""
    with atomic_path(path) as temporary:
        temporary.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def read_json(path: str | Path) -> Any:  # noqa: ANN401 - any JSON value
    """Read a JSON file, naming the file when it is missing or not JSON."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise XcompatError(f"{path} does not exist") from None
    except json.JSONDecodeError as error:
        raise XcompatError(f"{path} is not valid JSON ({error}); delete it and make it again") from None
