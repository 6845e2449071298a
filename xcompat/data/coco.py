"""Captions in the format of COCO and nocaps: a JSON file with images and annotations."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from xcompat.core.errors import XcompatError
from xcompat.data.schema import CAPTION, IMAGE
from xcompat.data.text_files import LARGEST_TABLE, UNREADABLE, parse_json

if TYPE_CHECKING:
    import pandas as pd

SUFFIX = ".json"
FOLDER = "annotations"
"""Folder of such files, next to the image folders."""


def read_coco_captions(file: Path) -> pd.DataFrame:
    """Read a COCO captions file, e.g. ``captions_val2014.json``.

    Args:
        file: an object with ``images`` (``id``, ``file_name``) and ``annotations`` (``image_id``, ``caption``).

    Returns:
        A row per caption, in image order, with columns ``image`` and ``caption``.

    Raises:
        XcompatError: the file has another format, or a caption names an unlisted image.
    """
    import pandas as pd

    try:
        if file.stat().st_size > LARGEST_TABLE:
            raise XcompatError(f"{file} is too large for a table; split it into several files")
        held = parse_json(file.read_bytes())
    except UNREADABLE as error:
        raise XcompatError(f"{file} cannot be read ({error}); fetch it again") from error
    try:
        names = {image["id"]: str(image["file_name"]) for image in held["images"]}
        captions: dict[Any, list[str]] = {number: [] for number in names}
        for annotation in held["annotations"]:
            captions[annotation["image_id"]].append(str(annotation["caption"]))
    except KeyError as error:
        raise XcompatError(f"{file}: {error} is missing among the images or their keys; fetch the file again") from None
    except (TypeError, IndexError):
        raise XcompatError(
            f"{file} is not a COCO captions file with images and annotations; write captions as CSV, TSV or JSON lines"
        ) from None
    rows = [(names[number], text) for number, texts in captions.items() for text in texts]
    return pd.DataFrame(rows, columns=[IMAGE, CAPTION])
