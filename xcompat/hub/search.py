"""Search for checkpoints on the Hub by fingerprints of the models they connect."""

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
"""Maximum cards to read."""


class _Version(BaseModel):
    name: str
    fingerprint: str


class _Card(BaseModel):
    """Fields that are read of an untrusted card."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    method: str
    embeds: list[str] = []
    compatible_with: list[_Version]
    base_model: str | list[str] | None = None
    eval_results: list[EvalResult] | None = None


@dataclass(frozen=True)
class HubCheckpoint:
    """Checkpoint on the Hub, according to its untrusted card.

    Args:
        name: ``user/name``.
        revision: commit of the card.
        method: its method. Empty if not stated.
        new: Hub name of the model whose queries it maps. Empty if not on the Hub.
        searches: names of the models whose galleries it searches.
        gains: gains of its queries over old queries. Empty without readable results.
        downloads: in the last month. None if not given.
        likes: None if not given.
        modified: the day of the last change, ``YYYY-MM-DD``. Empty if not given.
        is_other: whether its card names other models than its tags.
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
        """Whether the 95 % interval of every gain is at or above 0, or None without results."""
        return all(gain.ci95[0] >= 0 for gain in self.gains) if self.gains else None

    @property
    def least(self) -> Gain | None:
        """The smallest gain."""
        return min(self.gains, key=lambda gain: gain.mean, default=None)


class SearchResult(NamedTuple):
    """Result of a search on the Hub.

    Args:
        found: the checkpoints, most downloaded first.
        is_cut: whether the Hub has more than the first :data:`MOST`.
    """

    found: list[HubCheckpoint]
    is_cut: bool


def search(wanted: Mapping[str, str], token: str | bool | None = None) -> SearchResult:
    """List the checkpoints for given models.

    Args:
        wanted: ``searches`` -> digest of the old model, ``embeds`` -> digest of the new model. Either may be missing, and the
            start of a digest is enough.
        token: access token. None to use the token from `hf auth login`.

    Returns:
        At most :data:`MOST` checkpoints.

    Raises:
        XcompatError: the start of a digest is ambiguous, or the Hub cannot be reached.
    """
    api = HfApi(token=token)
    tags = ["xcompat", *(tag(role, digest) for role, digest in wanted.items() if len(digest) >= TAGGED)]
    with hub_errors("the list of models"):
        listed = [info for info in api.list_models(filter=tags, sort="downloads") if _has_tags(info, wanted)]
    for role, digest in wanted.items():
        meant = {each for info in listed for each in _tags(info) if each.startswith(tag(role, digest))}
        if len(meant) > 1:
            some = ", ".join(each.removeprefix(f"{role}:")[:16] for each in sorted(meant)[:3])
            raise XcompatError(f"{len(meant)} models have fingerprints beginning with {digest}, e.g. {some}; give more digits")
    return SearchResult([_look_at(api, info, wanted) for info in listed[:MOST]], len(listed) > MOST)


def _tags(info: ModelInfo) -> list[str]:
    tags: list[Any] = info.tags or []
    return [each for each in tags if isinstance(each, str)]


def _has_tags(info: ModelInfo, wanted: Mapping[str, str]) -> bool:
    return all(any(each.startswith(tag(role, digest)) for each in _tags(info)) for role, digest in wanted.items())


def _look_at(api: HfApi, listed: ModelInfo, wanted: Mapping[str, str]) -> HubCheckpoint:
    """Read a checkpoint's card, or return only the listed facts if the card is unreadable."""
    with hub_errors(str(listed.id)):
        try:
            with _silent():
                info = api.model_info(listed.id)
            card = _Card.model_validate(vars(info.card_data) if info.card_data is not None else {})
        except (
            RepositoryNotFoundError,  # deleted since, or hidden from this user
            *(ValidationError, TypeError, ValueError, KeyError, AttributeError),  # huggingface_hub does not validate cards
        ):
            return HubCheckpoint(str(listed.id), "", **_figures(listed))
    stated = {SEARCHES: [each.fingerprint for each in card.compatible_with], EMBEDS: card.embeds}
    is_other = not all(any(each.startswith(digest) for each in stated[role]) for role, digest in wanted.items())
    return HubCheckpoint(
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
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)
