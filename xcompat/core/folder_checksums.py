"""Checksums of a folder's files, in a file beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from xcompat.core.checksums import FileRecord, difference, file_record
from xcompat.core.errors import XcompatError
from xcompat.core.files import read_json, write_json

CHECKSUMS = "xcompat_checksums.json"
"""File name that other tools' checksum files do not use."""
_RECORDS = TypeAdapter(dict[str, FileRecord])


def write_checksums(folder: Path, files: Iterable[Path]) -> None:
    """Write a folder's file checksums into the folder."""
    records = {file.relative_to(folder).as_posix(): file_record(file) for file in sorted(files) if file.name != CHECKSUMS}
    write_json(folder / CHECKSUMS, _RECORDS.dump_python(records))


def changes(folder: Path, matters: Callable[[str], bool] = lambda name: True) -> Iterator[str]:
    """Compare a folder's files with their checksums.

    Args:
        folder: any folder. Without recorded checksums nothing is compared.
        matters: whether to compare a file, given its path below the folder.

    Yields:
        A line for each changed or missing file.

    Raises:
        XcompatError: the recorded checksums are damaged.

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
