"""Choice of a search's queries and query model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from xcompat.core.distributed import device
from xcompat.core.errors import XcompatError
from xcompat.core.fingerprint import Fingerprint
from xcompat.core.paths import model_folder
from xcompat.core.progress import silence_libraries
from xcompat.embeddings.provider import Provider, ServedMap
from xcompat.models.base import CompatModel
from xcompat.models.embedder import is_checkpoint, load_checkpoint, load_embedder
from xcompat.retrieval import argument_checks
from xcompat.retrieval.content import find_content
from xcompat.retrieval.embedded_queries import EmbeddedQueries
from xcompat.retrieval.queries import TypedQuery, load_queries
from xcompat.vectors.checks import BAD_SHARE

if TYPE_CHECKING:
    from xcompat.models.base import CompatModel
    from xcompat.models.embedder import Embedder
    from xcompat.retrieval.queries import Queries, Source


def load_embedded(
    queries: str, model: str, known: Sequence[Fingerprint | None], conflict: str | None, max_bad_share: float | None
) -> tuple[EmbeddedQueries, CompatModel | Embedder | Fingerprint] | None:
    """Load embedded queries and the model that made them.

    Args:
        queries: the source.
        model: value of ``--model``: a map, a model, or a name known to the gallery.
        known: the searched embeddings' models.
        conflict: an option to embed texts, if set.
        max_bad_share: largest share of unusable rows; None to use the default.

    Returns:
        Both; None if the queries, or their texts for a model that embeds texts, must be embedded.

    Raises:
        XcompatError: they cannot be read, have another dimension, or an option embeds texts.
    """
    content, owner = find_content(queries), None
    if content == "both" and conflict is None:
        owner = load_owner(model, known)
        content = "embeddings" if _takes_embeddings_alone(owner) else "other"
    if content != "embeddings":
        return None
    if conflict is not None:
        raise XcompatError(
            f"{conflict} embeds queries, but {queries} holds embeddings; remove {conflict}, or give texts as queries"
        )
    embedded = EmbeddedQueries(queries, BAD_SHARE if max_bad_share is None else max_bad_share)
    owner = owner if owner is not None else load_owner(model, known)
    embedded.require_fit(owner)
    return embedded, owner


def load_queries_and_model(
    query: str | None,
    queries: str | None,
    model: str,
    known: Sequence[Fingerprint | None],
    fallback: str = "",
    embed_with: Provider | None = None,
    max_bad_share: float | None = None,
) -> tuple[Queries, Source]:
    """Load queries and the model to embed them.

    Args:
        query: a single query.
        queries: a source with many queries.
        model: see :func:`load_embedded`.
        known: see :func:`load_embedded`.
        fallback: the old model.
        embed_with: service that embeds texts for a map of its embeddings.
        max_bad_share: see :func:`load_embedded`.

    Raises:
        XcompatError: see :func:`load_embedded`; or the model does not exist.
    """
    conflict = "--embed-with" if embed_with is not None else "--fallback" if fallback else None
    if queries is not None and (found := load_embedded(queries, model, known, conflict, max_bad_share)) is not None:
        return found
    if max_bad_share is not None:
        raise XcompatError("--max-bad-share works with embedded queries only; remove --max-bad-share")
    argument_checks.require_models(model, fallback)
    typed = TypedQuery(query) if query is not None else load_queries(str(queries))
    silence_libraries()
    return typed, load_embedder(model, device()) if embed_with is None else ServedMap.load(model, embed_with)


def load_owner(model: str, known: Sequence[Fingerprint | None]) -> CompatModel | Embedder | Fingerprint:
    """Load the model that made embeddings: a map without its encoder, or a name known to the gallery."""
    if (name := Fingerprint.from_string(model)) in known:
        return name
    argument_checks.require_models(model)

    silence_libraries()
    if not is_checkpoint(model_folder(model)):
        return load_embedder(model, device())
    return torch.nn.Module.to(load_checkpoint(model), device())


def _takes_embeddings_alone(model: CompatModel | Embedder | Fingerprint) -> bool:
    """Return whether the model is a map without a known encoder."""
    return isinstance(model, CompatModel) and model.embeds_in_memory and model.config.encoder is None
