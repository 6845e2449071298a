"""What lies in the cache of the Hub: files are called after a digest of what they hold, so that damaged ones can be told."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path

from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import RemoteEntryNotFoundError
from huggingface_hub.file_download import repo_folder_name

_SMALL, _LARGE = 40, 64
"""Digits in the name of a small file, SHA-1 as git or a mirror takes it, and in that of a large one, SHA-256."""


def drop_damaged(name: str) -> list[str]:
    """Delete the files of a model in the Hub's cache that are not what they are called after, so that they are fetched anew.

    Nothing else looks: a file that was cut short, or that the Hub changed while it was sent, stays for ever.

    Args:
        name: of the model; a folder here has no cache.

    Returns:
        Names of the files, sorted.
    """
    if Path(name).exists():
        return []
    folder = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name.removeprefix("hf-hub:"), repo_type="model")
    damaged = {}
    for link in sorted(folder.glob("snapshots/*/**/*")):
        blob = link.resolve()
        if link.is_symlink() and blob.is_file() and blob.parent == (folder / "blobs").resolve() and not _is_whole(blob):
            damaged[link.name] = blob
    for blob in set(damaged.values()):
        blob.unlink()
    return sorted(damaged)


def require_fetched(name: str, file: str, revision: str) -> None:
    """Fetch a file that a model may have; transformers does without one that the Hub fails to send, as if there were none.

    Args:
        name: of the model; a folder here has its files.
        file: in its repository.
        revision: branch, tag or commit.

    Raises:
        OSError: it cannot be fetched, nor be known to be missing.
    """
    if Path(name).exists() or constants.HF_HUB_OFFLINE or try_to_load_from_cache(name, file, revision=revision) is not None:
        return
    with suppress(RemoteEntryNotFoundError):
        hf_hub_download(name, file, revision=revision)


def _is_whole(blob: Path) -> bool:
    with blob.open("rb") as file:
        if len(blob.name) == _LARGE:
            return hashlib.file_digest(file, "sha256").hexdigest() == blob.name
        if len(blob.name) != _SMALL:
            return True  # of a server with names of its own
        held = file.read()
    as_git_does = b"blob %d\0" % len(held) + held
    return blob.name in (hashlib.sha1(each, usedforsecurity=False).hexdigest() for each in (as_git_does, held))
