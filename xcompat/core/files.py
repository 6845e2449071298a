"""Durable, atomic writes. Even after a power cut, a path has either the old or the new content."""

from __future__ import annotations

import ctypes
import errno
import fnmatch
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xcompat.core.errors import XcompatError

try:
    import fcntl
except ModuleNotFoundError:
    raise XcompatError("xcompat needs the file locks of Linux or macOS; on Windows, run it in WSL 2") from None

if TYPE_CHECKING:
    from numpy.typing import NDArray

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # constants of Linux
_NOT_OFFERED = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)
"""Errors of file systems that cannot swap two names or flush a folder."""
_NAME_KEPT = 50  # characters of a name in its temporary folder's name, as names are limited to 255 bytes
PARTIAL = ".xcompat-partial"
"""Suffix of temporary folders. It includes the program's name, as other programs also use ``*.partial``."""
_LEFTOVER = re.compile(r"\..*\.[a-z0-9_]{8}" + re.escape(PARTIAL), re.DOTALL)
_PREVIOUS = ".previous"


@contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path, and durably replace ``path`` with it if the block succeeds.

    Data are flushed before the rename. Leftovers of a killed writer are removed.

    Args:
        path: the output file or folder. Missing parents are created.

    Yields:
        A new path on the same file system. Write a file or a folder there.

    Raises:
        OSError: a write fails. The old content stays.

    Example:
        >>> import tempfile
        >>> target = Path(tempfile.mkdtemp()) / "a.txt"
        >>> with atomic_path(target) as temporary:
        ...     _ = temporary.write_text("whole")
        >>> target.read_text()
        'whole'
    """
    path = Path(path)
    with temporary_folder(path) as holder:
        temporary = holder / path.name
        yield temporary
        drop_unfinished(temporary)
        _follow_umask(temporary, _mode_of_new_files(holder))
        sync_tree(temporary)
        _put_in_place(temporary, path)
        sync_folder(path.parent)


@contextmanager
def temporary_folder(path: Path) -> Iterator[Path]:
    """Yield a folder beside ``path`` and remove it at the end. Leftovers of killed processes are removed first.

    Args:
        path: path to create the folder for. Missing parents are created.

    Yields:
        The empty folder.
    """
    make_folder(path.parent)
    _clear(path.parent, _prefix(path))
    with _holder(path) as holder:
        yield holder


def drop_unfinished(folder: Path) -> None:
    """Remove leftover temporary folders from a folder before its publication.

    Raises:
        OSError: a leftover cannot be removed.
    """
    for parent, names, _ in os.walk(folder, onerror=_raise) if folder.is_dir() else ():
        for name in filter(_LEFTOVER.fullmatch, list(names)):
            shutil.rmtree(Path(parent, name))
            names.remove(name)


def _raise(error: OSError) -> None:
    raise error


def make_folder(folder: Path) -> None:
    """Create a folder and its parents, so that they survive a power cut."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for made in missing:
        sync_folder(made.parent)


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder, as a power cut can otherwise undo a rename."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NOT_OFFERED:
            raise
    finally:
        os.close(descriptor)


def clear_leftovers(folder: Path) -> None:
    """Remove leftovers of killed writers from a folder, and restore a half-replaced folder.

    Live writers' temporary folders and all other files stay. The folder may be missing.
    """
    if folder.is_dir():
        _clear(folder, ".")


def _prefix(path: Path) -> str:
    return f".{path.name[:_NAME_KEPT]}."


def _clear(folder: Path, prefix: str) -> None:
    for entry in os.scandir(folder):
        if entry.name.startswith(prefix) and _LEFTOVER.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
            with suppress(FileNotFoundError, PermissionError):  # another process may be clearing it too
                _clear_one(Path(entry.path))


def _clear_one(leftover: Path) -> None:
    descriptor = os.open(leftover, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if _lock(descriptor, wait=False):
            _remove(leftover)
    finally:
        os.close(descriptor)


def _remove(holder: Path) -> None:
    """Remove a temporary folder, after restoring a replaced folder whose place is empty."""
    for previous in list_entries(holder, f"*{_PREVIOUS}"):
        place = holder.parent / previous.name.removesuffix(_PREVIOUS)
        if not os.path.lexists(place):
            previous.rename(place)
            sync_folder(holder.parent)
    shutil.rmtree(holder, ignore_errors=True)


def _lock(descriptor: int, wait: bool) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:  # another process has the lock, or the storage has no locks to tell whether an owner is alive
        return False
    return True


@contextmanager
def _holder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder, locked against cleanup by other processes."""
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
        holder = Path(tempfile.mkdtemp(prefix=_prefix(path), suffix=PARTIAL, dir=path.parent))
        try:
            descriptor = os.open(holder, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:  # another process cleared it before it was locked
            continue
        _lock(descriptor, wait=True)
        if holder.exists():
            return holder, descriptor
        os.close(descriptor)


def _mode_of_new_files(folder: Path) -> int:
    """Return the umask's mode for new files from a probe file, as reading the umask sets it for all threads."""
    probe = Path(tempfile.mkdtemp(dir=folder)) / "probe"  # in a folder of its own, so that no written name collides
    probe.touch()
    return stat.S_IMODE(probe.stat().st_mode)


def _follow_umask(path: Path, mode: int) -> None:
    """Give files the umask's permissions, as safetensors writes files that only their owner may read."""
    for file in files_below(path) if path.is_dir() else [path]:
        if file.is_file() and not file.is_symlink() and (now := stat.S_IMODE(file.stat().st_mode)) | mode != now:
            file.chmod(now | mode)


def list_entries(folder: Path, pattern: str = "*") -> list[Path]:
    """List a folder's entries, sorted. A missing folder has none.

    Unlike ``Path.glob`` it raises for a folder without read permission.

    Args:
        folder: the folder.
        pattern: ``fnmatch`` pattern of names.

    Raises:
        OSError: the folder cannot be read.
    """
    try:
        return sorted(file for file in folder.iterdir() if fnmatch.fnmatchcase(file.name, pattern))
    except FileNotFoundError:
        return []


def files_below(folder: Path) -> Iterator[Path]:
    """Yield every file and link below a folder, in order. It raises for a folder without read permission."""
    with os.scandir(folder) as scanned:
        entries = sorted(scanned, key=lambda entry: entry.name)
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from files_below(Path(entry.path))
        else:
            yield Path(entry.path)


def sync_tree(path: Path) -> None:
    """Flush a file, or a folder with its content."""
    if path.is_dir():
        for inner in path.iterdir():
            if not inner.is_symlink():
                sync_tree(inner)
        sync_folder(path)
    else:
        with path.open("rb") as handle:
            os.fsync(handle.fileno())


def _put_in_place(temporary: Path, path: Path) -> None:
    """Rename a new file or folder to its place. A replaced folder moves into the temporary folder."""
    if not (path.is_dir() and temporary.is_dir()) or path.is_symlink():
        temporary.replace(path)
    elif not _exchange(temporary, path):  # rename cannot replace a folder with files
        previous = temporary.with_name(f"{path.name}{_PREVIOUS}")
        path.rename(previous)  # if this process dies here, the next writer puts it back
        temporary.rename(path)


def _exchange(one: Path, other: Path) -> bool:
    swap = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)  # only Linux has it
    if swap is None:
        return False
    if swap(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _NOT_OFFERED:
        return False
    raise OSError(code, os.strerror(code), str(other))


def write_array(path: Path, array: NDArray[Any]) -> None:
    """Write a ``.npy`` file of numbers or booleans, and report every error. NumPy's writer misses a full disk at the end.

    Raises:
        OSError: the file cannot be written.
    """
    from numpy.lib import format as npy

    array = array if array.flags.c_contiguous else array.copy()
    with path.open("wb") as file:
        npy.write_array_header_1_0(file, npy.header_data_from_array_1_0(array))
        file.write(array.data)


def write_blocks(path: Path, blocks: Iterable[NDArray[Any]], shape: tuple[int, int], dtype: str) -> None:
    """Write blocks of rows into a ``.npy`` file, a block in memory at a time, and report every error.

    Args:
        path: the file.
        blocks: (n, D) rows.
        shape: number of all rows, and D.
        dtype: stored number type, e.g. ``<f4``.

    Raises:
        OSError: the file cannot be written. A memory-mapped array would end the process if the disk is full.
    """
    import numpy as np

    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": dtype, "fortran_order": False, "shape": shape})
        for block in blocks:
            file.write(np.ascontiguousarray(block, dtype).data)


def write_json(path: str | Path, value: object) -> None:
    """Write a JSON file atomically. NaN and infinities are errors."""
    with atomic_path(path) as temporary:
        temporary.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def read_json(path: str | Path) -> Any:  # noqa: ANN401 - any JSON value
    """Read a JSON file. Raise an error with the file name if it is missing or invalid."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise XcompatError(f"{path} does not exist") from None
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, a number of thousands of digits, or too deep
        raise XcompatError(f"{path} is not valid JSON ({error}); delete and recreate it with the command that wrote it") from None
