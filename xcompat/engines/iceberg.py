"""Reader of the Parquet files of an Iceberg table."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from xcompat.core.errors import XcompatError, describe_error
from xcompat.engines import parquet
from xcompat.engines.filesystems import resolve_filesystem
from xcompat.engines.sources import Source

if TYPE_CHECKING:
    import pyarrow as pa

FIELD_ID = b"PARQUET:field_id"
"""Arrow's key for the Iceberg column number, which survives renames."""


def require(uri: str) -> None:
    """Raise if the metadata file or PyIceberg is missing."""
    if find_spec("pyiceberg") is None:
        raise XcompatError(
            f'{uri} is an Iceberg table and needs PyIceberg; install it with `pip install -e ".[iceberg]"` in a clone of xcompat'
        )
    parquet.require(uri)


def read(uri: str) -> Source:
    """Return a version of a table.

    Raises:
        XcompatError: it is unreadable, or has deleted rows, other file formats or renamed columns.
    """
    from pyarrow import fs

    require(uri)
    from pyiceberg.manifest import FileFormat

    metadata, tasks = _plan_files(uri)
    system, paths = resolve_filesystem(uri)[0], list[str]()
    for file, deletes in tasks:
        if deletes:
            raise XcompatError(
                f"{uri} marks rows of {file.file_path} as deleted; rewrite its data files, then use the new metadata"
            )
        if file.file_format != FileFormat.PARQUET:
            raise XcompatError(f"{uri}: {file.file_path} is not Parquet; rewrite its data files as Parquet")
        other, path = resolve_filesystem(file.file_path)
        if other != system:
            raise XcompatError(f"{uri}: {file.file_path} is in another file system; move all data files into one file system")
        paths.append(path)
    found: list[fs.FileInfo] = system.get_file_info(sorted(paths))
    if gone := [info.path for info in found if info.type != fs.FileType.File]:
        raise XcompatError(f"{uri}: {gone[0]} does not exist; use newer metadata")
    ids = {column.name: column.field_id for column in metadata.schema().fields}
    return parquet.read_files(uri, found, lambda path, own: _require_names(uri, ids, path, own))


def _plan_files(uri: str) -> tuple[Any, list[tuple[Any, Any]]]:
    """Return the metadata, and data files with their delete files.

    Arrow reads all files: metadata can name a class for PyIceberg to import.
    """
    from pyiceberg.exceptions import ValidationError
    from pyiceberg.io.pyarrow import PyArrowFileIO
    from pyiceberg.serializers import FromInputFile
    from pyiceberg.table import DataScan

    reader = PyArrowFileIO()
    try:
        metadata = FromInputFile.table_metadata(reader.new_input(uri))
        scan = DataScan(table_metadata=metadata, io=reader)
        return metadata, [(task.file, task.delete_files) for task in scan.plan_files()]
    except (OSError, ValueError, NotImplementedError, ValidationError) as error:
        raise XcompatError(f"{uri} cannot be read as Iceberg metadata ({describe_error(error)})") from error


def _require_names(uri: str, ids: dict[str, int], path: str, own: pa.Schema) -> None:
    """Raise if a name in a file belongs to another column today."""
    for field in own:
        number = (field.metadata or {}).get(FIELD_ID)
        if field.name in ids and number is not None and int(number) != ids[field.name]:
            raise XcompatError(
                f"{uri}: {path} has the column {field.name!r}, which was renamed later; rewrite the data files of the table"
            )
