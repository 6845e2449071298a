"""What ``xcompat gallery`` is asked for, checked before anything that embeds or searches is imported."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

from xcompat.core.errors import XcompatError
from xcompat.core.paths import is_file, nearest_path
from xcompat.data.picture_files import IMAGE_SUFFIXES
from xcompat.data.sources import has_suffix, local_files
from xcompat.encoders import require_model
from xcompat.encoders.model_files import is_own


def require_one_search(query: str | None, queries: str | None, two_forms: bool, below_nothing: bool) -> None:
    """Refuse a search that asks nothing, or two things at once.

    Args:
        query: one query.
        queries: the source of many.
        two_forms: whether the result is wanted as JSON and as CSV.
        below_nothing: whether a confidence is given, and no old model to ask below it.
    """
    if below_nothing:
        raise XcompatError("--fallback-below says when the old model is asked instead: name it with --fallback")
    if (query is None) == (queries is None):
        raise XcompatError("give one query, or many with --queries" + ("" if query is None else ": not both"))
    if two_forms:
        raise XcompatError("--json and --csv are two forms of one result; choose one")


def require_reranking(
    rerank: int | None, originals: Path | None, rerank_with: str, budget: int | None, record_demand: bool
) -> None:
    """Refuse options of re-ranking without ``--rerank``, and originals or a model that are not there."""
    given = {
        "--originals": originals is not None,
        "--rerank-with": bool(rerank_with),
        "--rerank-budget": budget is not None,
        "--record-demand": record_demand,
    }
    if rerank is None:
        for option in (name for name, is_given in given.items() if is_given):
            raise XcompatError(f"{option} needs --rerank; add --rerank 20")
    if originals is not None:
        local_files(str(originals))
    if rerank_with:
        require_models(rerank_with)


def require_of_stores(of_galleries: bool, where: list[str]) -> None:
    """Refuse what a store cannot do.

    Args:
        of_galleries: whether an option is given that only galleries have.
        where: the conditions.
    """
    if of_galleries:
        raise XcompatError("--fallback, --group-by and --record-demand work with galleries only, not with stores")
    if len(where) > 1:
        raise XcompatError("a store takes one condition in its own language, which may have several parts: give --where once")


def require_asked(query: str | None, queries: str | None) -> None:
    """Refuse the path of a picture or of a source that is not there."""
    if query is not None and has_suffix(query, IMAGE_SUFFIXES) and not is_file(query):
        raise XcompatError(f"there is no picture {query}; {nearest_path(query)}")
    if queries is not None:
        local_files(queries)


def require_named(model: str) -> None:
    """Refuse to go on without a model."""
    if not model:
        raise XcompatError("name the model with --model: a run's folder, a checkpoint, or a model by name")


def require_models(model: str, *others: str) -> None:
    """Refuse a model that is not named, and folders that hold none."""
    require_named(model)
    for name in filter(None, (model, *others)):
        require_model(name)


def require_there(source: Path, model: str) -> None:
    """Refuse pictures or texts that are not there, and a model that is none, before anything that reads either is imported."""
    local_files(str(source))
    require_models(model)


def require_map(model: str) -> str:
    """Return where a model lies that may map what is stored; a name on the Hub passes.

    Raises:
        XcompatError: it is not named, or a folder that holds none.
    """
    require_named(model)
    source = require_model(model)
    if Path(source.name).is_dir() and not is_own(Path(source.name)):
        refuse_encoder(model)
    return source.name if source.revision is None else f"{source.name}@{source.revision}"


def refuse_encoder(model: str) -> NoReturn:
    """Refuse a model that is no map of this library."""
    raise XcompatError(
        f"{model} is a plain encoder and maps nothing; to store its embeddings, name a map or run of it with --backfill"
    )
