"""Parts of a query memory, and codecs of its entries."""

from __future__ import annotations

import re
from typing import Literal

from xcompat.core.errors import XcompatError

MemoryParts = Literal["none", "transform", "full"]
"""Parts of a query memory: none, only the learned transform, or also the entries, which are embeddings of training data."""
CODECS = "SQ8, SQ4, SQfp16, or PQ and a number of bytes, e.g. PQ64"
_KNOWN = re.compile(r"SQ(4|8|fp16)|PQ[1-9][0-9]{0,3}")
AS_THEY_ARE = "float32"
"""In place of a codec: entries are not compressed."""


def is_codec(name: object) -> bool:
    """Return whether this names a codec: 8 or 4 bits or half precision per dimension, or product quantisation."""
    return isinstance(name, str) and _KNOWN.fullmatch(name) is not None


def require_codec(name: str | None) -> None:
    """Raise unless the name is a codec, :data:`AS_THEY_ARE`, or None, which chooses by the number of entries."""
    if name not in (None, AS_THEY_ARE) and not is_codec(name):
        raise XcompatError(f"unknown memory codec {name!r}; use {AS_THEY_ARE}, {CODECS}")
