"""Names of columns: what a data set is asked for, and what a model's ``forward`` receives."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

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
