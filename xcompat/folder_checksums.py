"""What the files of a folder were when they were written, kept beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from xcompat.checksums import FileRecord, difference, file_record
from xcompat.errors import XcompatError
from xcompat.files import read_json, write_json

CHECKSUMS = "xcompat_checksums.json"
"""A name of its own: others keep checksums of theirs beside a model, in forms of theirs."""
_RECORDS = TypeAdapter(dict[str, FileRecord])


def write_checksums(folder: Path, files: Iterable[Path]) -> None:
    """Record what files are now.

    Args:
        folder: where the record is written.
        files: files under it.
    """
    records = {file.relative_to(folder).as_posix(): file_record(file) for file in sorted(files) if file.name != CHECKSUMS}
    write_json(folder / CHECKSUMS, _RECORDS.dump_python(records))


def changes(folder: Path, matters: Callable[[str], bool] = lambda name: True) -> Iterator[str]:
    """Compare the files of a folder with what they were.

    Args:
        folder: with a record, or without one.
        matters: whether a file, by its path under the folder, is looked at.

    Yields:
        One line for each file that has changed or is gone; nothing where nothing was recorded.

    Raises:
        XcompatError: the record itself is damaged.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> _ = (folder / "a.txt").write_text("whole")
        >>> write_checksums(folder, [folder / "a.txt"])
        >>> list(changes(folder))
        []
        >>> _ = (folder / "a.txt").write_text("other")
        >>> [line.removeprefix(f"{folder}/") for line in changes(folder)]
        ['a.txt has changed since it was written']
    """
    file = folder / CHECKSUMS
    if not file.exists():
        return
    try:
        records = _RECORDS.validate_python(read_json(file))
    except ValidationError:
        raise XcompatError(f"{file} is damaged") from None
    for name, record in records.items():
        if matters(name):
            yield from difference(folder / name, record)
