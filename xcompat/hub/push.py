"""Push of a model with its card to the Hub in a single commit."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import RevisionNotFoundError

from xcompat.core.errors import XcompatError
from xcompat.core.files import files_below, read_json, write_json
from xcompat.encoders.model_files import LORA, record_model
from xcompat.hub.card import ModelFacts, RunFacts, model_card
from xcompat.hub.endpoint import PUSHED, Repository, hub_errors, public_name, read_repository, replace_by_hub_name

CONFIG = "config.json"
_WEIGHTS = re.compile(rf"({LORA}/)?[^/]+\.safetensors(\.index\.json)?")
"""Paths of the model's weights."""
_BESIDE_A_MODEL = {".gitattributes", "README.md", "LICENSE"}


class PushedModel(NamedTuple):
    """Model to push.

    Args:
        facts: facts for the card.
        config: configuration of a compatible model or plain encoder.
        write: writes all files of the model but the card into a folder.
    """

    facts: ModelFacts
    config: dict[str, Any]
    write: Callable[[Path], object]


def push(
    model: PushedModel,
    repo: str,
    run: RunFacts | None = None,
    *,
    private: bool | None = None,
    overwrite: bool = False,
    revision: str | None = None,
    license: str | None = None,  # noqa: A002 - the Hub's word
    tags: Sequence[str] = (),
    token: str | bool | None = None,
    **commit: object,
) -> CommitInfo:
    """Push a model with its preprocessing and card. Local paths are removed, and other models are not replaced.

    Args:
        model: the model.
        repo: ``user/name``, or a name in the user's own account.
        run: facts about the run for the card.
        private: whether the repository is private. None for private only if the base is gated or private.
        overwrite: whether to replace another model in the repository, and delete its other files.
        revision: the branch, created if missing. None to use the default branch.
        license: the license for the card.
        tags: further tags for the card.
        token: access token. None to use the token from `hf auth login`.
        commit: ``commit_message``, ``commit_description`` and ``create_pr`` of huggingface_hub.

    Returns:
        The commit. As text, its URL.

    Raises:
        XcompatError: the repository contains another model or has another visibility, or the Hub refuses or cannot be reached.
    """
    facts, config, write = model
    base = facts.look_up_base(token)
    private = True if private is None and base is not None and base.restricted else private
    lineage = _lineage_of(config, facts.fingerprint.digest if facts.fingerprint is not None else None)
    repo = _open_repository(repo, lineage, private, revision, overwrite, token)
    with TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        write(folder)
        _hide_paths(folder)
        model_card(repo, facts, base, run, license, tags).save(folder / "README.md")
        return _upload(folder, repo, revision, overwrite, token, **commit)


def record_push(folder: str | Path, commit: CommitInfo, fingerprints: Sequence[str]) -> None:
    """Record a push in the model's folder, so that newer models refer to the repository.

    Args:
        folder: the model's folder.
        commit: commit of the push.
        fingerprints: digests of the pushed model, as the folder may later contain another model.
    """
    record = {"name": commit.repo_url.repo_id, "revision": commit.oid, "fingerprints": sorted(set(fingerprints))}
    write_json(Path(folder) / PUSHED, record)


def _lineage_of(config: dict[str, Any], fingerprint: str | None) -> dict[str, object]:
    """Return the properties that do not change when a model is trained further, merged or converted.

    These are method, dimension, and the fingerprints of base and old model. For a plain encoder, its own fingerprint.
    """
    method = str(config.get("model_type", "open_clip"))
    if not method.startswith("xcompat"):
        return {"architecture": method, "fingerprint": fingerprint}
    described = {key: (config.get(key) or {}).get("fingerprint") for key in ("encoder", "old")}
    return {"method": method, "dimension": config.get("embedding_dim"), **described}


def _open_repository(
    repo: str, lineage: dict[str, object], private: bool | None, revision: str | None, overwrite: bool, token: str | bool | None
) -> str:
    """Create a missing repository, or raise if it contains another model."""
    with hub_errors(repo):
        api = HfApi(library_name="xcompat", token=token)
        repo = api.create_repo(repo, private=private, exist_ok=True).repo_id
        content = _content(api, repo, revision)
    if private is not None and private != content.private:
        now, asked = ("public", "private") if private else ("private", "public")
        why = "--private, or a base that is gated or private," if private else "--public"
        raise XcompatError(
            f"{repo} is {now}, but {why} requires {asked}; make the repository {asked} on the Hub, or push with --{now} "
            f"(private={not private})"
        )
    if overwrite:
        return repo
    fix = "choose another name, or replace it with --overwrite (overwrite=True)"
    if content.config is None:
        if strange := sorted(content.files - _BESIDE_A_MODEL):
            raise XcompatError(f"{repo} contains other files, e.g. {strange[0]}; {fix}")
        return repo
    held = _lineage_of(content.config, content.fingerprint)
    for key in {**held, **lineage}:
        there, own = held.get(key), lineage.get(key)
        if there != own:
            raise XcompatError(f"{repo} contains another model: its {key} is {_short(there)}, not {_short(own)}; {fix}")
    return repo


def _content(api: HfApi, repo: str, revision: str | None) -> Repository:
    """Return a branch's content, or the default branch's for a new branch."""
    try:
        return read_repository(api, repo, revision)
    except RevisionNotFoundError:
        return read_repository(api, repo, None)


def _short(value: object) -> str:
    text = str(value)
    return text[:12] if len(text) == 64 else text


def _hide_paths(folder: Path) -> None:
    """Remove local paths from ``config.json`` and PEFT's configuration."""
    file, lora = folder / CONFIG, folder / LORA / "adapter_config.json"
    if file.exists():
        config = _hide_local_names(read_json(file))
        write_json(file, config)
        if lora.exists():
            base = {"base_model_name_or_path": config["encoder"]["name"], "revision": config["encoder"].get("revision")}
            write_json(lora, read_json(lora) | base)
        record_model(folder)


def _hide_local_names(value: Any, key: str = "") -> Any:  # noqa: ANN401 - nested JSON
    if isinstance(value, dict):
        value = replace_by_hub_name(value) if {"name", "fingerprint"} <= value.keys() else value
        return {name: _hide_local_names(inner, name) for name, inner in value.items()}
    if isinstance(value, list):
        return [_hide_local_names(inner, key) for inner in value]
    return public_name(value) if key in ("name", "_name_or_path") and isinstance(value, str) and value else value


def _upload(
    folder: Path,
    repo: str,
    revision: str | None,
    replace: bool,
    token: str | bool | None,
    **commit: Any,  # noqa: ANN401 - huggingface_hub's own
) -> CommitInfo:
    """Push a folder in a single commit. Files sent by an interrupted push are not sent again.

    With ``replace``, other files are deleted. Otherwise only old weights are.
    """
    api = HfApi(library_name="xcompat", token=token)
    commit["commit_message"] = commit.get("commit_message") or "Upload model"
    with hub_errors(repo):
        if revision is not None and not revision.startswith("refs/pr"):
            api.create_branch(repo, branch=revision, exist_ok=True)
        given = {path.relative_to(folder).as_posix(): path for path in files_below(folder) if path.is_file()}
        stale = sorted(_content(api, repo, revision).files - given.keys() - {".gitattributes"})
        if not replace:  # old weights would be loaded, but other files belong to the user
            stale = [name for name in stale if _WEIGHTS.fullmatch(name)]
        added = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=path) for name, path in given.items()]
        deleted = [CommitOperationDelete(path_in_repo=name) for name in stale]
        try:
            return api.create_commit(repo, [*added, *deleted], revision=revision, **commit)
        except ValueError as error:  # huggingface_hub's error for a full quota or a refused card
            raise XcompatError(f"{api.endpoint} refuses the commit to {repo}: {' '.join(str(error).split())}") from error
