"""Embedding galleries on disk, for a single model or several compatible models."""

from xcompat.retrieval.gallery import Gallery
from xcompat.retrieval.searching import Hit

__all__ = ["Gallery", "Hit"]
