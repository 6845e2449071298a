"""Names of columns: what a data set is asked for, and what a model's ``forward`` receives."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from xcompat.errors import XcompatError, nearest

IMAGE = "image"
CAPTION = "caption"
ID = "id"
TEXT = "text"
LABEL = "label"
INDEX = "index"
SEED = "seed"
CAPTION_NUMBER = "caption_number"

PIXEL_VALUES = "pixel_values"
SECOND_PIXEL_VALUES = "second_pixel_values"
LABELS = "labels"
OLD_EMBEDS = "old_embeds"
OLD_TEXT_EMBEDS = "old_text_embeds"
NEW_EMBEDS = "new_embeds"
SIDE_INFO = "side_info"
NEW_SIDE_INFO = "new_side_info"

IMAGE_COLUMNS = ("image", "file_name", "filename", "image_path", "path")
CAPTION_COLUMNS = ("caption", "captions", "text", "texts", "sentences", "title")
LABEL_COLUMNS = ("label", "class", "cls", "category", "class_name")


def captions_of(value: str | Iterable[Any] | None) -> list[str]:
    """List the captions of one image, whether its data set keeps one or several.

    Args:
        value: a string, a list of strings (Nones and blanks among them are dropped), or None.

    Returns:
        The captions without surrounding white space, never blank; empty when there is none.

    Example:
        >>> captions_of(" a dog "), captions_of(["a dog", "", "an animal"]), captions_of(None)
        (['a dog'], ['a dog', 'an animal'], [])
    """
    values = [value] if isinstance(value, str) else list(value) if isinstance(value, Iterable) else []  # NaN is a missing one
    return [text.strip() for text in values if isinstance(text, str) and text.strip()]


def pick_column(given: str | None, known: tuple[str, ...], columns: list[str], what: str, where: str) -> str:
    """Choose a column: the one the user named, or the first that is called as such columns are.

    Args:
        given: what the user named, or None.
        known: usual names, most usual first.
        columns: the columns there are.
        what: the field to set, for the message.
        where: the data set, for the message.

    Returns:
        The column's name.

    Raises:
        XcompatError: it is not there.
    """
    if given is not None:
        if given not in columns:
            raise XcompatError(f"{where} has no column {given!r}; {nearest(given, columns)}")
        return given
    for name in known:
        if name in columns:
            return name
    raise XcompatError(f"{where} has no column named {' or '.join(known[:2])} (it has {', '.join(columns)}); set {what}")
