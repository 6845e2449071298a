"""The Hub at its edge: names and revisions on it, what it says of a model, and its errors in one line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import HfApi, constants
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from xcompat.errors import XcompatError, what_failed
from xcompat.files import read_json

_NETWORK_ERROR: type[Exception] = HfHubHTTPError.__bases__[0]
"""The root of what huggingface_hub's HTTP library raises, which one that is changes between its versions."""
_HUB_NAME = re.compile(r"(?:[\w.-]+/)?[\w.-]+")
CONFIGS = ("config.json", "open_clip_config.json")
"""What tells that a folder or repository holds a model."""
PUSHED = "pushed.json"
"""Where a model's folder keeps its name and commit on the Hub, for the newer models that name the folder."""
_LOG_IN = "log in with `hf auth login`"


class HubModel(NamedTuple):
    """What the Hub says of a model.

    Args:
        commit: what its revision is now.
        restricted: whether it is gated or private.
        license: as its card states it; None where it does not.
    """

    commit: str
    restricted: bool
    license: str | None


class Repository(NamedTuple):
    """What a repository holds.

    Args:
        files: their names.
        config: of the model among them; None without one.
        fingerprint: of that model, as its card states it; None where it does not.
    """

    files: set[str]
    config: dict[str, Any] | None
    fingerprint: str | None


@contextmanager
def hub_errors(name: str) -> Iterator[None]:
    """Turn what huggingface_hub raises in the block into one line that says how to mend it.

    Args:
        name: the model that the block is about.

    Raises:
        XcompatError: in the place of huggingface_hub's own errors.
    """
    try:
        yield
    except HFValidationError as error:
        raise XcompatError(f"{name!r} is no name on the Hub; write it as user/name") from error
    except (_NETWORK_ERROR, LocalEntryNotFoundError, LocalTokenNotFoundError, OfflineModeIsEnabled) as error:
        raise XcompatError(_explain(name, error)) from error
    except RuntimeError as error:
        if isinstance(error.__cause__, _NETWORK_ERROR):  # so it wraps what goes wrong with a large file
            raise XcompatError(_explain(name, error.__cause__)) from error
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:  # huggingface_hub takes answers as they are
        if isinstance(error, XcompatError):
            raise
        raise XcompatError(
            f"what {constants.ENDPOINT} says of {name} cannot be understood ({what_failed(error)}); do it again later"
        ) from error


def _explain(name: str, error: BaseException) -> str:
    where = constants.ENDPOINT
    if isinstance(error, HfHubHTTPError):
        return _explain_status(name, error)
    if isinstance(error, LocalTokenNotFoundError):
        return f"{where} wants to know who you are; {_LOG_IN}"
    if isinstance(error, OfflineModeIsEnabled):
        return f"{name} cannot be reached: HF_HUB_OFFLINE is set; unset it"
    reason = " ".join(str(error).split())
    return f"{where} cannot be reached for {name} ({reason}); check the network and HF_ENDPOINT and do it again, which continues"


def _explain_status(name: str, error: HfHubHTTPError) -> str:
    where, status = constants.ENDPOINT, error.response.status_code
    if isinstance(error, GatedRepoError):
        return f"{name} is gated on {where}: ask for access on its page, and {_LOG_IN}"
    if isinstance(error, RevisionNotFoundError):
        return f"{name} on {where} has no such revision ({error.server_message}); name a branch, tag or commit that it has"
    if isinstance(error, RepositoryNotFoundError):
        return f"{name} is not on {where}, or not for you to see; check the name, or {_LOG_IN}"
    said = f"{status}: {error.server_message or 'no reason given'}"
    if status in (401, 403):
        return f"{where} refuses access to {name} ({said}); {_LOG_IN}, with a token that may do this"
    if status in (409, 412):
        return f"{name} was changed on {where} at the same time ({said}); do it again"
    return f"{where} failed on {name} ({said}); do it again, which continues"


def is_hub_name(name: str) -> bool:
    """Return whether a name can be one on the Hub: no folder here, and of the Hub's form.

    Args:
        name: of a model.

    Example:
        >>> is_hub_name("openai/clip-vit-base-patch32"), is_hub_name("/data/models/clip")
        (True, False)
    """
    return _HUB_NAME.fullmatch(plain_name(name)) is not None and not Path(name).exists()


def plain_name(name: str) -> str:
    """Return a model's name on the Hub without open_clip's prefix."""
    return name.removeprefix("hf-hub:")


def public_name(name: str) -> str:
    """Return what to call a model in public: a folder of this machine loses its path.

    Args:
        name: Hub name, folder, or what people call it.

    Example:
        >>> public_name("/home/me/runs/upgrade/xbt/model"), public_name("openai/clip-vit-base-patch32")
        ('xbt', 'openai/clip-vit-base-patch32')
    """
    folder = Path(name)
    if not folder.is_absolute() and not folder.is_dir() and not name.startswith(("~", ".")):
        return name
    return folder.parent.name if folder.name == "model" else folder.name


def published(described: dict[str, Any]) -> dict[str, Any]:
    """Name a model by its place on the Hub, where its folder has been pushed.

    Args:
        described: with ``name`` and ``fingerprint``, as a configuration describes another model.

    Returns:
        The same with the Hub's name and commit; unchanged where nothing was pushed.
    """
    record = Path(described["name"]) / PUSHED
    return described | read_json(record) if record.exists() else described


def is_dataset(name: str) -> bool:
    """Ask the Hub whether it has a data set of that name.

    Args:
        name: ``user/name``; anything else is none.

    Raises:
        XcompatError: the Hub cannot be reached.
    """
    if name.startswith(".") or "/" not in name or not is_hub_name(name):
        return False
    with hub_errors(name):
        try:
            HfApi().dataset_info(name)
        except RepositoryNotFoundError:
            return False
    return True


def read_config(file: str | Path) -> dict[str, Any]:
    """Read a model's configuration.

    Args:
        file: its JSON, which somebody else may have written.

    Raises:
        XcompatError: it is no JSON, or JSON of something else.
    """
    config = read_json(file)
    if not isinstance(config, dict):
        raise XcompatError(
            f"{file} holds a {type(config).__name__} in the place of a configuration; fetch or save the model again"
        )
    return config


def read_repository(api: HfApi, repo: str, revision: str | None) -> Repository:
    """Read what a repository says of itself.

    Args:
        api: the Hub.
        repo: ``user/name``.
        revision: branch, tag or commit; None for the default branch.

    Returns:
        What it holds; huggingface_hub's own errors are the caller's to explain.
    """
    info = api.model_info(repo, revision=revision)
    files = {sibling.rfilename for sibling in info.siblings or []}
    file = next((name for name in CONFIGS if name in files), None)
    if file is None:
        return Repository(files, None, None)
    card: dict[str, Any] = info.card_data.to_dict() if info.card_data else {}
    return Repository(files, read_config(api.hf_hub_download(repo, file, revision=info.sha)), card.get("fingerprint"))


def look_up(name: str, revision: str | None = None, token: str | bool | None = None) -> HubModel | None:
    """Ask the Hub about a model.

    Args:
        name: Hub name.
        revision: branch, tag or commit; None for the default branch.
        token: to be known by; None for the one of `hf auth login`.

    Returns:
        What it says; None when it has no such model, or none that may be seen.

    Raises:
        XcompatError: it has no such revision, or cannot be reached.
    """
    with hub_errors(name):
        try:
            info = HfApi(token=token).model_info(plain_name(name), revision=revision)
        except RepositoryNotFoundError:
            return None
    card: Any = info.card_data
    assert info.sha is not None
    return HubModel(info.sha, bool(info.gated or info.private), getattr(card, "license", None))
