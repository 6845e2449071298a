"""Checksum files of ``xcompat embed``."""

from __future__ import annotations

import io
import json
from typing import IO, Any

from xcompat.core.checksums import BLOCK, FileRecord
from xcompat.engines.filesystems import open_file, path_in, write_to


class HashedFile(io.RawIOBase):
    """Writable file that computes its checksum.

    Args:
        file: target file.
    """

    def __init__(self, file: IO[bytes]) -> None:
        import xxhash

        self._file, self._digest, self._size = file, xxhash.xxh3_128(), 0

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, data: Any) -> int:  # noqa: ANN401 - any buffer
        """Write a block."""
        self._digest.update(data)
        written = self._file.write(data)
        self._size += written
        return written

    def tell(self) -> int:
        """Return the number of bytes written."""
        return self._size

    @property
    def record(self) -> FileRecord:
        """Size and checksum."""
        return FileRecord(size=self._size, xxh3=self._digest.hexdigest())


def write_checksum(out: str, name: str, record: FileRecord) -> None:
    """Write the checksum of a part.

    Args:
        out: folder.
        name: file name of the part.
        record: size and checksum.
    """
    with write_to(out, _name_of(name)) as file:
        file.write(record.model_dump_json().encode() + b"\n")


def find_damage(out: str, name: str) -> str | None:
    """Compare a part with its checksum.

    Args:
        out: folder.
        name: file name of the part.

    Returns:
        The damage as the end of a sentence, or None.
    """
    import xxhash

    try:
        with open_file(out, path_in(out, _name_of(name))) as file:
            record = FileRecord(**json.loads(file.read()))
    except FileNotFoundError:
        return "has no checksum"
    except (ValueError, TypeError):
        return "has a damaged checksum"
    digest, size = xxhash.xxh3_128(), 0
    with open_file(out, path_in(out, name)) as file:
        while block := file.read(BLOCK):
            digest.update(block)
            size += len(block)
    return None if FileRecord(size=size, xxh3=digest.hexdigest()) == record else "has changed since it was written"


def _name_of(part: str) -> str:
    """Return a name with an underscore, which readers of Parquet folders skip."""
    return f"_{part}.json"
