"""Image lists: a path per line, optionally with its class."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from xcompat.core.errors import XcompatError
from xcompat.data.text_files import first_line, text_lines

_LINE = re.compile(r"(\S+\.(?:jpe?g|png|webp|gif|bmp|tiff?))(?:\s+(\S+))?", re.IGNORECASE)
"""``/a/airfield/00000001.jpg 0`` (Places-365), ``n000002/0001_01.jpg`` (VGGFace2), ``ILSVRC2012_val_00000001.JPEG 65``."""


def is_image_list(file: Path) -> bool:
    r"""Return whether the first line of a text file is an image path.

    Args:
        file: e.g. ``places365_val.txt``. Unreadable files give False.

    Example:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp()) / "places365_val.txt"
        >>> _ = file.write_text("Places365_val_00000001.jpg 165\n")
        >>> is_image_list(file)
        True
    """
    try:
        return _LINE.fullmatch(first_line(file, "utf-8-sig", errors="replace").strip()) is not None
    except XcompatError:
        return False


def read_image_list(file: Path) -> Iterator[tuple[str, str | None]]:
    """Read an image list.

    Args:
        file: an image path per line, optionally followed by its class.

    Yields:
        The path without leading slash, and the class as written, else the image's folder, else None.

    Raises:
        XcompatError: a line contains no image path.
    """
    for number, line in text_lines(file):
        found = _LINE.fullmatch(line)
        if found is None:
            raise XcompatError(
                f"{file} line {number} is not an image path with a class ({line[:80]!r}); write e.g. 'cat/001.jpg 0'"
            )
        path = found[1].lstrip("/")
        yield path, found[2] or Path(path).parent.name or None
