"""Checksum files of ``xcompat embed``."""

from __future__ import annotations

import json

from xcompat.core.checksums import FileRecord, stream_record
from xcompat.engines.filesystems import open_file, path_in, write_to


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
    try:
        with open_file(out, path_in(out, _name_of(name))) as file:
            record = FileRecord(**json.loads(file.read()))
    except FileNotFoundError:
        return "has no checksum"
    except (ValueError, TypeError):
        return "has a damaged checksum"
    with open_file(out, path_in(out, name)) as file:
        return None if stream_record(file) == record else "has changed since it was written"


def _name_of(part: str) -> str:
    """Return a name with an underscore, which readers of Parquet folders skip."""
    return f"_{part}.json"
