"""A compatible model as Haystack's components, which embed queries or documents, or order documents again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from xcompat.core.errors import XcompatError
from xcompat.core.fingerprint import Fingerprint
from xcompat.integrations.texts import Service, Source, TextEmbedder, TextReranker

try:
    from haystack import Document, component, default_from_dict, default_to_dict
except ImportError:
    raise XcompatError("this needs haystack-ai; install it with `pip install xcompat[haystack]`") from None


class _Embedder:
    """What both components share: the model, which :meth:`warm_up` loads, and how a pipeline is saved."""

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
        """Load the model, unless it is loaded."""
        self._ready()

    def _ready(self) -> TextEmbedder:
        if self._texts is None:
            self._texts = TextEmbedder(self.model, self.version, self.device, self.embed_with)
        return self._texts

    def to_dict(self) -> dict[str, Any]:
        """Describe the component, so that a pipeline can be saved.

        Raises:
            XcompatError: it was given a function, which no file may run, or a model that is loaded, whose name is not known.
        """
        if self.embed_with is not None:
            raise XcompatError("a saved pipeline runs no function of yours: make the component anew where the pipeline is loaded")
        if not isinstance(self.model, str | Path):
            raise XcompatError("a pipeline is saved with the name of its model: give the component a folder or a name on the Hub")
        version = self.version.digest if isinstance(self.version, Fingerprint) else self.version
        return default_to_dict(self, model=str(self.model), version=version, device=self.device)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """Make the component that :meth:`to_dict` described."""
        return default_from_dict(cls, data)


@component
class CompatTextEmbedder(_Embedder):
    """Embeds queries with a new model for a document store of the old one.

    Args:
        model: as in :class:`~xcompat.integrations.texts.TextEmbedder`.
        version: likewise.
        device: likewise.
        embed_with: likewise; a pipeline with it cannot be saved.

    Example:
        ``pipeline.add_component("embedder", CompatTextEmbedder("runs/map"))``
    """

    @component.output_types(embedding=list[float])
    def run(self, text: str) -> dict[str, list[float]]:
        """Embed a query (see :meth:`TextEmbedder.query`)."""
        return {"embedding": self._ready().query(text)}


@component
class CompatVectorMapper(_Embedder):
    """Brings embeddings of queries, which another component made with the new model, into the space of a store of the old one.

    Args:
        model: as in :class:`~xcompat.integrations.texts.TextEmbedder`; a map needs no encoder.
        version: likewise.
        device: likewise.

    Example:
        ``pipeline.connect("openai.embedding", "mapper.embedding"); pipeline.connect("mapper.embedding", "retriever")``
    """

    @component.output_types(embedding=list[float])
    def run(self, embedding: list[float]) -> dict[str, list[float]]:
        """Map an embedding (see :meth:`TextEmbedder.vector`)."""
        return {"embedding": self._ready().vector(embedding)}


@component
class CompatDocumentEmbedder(_Embedder):
    """Embeds documents for a store that queries of :class:`CompatTextEmbedder` search.

    Args:
        model: as in :class:`~xcompat.integrations.texts.TextEmbedder`.
        version: likewise.
        device: likewise.
        meta_fields_to_embed: metadata that is embedded before a document's text, as in Haystack's own embedders.
        embedding_separator: what stands between them.
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
        """See :meth:`_Embedder.to_dict`."""
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
    """Orders the documents that an old document store found by the new model.

    Args:
        model: the new model, as in :class:`~xcompat.integrations.texts.TextReranker`.
        top_k: documents that are kept; None for all.
        device: as in :class:`CompatTextEmbedder`.
        embed_with: likewise.

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
        """Load the model, unless it is loaded."""
        if self._ranker is None:
            self._ranker = TextReranker(self.model, self.device, self.embed_with)

    def to_dict(self) -> dict[str, Any]:
        """See :meth:`_Embedder.to_dict`."""
        described = _Embedder.to_dict(self)
        kept = {name: value for name, value in described["init_parameters"].items() if name != "version"}
        return described | {"init_parameters": kept | {"top_k": self.top_k}}

    @component.output_types(documents=list[Document])
    def run(self, query: str, documents: list[Document]) -> dict[str, list[Document]]:
        """Return the documents in their new order, with their new scores."""
        self.warm_up()
        assert self._ranker is not None
        ordered = self._ranker.order(query, [each.content or "" for each in documents], [each.score for each in documents])
        return {"documents": [replace(documents[place], score=score) for place, score in ordered[: self.top_k]]}
