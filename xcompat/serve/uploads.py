"""Visitors' images, decoded in memory within limits and never written to disk."""

from __future__ import annotations

import io

from PIL import Image, UnidentifiedImageError
from rich.filesize import decimal

from xcompat.core.errors import XcompatError
from xcompat.data.images import UnusableSampleError, open_image

UPLOAD_BYTES, UPLOAD_PIXELS = 10 * 10**6, 2**25
"""Maximum bytes of an image's file, and maximum pixels (33 million)."""
FORMATS = ("PNG", "JPEG", "MPO", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "HEIF")
"""Pillow formats that browsers and phones write. Decoders of rare formats are not exposed to strangers."""


def read_upload(data: bytes) -> Image.Image:
    """Decode an image.

    Args:
        data: its file's bytes.

    Returns:
        The image in mode RGB.

    Raises:
        XcompatError: the image is too large, damaged, or in an unsupported format.
    """
    if len(data) > UPLOAD_BYTES:
        raise XcompatError(f"the image is larger than {decimal(UPLOAD_BYTES)}; make it smaller")
    if not data:
        raise XcompatError("choose an image to search with")
    Image.init()
    try:
        _require_format(data)
        return open_image(data, UPLOAD_PIXELS)
    except UnusableSampleError as error:
        raise XcompatError(f"the image cannot be read: {error}") from None


def _require_format(data: bytes) -> None:
    try:
        with Image.open(io.BytesIO(data), formats=[name for name in FORMATS if name in Image.OPEN]):
            return
    except UnidentifiedImageError:
        raise UnusableSampleError("its bytes are not an image in a supported format") from None
    except Exception as error:  # decoders may raise anything on damaged bytes
        raise UnusableSampleError(f"unreadable image ({type(error).__name__})") from None
