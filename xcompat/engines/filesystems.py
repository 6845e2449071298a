"""Files in Arrow's file systems: local, s3://, gs://, hdfs:// and others."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, Any

import pyarrow as pa
from pyarrow import fs

from xcompat.core.errors import XcompatError, describe_error
from xcompat.core.files import atomic_path
from xcompat.core.paths import nearest_path
from xcompat.vectors.formats import PARQUET

if TYPE_CHECKING:
    from pyarrow import fs

PLAN = "_plan.json"
"""Plan of an output folder. Readers of Parquet folders skip the underscore."""
ICEBERG = ".metadata.json"
"""Suffix of Iceberg metadata files."""
LOGS = {"_delta_log": "Delta", ".hoodie": "Hudi"}
"""Folder with a transaction log -> type of the table. Such tables keep deleted rows in their files."""


def resolve_filesystem(uri: str) -> tuple[fs.FileSystem, str]:
    """Return the file system of a path or URI, and the path in it.

    Raises:
        XcompatError: the file system is unknown or unreachable.
    """
    if "://" not in uri:
        return fs.LocalFileSystem(), str(Path(uri).expanduser().resolve())
    try:
        found: tuple[fs.FileSystem, str] = fs.FileSystem.from_uri(uri)
    except (pa.ArrowException, OSError, ValueError, ImportError) as error:
        raise XcompatError(f"{uri} cannot be opened ({describe_error(error)}); use a path or URI supported by Arrow") from None
    return found


def list_parquet_files(uri: str) -> list[fs.FileInfo]:
    """List the Parquet files at a path or URI, sorted by path.

    Names with a leading dot or underscore are skipped, as in Spark.

    Raises:
        XcompatError: there are none, or they can contain deleted rows.
    """
    system, path = resolve_filesystem(uri)
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
            f"{uri} is an Iceberg table with files of older versions; use the metadata file of a single version, "
            f"e.g. {uri.rstrip('/')}/metadata/{newest}"
        )
    for folder, name in LOGS.items():
        if any(info.path == f"{path.rstrip('/')}/{folder}" for info in inside):
            raise XcompatError(
                f"{uri} is a {name} table, and its files include deleted rows; write the current rows as Parquet, or use "
                "another reader (docs/engines.md)"
            )
    for info in inside:
        if info.base_name == PLAN and info.path != f"{path.rstrip('/')}/{PLAN}":
            raise XcompatError(
                f"{info.path.removesuffix(f'/{PLAN}')} was written by `xcompat embed` and is inside {uri}, so its rows would be "
                "read too; move it outside, or name the input folders"
            )
    files = [info for info in inside if info.type == fs.FileType.File and _is_data(PurePosixPath(info.path), path)]
    if not files:
        raise XcompatError(f"{uri} contains no *{PARQUET} files; choose a Parquet file or a folder of them")
    return sorted(files, key=lambda info: str(info.path))


def names_in(uri: str) -> list[str]:
    """Return the visible names in a folder. It need not exist."""
    system, path = resolve_filesystem(uri)
    if _info(system, path, uri).type == fs.FileType.File:
        raise XcompatError(f"{uri} is a file; choose a folder for --out")
    names = (info.base_name for info in system.get_file_info(fs.FileSelector(path, allow_not_found=True)))
    return sorted(name for name in names if not name.startswith("."))


def require_outside(out: str, uri: str) -> None:
    """Raise if the output is inside the input folder.

    Raises:
        XcompatError: it is inside, so later runs would read it.
    """
    (system, path), (of_source, source) = resolve_filesystem(out), resolve_filesystem(uri)
    if system == of_source and PurePosixPath(source) in PurePosixPath(path).parents:
        raise XcompatError(
            f"{out} is inside {uri}, so later runs would read the output as input; choose another folder for --out"
        )


def path_in(uri: str, name: str) -> str:
    """Return the path of a file in a folder."""
    return f"{resolve_filesystem(uri)[1].rstrip('/')}/{name}"


def open_file(uri: str, path: str) -> Any:  # noqa: ANN401 - pyarrow has no types
    """Open a file for random reads.

    Args:
        uri: address in the file system to use.
        path: path in it.
    """
    return resolve_filesystem(uri)[0].open_input_file(path)


def state_of(uri: str, path: str) -> str:
    """Return the size and time of a file, to detect changes.

    It does not use listings: object stores can list more exact times.
    """
    info = _info(resolve_filesystem(uri)[0], path, uri)
    return f"{info.size} {info.mtime_ns}"


@contextmanager
def write_to(uri: str, name: str) -> Iterator[IO[bytes]]:
    """Open a new file, which becomes visible when complete, by a rename or an upload."""
    system, path = resolve_filesystem(uri)[0], path_in(uri, name)
    if is_local(system):
        with atomic_path(path) as temporary, temporary.open("wb") as file:
            yield file
    else:
        with tempfile.TemporaryFile() as file:  # an error in an open stream would leave a partial file
            yield file
            file.seek(0)
            with system.open_output_stream(path) as stream:
                shutil.copyfileobj(file, stream)


def is_local(system: fs.FileSystem) -> bool:
    """Return whether a file system is local."""
    return isinstance(system, fs.LocalFileSystem)


def _info(system: fs.FileSystem, path: str, uri: str) -> fs.FileInfo:
    try:
        return system.get_file_info(path)
    except OSError as error:
        raise XcompatError(f"{uri} cannot be read ({describe_error(error)})") from None


def _is_metadata(info: fs.FileInfo) -> bool:
    return str(info.base_name).endswith(ICEBERG)


def _is_data(file: PurePosixPath, folder: str) -> bool:
    inside = file.relative_to(folder).parts
    return file.name.endswith(PARQUET) and not any(part.startswith((".", "_")) for part in inside)
