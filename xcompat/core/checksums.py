"""Sizes and checksums of files, to detect damage before use: of single files, folders, streams and JSON objects."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any, TypeAlias

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from xcompat.core.errors import XcompatError
from xcompat.core.files import read_json, write_json

BLOCK = 1 << 22
CHECKSUMS = "xcompat_checksums.json"
"""File name that other tools' checksum files do not use."""
Stamp: TypeAlias = tuple[int, int, int, int, str]


class FileRecord(BaseModel):
    """Size and checksum of a file.

    Args:
        size: bytes.
        xxh3: 32 hexadecimal digits of XXH3-128. It detects damage, not forgery.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    size: int
    xxh3: str


_RECORDS = TypeAdapter(dict[str, FileRecord])
_intact: set[Stamp] = set()
"""Stamps of the files that this process has found whole."""


class HashedFile(io.RawIOBase):
    """Writable file that computes its checksum.

    Args:
        file: target file.
    """

    def __init__(self, file: IO[bytes] | None = None) -> None:
        import xxhash

        self._file, self._digest, self._size = file, xxhash.xxh3_128(), 0

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, data: Any) -> int:  # noqa: ANN401 - any buffer
        """Write a block."""
        self._digest.update(data)
        written = self._file.write(data) if self._file is not None else len(data)
        self._size += written
        return written

    def tell(self) -> int:
        """Return the number of bytes written."""
        return self._size

    @property
    def record(self) -> FileRecord:
        """Size and checksum."""
        return FileRecord(size=self._size, xxh3=self._digest.hexdigest())


def stream_record(handle: IO[bytes]) -> FileRecord:
    """Return the size and checksum of the rest of an open file."""
    hashed = HashedFile()
    while block := handle.read(BLOCK):
        hashed.write(block)
    return hashed.record


def file_record(path: Path) -> FileRecord:
    """Return the current size and checksum of a file.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "a.txt"
        >>> _ = path.write_text("whole")
        >>> file_record(path).size
        5
    """
    with path.open("rb") as handle:
        return stream_record(handle)


def difference(path: Path, record: FileRecord) -> list[str]:
    """Compare a file with its record. Return a line if it differs, else an empty list."""
    if not path.is_file():
        return [f"{path} is missing"]
    size = path.stat().st_size
    if size != record.size:
        return [f"{path} has {size} bytes, expected {record.size}"]
    return [] if file_record(path) == record else [f"{path} has changed since it was written"]


def difference_once(
    path: Path,
    record: FileRecord,
    is_known: Callable[[Stamp], bool] = lambda stamp: False,
    remember: Callable[[Stamp], None] = lambda stamp: None,
) -> list[str]:
    """Compare a file as :func:`difference` does, but read it again only after a change of size, inode or times.

    Args:
        path: the file.
        record: its recorded size and checksum.
        is_known: whether another process has found the file whole with this stamp.
        remember: called with the stamp of a whole file after reading it.
    """
    stamp = _stamp(path, record)
    if stamp is None or not (stamp in _intact or is_known(stamp)):
        if found := difference(path, record):
            return found
        if (stamp := _stamp(path, record)) is not None:
            remember(stamp)
    if stamp is not None:
        _intact.add(stamp)
    return []


def _stamp(path: Path, record: FileRecord) -> Stamp | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_size, found.st_ino, found.st_mtime_ns, found.st_ctime_ns, record.xxh3


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


def json_checksum(fields: dict[str, Any]) -> str:
    """Return a JSON object's checksum without ``checksum``, independent of layout and key order."""
    import xxhash

    rest = {key: value for key, value in fields.items() if key != "checksum"}
    return xxhash.xxh3_128_hexdigest(json.dumps(rest, sort_keys=True).encode())


def json_digest(value: object) -> str:
    """Return the SHA-256 of a JSON value, independent of key order: 64 hexadecimal digits."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def digest_of_files(files: Iterable[Path]) -> str:
    """Return a SHA-256 over the content of files in order: 64 hexadecimal digits."""
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as handle:
            digest.update(hashlib.file_digest(handle, "sha256").digest())
    return digest.hexdigest()
