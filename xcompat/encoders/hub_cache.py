"""Hub cache integrity. The cache names each file by its digest."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path

from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import RemoteEntryNotFoundError
from huggingface_hub.file_download import repo_folder_name

_SMALL, _LARGE = 40, 64
"""Name lengths of small files (SHA-1 of git or of a mirror) and large files (SHA-256)."""


def drop_damaged(name: str) -> list[str]:
    """Delete a Hub model's cached files if they do not match their digest, and return their sorted names.

    The Hub client does not check digests, so truncated files would stay.
    """
    name = name.removeprefix("hf-hub:").removeprefix("sentence-transformers:")
    if Path(name).exists():
        return []
    folder = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type="model")
    damaged = {}
    for link in sorted(folder.glob("snapshots/*/**/*")):
        blob = link.resolve()
        if link.is_symlink() and blob.is_file() and blob.parent == (folder / "blobs").resolve() and not _is_whole(blob):
            damaged[link.name] = blob
    for blob in set(damaged.values()):
        blob.unlink()
    return sorted(damaged)


def require_fetched(name: str, file: str, revision: str) -> None:
    """Download a Hub model's optional file. Transformers would treat a failed download like a missing file.

    Args:
        name: model name; local folders are skipped.
        file: path in the repository.
        revision: branch, tag or commit.

    Raises:
        OSError: the download failed.
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
            return True  # another naming scheme of the server
        held = file.read()
    as_git_does = b"blob %d\0" % len(held) + held
    return blob.name in (hashlib.sha1(each, usedforsecurity=False).hexdigest() for each in (as_git_does, held))
