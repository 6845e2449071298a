"""Embedding galleries on disk, for a single model or several compatible models."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xcompat.retrieval.gallery import Gallery
    from xcompat.retrieval.searching import Hit

__all__ = ["Gallery", "Hit"]

_PLACES = {"Gallery": "gallery", "Hit": "searching"}


def __getattr__(name: str) -> Any:  # noqa: ANN401 - lazy import: loads faiss on first use
    if name in _PLACES:
        return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
