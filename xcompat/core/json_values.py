"""Table values as JSON. Values without a JSON form become text or are dropped with a notice."""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from uuid import UUID

import numpy as np

from xcompat.core.progress import notice_once
from xcompat.core.surrogates import replace_nested_surrogates

_AS_ISO = (datetime.datetime, datetime.date, datetime.time)
_AS_TEXT = (Decimal, UUID, datetime.timedelta)


class _NoJsonError(ValueError):
    """A value without a JSON form. The message is its type."""


@dataclass
class JsonColumns:
    """Converter from column values to JSON, with a record of changed and dropped columns.

    Args:
        as_text: column -> an example value, converted to text.
        left_out: column -> a dropped value's type.
    """

    as_text: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def convert(self, row: Mapping[str, object], keep_empty: bool = False) -> dict[str, object]:
        """Return a row's values as JSON, without empty values unless ``keep_empty``.

        Timestamps, dates, times, decimals, UUIDs and infinities become text. Bytes and other objects are dropped.

        Example:
            >>> JsonColumns().convert({"at": datetime.date(2020, 1, 2), "price": Decimal("1.50"), "size": 3, "none": math.nan})
            {'at': '2020-01-02', 'price': '1.50', 'size': 3}
        """
        found: dict[str, object] = {}
        for name, value in row.items():
            try:
                known = self._json(str(name), value)
            except _NoJsonError as error:
                self.left_out.setdefault(str(name), str(error))
                continue
            if keep_empty or known or isinstance(known, int | float):  # 0 and False are values
                found[str(name)] = known
        return replace_nested_surrogates(found)

    def lines(self) -> list[str]:
        """Return a line for each changed or dropped column."""
        changed = [f"metadata: {name} is kept as text, e.g. {example!r}" for name, example in self.as_text.items()]
        dropped = [f"metadata: {name} drops values of type {kind}" for name, kind in self.left_out.items()]
        return changed + dropped

    def report(self) -> None:
        """Print a notice for each changed or dropped column, once per process."""
        for name in self.as_text:
            notice_once(f"metadata: {name} is kept as text")
        for name, kind in self.left_out.items():
            notice_once(f"metadata: {name} drops values of type {kind}")

    def _json(self, column: str, value: object) -> object:
        if isinstance(value, np.generic | np.ndarray):
            value = value.tolist()
        if isinstance(value, Mapping):
            return {str(key): self._json(column, each) for key, each in value.items()}
        if isinstance(value, list | tuple | set | frozenset):
            return [self._json(column, each) for each in value]
        return self._single(column, value)

    def _single(self, column: str, value: object) -> object:
        if isinstance(value, float):
            return self._number(column, value)
        if isinstance(value, (*_AS_ISO, *_AS_TEXT)):
            return self._text(column, value.isoformat() if isinstance(value, _AS_ISO) else str(value))
        if value is None or isinstance(value, str | bool | int):
            return value
        raise _NoJsonError(type(value).__name__)

    def _number(self, column: str, value: float) -> float | str | None:
        if math.isnan(value):
            return None
        return value if math.isfinite(value) else self._text(column, str(value))

    def _text(self, column: str, text: str) -> str | None:
        if text == "NaT":  # pandas' missing time
            return None
        self.as_text.setdefault(column, text)
        return text
