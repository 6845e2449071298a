"""EXIF orientation in photos. Cameras store the sensor's image and record how to rotate it."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image

ORIENTATION = "exif"
"""Value of ``orientation`` in preprocessing descriptions, if images are turned by their EXIF orientation."""


def has_orientation(image: Image) -> bool:
    """Return whether an image's EXIF data tells viewers to turn or mirror it."""
    from PIL.ExifTags import Base

    with suppress(Exception):  # damaged EXIF data raise many kinds of errors; the image itself may be whole
        return image.getexif().get(Base.Orientation) in range(2, 9)
    return False


def turn_upright(image: Image) -> Image:
    """Turn or mirror an image by its EXIF orientation, as viewers show it.

    Args:
        image: any image. It is not changed.

    Returns:
        An upright image without the tag, or the same object if it needs no turn.

    Example:
        >>> from PIL import Image
        >>> photo = Image.new("RGB", (40, 30))
        >>> photo.getexif()[0x0112] = 6
        >>> turn_upright(photo).size
        (30, 40)
    """
    from PIL.ImageOps import exif_transpose

    if has_orientation(image):
        with suppress(Exception):
            return exif_transpose(image)
    return image
