"""Lone surrogates: halves of characters that JSON and file names can hold, and that UTF-8, models and tables cannot."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from xcompat.core.progress import notice

_SURROGATE = re.compile("[\ud800-\udfff]")
REPLACEMENT = "\ufffd"


def replace_surrogates(text: str) -> str:
    r"""Join surrogates that form a character, and replace all others by U+FFFD, the replacement character.

    Example:
        >>> replace_surrogates("a \ud83d b"), replace_surrogates("\ud83d\ude00") == "\U0001f600"
        ('a � b', True)
    """
    if not _SURROGATE.search(text):
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def decode_utf8(data: bytes) -> str:
    """Decode bytes that should be UTF-8; surrogates and invalid bytes become U+FFFD."""
    try:
        return replace_surrogates(data.decode("utf-8", "surrogatepass"))
    except UnicodeDecodeError:
        return data.decode("utf-8", "replace")


@dataclass
class Surrogates:
    """Replaces surrogates in the rows of a file, counts these rows, and names the first.

    Args:
        count: rows in which something was replaced.
        first: the place of the first such row.
    """

    count: int = 0
    first: str = ""

    def replace_in(self, value: Any, where: str) -> Any:  # noqa: ANN401 - any JSON value
        """Return a value with replaced surrogates, in nested values and keys too; the same object if it has none."""
        if not _has_surrogates(value):
            return value
        self.add(where)
        return _replace(value)

    def add(self, where: str) -> None:
        """Count a row in which something was replaced."""
        self.count, self.first = self.count + 1, self.first or where

    def report(self) -> None:
        """Print a notice if something was replaced."""
        if self.count:
            rows = "1 row holds" if self.count == 1 else f"{self.count:,} rows hold"
            notice(f"{rows} half a character (a lone surrogate), replaced by {REPLACEMENT}; the first is {self.first}")


def _has_surrogates(value: Any) -> bool:  # noqa: ANN401 - any JSON value
    if isinstance(value, str):
        return not value.isascii() and _SURROGATE.search(value) is not None
    if isinstance(value, dict):
        return any(map(_has_surrogates, value)) or any(map(_has_surrogates, value.values()))
    return isinstance(value, list) and any(map(_has_surrogates, value))


def _replace(value: Any) -> Any:  # noqa: ANN401 - any JSON value
    if isinstance(value, str):
        return replace_surrogates(value)
    if isinstance(value, dict):
        return {_replace(key): _replace(each) for key, each in value.items()}
    return [_replace(each) for each in value] if isinstance(value, list) else value
