"""Framework-independent embedding and re-ranking of texts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xcompat.core.distributed import device as own_device
from xcompat.core.errors import XcompatError
from xcompat.core.fingerprint import Fingerprint
from xcompat.core.paths import model_folder
from xcompat.data.schema import TEXT
from xcompat.embeddings.embed import embed_in_memory
from xcompat.embeddings.provider import Function, Provider, ServedMap, query_model
from xcompat.models.base import CompatModel
from xcompat.models.embedder import Embedder, is_checkpoint, load_checkpoint, load_embedder
from xcompat.retrieval.embedded_queries import require_dim
from xcompat.retrieval.fallback import Fallback, OldQueries
from xcompat.retrieval.items import checked_embeddings
from xcompat.retrieval.manifest import VersionRecord
from xcompat.retrieval.reranking import Reranker
from xcompat.retrieval.searching import Hit
from xcompat.retrieval.versions import (
    as_float32,
    notice_missing_old,
    own_metric,
    query_view,
    searchable_versions,
    stored_version,
    takes_old_queries,
)
from xcompat.score_scale import OLD_WEIGHT

Source: TypeAlias = str | Path | CompatModel | Embedder
"""A run's folder, a checkpoint, a name on the Hub, or a loaded model."""
Service: TypeAlias = str | Function | Provider
"""Embedding service of a map: a function, its name (``module:function``), or a :class:`Provider`."""


class TextEmbedder:
    """Embedder of queries in a version's space, and of documents as in the model's galleries.

    Args:
        model: the new model.
        version: the stored version to search, by name, digest or fingerprint: any compatible version, or the model's own.
            None to use the old model, or its own without an old model.
        device: device for a model loaded here. None to use an accelerator if available.
        embed_with: embedding service, if the model is a map of a service's embeddings.

    Raises:
        XcompatError: the model neither embeds texts nor maps embeddings, or its queries do not fit the version.
    """

    def __init__(
        self,
        model: Source,
        version: str | Fingerprint | None = None,
        device: str | None = None,
        embed_with: Service | None = None,
    ) -> None:
        self._source = _load_source(model, device) if embed_with is None else _load_served_map(model, device, embed_with)
        self._device, self._asking = device, query_model(self._source)
        self._stored = stored_version(self._asking, None)
        self._version = _select_version(version, self._asking)
        self._mixes = takes_old_queries(self._asking, self._version)

    @property
    def version(self) -> Fingerprint:
        """Version to search."""
        return self._version.fingerprint

    @property
    def stored_fingerprint(self) -> Fingerprint:
        """Fingerprint of the documents' embeddings."""
        return self._stored.fingerprint

    def query(self, text: str) -> list[float]:
        """Embed a query.

        Args:
            text: without a prompt. The model's own query prompt is added.

        Returns:
            A unit-length vector in the version's dimension.
        """
        _require_texts([text])
        return self._view(self.embed_own(text), text)

    def vector(self, embedding: Sequence[float]) -> list[float]:
        """Map a query's embedding from the new model's space to the store's space.

        Args:
            embedding: D numbers of any length above 0.

        Returns:
            A unit-length vector in the version's dimension.

        Raises:
            XcompatError: the embedding has another dimension or no direction.
        """
        own_1D = as_float32(embedding)
        require_dim(self._asking, own_1D.shape[1], "the embedding")
        return self._view(checked_embeddings(own_1D, own_metric(self._asking), lambda _: "the embedding"))

    def _view(self, own_1D: Tensor | NDArray[np.float32], text: str | None = None) -> list[float]:
        view_1d = query_view(self._asking, own_1D, self._version)
        assert view_1d is not None
        if text is None:
            if self._mixes:
                notice_missing_old(self._asking)
        elif self._mixes and (old := self._old) is not None:
            asking = old.model.for_queries()
            old_1d = asking.embed(asking.processor.texts([text]))
            view_1d = OldQueries(old.model, old_1d, old.share).replace_or_mix(self._asking, self._version, view_1d)
        return view_1d[0].tolist()

    @cached_property
    def _old(self) -> Fallback | None:
        """Old model to mix into a map's queries, loaded on first use."""
        return Fallback.for_model(self._asking, self._device or own_device())

    def documents(self, texts: Sequence[str]) -> list[list[float]]:
        """Embed documents.

        Args:
            texts: N strings.

        Returns:
            N unit-length lists of floats.

        Raises:
            XcompatError: the model stores more dimensions than the searched version.
        """
        _require_texts(texts)
        if self._stored.dim != self._version.dim:  # old queries cannot use an expanded model's further dimensions
            raise XcompatError(
                f"{self._stored.name} stores {self._stored.dim} dimensions, but a store of {self.version} has "
                f"{self._version.dim}: keep new documents in a separate store, "
                f"with version={self.stored_fingerprint.digest[:12]!r}"
            )
        if isinstance(self._source, ServedMap):
            return self._source.embed(texts, "stored").tolist()
        return embed_in_memory(_require_embedder(self._source), texts).tolist()

    @property
    def source(self) -> Embedder | ServedMap:
        """Model or service that embeds texts.

        Raises:
            XcompatError: the model is a map without an encoder.
        """
        return self._source if isinstance(self._source, ServedMap) else _require_embedder(self._source)

    def embed_own(self, text: str) -> Tensor:
        """Embed a query in the model's own space.

        Args:
            text: without a prompt.

        Returns:
            (1, D) float32.
        """
        if isinstance(self._source, ServedMap):
            return self._source.embed([text])
        queries = _require_embedder(self._source).for_queries()
        return queries.embed(queries.processor.texts([text]), "own")


class TextReranker:
    """Re-ranker of an old store's hits, by the new model's embeddings of their texts.

    The store stays unchanged and finds candidates for queries of any model (:class:`~xcompat.retrieval.reranking.Reranker`).

    Args:
        model: the new model, or a map of its embeddings.
        device: device for a model loaded here. None to use an accelerator if available.
        embed_with: embedding service, if the model is a map of a service's embeddings.
        old_weight: weight of the store's scores, if these are cosines.

    Raises:
        XcompatError: the model embeds no texts.
    """

    def __init__(
        self, model: Source, device: str | None = None, embed_with: Service | None = None, old_weight: float = OLD_WEIGHT
    ) -> None:
        self._asking = TextEmbedder(model, None, device, embed_with)
        self._with_scores = Reranker(self._asking.source, old_weight=old_weight)
        self._without_scores = Reranker(self._asking.source, old_weight=0.0)

    def order(self, query: str, texts: Sequence[str], scores: Sequence[float | None]) -> list[tuple[int, float]]:
        """Score texts again.

        Args:
            query: the query.
            texts: N hits. Between scored texts, an empty text keeps its place.
            scores: N cosines from the store. With None, only the new model decides.

        Returns:
            Index and score of each text, best first.
        """
        _require_texts([query])
        if not any(text.strip() for text in texts):
            return [(place, score or 0.0) for place, score in enumerate(scores)]
        reranker = self._without_scores if None in scores else self._with_scores
        version = reranker.fingerprint
        hits = [
            Hit(str(n), score or 0.0, version, {TEXT: text}) for n, (text, score) in enumerate(zip(texts, scores, strict=True))
        ]
        (ordered,) = reranker.order(self._asking.embed_own(query), [hits])
        return [(int(hit.id), hit.score) for hit in ordered]


def _load_served_map(model: Source, device: str | None, embed_with: Service) -> ServedMap:
    if device is not None:
        raise XcompatError("device does not apply to a service (embed_with); remove it")
    return ServedMap.load(model.model if isinstance(model, Embedder) else model, embed_with)


def _load_source(model: Source, device: str | None) -> Embedder | CompatModel:
    """Load the model. A map without an encoder maps only vectors."""
    found: Source = model
    if isinstance(model, str | Path) and is_checkpoint(model_folder(model)):
        found = torch.nn.Module.to(load_checkpoint(os.fspath(model)), device or own_device())
    inner = found.model if isinstance(found, Embedder) else found
    if isinstance(inner, CompatModel) and inner.embeds_in_memory and inner.config.encoder is None:
        return inner.for_inference()
    return _load_text_model(model, device)


def _require_embedder(source: Embedder | CompatModel) -> Embedder:
    if isinstance(source, Embedder):
        return source
    raise XcompatError(
        "this map has no encoder and cannot embed texts: map the embeddings of your queries with map_vector, "
        "or set embed_with to your embedding function"
    )


def _load_text_model(model: Source, device: str | None) -> Embedder:
    loaded = _load_stored_embedder(model, device)
    inner = loaded.model
    if not (inner.embeds_texts if isinstance(inner, CompatModel) else getattr(inner, "has_text", False)):
        raise XcompatError(f"{loaded.name} embeds no texts; choose a model with a text encoder")
    return loaded


def _load_stored_embedder(model: Source, device: str | None) -> Embedder:
    if isinstance(model, str | Path):
        return load_embedder(os.fspath(model), device or own_device())
    if device is not None:
        raise XcompatError(f"the model is already loaded: load it on {device}, or pass its name")
    if isinstance(model, Embedder):
        if isinstance(model.model, CompatModel):
            return Embedder.from_model(model.model, "stored", model.autocast)
        return model.passages or model  # a query embedder would add the query prompt to documents
    if isinstance(model, CompatModel):
        return Embedder.from_model(model.for_inference(), "stored")
    raise XcompatError(f"model must be a folder, a name, or a model loaded by xcompat, not {type(model).__name__}")


def _select_version(version: str | Fingerprint | None, asking: CompatModel | Embedder) -> VersionRecord:
    known = searchable_versions(asking)
    if version is None:
        return known[0]
    found = [record for record in known if version in (record.fingerprint, *_names(record))]
    if len(found) == 1:
        return found[0]
    if isinstance(asking, CompatModel) and asking.maps_galleries:
        raise XcompatError(
            f"{type(asking).__name__} maps galleries, not queries: upgrade the stored embeddings with "
            "model.upgrade, and remove version"
        )
    wrong = f"{len(found)} versions are called {version}" if found else f"queries of this model do not fit {version}"
    raise XcompatError(f"{wrong}; choose one of these: {', '.join(str(record.fingerprint) for record in found or known)}")


def _names(version: VersionRecord) -> tuple[str, ...]:
    return version.name, version.digest, version.digest[:12], str(version.fingerprint)


def _require_texts(texts: Sequence[object]) -> None:
    """Reject anything but strings, as tokenizers take lists for split texts."""
    wrong = [texts] if isinstance(texts, str) else [text for text in texts if not isinstance(text, str)]
    if wrong:
        raise XcompatError(f"pass a query as a string and documents as a list of strings, not {type(wrong[0]).__name__}")
