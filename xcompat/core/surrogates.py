"""Lone surrogates: half characters that JSON and file names allow, but UTF-8, models and tables do not."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from xcompat.core.progress import notice

_SURROGATE = re.compile("[\ud800-\udfff]")
REPLACEMENT = "\ufffd"


def replace_surrogates(text: str) -> str:
    r"""Join surrogate pairs into characters, and replace lone surrogates by U+FFFD.

    Example:
        >>> replace_surrogates("a \ud83d b"), replace_surrogates("\ud83d\ude00") == "\U0001f600"
        ('a � b', True)
    """
    if not _SURROGATE.search(text):
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def replace_nested_surrogates(value: Any) -> Any:  # noqa: ANN401 - any JSON value
    """Replace surrogates in a JSON value, also in nested values and keys. A value without any is returned itself."""
    return _replace(value) if _has_surrogates(value) else value


def decode_utf8(data: bytes) -> str:
    """Decode bytes as UTF-8. Surrogates and invalid bytes become U+FFFD."""
    try:
        return replace_surrogates(data.decode("utf-8", "surrogatepass"))
    except UnicodeDecodeError:
        return data.decode("utf-8", "replace")


@dataclass
class Surrogates:
    """Replacer of surrogates in a file's rows, with a count of changed rows.

    Args:
        count: number of changed rows.
        first: location of the first changed row.
    """

    count: int = 0
    first: str = ""

    def replace_in(self, value: object, where: str) -> Any:  # noqa: ANN401 - any JSON value
        """Replace surrogates as :func:`replace_nested_surrogates` does, and count a changed row."""
        found = replace_nested_surrogates(value)
        if found is not value:
            self.add(where)
        return found

    def add(self, where: str) -> None:
        """Count a changed row."""
        self.count, self.first = self.count + 1, self.first or where

    def report(self) -> None:
        """Print a notice if any row changed."""
        if self.count:
            rows = "1 row contains" if self.count == 1 else f"{self.count:,} rows contain"
            notice(f"{rows} half a character (a lone surrogate), replaced by {REPLACEMENT}; the first is {self.first}")


def _has_surrogates(value: object) -> bool:
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
