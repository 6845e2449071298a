"""From whatever a data set stores for an image to an RGB picture, or to one reason why not."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from PIL import Image, UnidentifiedImageError

from xcompat.errors import XcompatError


class UnusableSampleError(XcompatError):
    """A sample whose image cannot be decoded, or that has no caption where one is needed."""


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert any PIL image to RGB, compositing transparency on white.

    A plain ``convert("RGB")`` shows whatever colour lies under transparent pixels, mostly black.

    Args:
        image: a picture of any mode.

    Returns:
        The picture in mode RGB (the same object when it is RGB already).

    Example:
        >>> to_rgb(Image.new("RGBA", (1, 1), (0, 0, 0, 0))).getpixel((0, 0))
        (255, 255, 255)
    """
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")


def open_image(value: Any) -> Image.Image:  # noqa: ANN401 - data sets store images in many forms
    """Decode an image as a data set stores it.

    Args:
        value: ``{"bytes": ..., "path": ...}`` (``datasets.Image(decode=False)``), bytes, a path or a PIL image.

    Returns:
        The decoded picture in mode RGB.

    Raises:
        UnusableSampleError: the file is missing, damaged, cut short or no image.
    """
    if isinstance(value, dict):
        value = value["bytes"] if value.get("bytes") is not None else value.get("path")
    try:
        if isinstance(value, Image.Image):
            value.load()  # an opened file that is cut short says so here
            return to_rgb(value)
        if isinstance(value, bytes):
            value = io.BytesIO(value)
        elif not isinstance(value, (str, Path)):
            raise UnusableSampleError(f"expected image bytes or a path, not {type(value).__name__}")
        with Image.open(value) as image:
            image.load()
            return to_rgb(image)
    except UnusableSampleError:
        raise
    except UnidentifiedImageError as error:
        raise UnusableSampleError("its bytes are no image in a known format") from error
    except Exception as error:  # decoders raise whatever their format module happens to raise on damaged bytes
        raise UnusableSampleError(f"unreadable image ({type(error).__name__}: {error})") from error
