"""Access to the Hub: names, revisions, model facts, and single-line errors."""

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

from xcompat.core.errors import XcompatError, describe_error
from xcompat.core.files import read_json

_NETWORK_ERROR: type[Exception] = HfHubHTTPError.__bases__[0]
"""Base error of huggingface_hub's HTTP library, which differs between versions."""
_HUB_NAME = re.compile(r"(?:[\w.-]+/)?[\w.-]+")
CONFIGS = ("config.json", "open_clip_config.json", "config_sentence_transformers.json")
"""Files that mark a folder or repository with a model."""
PUSHED = "pushed.json"
"""File in a model's folder with its name and commit on the Hub, for models that refer to the folder."""
_LOG_IN = "log in with `hf auth login`"


class HubModel(NamedTuple):
    """The Hub's facts about a model.

    Args:
        commit: current commit of the revision.
        restricted: whether the model is gated or private.
        license: the license on its card, or None.
    """

    commit: str
    restricted: bool
    license: str | None


class Repository(NamedTuple):
    """Content of a repository.

    Args:
        files: names of its files.
        config: configuration of its model. None without a model.
        fingerprint: the model's fingerprint on its card, or None.
        private: whether it is private.
    """

    files: set[str]
    config: dict[str, Any] | None
    fingerprint: str | None
    private: bool


@contextmanager
def hub_errors(name: str) -> Iterator[None]:
    """Convert huggingface_hub's errors about a model into a single-line :class:`XcompatError` with the fix."""
    try:
        yield
    except HFValidationError as error:
        raise XcompatError(f"{name!r} is not a valid name on the Hub; write it as user/name") from error
    except (_NETWORK_ERROR, LocalEntryNotFoundError, LocalTokenNotFoundError, OfflineModeIsEnabled) as error:
        raise XcompatError(_explain(name, error)) from error
    except RuntimeError as error:
        if isinstance(error.__cause__, _NETWORK_ERROR):  # huggingface_hub wraps errors of large files so
            raise XcompatError(_explain(name, error.__cause__)) from error
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:  # huggingface_hub does not validate answers
        if isinstance(error, XcompatError):
            raise
        raise XcompatError(
            f"cannot parse the answer of {constants.ENDPOINT} about {name} ({describe_error(error)}); try again later"
        ) from error


def _explain(name: str, error: BaseException) -> str:
    where = constants.ENDPOINT
    if isinstance(error, HfHubHTTPError):
        return _explain_status(name, error)
    if isinstance(error, LocalTokenNotFoundError):
        return f"{where} requires a login; {_LOG_IN}"
    if isinstance(error, OfflineModeIsEnabled):
        return f"{name} cannot be reached: HF_HUB_OFFLINE is set; unset it"
    reason = " ".join(str(error).split())
    return f"{where} cannot be reached for {name} ({reason}); check the network and HF_ENDPOINT, then run again to continue"


def _explain_status(name: str, error: HfHubHTTPError) -> str:
    where, status = constants.ENDPOINT, error.response.status_code
    if isinstance(error, GatedRepoError):
        return f"{name} is gated on {where}: request access on its page, and {_LOG_IN}"
    if isinstance(error, RevisionNotFoundError):
        return f"{name} on {where} has no such revision ({error.server_message}); use an existing branch, tag or commit"
    if isinstance(error, RepositoryNotFoundError):
        return f"{name} is not on {where}, or you have no access; check the name, or {_LOG_IN}"
    said = f"{status}: {error.server_message or 'no reason given'}"
    if status in (401, 403):
        return f"{where} refuses access to {name} ({said}); {_LOG_IN}, with a token that has this permission"
    if status in (409, 412):
        return f"{name} was changed on {where} at the same time ({said}); run the command again"
    return f"{where} failed on {name} ({said}); run the command again to continue"


def is_hub_name(name: str) -> bool:
    """Return whether a name has the form of a Hub name and is not a local path.

    Example:
        >>> is_hub_name("openai/clip-vit-base-patch32"), is_hub_name("/data/models/clip")
        (True, False)
    """
    return _HUB_NAME.fullmatch(plain_name(name)) is not None and not Path(plain_name(name)).exists()


def plain_name(name: str) -> str:
    """Return a model's Hub name or folder without its library's prefix."""
    return name.removeprefix("hf-hub:").removeprefix("sentence-transformers:")


def public_name(name: str) -> str:
    """Return a model's public name: only the last part of a local folder.

    Example:
        >>> public_name("/home/me/runs/upgrade/xbt/model"), public_name("openai/clip-vit-base-patch32")
        ('xbt', 'openai/clip-vit-base-patch32')
    """
    plain = plain_name(name)
    folder = Path(plain)
    if not folder.is_absolute() and not folder.is_dir() and not plain.startswith(("~", ".")):
        return name
    return folder.parent.name if folder.name == "model" else folder.name


def replace_by_hub_name(described: dict[str, Any]) -> dict[str, object]:
    """Replace the local folder of a pushed model by its name and commit on the Hub.

    Args:
        described: description of another model in a configuration: ``name``, ``fingerprint`` and others.
    """
    record = Path(plain_name(described["name"])) / PUSHED
    if not record.exists():
        return described
    pushed = read_json(record)
    known = pushed.pop("fingerprints")
    return described | pushed if described["fingerprint"] in known else described


def is_dataset(name: str) -> bool:
    """Return whether the Hub has a data set of this name, ``user/name``.

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


def read_config(file: str | Path) -> dict[str, object]:
    """Read a model's configuration from a JSON file.

    Raises:
        XcompatError: the file is not JSON or not an object.
    """
    config = read_json(file)
    if not isinstance(config, dict):
        raise XcompatError(
            f"{file} contains a {type(config).__name__} instead of a configuration; download or save the model again"
        )
    return config


def read_repository(api: HfApi, repo: str, revision: str | None) -> Repository:
    """Read a repository's content. The caller handles huggingface_hub's errors.

    Args:
        api: the Hub.
        repo: ``user/name``.
        revision: branch, tag or commit. None to use the default branch.
    """
    info = api.model_info(repo, revision=revision)
    files = {sibling.rfilename for sibling in info.siblings or []}
    file = next((name for name in CONFIGS if name in files), None)
    if file is None:
        return Repository(files, None, None, bool(info.private))
    card: dict[str, Any] = info.card_data.to_dict() if info.card_data else {}
    config = read_config(api.hf_hub_download(repo, file, revision=info.sha))
    return Repository(files, config, card.get("fingerprint"), bool(info.private))


def look_up(name: str, revision: str | None = None, token: str | bool | None = None) -> HubModel | None:
    """Return the Hub's facts about a model.

    Args:
        name: Hub name.
        revision: branch, tag or commit. None to use the default branch.
        token: access token. None to use the token from `hf auth login`.

    Returns:
        Its facts, or None if the model does not exist or is hidden from this user.

    Raises:
        XcompatError: there is no such revision, or the Hub cannot be reached.
    """
    with hub_errors(name):
        try:
            info = HfApi(token=token).model_info(plain_name(name), revision=revision)
        except RepositoryNotFoundError:
            return None
    card: Any = info.card_data
    assert info.sha is not None
    return HubModel(info.sha, bool(info.gated or info.private), getattr(card, "license", None))
