"""A folder to the Hub in one commit, refused where it would replace another model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import RevisionNotFoundError

from xcompat.encoders.model_files import record_model
from xcompat.errors import XcompatError
from xcompat.files import files_below, read_json, write_json
from xcompat.hub.endpoint import PUSHED, HubModel, Repository, hub_errors, public_name, published, read_repository

CONFIG = "config.json"
_BESIDE_A_MODEL = {".gitattributes", "README.md", "LICENSE"}


def lineage_of(config: dict[str, Any], fingerprint: str | None) -> dict[str, Any]:
    """Return what stays the same when a run is trained on, merged or pushed in another form.

    Args:
        config: of a compatible model, or of a plain encoder.
        fingerprint: of the model; a plain encoder, whose configuration says little, is known by it.

    Returns:
        Method, dimension, and the fingerprints of the encoder it began with and of the old model.
    """
    method = str(config.get("model_type", "open_clip"))
    if not method.startswith("xcompat"):
        return {"architecture": method, "fingerprint": fingerprint}
    described = {key: (config.get(key) or {}).get("fingerprint") for key in ("encoder", "old")}
    return {"method": method, "dimension": config.get("embedding_dim"), **described}


def open_repository(
    repo: str,
    lineage: dict[str, Any],
    private: bool | None,
    revision: str | None,
    overwrite: bool,
    token: str | bool | None = None,
) -> str:
    """Make a repository if it is missing, and refuse one that holds another model.

    Args:
        repo: ``user/name``, or a name of one's own.
        lineage: of the model to push.
        private: whether a new repository is private; None for the Hub's default.
        revision: the branch; None for the default one.
        overwrite: whether another model may be replaced.
        token: to be known by; None for the one of `hf auth login`.

    Returns:
        Its name with the user's.

    Raises:
        XcompatError: it holds another model, naming what differs; or the Hub refuses or cannot be reached.
    """
    with hub_errors(repo):
        api = HfApi(library_name="xcompat", token=token)
        repo = api.create_repo(repo, private=private, exist_ok=True).repo_id
        content = _content(api, repo, revision)
    if overwrite:
        return repo
    mend = "choose another name, or replace it with --overwrite (overwrite=True)"
    if content.config is None:
        if strange := sorted(content.files - _BESIDE_A_MODEL):
            raise XcompatError(f"{repo} holds something else, such as {strange[0]}; {mend}")
        return repo
    held = lineage_of(content.config, content.fingerprint)
    for key in {**held, **lineage}:
        there, own = held.get(key), lineage.get(key)
        if there != own:
            raise XcompatError(f"{repo} holds another model: its {key} is {_short(there)}, not {_short(own)}; {mend}")
    return repo


def _content(api: HfApi, repo: str, revision: str | None) -> Repository:
    """Return what a branch holds, or the default branch where it is new."""
    try:
        return read_repository(api, repo, revision)
    except RevisionNotFoundError:
        return read_repository(api, repo, None)


def _short(value: object) -> str:
    text = str(value)
    return text[:12] if len(text) == 64 else text


def visibility(base: HubModel | None, private: bool | None) -> bool | None:
    """Return whether a new repository is private: as asked, else as its base is; None leaves it to the Hub.

    Args:
        base: what the Hub says of the model it was made from; None where it knows none.
        private: what the user asked for; None for nothing.
    """
    return True if private is None and base is not None and base.restricted else private


def hide_paths(folder: str | Path) -> None:
    """Rewrite ``config.json`` so that no model is called by a folder of this machine, but by its name on the Hub if it has one.

    Args:
        folder: of a checkpoint.
    """
    file = Path(folder) / CONFIG
    if file.exists():
        write_json(file, _hidden(read_json(file)))
        record_model(folder)


def _hidden(value: Any, key: str = "") -> Any:  # noqa: ANN401 - nested JSON
    if isinstance(value, dict):
        value = published(value) if {"name", "fingerprint"} <= value.keys() else value
        return {name: _hidden(inner, name) for name, inner in value.items()}
    if isinstance(value, list):
        return [_hidden(inner, key) for inner in value]
    return public_name(value) if key in ("name", "_name_or_path") and isinstance(value, str) and value else value


def record_push(folder: str | Path, repo: str, commit: CommitInfo) -> None:
    """Note beside a model where it was pushed to, so that newer models name that place in the place of the folder.

    Args:
        folder: of the model.
        repo: where it went.
        commit: what :func:`upload` returned.
    """
    write_json(Path(folder) / PUSHED, {"name": repo, "revision": commit.oid})


def upload(folder: str | Path, repo: str, revision: str | None = None, replace: bool = False, **commit: Any) -> CommitInfo:  # noqa: ANN401
    """Push every file of a folder in one commit; what a broken push has sent already is not sent again.

    Args:
        folder: a checkpoint with its card.
        repo: ``user/name``.
        revision: the branch, made if missing; None for the default one.
        replace: whether files of the repository that are not in the folder go; without it only weights do.
        commit: ``commit_message``, ``commit_description``, ``create_pr`` and ``token``, as huggingface_hub takes them.

    Returns:
        The commit: its address, as text.

    Raises:
        XcompatError: the Hub refuses or cannot be reached.
    """
    folder, api = Path(folder), HfApi(library_name="xcompat", token=commit.pop("token", None))
    commit["commit_message"] = commit.get("commit_message") or "Upload model"
    with hub_errors(repo):
        if revision is not None and not revision.startswith("refs/pr"):
            api.create_branch(repo, branch=revision, exist_ok=True)
        given = {path.relative_to(folder).as_posix(): path for path in files_below(folder) if path.is_file()}
        stale = sorted(_content(api, repo, revision).files - given.keys() - {".gitattributes"})
        if not replace:  # a picture or a licence beside the model is the user's own, old weights would be read
            stale = [name for name in stale if name.endswith((".safetensors", ".safetensors.index.json"))]
        added = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=path) for name, path in given.items()]
        deleted = [CommitOperationDelete(path_in_repo=name) for name in stale]
        try:
            return api.create_commit(repo, [*added, *deleted], revision=revision, **commit)
        except ValueError as error:  # so it says that there is no room, or that the card is refused
            raise XcompatError(f"{api.endpoint} refuses what {repo} was to hold: {' '.join(str(error).split())}") from error
