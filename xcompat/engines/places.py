"""Parquet wherever Arrow's file systems reach: this machine, s3://, gs://, hdfs:// and others."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, Any

from xcompat.core.errors import XcompatError, what_failed
from xcompat.core.files import atomic_path
from xcompat.core.paths import nearest_path
from xcompat.vectors import PARQUET

if TYPE_CHECKING:
    from pyarrow import fs

PLAN = "_plan.json"
"""What says, in a folder that ``xcompat embed`` writes, what it holds; readers of folders of Parquet leave such a name out."""
ICEBERG = ".metadata.json"
"""How the names of files end that describe a version of an Iceberg table."""
LOGS = {"_delta_log": "Delta", ".hoodie": "Hudi"}
"""The folder in which a table says which of its Parquet files are rows of it -> the kind of table."""


def located(uri: str) -> tuple[fs.FileSystem, str]:
    """Return the file system of a path or URI, and the path in it.

    Raises:
        XcompatError: Arrow has no such file system, or it cannot be reached.
    """
    import pyarrow as pa
    from pyarrow import fs

    if "://" not in uri:
        return fs.LocalFileSystem(), str(Path(uri).expanduser().resolve())
    try:
        found: tuple[fs.FileSystem, str] = fs.FileSystem.from_uri(uri)
    except (pa.ArrowException, OSError, ValueError, ImportError) as error:
        raise XcompatError(f"{uri} cannot be opened ({what_failed(error)}); name a path, or a URI as Arrow reads it") from None
    return found


def files_at(uri: str) -> list[fs.FileInfo]:
    """List the Parquet files at a path or URI, which is a file or a folder, in the order of their paths.

    Names that begin with a dot or an underscore are left out, as Spark and others do.

    Raises:
        XcompatError: there are none, or some that are no rows any more.
    """
    from pyarrow import fs

    system, path = located(uri)
    found = _info(system, path, uri)
    if found.type == fs.FileType.NotFound:
        raise XcompatError(f"{uri} does not exist" + (f"; {nearest_path(uri)}" if is_local(system) else ""))
    if found.type == fs.FileType.File:
        return [found]
    inside = system.get_file_info(fs.FileSelector(path, recursive=True))
    metadata = [info for info in inside if info.path.startswith(f"{path.rstrip('/')}/metadata/") and _is_metadata(info)]
    if metadata:
        newest = max(metadata, key=lambda info: info.mtime_ns or 0).base_name
        raise XcompatError(
            f"{uri} is an Iceberg table, and files of its older versions are in there too; name the metadata of a version, "
            f"such as {uri.rstrip('/')}/metadata/{newest}"
        )
    for folder, name in LOGS.items():
        if any(info.path == f"{path.rstrip('/')}/{folder}" for info in inside):
            raise XcompatError(
                f"{uri} is a {name} table, and rows that it has no more are in its files too; write its rows as Parquet, or map "
                "them with a reader of such tables (docs/engines.md)"
            )
    for info in inside:
        if info.base_name == PLAN and info.path != f"{path.rstrip('/')}/{PLAN}":
            raise XcompatError(
                f"{info.path.removesuffix(f'/{PLAN}')} was written by `xcompat embed` and lies in {uri}, as whose rows it would "
                "be read; move it out of there, or name the folders with the rows one by one"
            )
    files = [info for info in inside if info.type == fs.FileType.File and _is_data(PurePosixPath(info.path), path)]
    if not files:
        raise XcompatError(f"{uri} holds no files *{PARQUET}; name a file, or a folder of them")
    return sorted(files, key=lambda info: str(info.path))


def names_in(uri: str) -> list[str]:
    """Return the names in a folder, which need not exist; hidden ones are left out."""
    from pyarrow import fs

    system, path = located(uri)
    if _info(system, path, uri).type == fs.FileType.File:
        raise XcompatError(f"{uri} is a file; name a folder for --out")
    names = (info.base_name for info in system.get_file_info(fs.FileSelector(path, allow_not_found=True)))
    return sorted(name for name in names if not name.startswith("."))


def require_outside(out: str, uri: str) -> None:
    """Refuse a folder of what is made below the one that is read: later runs would read it too.

    Raises:
        XcompatError: it lies there.
    """
    (system, path), (of_source, source) = located(out), located(uri)
    if system == of_source and PurePosixPath(source) in PurePosixPath(path).parents:
        raise XcompatError(f"{out} lies in {uri}, and later runs would read it as rows; name a folder outside with --out")


def path_in(uri: str, name: str) -> str:
    """Return the path of a file in a folder, in that folder's file system."""
    return f"{located(uri)[1].rstrip('/')}/{name}"


def opened(uri: str, path: str) -> Any:  # noqa: ANN401 - Arrow's file, which has no types
    """Open a file for random reads.

    Args:
        uri: whose file system it is in.
        path: in there.
    """
    return located(uri)[0].open_input_file(path)


def state_of(uri: str, path: str) -> str:
    """Return what tells a file in the file system of a URI from a later one in its place.

    It is looked at by itself: where object stores list many files, their dates may be more exact.
    """
    info = _info(located(uri)[0], path, uri)
    return f"{info.size} {info.mtime_ns}"


@contextmanager
def write_to(uri: str, name: str) -> Iterator[IO[bytes]]:
    """Open a new file in a folder; nobody sees it before it is whole.

    In a folder of this machine it is renamed to its place; elsewhere it is sent when it is whole, and object stores show it then.
    """
    system, path = located(uri)[0], path_in(uri, name)
    if is_local(system):
        with atomic_path(path) as temporary, temporary.open("wb") as file:
            yield file
    else:
        with tempfile.TemporaryFile() as file:  # an error while a stream is open would leave what was sent so far
            yield file
            file.seek(0)
            with system.open_output_stream(path) as stream:
                shutil.copyfileobj(file, stream)


def is_local(system: fs.FileSystem) -> bool:
    """Return whether a file system is that of this machine."""
    from pyarrow import fs

    return isinstance(system, fs.LocalFileSystem)


def _info(system: fs.FileSystem, path: str, uri: str) -> fs.FileInfo:
    try:
        return system.get_file_info(path)
    except OSError as error:
        raise XcompatError(f"{uri} cannot be read ({what_failed(error)})") from None


def _is_metadata(info: fs.FileInfo) -> bool:
    return str(info.base_name).endswith(ICEBERG)


def _is_data(file: PurePosixPath, folder: str) -> bool:
    inside = file.relative_to(folder).parts
    return file.name.endswith(PARQUET) and not any(part.startswith((".", "_")) for part in inside)
