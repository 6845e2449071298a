"""Argument checks for ``xcompat gallery``, before heavy imports."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

from xcompat.core.errors import XcompatError
from xcompat.core.paths import is_file, nearest_path
from xcompat.data.image_files import IMAGE_SUFFIXES
from xcompat.data.sources import has_suffix, local_files
from xcompat.encoders import require_model
from xcompat.encoders.model_files import is_xcompat_model


def require_one_search(query: str | None, queries: str | None, two_forms: bool, lacks_fallback: bool) -> None:
    """Raise unless a search has a single kind of query, which exists, and a single output format.

    Args:
        query: a single query.
        queries: a source with many queries.
        two_forms: whether JSON and CSV are requested.
        lacks_fallback: whether a confidence is set without an old model.
    """
    if lacks_fallback:
        raise XcompatError("--fallback-below needs an old model; set it with --fallback")
    if (query is None) == (queries is None):
        raise XcompatError("give one query, or many with --queries" + ("" if query is None else ": not both"))
    if two_forms:
        raise XcompatError("--json and --csv are two forms of the same result; remove --json or --csv")
    if query is not None and has_suffix(query, IMAGE_SUFFIXES) and not is_file(query):
        raise XcompatError(f"there is no image {query}; {nearest_path(query)}")
    if queries is not None:
        local_files(queries)


class RerankOptions(NamedTuple):
    """Options of a search for re-ranking.

    Args:
        candidates: ``--rerank``: number of hits, True for the number chosen with the model, or None for no re-ranking.
        originals: ``--images`` or ``--texts``.
        model: ``--rerank-with``.
        budget: ``--rerank-budget``.
        record_demand: ``--record-demand``.
        cache_mb: ``--cache-mb``.
        cache_days: ``--cache-days``.
        address_column: ``--address-column``.
    """

    candidates: int | None = None
    originals: Sequence[Path] | None = None
    model: str = ""
    budget: int | None = None
    record_demand: bool = False
    cache_mb: float | None = None
    cache_days: float | None = None
    address_column: str | None = None

    def require(self, searches_store: bool = False, searches_index: bool = False) -> None:
        """Raise for options without ``--rerank``, options that stores do not support, or missing inputs.

        Args:
            searches_store: whether a store is searched, whose cache is a column without limits.
            searches_index: whether a faiss index is searched, which can need ids.
        """
        limits = {"--cache-mb": self.cache_mb is not None, "--cache-days": self.cache_days is not None}
        given = {
            "--images or --texts": bool(self.originals),
            "--address-column": self.address_column is not None,
            "--rerank-with": bool(self.model),
            "--rerank-budget": self.budget is not None,
            "--record-demand": self.record_demand,
        } | limits
        if self.candidates is None:
            for option in (name for name, is_given in given.items() if is_given):
                ids = ", or replace it with --ids to name the vectors of an index" if self.originals and searches_index else ""
                raise XcompatError(f"{option} needs --rerank; add --rerank 20{ids}")
        for option in (name for name, is_given in limits.items() if is_given and searches_store):
            raise XcompatError(f"{option} works with galleries only: a store keeps new embeddings in a column; remove {option}")
        if self.originals and self.address_column is not None:
            raise XcompatError("--address-column replaces --images and --texts; remove one of them")
        for path in self.originals or ():
            local_files(str(path))
        if self.model:
            require_models(self.model)


def require_of_stores(of_galleries: bool, where: list[str]) -> None:
    """Raise for options that stores do not support.

    Args:
        of_galleries: whether an option for galleries only is set.
        where: the conditions.
    """
    if of_galleries:
        raise XcompatError("--fallback and --group-by work with galleries only, not with stores")
    if len(where) > 1:
        raise XcompatError("a store takes one condition in its own query language; use --where only once")


def require_named(model: str) -> None:
    """Raise if no model is set."""
    if not model:
        raise XcompatError("name the model with --model: a run's folder, a checkpoint, or a model by name")


def require_models(model: str, *others: str) -> None:
    """Raise if a model is not set, or a folder contains none."""
    require_named(model)
    for name in filter(None, (model, *others)):
        require_model(name)


def require_map(model: str) -> str:
    """Return a map's location; Hub names are not checked.

    Raises:
        XcompatError: it is not set, or not a map.
    """
    require_named(model)
    source = require_model(model)
    if Path(source.name).is_dir() and not is_xcompat_model(Path(source.name)):
        refuse_encoder(model)
    return source.name if source.revision is None else f"{source.name}@{source.revision}"


def refuse_encoder(model: str) -> NoReturn:
    """Raise for a model that is not an xcompat map."""
    raise XcompatError(
        f"{model} is a plain encoder and maps nothing; to re-embed with it, use a map or run of it with --backfill"
    )
