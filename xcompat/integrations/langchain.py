"""A compatible model where LangChain expects an embedding model."""

from __future__ import annotations

from xcompat.errors import XcompatError
from xcompat.fingerprint import Fingerprint
from xcompat.integrations.texts import Service, Source, TextEmbedder

try:
    from langchain_core.embeddings import Embeddings
except ImportError:
    raise XcompatError("this needs langchain-core; install it with `pip install xcompat[langchain]`") from None


class CompatEmbeddings(Embeddings):
    """Queries of a new model for a vector store of the old one, and documents that such a store can take.

    Args:
        model: as in :class:`~xcompat.integrations.texts.TextEmbedder`.
        version: likewise.
        device: likewise.
        embed_with: likewise.

    Example:
        ``store = InMemoryVectorStore(CompatEmbeddings("runs/map"))``
    """

    def __init__(
        self,
        model: Source,
        version: str | Fingerprint | None = None,
        device: str | None = None,
        embed_with: Service | None = None,
    ) -> None:
        self._texts = TextEmbedder(model, version, device, embed_with)

    def embed_query(self, text: str) -> list[float]:
        """Embed a query for what the store holds (see :meth:`TextEmbedder.query`)."""
        return self._texts.query(text)

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """Embed documents for the store (see :meth:`TextEmbedder.documents`)."""
        return self._texts.documents(texts)

    def map_vector(self, embedding: list[float]) -> list[float]:
        """Bring the embedding of a query into the store's space, for ``similarity_search_by_vector``."""
        return self._texts.vector(embedding)
