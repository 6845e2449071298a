"""Durable, atomic writes: at every instant a name leads to the old content or to the new one, whole, also after a power cut."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import fnmatch
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xcompat.errors import XcompatError

if TYPE_CHECKING:
    from numpy.typing import NDArray

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of Linux
_NOT_OFFERED = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)
"""What a file system answers that cannot exchange two names, or flush a folder."""
_NAME_KEPT = 50  # characters of a name in that of its temporary folder: 255 bytes are allowed
_LEFTOVER = re.compile(r"\..*\.[a-z0-9_]{8}\.partial", re.DOTALL)
_PREVIOUS = ".previous"


@contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path`` that takes its place, for good, when the block succeeds.

    Data are flushed before they get their name, and the name before this returns. What a killed process left of an earlier
    attempt at the same path is removed.

    Args:
        path: the file (or folder) to be written. Its parent is made if missing.

    Yields:
        A path that does not exist yet, on the same file system; write a file or a folder there.

    Raises:
        OSError: something cannot be written; what was there is there still.

    Example:
        >>> import tempfile
        >>> target = Path(tempfile.mkdtemp()) / "a.txt"
        >>> with atomic_path(target) as temporary:
        ...     _ = temporary.write_text("whole")
        >>> target.read_text()
        'whole'
    """
    path = Path(path)
    make_folder(path.parent)
    _clear(path.parent, _prefix(path))
    with _holder(path) as holder:
        temporary = holder / path.name
        yield temporary
        drop_unfinished(temporary)
        _follow_umask(temporary, _mode_of_new_files(holder))
        sync_tree(temporary)
        _put_in_place(temporary, path)
        sync_folder(path.parent)


def drop_unfinished(folder: Path) -> None:
    """Remove the temporary folders of writers that could not do so, from what one writer made and nobody sees yet.

    Raises:
        OSError: one cannot be removed now either: it would be published.
    """
    for parent, names, _ in os.walk(folder, onerror=_raise) if folder.is_dir() else ():
        for name in filter(_LEFTOVER.fullmatch, list(names)):
            shutil.rmtree(Path(parent, name))
            names.remove(name)


def _raise(error: OSError) -> None:
    raise error


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, so that a power cut leaves them there."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for made in missing:
        sync_folder(made.parent)


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder: without it a power cut can take back a rename that was done."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NOT_OFFERED:
            raise
    finally:
        os.close(descriptor)


def clear_leftovers(folder: Path) -> None:
    """Remove what writers that were killed left in a folder, and put back what one of them had set aside.

    Temporary folders of writers that are alive, and all that this module did not make, stay.

    Args:
        folder: any folder; one that is missing holds nothing.
    """
    if folder.is_dir():
        _clear(folder, ".")


def _prefix(path: Path) -> str:
    return f".{path.name[:_NAME_KEPT]}."


def _clear(folder: Path, prefix: str) -> None:
    for entry in os.scandir(folder):
        if entry.name.startswith(prefix) and _LEFTOVER.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
            with suppress(FileNotFoundError, PermissionError):  # another process may clear it as well
                _clear_one(Path(entry.path))


def _clear_one(leftover: Path) -> None:
    descriptor = os.open(leftover, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if _lock(descriptor, wait=False):
            _remove(leftover)
    finally:
        os.close(descriptor)


def _remove(holder: Path) -> None:
    """Remove a temporary folder; what it holds of a folder whose place is empty goes back there first."""
    for previous in listed(holder, f"*{_PREVIOUS}"):
        place = holder.parent / previous.name.removesuffix(_PREVIOUS)
        if not os.path.lexists(place):
            previous.rename(place)
            sync_folder(holder.parent)
    shutil.rmtree(holder, ignore_errors=True)


def _lock(descriptor: int, wait: bool) -> bool:
    """Lock a folder for as long as this process lives; return whether that was done."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:  # held by another, or no locks on this storage: then nobody can tell whether an owner is alive
        return False
    return True


@contextmanager
def _holder(path: Path) -> Iterator[Path]:
    """Make a temporary folder beside a path, locked so that nobody takes it for a leftover, and remove it in the end."""
    holder, descriptor = _locked_holder(path)
    try:
        try:
            yield holder
        finally:
            _remove(holder)
    finally:
        os.close(descriptor)


def _locked_holder(path: Path) -> tuple[Path, int]:
    while True:
        holder = Path(tempfile.mkdtemp(prefix=_prefix(path), suffix=".partial", dir=path.parent))
        try:
            descriptor = os.open(holder, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:  # cleared away before it was locked
            continue
        _lock(descriptor, wait=True)
        if holder.exists():
            return holder, descriptor
        os.close(descriptor)


def _mode_of_new_files(folder: Path) -> int:
    """Return what the umask leaves, by a file in a temporary folder: to ask for the umask is to set it, for all threads."""
    probe = Path(tempfile.mkdtemp(dir=folder)) / "probe"  # a name of its own beside what is written
    probe.touch()
    return stat.S_IMODE(probe.stat().st_mode)


def _follow_umask(path: Path, mode: int) -> None:
    """Give files the permissions of others: some libraries, such as safetensors, write them for their owner alone."""
    for file in files_below(path) if path.is_dir() else [path]:
        if file.is_file() and not file.is_symlink() and (now := stat.S_IMODE(file.stat().st_mode)) | mode != now:
            file.chmod(now | mode)


def listed(folder: Path, pattern: str = "*") -> list[Path]:
    """List what is in a folder, in order; nothing where there is no folder.

    Unlike ``Path.glob`` and ``Path.rglob`` it does not take a folder that may not be read for one that is empty.

    Args:
        folder: the folder.
        pattern: of names, as of ``fnmatch``.

    Raises:
        OSError: it cannot be read.
    """
    try:
        return sorted(file for file in folder.iterdir() if fnmatch.fnmatchcase(file.name, pattern))
    except FileNotFoundError:
        return []


def files_below(folder: Path) -> Iterator[Path]:
    """Yield every file and link in a folder and in those below it, in order; like :func:`listed` it passes over no folder."""
    with os.scandir(folder) as scanned:
        entries = sorted(scanned, key=lambda entry: entry.name)
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from files_below(Path(entry.path))
        else:
            yield Path(entry.path)


def sync_tree(path: Path) -> None:
    """Flush a file, or every file of a folder and then the names in it."""
    if path.is_dir():
        for inner in path.iterdir():
            if not inner.is_symlink():
                sync_tree(inner)
        sync_folder(path)
    else:
        with path.open("rb") as handle:
            os.fsync(handle.fileno())


def _put_in_place(temporary: Path, path: Path) -> None:
    """Give what was written its name; a folder that was there ends up where the new one was."""
    if not (path.is_dir() and temporary.is_dir()) or path.is_symlink():
        temporary.replace(path)
    elif not _exchange(temporary, path):  # rename cannot replace a folder that holds files
        previous = temporary.with_name(f"{path.name}{_PREVIOUS}")
        path.rename(previous)  # if this process dies here, whoever writes next puts it back
        temporary.rename(path)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two names in one step; return whether the system can."""
    swap = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)  # Linux alone has it
    if swap is None:
        return False
    if swap(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _NOT_OFFERED:
        return False
    raise OSError(code, os.strerror(code), str(other))


def write_array(path: Path, array: NDArray[Any]) -> None:
    """Write a ``.npy`` file through a handle whose errors are seen: NumPy's own way loses what a full disk says at the end.

    Args:
        path: the file, such as :func:`atomic_path` yields.
        array: of numbers or booleans.

    Raises:
        OSError: it cannot be written.
    """
    from numpy.lib import format as npy

    array = array if array.flags.c_contiguous else array.copy()
    with path.open("wb") as file:
        npy.write_array_header_1_0(file, npy.header_data_from_array_1_0(array))
        file.write(array.data)


def write_json(path: str | Path, value: Any) -> None:  # noqa: ANN401 - any JSON value
    """Write a JSON file atomically; NaN and infinities are refused, as JSON has none."""
    with atomic_path(path) as temporary:
        temporary.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def read_json(path: str | Path) -> Any:  # noqa: ANN401 - any JSON value
    """Read a JSON file, naming the file when it is missing or not JSON."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise XcompatError(f"{path} does not exist") from None
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, a number of thousands of digits, or too deep
        raise XcompatError(f"{path} is not valid JSON ({error}); delete it and make it again") from None
