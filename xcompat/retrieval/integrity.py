"""No file of a gallery reaches a parser before it was compared with its checksum.

Parsers of native code (faiss, Arrow) crash on damaged files, and a flipped bit in a vector is a wrong answer that nobody notices.
So each file is read once in full before it is used. What that costs is paid again only when the file has changed: a process
remembers what it compared, and of large files all processes do, in ``checked.json`` beside the manifest, by the file's stamp
(size, inode, times of change). Whatever writes to a file changes its stamp; bits that rot on the disk without a write do not, and
`xcompat gallery verify`, which reads everything, finds those.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

from xcompat.checksums import FileRecord, difference
from xcompat.errors import XcompatError
from xcompat.files import write_json

CHECKED = "checked.json"
LARGE = 1 << 26
"""Bytes that take longer to read than a stamp takes to be looked up: 64 MB are compared in about a hundredth of a second."""
MENDING = "open the gallery again if it was compacted meanwhile, or see `xcompat gallery verify`"
_Stamp: TypeAlias = tuple[int, int, int, int, str]
_compared: set[_Stamp] = set()


def require_whole(gallery: Path, path: Path, record: FileRecord) -> Path:
    """Refuse a file that is not what it was when it was written.

    Args:
        gallery: the folder, which remembers large files that were compared.
        path: of a file in it.
        record: what that was.

    Returns:
        The path.

    Raises:
        XcompatError: it is missing or has changed.
    """
    stamp = _stamp(path, record)
    if stamp is not None and stamp in _compared:
        return path
    is_large = record.size >= LARGE
    if not (is_large and stamp is not None and stamp in _remembered(gallery).values()):
        if wrong := difference(path, record):
            raise XcompatError(f"{wrong[0]}; {MENDING}")
        if is_large:
            _remember(gallery, path, record)
    if (stamp := _stamp(path, record)) is not None:
        _compared.add(stamp)
    return path


def _stamp(path: Path, record: FileRecord) -> _Stamp | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_size, found.st_ino, found.st_mtime_ns, found.st_ctime_ns, record.xxh3


def _remembered(gallery: Path) -> dict[str, _Stamp]:
    """Return the stamps of large files by their paths; whatever is wrong with them costs one more look at the files."""
    try:
        found = json.loads((gallery / CHECKED).read_bytes())
        return {str(name): tuple(stamp) for name, stamp in found.items()}
    except (OSError, ValueError, AttributeError, TypeError, RecursionError):
        return {}


def _remember(gallery: Path, path: Path, record: FileRecord) -> None:
    there = {name: stamp for name, stamp in _remembered(gallery).items() if (gallery / name).is_file()}
    if (stamp := _stamp(path, record)) is not None:
        with suppress(OSError):  # who may not write here reads the file again the next time
            write_json(gallery / CHECKED, there | {str(path.relative_to(gallery)): stamp})
