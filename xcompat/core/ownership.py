"""Protection of files that a command did not write itself."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from xcompat.core.checksums import FileRecord, file_record
from xcompat.core.errors import XcompatError
from xcompat.core.files import atomic_path, clear_leftovers, drop_unfinished, files_below, read_json, write_json

MARKER = ".xcompat.json"
"""Name of the marker in a command's output folder. For an output file, it is appended to the file's name."""


class OwnershipMarker(BaseModel):
    """Content of a marker.

    Args:
        made_by: the command, e.g. ``export onnx``.
        files: path below the folder (or the file's name) -> size and checksum of every written file.
        before: record of the replaced file, which a kill can leave in place beside the new marker.
        about: further facts, e.g. fingerprints.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    made_by: str
    files: dict[str, FileRecord]
    before: FileRecord | None = None
    about: dict[str, str] = {}


@contextmanager
def owned_path(
    path: str | Path, made_by: str, overwrite: bool | None = False, read: Iterable[Path] = (), about: dict[str, str] | None = None
) -> Iterator[Path]:
    """Yield a temporary path that replaces a command's output on success, with a marker naming the command.

    Args:
        path: the file or folder.
        made_by: the command.
        overwrite: whether to replace anything. None for a command without this option.
        read: inputs of the command, which are never replaced.
        about: see :class:`OwnershipMarker`.

    Yields:
        A new path. Write a file or a folder there.

    Raises:
        XcompatError: see :func:`require_replaceable`. Nothing is written then.

    Example:
        >>> import tempfile
        >>> target = Path(tempfile.mkdtemp()) / "out"
        >>> for _ in range(2):  # the second time it replaces its own
        ...     with owned_path(target, "export example") as temporary:
        ...         temporary.mkdir()
        ...         _ = (temporary / "a.txt").write_text("made")
        >>> _ = (target / "notes.txt").write_text("mine")
        >>> require_replaceable(target, "export example")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        xcompat.core.errors.XcompatError: ...notes.txt was not made by `xcompat export example`; move it, choose another place...
    """
    path = Path(path)
    require_replaceable(path, made_by, overwrite, read)
    with atomic_path(path) as temporary:
        yield temporary
        require_replaceable(path, made_by, overwrite, read)  # again: writing may have taken long
        drop_unfinished(temporary)  # before its files are recorded
        files = {name: record for name, record in _records(temporary).items() if record is not None}
        made = OwnershipMarker(made_by=made_by, files=files, about=about or {})
        if temporary.is_dir():
            # not atomically: nobody sees it yet, and a temporary folder that cannot be removed would be published with it
            (temporary / MARKER).write_text(made.model_dump_json(indent=2) + "\n", encoding="utf-8")
        else:
            before = file_record(path) if path.is_file() else None
            write_json(_marker(path), made.model_copy(update={"before": before}).model_dump(mode="json"))


def require_replaceable(path: Path, made_by: str, overwrite: bool | None = False, read: Iterable[Path] = ()) -> None:
    """Raise if a path contains inputs of the command, or anything it did not write.

    Args:
        path: the file or folder to replace.
        made_by: the command.
        overwrite: whether to replace anything but the inputs. None for a command without this option.
        read: inputs of the command. In an input folder, other commands' output is never replaced.

    Raises:
        XcompatError: names the first file in the way.
    """
    if path.resolve() in (Path.cwd(), *Path.cwd().parents):
        raise XcompatError(
            f"{path} is the current folder or a parent of it, and `xcompat {made_by}` replaces the whole folder; "
            f"use a new folder, e.g. {path / 'out'}"
        )
    clear_leftovers(path.parent)  # puts a folder back that a killed writer was replacing
    read = list(read)
    for source in read:
        if path.resolve() in (source.resolve(), *source.resolve().parents) or (path.exists() and path.samefile(source)):
            raise XcompatError(f"{path} is an input of `xcompat {made_by}` ({source}); write to another place")
    kept = next((source for source in read if source.resolve() in path.resolve().parents), None)
    if (overwrite and kept is None) or not os.path.lexists(path):
        return
    made = read_marker(path)
    theirs = made.files if made is not None and made.made_by == made_by else {}
    for name, record in _records(path).items():
        known = (theirs.get(name), made.before if made is not None and theirs and path.is_file() else None)
        if record is None or record not in known:
            file = path / name if path.is_dir() else path
            what = "has changed since it was made by" if name in theirs else "was not made by"
            fix = (
                "move it, or choose another place"
                if overwrite is None or kept is not None
                else "move it, choose another place, or add --overwrite"
            )
            raise XcompatError(f"{file} {what} `xcompat {made_by}`; {fix}")


def read_marker(path: Path) -> OwnershipMarker | None:
    """Return the marker of a file or folder, or None if it is missing or unreadable."""
    marker = path / MARKER if path.is_dir() else _marker(path)
    try:
        return OwnershipMarker.model_validate(read_json(marker))
    except (XcompatError, ValidationError):
        return None


def _marker(file: Path) -> Path:
    return file.with_name(file.name + MARKER)


def _records(path: Path) -> dict[str, FileRecord | None]:
    """Return every file's record, and None for links and other entries."""
    if not path.is_dir():
        return {path.name: file_record(path) if path.is_file() else None}
    inside = (file for file in files_below(path) if file != path / MARKER)
    return {
        file.relative_to(path).as_posix(): file_record(file) if file.is_file() and not file.is_symlink() else None
        for file in inside
    }
