"""Embedding galleries on disk, for one model or several compatible ones."""

from xcompat.retrieval.gallery import Gallery
from xcompat.retrieval.searching import Hit

__all__ = ["Gallery", "Hit"]
