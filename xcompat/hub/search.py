"""Find checkpoints on the Hub by the fingerprints of the models that they were made for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from huggingface_hub import EvalResult, HfApi, ModelInfo
from huggingface_hub.errors import RepositoryNotFoundError
from huggingface_hub.utils import logging
from pydantic import BaseModel, ConfigDict, ValidationError

from xcompat.core.errors import XcompatError
from xcompat.hub.endpoint import hub_errors
from xcompat.hub.metadata import EMBEDS, SEARCHES, TAGGED, Gain, gains_in, tag

MOST = 100
"""Most cards that are read."""


class _Version(BaseModel):
    name: str
    fingerprint: str


class _Card(BaseModel):
    """What is read of a stranger's card."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    method: str
    embeds: list[str] = []
    compatible_with: list[_Version]
    base_model: str | list[str] | None = None
    eval_results: list[EvalResult] | None = None


@dataclass(frozen=True)
class Found:
    """A checkpoint on the Hub, as its card describes it; all of it was written by a stranger.

    Args:
        name: ``user/name``.
        revision: the commit that was looked at.
        method: its method; empty if the card does not say.
        new: the model whose queries it maps, by its name on the Hub; empty if it is not there.
        searches: names of the models whose galleries it searches.
        gains: what its queries find more than old ones; empty if the card has no readable results.
        downloads: in the last month; None if not given.
        likes: None if not given.
        modified: the day of the last change, ``YYYY-MM-DD``; empty if not given.
        is_other: whether its card says that it was made for other models than its tags promise.
    """

    name: str
    revision: str
    method: str = ""
    new: str = ""
    searches: list[str] = field(default_factory=list)
    gains: list[Gain] = field(default_factory=list)
    downloads: int | None = None
    likes: int | None = None
    modified: str = ""
    is_other: bool = False

    @property
    def finds_more(self) -> bool | None:
        """Whether its queries are surely at or above old ones by every metric of its card; None if the card has no results."""
        return all(gain.ci95[0] >= 0 for gain in self.gains) if self.gains else None

    @property
    def least(self) -> Gain | None:
        """The smallest gain."""
        return min(self.gains, key=lambda gain: gain.mean, default=None)


class Listed(NamedTuple):
    """What was found on the Hub.

    Args:
        found: the checkpoints, the most downloaded first.
        is_cut: whether the Hub lists more than :data:`MOST`, of which these are the first.
    """

    found: list[Found]
    is_cut: bool


def search(wanted: Mapping[str, str], token: str | bool | None = None) -> Listed:
    """List the checkpoints that were made for some models.

    Args:
        wanted: ``searches`` -> digest of the old model, ``embeds`` -> digest of the new one; either may be left out, and the
            beginning of a digest is enough.
        token: access token; None for the one of `hf auth login`.

    Returns:
        The checkpoints, :data:`MOST` of them at most.

    Raises:
        XcompatError: a beginning fits several models, or the Hub cannot be reached.
    """
    api = HfApi(token=token)
    tags = ["xcompat", *(tag(role, digest) for role, digest in wanted.items() if len(digest) >= TAGGED)]
    with hub_errors("the list of models"):
        listed = [info for info in api.list_models(filter=tags, sort="downloads") if _has_tags(info, wanted)]
    for role, digest in wanted.items():
        meant = {each for info in listed for each in _tags(info) if each.startswith(tag(role, digest))}
        if len(meant) > 1:
            some = ", ".join(each.removeprefix(f"{role}:")[:16] for each in sorted(meant)[:3])
            raise XcompatError(
                f"{len(meant)} models have a fingerprint that begins with {digest}, such as {some}; give more digits"
            )
    return Listed([_look_at(api, info, wanted) for info in listed[:MOST]], len(listed) > MOST)


def _tags(info: ModelInfo) -> list[str]:
    tags: list[Any] = info.tags or []
    return [each for each in tags if isinstance(each, str)]


def _has_tags(info: ModelInfo, wanted: Mapping[str, str]) -> bool:
    return all(any(each.startswith(tag(role, digest)) for each in _tags(info)) for role, digest in wanted.items())


def _look_at(api: HfApi, listed: ModelInfo, wanted: Mapping[str, str]) -> Found:
    """Read a checkpoint's card; without one that can be read, return what the list says."""
    with hub_errors(str(listed.id)):
        try:
            with _silent():
                info = api.model_info(listed.id)
            card = _Card.model_validate(vars(info.card_data) if info.card_data is not None else {})
        except (
            RepositoryNotFoundError,  # gone since it was listed, or not for this user to see
            *(ValidationError, TypeError, ValueError, KeyError, AttributeError),  # huggingface_hub does not validate cards
        ):
            return Found(str(listed.id), "", **_figures(listed))
    stated = {SEARCHES: [each.fingerprint for each in card.compatible_with], EMBEDS: card.embeds}
    is_other = not all(any(each.startswith(digest) for each in stated[role]) for role, digest in wanted.items())
    return Found(
        str(info.id),
        str(info.sha or ""),
        card.method,
        ", ".join([base] if isinstance(base := card.base_model or [], str) else base),
        [each.name for each in card.compatible_with],
        _gains(card),
        is_other=is_other,
        **_figures(info),
    )


def _gains(card: _Card) -> list[Gain]:
    try:
        return gains_in(card.eval_results or [])
    except ValueError:  # pydantic's too
        return []


def _figures(info: ModelInfo) -> dict[str, Any]:
    counts = {name: value for name in ("downloads", "likes") if isinstance(value := getattr(info, name), int)}
    return counts | {"modified": f"{info.last_modified:%Y-%m-%d}" if info.last_modified is not None else ""}


@contextmanager
def _silent() -> Iterator[None]:
    """Keep huggingface_hub from printing what it makes of a stranger's card."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)
