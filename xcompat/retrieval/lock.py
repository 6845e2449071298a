"""The writer's lock of a gallery: one process at a time changes it, also on storage that has no locks."""

from __future__ import annotations

import errno
from pathlib import Path

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout

from xcompat.errors import XcompatError

LOCK, OWNER = ".lock", ".lock.owner"
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP)
"""What storage without ``flock`` answers, such as some NFS."""


def lock_writer(folder: Path) -> BaseFileLock:
    """Take the writer's lock, which ends with its process at the latest.

    Storage without ``flock`` gets a file that names the owner instead. When its process is dead, the next writer on the same
    machine takes it over where the storage can swap two names; elsewhere a person deletes the file, which the message names.

    Args:
        folder: the gallery.

    Returns:
        The lock; release it.

    Raises:
        XcompatError: another process has it.
    """
    lock = FileLock(folder / LOCK, fallback_to_soft=False)  # its own fallback takes the file that is always there for an owner's
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise XcompatError(f"another process is writing to {folder}; wait until it is done, and try again") from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return _owned(folder)
    return lock


def _owned(folder: Path) -> BaseFileLock:
    lock = SoftFileLock(folder / OWNER)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise XcompatError(
            f"another process is writing to {folder}{_owner(folder / OWNER)}, whose storage has no locks: "
            f"wait until it is done, or delete {folder / OWNER} if it runs no more"
        ) from None
    return lock


def _owner(path: Path) -> str:
    """Say who holds a lock, as far as its file does."""
    try:
        process, host = path.read_text(encoding="utf-8").split()[:2]
    except (OSError, ValueError):
        return ""
    return f" (process {process} on {host})"
