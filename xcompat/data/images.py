"""Decoding of images in any format to upright RGB."""

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
from xcompat.data.image_files import INSTALL_HEIC, can_read_heic, has_brand, read_head

MAX_PIXELS = 2**27
"""Largest number of pixels to decode. A few kB can encode gigabytes; cameras reach 108 million."""
MAX_ASPECT = 256
"""Largest ratio of the longer to the shorter side, as models resize the shorter side to a fixed size."""
DARK = 4096
"""16-bit images without a value this high are almost black, or use fewer bits than declared."""


class UnusableSampleError(XcompatError):
    """A sample with an undecodable image, or without a required caption."""


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert any PIL image to RGB, with transparency on white.

    Plain ``convert("RGB")`` shows hidden colours of transparent pixels, and values above 255 as white. Grey images of more than 8
    bits are scaled:

    - 16-bit integers: 65535 is white (32767 in a signed TIFF). A maximum below 4096 is rejected, as the image may use 8, 10 or 12
      bits. 14-bit images come out dark.
    - 32-bit integers: the same, but values do not change if none is above 255.
    - floats: 1 is white if no value is above 1; 255 is white if a value is above 16.

    Other ranges (negative, not finite, too high) are rejected. Pillow itself cuts 16-bit colour images to 8 bits.

    Args:
        image: image in any mode.

    Returns:
        RGB image; the same object if it is RGB.

    Raises:
        UnusableSampleError: the value of white is ambiguous.

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
    """Scale a grey image to 8 bits. Transparent pixels become white."""
    values_HW = np.asarray(image)
    tags = getattr(image, "tag_v2", {})  # of a TIFF
    signed_16 = (tags.get(SAMPLEFORMAT), tags.get(BITSPERSAMPLE)) == ((2,), (16,))
    white = _find_white_value("signed" if signed_16 else image.mode, float(values_HW.min()), float(values_HW.max()))
    notice_once(f"grey images of more than 8 bits are scaled to 8: {white:g} becomes 255")
    grey_HW = np.rint(np.multiply(values_HW, 255 / white, dtype=np.float32))
    if tags.get(PHOTOMETRIC_INTERPRETATION) == 0:  # white is zero
        grey_HW = 255 - grey_HW
    if "transparency" in image.info:
        grey_HW[values_HW == image.info["transparency"]] = 255
    return Image.fromarray(grey_HW.astype(np.uint8))


def _find_white_value(mode: str, low: float, high: float) -> float:
    if mode == "F":
        white, known = (1.0, True) if high <= 1 else (255.0, 16 < high <= 255)
    elif mode == "I" and high <= 255:
        white, known = 255.0, True
    else:
        white = 32767.0 if mode == "signed" else 65535.0
        known = high == 0 or DARK <= high <= white
    if not (known and low >= 0):  # false for NaN
        kind = "floats" if mode == "F" else "integers"
        raise UnusableSampleError(
            f"its {kind} go from {low:g} to {high:g}, so the white value is unknown; save the image with 8 bits"
        )
    return white


def open_image(value: Any, max_pixels: int = MAX_PIXELS) -> Image.Image:  # noqa: ANN401 - data sets store images in many forms
    """Decode an image, or the first frame of an animation, to upright RGB.

    Args:
        value: ``{"bytes": ..., "path": ...}`` (``datasets.Image(decode=False)``), bytes, a path or a PIL image.
        max_pixels: larger images are rejected before decoding.

    Returns:
        RGB image, rotated by its EXIF orientation.

    Raises:
        UnusableSampleError: the file is missing, damaged or not an image, exceeds ``max_pixels`` or `MAX_ASPECT`, or has an
            ambiguous white value (see :func:`to_rgb`).
    """
    if isinstance(value, dict):
        value = value["bytes"] if value.get("bytes") is not None else value.get("path")
    try:
        if isinstance(value, Image.Image):
            return _decode(value, max_pixels)
        if isinstance(value, bytes):
            value = io.BytesIO(value)
        elif not isinstance(value, (str, Path)):
            raise UnusableSampleError(f"expected image bytes or a path, not {type(value).__name__}")
        _register_heic()
        with Image.open(value) as image:
            return _decode(image, max_pixels)
    except UnusableSampleError:
        raise
    except UnidentifiedImageError as error:
        raise UnusableSampleError(_explain_unknown(value)) from error
    except Image.DecompressionBombError as error:  # Pillow's limit, far above ours
        raise UnusableSampleError(f"more than the limit of {max_pixels:,} pixels; make the image smaller") from error
    except Exception as error:  # decoders raise many types on damaged bytes
        raise UnusableSampleError(f"unreadable image ({type(error).__name__}: {error})") from error


def stores_orientation(value: Any) -> bool:  # noqa: ANN401 - data sets store images in many forms
    """Return whether an image, as for :func:`open_image`, has an EXIF orientation other than upright."""
    if isinstance(value, dict):
        value = value["bytes"] if value.get("bytes") is not None else value.get("path")
    with suppress(Exception):  # unreadable images have none
        _register_heic()
        with Image.open(io.BytesIO(value) if isinstance(value, bytes) else value) as image:
            return has_orientation(image)
    return False


def _decode(image: Image.Image, max_pixels: int) -> Image.Image:
    """Decode an open image, or raise if its size or format is rejected."""
    width, height = image.size
    if image.format == "EPS":
        raise UnusableSampleError("PostScript files are programs and are not run; convert the image to PNG")
    if width * height > max_pixels:
        raise UnusableSampleError(f"{width} x {height} is more than the limit of {max_pixels:,} pixels; make the image smaller")
    if not 0 < max(width, height) <= MAX_ASPECT * min(width, height):
        raise UnusableSampleError(
            f"{width} x {height}: one side is more than {MAX_ASPECT} times the other; cut the image into pieces"
        )
    image.load()  # raises if the file is cut short
    return to_rgb(turn_upright(image))


@cache
def _register_heic() -> bool:
    """Register the HEIC opener; return whether pillow-heif is installed."""
    if not can_read_heic():
        return False
    import pillow_heif

    pillow_heif.register_heif_opener()
    return True


def _explain_unknown(value: io.BytesIO | str | Path) -> str:
    head = value.getvalue() if isinstance(value, io.BytesIO) else read_head(Path(value))
    if has_brand(head, avif=False):
        return "damaged HEIC image" if _register_heic() else INSTALL_HEIC
    if has_brand(head, avif=True):
        return "damaged AVIF image, or Pillow lacks AVIF support; fetch the image again, or install Pillow 11.3 or later"
    return "its bytes are not an image in a known format"
