"""Sizes and checksums of files, to detect damage before use."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict

BLOCK = 1 << 22


class FileRecord(BaseModel):
    """Size and checksum of a file.

    Args:
        size: bytes.
        xxh3: 32 hexadecimal digits of XXH3-128. It detects damage, not forgery.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    size: int
    xxh3: str


def file_record(path: Path) -> FileRecord:
    """Return the current size and checksum of a file.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "a.txt"
        >>> _ = path.write_text("whole")
        >>> file_record(path).size
        5
    """
    import xxhash

    digest = xxhash.xxh3_128()
    size = 0
    with path.open("rb") as handle:
        while block := handle.read(BLOCK):
            digest.update(block)
            size += len(block)
    return FileRecord(size=size, xxh3=digest.hexdigest())


def difference(path: Path, record: FileRecord) -> list[str]:
    """Compare a file with its record. Return a line if it differs, else an empty list."""
    if not path.is_file():
        return [f"{path} is missing"]
    size = path.stat().st_size
    if size != record.size:
        return [f"{path} has {size} bytes, expected {record.size}"]
    return [] if file_record(path) == record else [f"{path} has changed since it was written"]
