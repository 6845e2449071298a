"""What a test set's galleries hold and what its queries are, for people: pictures, texts, and which of them match."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from PIL.Image import Image

PICTURES, CAPTIONS, TEXTS = "pictures", "captions", "texts"


@dataclass(frozen=True)
class GalleryItems:
    """The items of one gallery of a test set.

    Args:
        title: :data:`PICTURES`, :data:`CAPTIONS` or :data:`TEXTS`.
        kind: what a contestant's ``matrices`` call their embeddings.
        ids: N distinct ids.
        metadata: N objects.
        picture: gives the picture of a row; None for texts.
    """

    title: str
    kind: str
    ids: list[str]
    metadata: Sequence[dict[str, Any] | None]
    picture: Callable[[int], Image] | None = None


@dataclass(frozen=True)
class Questions:
    """The queries of one direction of a test set.

    Args:
        gallery: title of the gallery that they search.
        kind: what a contestant's ``matrices`` call their embeddings.
        query: gives the text or the picture of a row.
        words: what a row is called.
        matches: whether a row is to find an item, by the item's id and metadata.
        own_id: the id under which a row is in the gallery itself, which it is not to find; None if it is not.
    """

    gallery: str
    kind: str
    query: Callable[[int], str | Image]
    words: Callable[[int], str]
    matches: Callable[[int, str, dict[str, Any]], bool]
    own_id: Callable[[int], str | None] = field(default=lambda _: None)


def distinct(names: Sequence[Any]) -> list[str]:
    """Return names as they are where they are distinct; of several that are alike, each with its number.

    Example:
        >>> distinct(["a", "b", "a"])
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
