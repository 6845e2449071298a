"""LangChain embeddings and document compressor with a compatible model."""

from __future__ import annotations

from collections.abc import Sequence

from xcompat.core.errors import XcompatError
from xcompat.core.fingerprint import Fingerprint
from xcompat.retrieval.text_embedder import Service, Source, TextEmbedder, TextReranker

try:
    from langchain_core.documents import BaseDocumentCompressor, Document
    from langchain_core.embeddings import Embeddings
    from pydantic import PrivateAttr
except ImportError:
    raise XcompatError(
        'this needs langchain-core; install it with `pip install -e ".[langchain]"` in a clone of xcompat'
    ) from None


class CompatEmbeddings(Embeddings):
    """New model's queries for a vector store of the old model, and documents for such a store.

    Args:
        model: as in :class:`~xcompat.retrieval.text_embedder.TextEmbedder`.
        version: as in ``TextEmbedder``.
        device: as in ``TextEmbedder``.
        embed_with: as there.

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
        """Embed a query for the store (see :meth:`TextEmbedder.query`)."""
        return self._texts.query(text)

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """Embed documents for the store (see :meth:`TextEmbedder.documents`)."""
        return self._texts.documents(texts)

    def map_vector(self, embedding: list[float]) -> list[float]:
        """Map a query's embedding into the store's space, for ``similarity_search_by_vector``."""
        return self._texts.vector(embedding)


class CompatReranker(BaseDocumentCompressor):
    """Re-ranker of an old vector store's documents by the new model, for a ``ContextualCompressionRetriever``.

    LangChain's retrievers return no scores, so only the new model decides.

    Args:
        model: the new model, as in :class:`~xcompat.retrieval.text_embedder.TextReranker`.
        top_k: number of documents to keep. None for all.
        device: as in :class:`~xcompat.retrieval.text_embedder.TextReranker`.
        embed_with: as there.

    Example:
        ``CompatReranker("runs/map", top_k=5).compress_documents(store.similarity_search(query, k=20), query)``
    """

    top_k: int | None = None
    _texts: TextReranker = PrivateAttr()

    def __init__(
        self, model: Source, top_k: int | None = None, device: str | None = None, embed_with: Service | None = None
    ) -> None:
        super().__init__(top_k=top_k)
        self._texts = TextReranker(model, device, embed_with)

    def compress_documents(self, documents: Sequence[Document], query: str, callbacks: object = None) -> list[Document]:
        """Return the documents in their new order.

        Args:
            documents: the store's hits.
            query: the query.
            callbacks: not used.
        """
        ordered = self._texts.order(query, [each.page_content for each in documents], [None] * len(documents))
        return [documents[place] for place, _ in ordered[: self.top_k]]
