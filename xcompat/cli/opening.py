"""Galleries, stores and models that options name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from xcompat.core.distributed import device
from xcompat.core.errors import XcompatError
from xcompat.core.progress import announce_loading, silence_libraries

if TYPE_CHECKING:
    from xcompat.embeddings.provider import Provider
    from xcompat.models.base import CompatModel
    from xcompat.models.embedder import Embedder
    from xcompat.retrieval import Gallery
    from xcompat.retrieval.argument_checks import RerankOptions
    from xcompat.retrieval.fallback import Fallback
    from xcompat.retrieval.originals import Originals
    from xcompat.retrieval.queries import Queries
    from xcompat.retrieval.queries import Source as QuerySource
    from xcompat.retrieval.reranking import Reranker
    from xcompat.stores import Store
    from xcompat.vectors import Vectors

Dtype = Literal["float32", "bfloat16", "float16"] | None


def is_address(text: str) -> bool:
    """Return whether a text is a database address, even without a slash. Messages about paths would show its password."""
    return "://" in text or re.match(r"[a-z][a-z0-9+.-]+:/", text, re.IGNORECASE) is not None


def open_store(uri: str) -> Store:
    """Open a store by its address."""
    import xcompat.stores

    return xcompat.stores.open(uri)


def open_searched(place: str) -> Gallery | Store:
    """Open a gallery by its folder, or a store by its address."""
    return open_store(place) if is_address(place) else open_gallery(Path(place))


def restrict(opened: Gallery | Store | None, where: list[str]) -> None:
    """Restrict a store to the part of a condition, which a gallery filters itself."""
    from xcompat.retrieval import Gallery

    if where and opened is not None and not isinstance(opened, Gallery):
        opened.restrict_to_part(where[0])


def is_index(place: str) -> bool:
    """Return whether a place is a faiss index."""
    from xcompat.stores import places

    return not is_address(place) and places.is_index(Path(place))


def is_vectors(source: str) -> bool:
    """Return whether a source holds vectors, and no texts or images to embed."""
    from xcompat.stores import places

    return places.holds_vectors(places.parse_place(source))


def read_stored(source: str, ids: Path | None, id_column: str | None, vector_name: str | None) -> Vectors:
    """Read stored vectors with ids, from any place that `xcompat map` reads."""
    from xcompat.stores import places
    from xcompat.vectors import Columns

    place, reading = places.parse_place(source), places.Reading(ids, Columns(id_column, vector_name))
    places.require_existing(place)
    places.require_reading([place], reading)
    return places.read_named(place, reading)


def read_columns(
    source: str, id_column: str | None, vector_name: str | None, kept: bool | list[str]
) -> Iterator[dict[str, object]] | None:
    """Read the other columns of a table of vectors, as metadata."""
    from xcompat.retrieval.table_metadata import read_metadata
    from xcompat.stores import places
    from xcompat.vectors import Columns

    place = places.parse_place(source)
    return read_metadata(place if isinstance(place, Path) else None, Columns(id_column, vector_name), kept)


def display_address(source: str) -> str:
    """Return a path or an address for messages, without passwords."""
    from xcompat.stores import places

    return str(places.parse_place(source))


def require_ids_of_index(place: str, ids: Path | None) -> None:
    """Raise if ``--ids`` is given for another place than a faiss index."""
    if ids is not None and not is_index(place):
        raise XcompatError(f"--ids gives the ids of a faiss index, but {place} is not a faiss index; remove --ids")


def require_index_ids(place: str, ids: Path | None, originals: Originals | None) -> None:
    """Raise if the place is a faiss index, and its ids and the originals do not fit together."""
    if is_index(place):
        from xcompat.retrieval import index_gallery

        index_gallery.require_ids(Path(place), ids, originals)


def open_index(index: str, source: QuerySource, ids: Path | None, originals: Originals | None) -> Gallery:
    """Open a faiss index, to search it with the model of its vectors or with a map."""
    from xcompat.embeddings.provider import query_model
    from xcompat.retrieval import index_gallery

    return index_gallery.open_index(Path(index), query_model(source), ids, originals=originals)


def open_gallery(folder: Path) -> Gallery:
    """Open a gallery by its folder."""
    from xcompat.retrieval import Gallery

    return Gallery.open(folder)


def load_old_model(typed: Queries, source: QuerySource, fallback: str, below: float | None) -> Fallback | None:
    """Load the old model of ``--fallback``, or of the map. Queries given as embeddings cannot be re-embedded."""
    from xcompat.retrieval.embedded_queries import EmbeddedQueries
    from xcompat.retrieval.fallback import Fallback

    if isinstance(typed, EmbeddedQueries):
        return None
    given = {"model": fallback or None, "below": below}
    named = {name: value for name, value in given.items() if value is not None}
    return Fallback.for_model(source, device(), named or None)


def load_rerank_originals(paths: list[Path] | None) -> Originals | None:
    """Load the images or texts of ``--images``; None without the option."""
    if not paths:
        return None
    from xcompat.retrieval.originals import load_originals

    return load_originals(paths)


def load_reranker(source: QuerySource, asked: RerankOptions, originals: Originals | None) -> Reranker | None:
    """Load the re-ranker of ``--rerank``; None without the option."""
    if asked.candidates is None:
        return None
    from xcompat.retrieval.reranking import Reranker, require_source

    return Reranker(
        require_source(load_model(asked.model) if asked.model else source),
        originals,
        None if asked.candidates is True else asked.candidates,
        budget=asked.budget,
        record_demand=asked.record_demand,
        cache_bytes=None if asked.cache_mb is None else int(1e6 * asked.cache_mb),
        cache_days=asked.cache_days,
        address_column=asked.address_column,
    )


def load_service(function: str | None, requests_per_minute: float | None, price: float | None) -> Provider | None:
    """Load the service of ``--embed-with``; None without the option."""
    for option, value in (("--requests-per-minute", requests_per_minute), ("--price-per-million-tokens", price)):
        if value is not None and function is None:
            raise XcompatError(f"{option} needs a service; set its function with --embed-with, or remove {option}")
        if value is not None and not value > 0:
            raise XcompatError(f"{option} is {value:g}; it must be above 0")
    if function is None:
        return None
    from xcompat.embeddings.provider import Provider, load_function

    return Provider(load_function(function), function, requests_per_minute, price)


def load_model(model: str, dtype: Dtype = None, side_info: str | None = None) -> Embedder:
    """Load a model. The announcement includes the model that is loaded next, for side-information."""
    from xcompat.retrieval import argument_checks

    argument_checks.require_models(model)
    with announce_loading(model, side_info):
        import torch

        from xcompat.models.embedder import load_embedder

    silence_libraries()
    dtypes = {"bfloat16": torch.bfloat16, "float16": torch.float16}
    return load_embedder(model, device(), "auto" if dtype is None else dtypes.get(dtype))


def load_map(model: str) -> CompatModel:
    """Load a model that can map stored vectors, without its encoder."""
    from xcompat.retrieval import argument_checks

    folder = argument_checks.require_map(model)
    with announce_loading(model):
        import torch

        from xcompat.models.embedder import is_checkpoint, load_checkpoint

    if not is_checkpoint(folder):
        load_model(model)  # or there is none
        argument_checks.refuse_encoder(model)
    silence_libraries()
    return torch.nn.Module.to(load_checkpoint(model), device())
