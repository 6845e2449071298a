"""What a command may replace: only its own, unchanged output, unless it is told to overwrite."""

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
"""Name of the marker in a folder that a command made; the marker of a file is the file's name with this appended."""


class Made(BaseModel):
    """Content of a marker.

    Args:
        made_by: the command, such as ``export onnx``.
        files: path below the folder (or the file's name) -> size and checksum, for every file that the command wrote.
        before: the file that is being replaced: a kill can leave it in place beside the new marker.
        about: further facts, such as fingerprints.
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
    """Yield a temporary path that replaces a command's output when the block succeeds, with a marker that names the command.

    Args:
        path: the file or folder.
        made_by: the command.
        overwrite: whether anything may be replaced; None for a command without that option.
        read: what the command reads, which it never replaces.
        about: see :class:`Made`.

    Yields:
        A path that does not exist yet; write a file or a folder there.

    Raises:
        XcompatError: see :func:`require_replaceable`; nothing is written then.

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
        made = Made(made_by=made_by, files=files, about=about or {})
        if temporary.is_dir():
            # not atomically: nobody sees it yet, and a temporary folder that cannot be removed would be published with it
            (temporary / MARKER).write_text(made.model_dump_json(indent=2) + "\n", encoding="utf-8")
        else:
            before = file_record(path) if path.is_file() else None
            write_json(_marker(path), made.model_copy(update={"before": before}).model_dump(mode="json"))


def require_replaceable(path: Path, made_by: str, overwrite: bool | None = False, read: Iterable[Path] = ()) -> None:
    """Refuse to replace anything that a command did not make, or that it reads.

    Args:
        path: the file or folder that would be replaced.
        made_by: the command.
        overwrite: whether anything but what the command reads may be replaced; None for a command without that option.
        read: what the command reads; in a folder among it, nothing that another command made is replaced.

    Raises:
        XcompatError: names the first file that is in the way.
    """
    if path.resolve() in (Path.cwd(), *Path.cwd().parents):
        raise XcompatError(
            f"{path} is the folder that you are in, or one above it, and `xcompat {made_by}` replaces its folder as a whole; "
            f"name a new folder, e.g. {path / 'out'}"
        )
    clear_leftovers(path.parent)  # puts a folder back that a killed writer was replacing
    read = list(read)
    for source in read:
        if path.resolve() in (source.resolve(), *source.resolve().parents) or (path.exists() and path.samefile(source)):
            raise XcompatError(f"{path} is where `xcompat {made_by}` reads {source}; choose another place to write to")
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
            mend = (
                "move it, or choose another place"
                if overwrite is None or kept is not None
                else "move it, choose another place, or add --overwrite"
            )
            raise XcompatError(f"{file} {what} `xcompat {made_by}`; {mend}")


def read_marker(path: Path) -> Made | None:
    """Return the marker of a file or folder; None if it is missing or cannot be read."""
    marker = path / MARKER if path.is_dir() else _marker(path)
    try:
        return Made.model_validate(read_json(marker))
    except (XcompatError, ValidationError):
        return None


def _marker(file: Path) -> Path:
    return file.with_name(file.name + MARKER)


def _records(path: Path) -> dict[str, FileRecord | None]:
    """Return the current size and checksum of every file; None for links and other entries that no command writes."""
    if not path.is_dir():
        return {path.name: file_record(path) if path.is_file() else None}
    inside = (file for file in files_below(path) if file != path / MARKER)
    return {
        file.relative_to(path).as_posix(): file_record(file) if file.is_file() and not file.is_symlink() else None
        for file in inside
    }
