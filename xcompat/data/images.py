"""Decoding of pictures in any form to upright RGB pictures."""

from __future__ import annotations

import io
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError
from PIL.TiffImagePlugin import BITSPERSAMPLE, PHOTOMETRIC_INTERPRETATION, SAMPLEFORMAT

from xcompat.core.errors import XcompatError
from xcompat.core.orientation import has_orientation, turn_upright
from xcompat.core.progress import notice_once
from xcompat.data.picture_files import INSTALL_HEIC, can_read_heic, has_brand, read_head

MAX_PIXELS = 2**27
"""Larger pictures are refused before they are decoded (134 million; cameras make 108): some kB can hold gigabytes of pixels."""
MAX_ASPECT = 256
"""Pictures with a larger ratio of the longer side to the shorter are refused: models resize the shorter side to a fixed size."""
DARK = 4096
"""A picture of 16 bits without a value this high is almost black, or uses fewer bits than it declares."""


class UnusableSampleError(XcompatError):
    """A sample whose image cannot be decoded, or that has no caption where one is needed."""


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert any PIL image to RGB, compositing transparency on white.

    A plain ``convert("RGB")`` shows the hidden colour of transparent pixels, mostly black, and every value above 255 as white.
    A grey picture of more than 8 bits is scaled from the whole range of its type to 0 to 255:

    - integers of 16 bits: 65535 is white (32767 if a TIFF says that they are signed). A picture whose highest value is below
      4096 is refused: it may hold 8, 10 or 12 bits, and no file says so. A picture of 14 bits comes out dark.
    - integers of 32 bits: the same, but if no value is above 255, values stay as they are.
    - floats: 1 is white if no value is above 1; 255 is white if a value is above 16.

    Anything else (negative, not finite, above its range) is refused. Colour pictures of 16 bits are cut to 8 by Pillow itself.

    Args:
        image: a picture of any mode.

    Returns:
        The picture in mode RGB (the same object when it is RGB already).

    Raises:
        UnusableSampleError: its range does not tell which value is white.

    Example:
        >>> to_rgb(Image.new("RGBA", (1, 1), (0, 0, 0, 0))).getpixel((0, 0))
        (255, 255, 255)
    """
    if image.mode == "F" or image.mode.startswith("I"):
        return _to_8_bits(image).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")


def _to_8_bits(image: Image.Image) -> Image.Image:
    """Scale a grey picture to 8 bits, as :func:`to_rgb` says; transparent pixels become white."""
    values_HW = np.asarray(image)
    tags = getattr(image, "tag_v2", {})  # of a TIFF
    signed_16 = (tags.get(SAMPLEFORMAT), tags.get(BITSPERSAMPLE)) == ((2,), (16,))
    white = _white("signed" if signed_16 else image.mode, float(values_HW.min()), float(values_HW.max()))
    notice_once(f"grey pictures of more than 8 bits are brought to 8: {white:g} becomes 255")
    grey_HW = np.rint(np.multiply(values_HW, 255 / white, dtype=np.float32))
    if tags.get(PHOTOMETRIC_INTERPRETATION) == 0:  # white is zero
        grey_HW = 255 - grey_HW
    if "transparency" in image.info:
        grey_HW[values_HW == image.info["transparency"]] = 255
    return Image.fromarray(grey_HW.astype(np.uint8))


def _white(mode: str, low: float, high: float) -> float:
    """Return the value of white in a grey picture with values from ``low`` to ``high``."""
    if mode == "F":
        white, known = (1.0, True) if high <= 1 else (255.0, 16 < high <= 255)
    elif mode == "I" and high <= 255:
        white, known = 255.0, True
    else:
        white = 32767.0 if mode == "signed" else 65535.0
        known = high == 0 or DARK <= high <= white
    if not (known and low >= 0):  # NaN is not
        kind = "floats" if mode == "F" else "integers"
        raise UnusableSampleError(f"its {kind} go from {low:g} to {high:g}, which does not tell what is white; save it in 8 bits")
    return white


def open_image(value: Any, max_pixels: int = MAX_PIXELS) -> Image.Image:  # noqa: ANN401 - data sets store images in many forms
    """Decode an image as a data set stores it, and turn it upright; an animation gives its first picture.

    Args:
        value: ``{"bytes": ..., "path": ...}`` (``datasets.Image(decode=False)``), bytes, a path or a PIL image.
        max_pixels: larger pictures are refused before they are decoded.

    Returns:
        The decoded picture in mode RGB, turned as its EXIF orientation says.

    Raises:
        UnusableSampleError: the file is missing, damaged, cut short or no image; it has more than ``max_pixels``, or one side is
            more than `MAX_ASPECT` times the other; or its range does not tell which value is white, see :func:`to_rgb`.
    """
    if isinstance(value, dict):
        value = value["bytes"] if value.get("bytes") is not None else value.get("path")
    try:
        if isinstance(value, Image.Image):
            return _decoded(value, max_pixels)
        if isinstance(value, bytes):
            value = io.BytesIO(value)
        elif not isinstance(value, (str, Path)):
            raise UnusableSampleError(f"expected image bytes or a path, not {type(value).__name__}")
        _register_heic()
        with Image.open(value) as image:
            return _decoded(image, max_pixels)
    except UnusableSampleError:
        raise
    except UnidentifiedImageError as error:
        raise UnusableSampleError(_explain_unknown(value)) from error
    except Image.DecompressionBombError as error:  # Pillow's limit, far above ours
        raise UnusableSampleError(f"more than the {max_pixels:,} pixels that are decoded; make it smaller") from error
    except Exception as error:  # decoders raise whatever their format module happens to raise on damaged bytes
        raise UnusableSampleError(f"unreadable image ({type(error).__name__}: {error})") from error


def stores_orientation(value: Any) -> bool:  # noqa: ANN401 - data sets store images in many forms
    """Return whether a picture, in any form that :func:`open_image` takes, has an EXIF orientation other than upright."""
    if isinstance(value, dict):
        value = value["bytes"] if value.get("bytes") is not None else value.get("path")
    with suppress(Exception):  # pictures that cannot be read have none
        _register_heic()
        with Image.open(io.BytesIO(value) if isinstance(value, bytes) else value) as image:
            return has_orientation(image)
    return False


def _decoded(image: Image.Image, max_pixels: int) -> Image.Image:
    """Decode an opened picture, or refuse its size or format."""
    width, height = image.size
    if image.format == "EPS":
        raise UnusableSampleError("PostScript is a program, which is not run; convert the picture to PNG")
    if width * height > max_pixels:
        raise UnusableSampleError(f"{width} x {height} is more than the {max_pixels:,} pixels that are decoded; make it smaller")
    if not 0 < max(width, height) <= MAX_ASPECT * min(width, height):
        raise UnusableSampleError(f"{width} x {height}: one side is more than {MAX_ASPECT} times the other; cut it into pieces")
    image.load()  # raises if the file is cut short
    return to_rgb(turn_upright(image))


@cache
def _register_heic() -> bool:
    """Teach Pillow to read HEIC; return whether pillow-heif is installed."""
    if not can_read_heic():
        return False
    import pillow_heif

    pillow_heif.register_heif_opener()
    return True


def _explain_unknown(value: io.BytesIO | str | Path) -> str:
    """Say why Pillow does not know a picture's format."""
    head = value.getvalue() if isinstance(value, io.BytesIO) else read_head(Path(value))
    if has_brand(head, avif=False):
        return "damaged HEIC picture" if _register_heic() else INSTALL_HEIC
    if has_brand(head, avif=True):
        return "damaged AVIF picture, or Pillow reads no AVIF; fetch the picture again, or install Pillow 11.3 or later"
    return "its bytes are no image in a known format"
