"""A picture that a browser sends: read in memory, within limits, and written nowhere."""

from __future__ import annotations

import base64
import binascii

from PIL.Image import Image
from rich.filesize import decimal

from xcompat.data.images import UnusableSampleError, open_image
from xcompat.errors import XcompatError

UPLOAD_BYTES, UPLOAD_PIXELS = 10 * 10**6, 2**25
"""The largest picture that is read: its file, and its pixels (33 million)."""
TOO_LARGE = "too large"
"""What the page sends in place of a larger file, which it does not read."""
REQUEST_BYTES = UPLOAD_BYTES * 4 // 3 + 2**16
"""The largest request that is read: such a picture in base64, and all else that the page sends with it."""


def read_upload(data_uri: str) -> Image:
    """Decode a picture.

    Args:
        data_uri: the file as ``data:image/png;base64,...``, as a browser's ``FileReader`` gives it.

    Returns:
        The picture in mode RGB.

    Raises:
        XcompatError: it is no picture, damaged, or too large.
    """
    about, _, encoded = data_uri.partition(",")
    if data_uri == TOO_LARGE or len(encoded) * 3 // 4 > UPLOAD_BYTES:
        raise XcompatError(f"the picture is larger than the {decimal(UPLOAD_BYTES)} that are read; make it smaller")
    if not about.startswith("data:") or not about.endswith(";base64"):
        raise XcompatError("choose a picture to search with")
    try:
        return open_image(base64.b64decode(encoded, validate=True), UPLOAD_PIXELS)
    except binascii.Error:
        raise XcompatError("the picture was cut short on its way; choose it again") from None
    except UnusableSampleError as error:
        raise XcompatError(f"the picture cannot be read: {error}") from None
