"""A folder to the Hub in one commit, refused where it would replace another model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

from xcompat.errors import XcompatError
from xcompat.files import read_json, write_json
from xcompat.hub.endpoint import hub_errors, look_up, public_name

CONFIG = "config.json"
_OWN_BY_ANYONE = {".gitattributes", "README.md", "LICENSE"}


def lineage_of(config: dict[str, Any]) -> dict[str, Any]:
    """Return what stays the same when a run is trained on, merged or pushed in another form.

    Args:
        config: of a compatible model, or of a plain encoder.

    Returns:
        Method, dimension, and the fingerprints of the encoder it began with and of the old model.
    """
    described = {key: (config.get(key) or {}).get("fingerprint") for key in ("encoder", "old")}
    return {"method": config.get("model_type"), "dimension": config.get("embedding_dim"), **described}


def require_own(repo: str, config: dict[str, Any], revision: str | None = None) -> None:
    """Refuse to replace another model; the same one may be pushed again.

    Args:
        repo: where it is to go.
        config: of the model to push.
        revision: the branch; None for the default one.

    Raises:
        XcompatError: the place holds a model of another lineage, naming what differs.
    """
    found = _files(repo, revision)
    if found is None:
        return
    files, commit = found
    mend = "choose another name, or replace it with --overwrite (overwrite=True)"
    if CONFIG not in files:
        if strange := sorted(files - _OWN_BY_ANYONE):
            raise XcompatError(f"{repo} holds something else, such as {strange[0]}; {mend}")
        return
    with hub_errors(repo):
        there = lineage_of(read_json(HfApi().hf_hub_download(repo, CONFIG, revision=commit)))
    own = lineage_of(config)
    different = [f"{key} is {_short(there[key])}, not {_short(own[key])}" for key in own if there[key] != own[key]]
    if different:
        raise XcompatError(f"{repo} holds another model: its {different[0]}; {mend}")


def _files(repo: str, revision: str | None) -> tuple[set[str], str] | None:
    """Return the files of a repository and their commit: those of the default branch where the branch is new."""
    with hub_errors(repo):
        try:
            info = HfApi().model_info(repo, revision=revision)
        except RevisionNotFoundError:
            info = HfApi().model_info(repo)
        except RepositoryNotFoundError:
            return None
    assert info.sha is not None
    return {sibling.rfilename for sibling in info.siblings or []}, info.sha


def _short(value: object) -> str:
    text = str(value)
    return text[:12] if len(text) == 64 else text


def visibility(base: str | None, revision: str | None, private: bool | None) -> bool | None:
    """Return whether a new repository is private: as asked, else as its base is; None leaves it to the Hub.

    Args:
        base: Hub name of the model it was made from; None where it has no name there.
        revision: of the base.
        private: what the user asked for; None for nothing.
    """
    if private is not None or base is None:
        return private
    found = look_up(base, revision)
    return True if found is not None and found.restricted else None


def hide_paths(folder: str | Path) -> None:
    """Rewrite ``config.json`` so that no model is called by a folder of this machine, which nobody else has.

    Args:
        folder: of a checkpoint.
    """
    file = Path(folder) / CONFIG
    if file.exists():
        write_json(file, _hidden(read_json(file)))


def _hidden(value: Any, key: str = "") -> Any:  # noqa: ANN401 - nested JSON
    if isinstance(value, dict):
        return {name: _hidden(inner, name) for name, inner in value.items()}
    if isinstance(value, list):
        return [_hidden(inner, key) for inner in value]
    return public_name(value) if key in ("name", "_name_or_path") and isinstance(value, str) and value else value


def upload(folder: str | Path, repo: str, private: bool | None, revision: str | None, replace: bool) -> str:
    """Push every file of a folder in one commit; what a broken push has sent already is not sent again.

    Args:
        folder: a checkpoint with its card.
        repo: ``user/name``; made if missing.
        private: whether a new repository is private; None for the Hub's default.
        revision: the branch, made if missing; None for the default one.
        replace: whether files of the repository that are not in the folder go; without it only weights do.

    Returns:
        The address of the commit.

    Raises:
        XcompatError: the Hub refuses or cannot be reached.
    """
    folder, api = Path(folder), HfApi(library_name="xcompat")
    with hub_errors(repo):
        repo = api.create_repo(repo, private=private, exist_ok=True).repo_id
        if revision is not None:
            api.create_branch(repo, branch=revision, exist_ok=True)
        given = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
        found = _files(repo, revision)
        stale = sorted((found[0] if found else set()) - given.keys() - {".gitattributes"})
        if not replace:  # a picture or a licence beside the model is the user's own, old weights would be read
            stale = [name for name in stale if name.endswith((".safetensors", ".safetensors.index.json"))]
        added = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=path) for name, path in given.items()]
        deleted = [CommitOperationDelete(path_in_repo=name) for name in stale]
        return api.create_commit(repo, [*added, *deleted], commit_message="Upload model", revision=revision).commit_url
