"""Checksum check for gallery files before a parser reads them.

Native parsers (faiss, Arrow) crash on damaged files, and a flipped bit silently gives wrong results. Each file is read in full
before first use and after changes. A process remembers the stamps (size, inode, times) of checked files; ``checked.json`` stores
large files' stamps for all processes.

Bit rot changes no stamp. Use `xcompat gallery verify` to read every file and find it.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from xcompat.core.checksums import FileRecord, Stamp, difference_once
from xcompat.core.errors import XcompatError
from xcompat.core.files import write_json

CHECKED = "checked.json"
LARGE = 1 << 26
"""Bytes from which a stamp is faster than reading. Checking 64 MB takes about 0.01 seconds."""
REPAIR_ADVICE = "open the gallery again if it was compacted in the meantime, or run `xcompat gallery verify`"


def require_whole(gallery: Path, path: Path, record: FileRecord) -> Path:
    """Raise if a file differs from its checksum.

    Args:
        gallery: the gallery folder.
        path: a file in it.
        record: its recorded size and checksum.

    Returns:
        The path.

    Raises:
        XcompatError: the file is missing or has changed.
    """
    is_large = record.size >= LARGE

    def is_known(stamp: Stamp) -> bool:
        return is_large and stamp in _read_stamps(gallery).values()

    def remember(stamp: Stamp) -> None:
        if is_large:
            there = {name: found for name, found in _read_stamps(gallery).items() if (gallery / name).is_file()}
            with suppress(OSError):  # without write access, the next process checks the file again
                write_json(gallery / CHECKED, there | {str(path.relative_to(gallery)): stamp})

    if wrong := difference_once(path, record, is_known, remember):
        raise XcompatError(f"{wrong[0]}; {REPAIR_ADVICE}")
    return path


def _read_stamps(gallery: Path) -> dict[str, Stamp]:
    """Return large files' stamps by path; empty if unreadable."""
    try:
        found = json.loads((gallery / CHECKED).read_bytes())
        return {str(name): tuple(stamp) for name, stamp in found.items()}
    except (OSError, ValueError, AttributeError, TypeError, RecursionError):
        return {}
