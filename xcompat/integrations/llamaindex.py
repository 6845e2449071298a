"""LlamaIndex embedding and node postprocessor with a compatible model."""

from __future__ import annotations

import asyncio
from typing import Any

from xcompat.core.errors import XcompatError
from xcompat.core.fingerprint import Fingerprint
from xcompat.retrieval.text_embedder import Service, Source, TextEmbedder, TextReranker

try:
    from llama_index.core.base.embeddings.base import BaseEmbedding
    from llama_index.core.bridge.pydantic import Field, PrivateAttr
    from llama_index.core.postprocessor.types import BaseNodePostprocessor
    from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle
except ImportError:
    raise XcompatError(
        'this needs llama-index-core; install it with `pip install -e ".[llamaindex]"` in a clone of xcompat'
    ) from None


class CompatEmbedding(BaseEmbedding):
    """New model's queries for an index of the old model, and nodes for such an index.

    Args:
        model: as in :class:`~xcompat.retrieval.text_embedder.TextEmbedder`.
        version: as in ``TextEmbedder``.
        device: as in ``TextEmbedder``.
        embed_with: as there.
        kwargs: the other fields of LlamaIndex's embedding models, except ``model_name``.

    Example:
        ``index = VectorStoreIndex.from_vector_store(store, embed_model=CompatEmbedding("runs/map"))``
    """

    embed_batch_size: int = Field(default=512, gt=0, le=2048, description="Number of nodes to sort by length at a time.")
    version: str = Field(description="Stored version that the queries search.")
    _texts: TextEmbedder = PrivateAttr()

    def __init__(
        self,
        model: Source,
        version: str | Fingerprint | None = None,
        device: str | None = None,
        embed_with: Service | None = None,
        **kwargs: Any,  # noqa: ANN401 - the base's own fields
    ) -> None:
        texts = TextEmbedder(model, version, device, embed_with)
        # an ingestion cache identifies models by their fields
        super().__init__(model_name=str(texts.stored_fingerprint), version=str(texts.version), **kwargs)
        self._texts = texts

    @classmethod
    def class_name(cls) -> str:
        """Return LlamaIndex's name of the class."""
        return "CompatEmbedding"

    def map_vector(self, embedding: list[float]) -> list[float]:
        """Map a query's embedding into the store's space, for ``QueryBundle(query, embedding=...)``."""
        return self._texts.vector(embedding)

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._texts.query(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return await asyncio.to_thread(self._texts.query, query)

    def _get_text_embedding(self, text: str) -> list[float]:
        return self._texts.documents([text])[0]

    async def _aget_text_embedding(self, text: str) -> list[float]:
        return await asyncio.to_thread(self._get_text_embedding, text)

    def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return self._texts.documents(texts)

    async def _aget_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return await asyncio.to_thread(self._texts.documents, texts)


class CompatRerank(BaseNodePostprocessor):
    """Re-ranker of an old index's nodes by the new model.

    Args:
        model: the new model, as in :class:`~xcompat.retrieval.text_embedder.TextReranker`.
        top_n: number of nodes to keep. None for all.
        device: as in :class:`~xcompat.retrieval.text_embedder.TextReranker`.
        embed_with: as there.

    Example:
        ``index.as_query_engine(similarity_top_k=20, node_postprocessors=[CompatRerank("runs/map", top_n=5)])``
    """

    top_n: int | None = Field(default=None, gt=0, description="Number of nodes to keep. None for all.")
    _texts: TextReranker = PrivateAttr()

    def __init__(
        self, model: Source, top_n: int | None = None, device: str | None = None, embed_with: Service | None = None
    ) -> None:
        super().__init__(top_n=top_n)
        self._texts = TextReranker(model, device, embed_with)

    @classmethod
    def class_name(cls) -> str:
        """Return LlamaIndex's name of the class."""
        return "CompatRerank"

    def _postprocess_nodes(self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None) -> list[NodeWithScore]:
        if query_bundle is None:
            raise XcompatError("re-ranking needs a query: call postprocess_nodes with query_str or query_bundle")
        texts = [each.node.get_content(metadata_mode=MetadataMode.EMBED) for each in nodes]
        ordered = self._texts.order(query_bundle.query_str, texts, [each.score for each in nodes])
        return [NodeWithScore(node=nodes[place].node, score=score) for place, score in ordered[: self.top_n]]
