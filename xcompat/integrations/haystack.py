"""Haystack components with a compatible model: embedders, vector mapper and ranker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from xcompat.core.errors import XcompatError
from xcompat.core.fingerprint import Fingerprint
from xcompat.retrieval.text_embedder import Service, Source, TextEmbedder, TextReranker

try:
    from haystack import Document, component, default_from_dict, default_to_dict
except ImportError:
    raise XcompatError('this needs haystack-ai; install it with `pip install -e ".[haystack]"` in a clone of xcompat') from None


class _Embedder:
    """Base of the components: the model, loaded by :meth:`warm_up`, and serialisation."""

    def __init__(
        self,
        model: Source,
        version: str | Fingerprint | None = None,
        device: str | None = None,
        embed_with: Service | None = None,
    ) -> None:
        self.model, self.version, self.device, self.embed_with = model, version, device, embed_with
        self._texts: TextEmbedder | None = None

    def warm_up(self) -> None:
        """Load the model if necessary."""
        self._ready()

    def _ready(self) -> TextEmbedder:
        if self._texts is None:
            self._texts = TextEmbedder(self.model, self.version, self.device, self.embed_with)
        return self._texts

    def to_dict(self) -> dict[str, Any]:
        """Describe the component for a saved pipeline.

        Raises:
            XcompatError: it has a function, which cannot be saved, or a loaded model, which has no name.
        """
        if self.embed_with is not None:
            raise XcompatError(
                "a saved pipeline cannot contain a function: remove embed_with to save it, and set it after loading"
            )
        if not isinstance(self.model, str | Path):
            raise XcompatError("a saved pipeline needs the model's name: give the component a folder or a name on the Hub")
        version = self.version.digest if isinstance(self.version, Fingerprint) else self.version
        return default_to_dict(self, model=str(self.model), version=version, device=self.device)

    @classmethod
    def from_dict(cls, data: dict[str, object]) -> Self:
        """Create the component from :meth:`to_dict`."""
        return default_from_dict(cls, data)


@component
class CompatTextEmbedder(_Embedder):
    """Embedder of queries with a new model for the old model's document store.

    Args:
        model: as in :class:`~xcompat.retrieval.text_embedder.TextEmbedder`.
        version: as in ``TextEmbedder``.
        device: as in ``TextEmbedder``.
        embed_with: as there. A pipeline with it cannot be saved.

    Example:
        ``pipeline.add_component("embedder", CompatTextEmbedder("runs/map"))``
    """

    @component.output_types(embedding=list[float])
    def run(self, text: str) -> dict[str, list[float]]:
        """Embed a query (see :meth:`TextEmbedder.query`)."""
        return {"embedding": self._ready().query(text)}


@component
class CompatVectorMapper(_Embedder):
    """Mapper of query embeddings, made by another component with the new model, into the space of the old model's store.

    Args:
        model: as in :class:`~xcompat.retrieval.text_embedder.TextEmbedder`. A map needs no encoder.
        version: as in ``TextEmbedder``.
        device: as in ``TextEmbedder``.

    Example:
        ``pipeline.connect("openai.embedding", "mapper.embedding"); pipeline.connect("mapper.embedding", "retriever")``
    """

    @component.output_types(embedding=list[float])
    def run(self, embedding: list[float]) -> dict[str, list[float]]:
        """Map an embedding (see :meth:`TextEmbedder.vector`)."""
        return {"embedding": self._ready().vector(embedding)}


@component
class CompatDocumentEmbedder(_Embedder):
    """Embedder of documents for a store searched with :class:`CompatTextEmbedder`.

    Args:
        model: as in :class:`~xcompat.retrieval.text_embedder.TextEmbedder`.
        version: as in ``TextEmbedder``.
        device: as in ``TextEmbedder``.
        meta_fields_to_embed: metadata to embed before a document's text, as in Haystack's own embedders.
        embedding_separator: separator between them.
        embed_with: as in :class:`CompatTextEmbedder`.
    """

    def __init__(
        self,
        model: Source,
        version: str | Fingerprint | None = None,
        device: str | None = None,
        meta_fields_to_embed: Sequence[str] = (),
        embedding_separator: str = "\n",
        embed_with: Service | None = None,
    ) -> None:
        _Embedder.__init__(
            self, model, version, device, embed_with
        )  # the decorator makes another class, which super() does not know
        self.meta_fields_to_embed, self.embedding_separator = list(meta_fields_to_embed), embedding_separator

    def to_dict(self) -> dict[str, Any]:
        """Describe the component for a saved pipeline."""
        described = _Embedder.to_dict(self)
        own = {"meta_fields_to_embed": self.meta_fields_to_embed, "embedding_separator": self.embedding_separator}
        return described | {"init_parameters": described["init_parameters"] | own}

    @component.output_types(documents=list[Document])
    def run(self, documents: list[Document]) -> dict[str, list[Document]]:
        """Return the documents with their embeddings (see :meth:`TextEmbedder.documents`)."""
        embeddings = self._ready().documents([self._text(document) for document in documents])
        return {"documents": [replace(document, embedding=row) for document, row in zip(documents, embeddings, strict=True)]}

    def _text(self, document: Document) -> str:
        about = (document.meta.get(field) for field in self.meta_fields_to_embed)
        return self.embedding_separator.join([*(str(value) for value in about if value is not None), document.content or ""])


@component
class CompatRanker(_Embedder):
    """Re-ranker of an old store's documents by the new model.

    Args:
        model: the new model, as in :class:`~xcompat.retrieval.text_embedder.TextReranker`.
        top_k: number of documents to keep. None for all.
        device: as in :class:`CompatTextEmbedder`.
        embed_with: as there.

    Example:
        ``pipeline.connect("retriever.documents", "ranker.documents")``
    """

    def __init__(
        self, model: Source, top_k: int | None = None, device: str | None = None, embed_with: Service | None = None
    ) -> None:
        _Embedder.__init__(self, model, None, device, embed_with)
        self.top_k = top_k
        self._ranker: TextReranker | None = None

    def warm_up(self) -> None:
        """Load the model if necessary."""
        if self._ranker is None:
            self._ranker = TextReranker(self.model, self.device, self.embed_with)

    def to_dict(self) -> dict[str, Any]:
        """Describe the component for a saved pipeline."""
        described = _Embedder.to_dict(self)
        kept = {name: value for name, value in described["init_parameters"].items() if name != "version"}
        return described | {"init_parameters": kept | {"top_k": self.top_k}}

    @component.output_types(documents=list[Document])
    def run(self, query: str, documents: list[Document]) -> dict[str, list[Document]]:
        """Return the documents in their new order, with new scores."""
        self.warm_up()
        assert self._ranker is not None
        ordered = self._ranker.order(query, [each.content or "" for each in documents], [each.score for each in documents])
        return {"documents": [replace(documents[place], score=score) for place, score in ordered[: self.top_k]]}
