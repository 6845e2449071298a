"""Gallery items and queries of a test set, for display."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from PIL.Image import Image

IMAGES, CAPTIONS, TEXTS = "pictures", "captions", "texts"


@dataclass(frozen=True)
class GalleryItems:
    """Items of a test set's gallery.

    Args:
        title: :data:`IMAGES`, :data:`CAPTIONS` or :data:`TEXTS`.
        kind: key in ``matrices``.
        ids: N distinct ids.
        metadata: N objects.
        image: returns the image of a row; None for texts.
    """

    title: str
    kind: str
    ids: list[str]
    metadata: Sequence[dict[str, Any] | None]
    image: Callable[[int], Image] | None = None


@dataclass(frozen=True)
class QuerySet:
    """Queries of one direction.

    Args:
        gallery: title of the gallery.
        kind: key in ``matrices``.
        query: returns text or image of a row.
        words: returns the display name of a row.
        matches: whether a row should find an item, by id and metadata.
        own_id: id of a row in the gallery, or None.
    """

    gallery: str
    kind: str
    query: Callable[[int], str | Image]
    words: Callable[[int], str]
    matches: Callable[[int, str, dict[str, Any]], bool]
    own_id: Callable[[int], str | None] = field(default=lambda _: None)


def make_distinct(names: Sequence[Any]) -> list[str]:
    """Return names as strings, numbered if equal.

    Example:
        >>> make_distinct(["a", "b", "a"])
        ['a (1)', 'b', 'a (2)']
    """
    texts = list(map(str, names))
    often, seen = Counter(texts), Counter[str]()
    result, taken = [], {text for text, count in often.items() if count == 1}
    for text in texts:
        name = text
        while often[text] > 1 and (name == text or name in taken):
            seen[text] += 1
            name = f"{text} ({seen[text]})"
        taken.add(name)
        result.append(name)
    return result
