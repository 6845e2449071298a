"""Embedding galleries on disk, for a single model or several compatible models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xcompat.core.lazy import import_on_use

if TYPE_CHECKING:
    from xcompat.retrieval.gallery import Gallery
    from xcompat.retrieval.searching import Hit

__all__ = ["Gallery", "Hit"]

__getattr__ = import_on_use(__name__, {"gallery": ["Gallery"], "searching": ["Hit"]})
