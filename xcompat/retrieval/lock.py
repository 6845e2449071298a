"""Writer lock for a gallery, also on storage without ``flock``."""

from __future__ import annotations

import errno
from pathlib import Path

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout

from xcompat.core.errors import XcompatError

LOCK, OWNER = ".lock", ".lock.owner"
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP)
"""Errors of storage without ``flock``, e.g. some NFS."""


def lock_writer(folder: Path) -> BaseFileLock:
    """Take the writer lock, which ends with the process at the latest.

    Without ``flock``, a file names the owner. If the owner has died, the next writer on the same machine takes it over, if the
    storage can swap two names. Otherwise delete the file named in the error.

    Returns:
        The lock; the caller releases it.

    Raises:
        XcompatError: another process holds it.
    """
    # all threads share it: one may add and another commit; filelock's fallback would mistake the existing file for an owner's
    lock = FileLock(folder / LOCK, thread_local=False, fallback_to_soft=False)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise XcompatError(f"another process is writing to {folder}; wait until it is done, and try again") from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return _lock_with_owner_file(folder)
    return lock


def _lock_with_owner_file(folder: Path) -> BaseFileLock:
    lock = SoftFileLock(folder / OWNER, thread_local=False)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise XcompatError(
            f"another process is writing to {folder}{_owner(folder / OWNER)}, on storage without locks; "
            f"wait until it is done, or delete {folder / OWNER} if it is no longer running"
        ) from None
    return lock


def _owner(path: Path) -> str:
    try:
        process, host = path.read_text(encoding="utf-8").split()[:2]
    except (OSError, ValueError):
        return ""
    return f" (process {process} on {host})"
