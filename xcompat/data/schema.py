"""Data set column names, and argument names of a model's ``forward``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from xcompat.core.errors import XcompatError, nearest

IMAGE = "image"
CAPTION = "caption"
ID = "id"
TEXT = "text"
QUERY = "query"
PASSAGE = "passage"
NEGATIVES = "negatives"
LABEL = "label"
CAMERA = "camera"
METADATA = "metadata"
INDEX = "index"
SEED = "seed"
CAPTION_NUMBER = "caption_number"

PIXEL_VALUES = "pixel_values"
SECOND_PIXEL_VALUES = "second_pixel_values"
CROP_PIXEL_VALUES = "crop_pixel_values"
LABELS = "labels"
OLD_EMBEDS = "old_embeds"
OLD_TEXT_EMBEDS = "old_text_embeds"
NEW_EMBEDS = "new_embeds"
SIDE_INFO = "side_info"
NEW_SIDE_INFO = "new_side_info"

IMAGE_COLUMNS = ("image", "file_name", "filename", "image_path", "image_name", "path", "file")
CAPTION_COLUMNS = ("caption", "captions", "text", "texts", "sentences", "title", "comment")
LABEL_COLUMNS = ("label", "class", "cls", "category", "class_name")


def captions_of(value: str | Iterable[Any] | None) -> list[str]:
    """Return the captions in a cell.

    Args:
        value: a string, a list of strings (None and blanks are dropped), or None.

    Returns:
        Stripped captions, never blank; can be empty.

    Example:
        >>> captions_of(" a dog "), captions_of(["a dog", "", "an animal"]), captions_of(None)
        (['a dog'], ['a dog', 'an animal'], [])
    """
    values = [value] if isinstance(value, str) else list(value) if isinstance(value, Iterable) else []  # NaN means missing
    return [text.strip() for text in values if isinstance(text, str) and text.strip()]


def pick_column(given: str | None, known: tuple[str, ...], columns: list[str], what: str, where: str) -> str:
    """Return the column given by the user, or the first with a usual name.

    Args:
        given: the user's choice, or None.
        known: usual names, most common first.
        columns: columns of the data set.
        what: field to set, for the message.
        where: data set, for the message.

    Raises:
        XcompatError: there is no such column.
    """
    if given is not None:
        if given not in columns:
            raise XcompatError(f"{where} has no column {given!r}; {nearest(given, columns)}")
        return given
    for name in known:
        if name in columns:
            return name
    raise XcompatError(f"{where} has no column named {' or '.join(known[:2])} (it has {', '.join(columns)}); set {what}")


def is_blank(value: object) -> bool:
    """Return whether a cell is empty: None, NaN or white space.

    Example:
        >>> [is_blank(value) for value in (None, float("nan"), " ", 0, "7")]
        [True, True, True, False, False]
    """
    return value is None or value != value or not str(value).strip()  # NaN differs from itself
