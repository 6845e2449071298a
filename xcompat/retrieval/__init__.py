"""Galleries of embeddings on disk, of one model or of several that are compatible."""

from xcompat.retrieval.gallery import Gallery
from xcompat.retrieval.searching import Hit

__all__ = ["Gallery", "Hit"]
