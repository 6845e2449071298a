"""Request models for the page's API: strictly typed, limited fields."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request

from xcompat.core.errors import visible_line
from xcompat.core.progress import snippet

TOP_K, MOST = 10, 50
LONGEST = 10_000
"""Maximum characters of a text or an id."""
LONGEST_FILTER, FILTERS = 500, 50

Query = Annotated[str, Field(max_length=LONGEST)]
Title = Annotated[str, Field(max_length=500)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class SearchQuery(_Strict):
    """A gallery search.

    Args:
        kind: query type. An image's bytes are sent separately.
        text: query text.
        item: id of the gallery item to search with.
        gallery: the gallery's title. Empty to use the first.
        where: filters `KEY=VALUE`.
        k: number of hits.
        rerank: whether to show a further column, re-ranked by the new model from the hits' originals.
    """

    kind: Literal["text", "image", "item"]
    text: Query = ""
    item: Query = ""
    gallery: Title = ""
    where: list[Annotated[str, Field(max_length=LONGEST_FILTER)]] = Field(default=[], max_length=FILTERS)
    k: int = Field(default=TOP_K, ge=1, le=MOST)
    rerank: bool = False


class DifferingQuery(_Strict):
    """Request for a page of the test queries with the largest differences between the two models."""

    direction: Title
    order: Literal["lost", "gained"]
    page: int = Field(default=1, ge=1, le=10**9)


class GalleryQuery(_Strict):
    """Request about a gallery."""

    gallery: Title


class WorkQuery(_Strict):
    """Job on a whole gallery.

    Args:
        gallery: the gallery's title.
        verb: the job.
        side: the model's label, for the doctor.
        budget: number of items to backfill.
        generation: state to return to.
        dry_run: whether to report only the effort.
    """

    gallery: Title
    verb: Literal["verify", "doctor", "upgrade", "backfill", "rollback"]
    side: Title = ""
    budget: int = Field(default=1000, ge=1, le=10**9)
    generation: int | None = Field(default=None, ge=0, le=10**9)
    dry_run: bool = False


class JobQuery(_Strict):
    """Request for a started job."""

    job: Annotated[str, Field(max_length=100)]


class PasswordQuery(_Strict):
    """Login."""

    password: Annotated[str, Field(max_length=1000)]


M = TypeVar("M", bound=BaseModel)


async def read_json(request: Request, model: type[M]) -> M:
    """Parse a request's body.

    Raises:
        HTTPException: the body is not JSON (415) or does not fit the model (422).
    """
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise HTTPException(415, "send application/json")
    try:
        return model.model_validate_json(await request.body())
    except ValidationError as error:
        raise _unprocessable(error) from None


def read_parameters(request: Request) -> SearchQuery:
    """Return the search in an image request's parameters.

    Raises:
        HTTPException: a parameter does not fit (422).
    """
    given = request.query_params
    values: dict[str, Any] = {**given, "where": given.getlist("where"), "kind": "image"}
    try:
        return SearchQuery.model_validate(values, strict=False)
    except ValidationError as error:
        raise _unprocessable(error) from None


def _unprocessable(error: ValidationError) -> HTTPException:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    place = ".".join(map(str, first["loc"]))
    said = first["msg"].removeprefix("Value error, ")
    return HTTPException(422, snippet(visible_line(f"{place}: {said}" if place else said), 300))
