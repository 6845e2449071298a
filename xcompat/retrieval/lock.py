"""The writer's lock of a gallery: one process changes it at a time, even on storage that has no locks."""

from __future__ import annotations

import errno
from pathlib import Path

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout

from xcompat.core.errors import XcompatError

LOCK, OWNER = ".lock", ".lock.owner"
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP)
"""Errors of storage without ``flock``, such as some NFS."""


def lock_writer(folder: Path) -> BaseFileLock:
    """Take the writer's lock; it is released when the process ends at the latest.

    On storage without ``flock`` the lock is a file that names its owner. If the owner has died, the next writer on the same
    machine takes the file over, provided that the storage can swap two names; otherwise a person deletes it: the error names it.

    Returns:
        The lock; the caller releases it.

    Raises:
        XcompatError: another process holds it.
    """
    # of all threads, as one may add and another commit; and filelock's fallback would take the existing file for an owner's
    lock = FileLock(folder / LOCK, thread_local=False, fallback_to_soft=False)
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
    lock = SoftFileLock(folder / OWNER, thread_local=False)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise XcompatError(
            f"another process is writing to {folder}{_owner(folder / OWNER)}, whose storage has no locks: "
            f"wait until it is done, or delete {folder / OWNER} if it runs no more"
        ) from None
    return lock


def _owner(path: Path) -> str:
    """Describe the holder of a lock from its file; empty if the file does not name one."""
    try:
        process, host = path.read_text(encoding="utf-8").split()[:2]
    except (OSError, ValueError):
        return ""
    return f" (process {process} on {host})"
