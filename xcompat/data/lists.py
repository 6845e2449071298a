"""Lists of images as data sets come with them: a path a line, and perhaps its class."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from xcompat.core.errors import XcompatError
from xcompat.data.text_files import first_line, text_lines

_LINE = re.compile(r"(\S+\.(?:jpe?g|png|webp|gif|bmp|tiff?))(?:\s+(\S+))?", re.IGNORECASE)
"""``/a/airfield/00000001.jpg 0`` of Places-365, ``n000002/0001_01.jpg`` of VGGFace2, ``ILSVRC2012_val_00000001.JPEG 65``."""


def is_image_list(file: Path) -> bool:
    r"""Return whether a text file lists images, by its first line.

    Args:
        file: such as ``places365_val.txt``; one that cannot be read is none.

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
    """Read a list of images.

    Args:
        file: an image's path a line, then its class or nothing.

    Yields:
        The path, without a slash before it, and the class: as it is written or, where none is, the folder that the image is in;
        None for an image without either.

    Raises:
        XcompatError: a line names no image.
    """
    for number, line in text_lines(file):
        found = _LINE.fullmatch(line)
        if found is None:
            raise XcompatError(f"{file} line {number} is no image with its class ({line[:80]!r}); write such as 'cat/001.jpg 0'")
        path = found[1].lstrip("/")
        yield path, found[2] or Path(path).parent.name or None
