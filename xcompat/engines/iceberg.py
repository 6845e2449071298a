"""An Iceberg table: the Parquet files of the version that a metadata file describes."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from xcompat.core.errors import XcompatError, what_failed
from xcompat.engines import parquet
from xcompat.engines.places import located
from xcompat.engines.sources import Source

if TYPE_CHECKING:
    import pyarrow as pa

FIELD_ID = b"PARQUET:field_id"
"""Where Arrow keeps the number by which Iceberg knows a column, whatever it is called."""


def require(uri: str) -> None:
    """Refuse an address without a metadata file, or a machine without PyIceberg."""
    if find_spec("pyiceberg") is None:
        raise XcompatError(f"{uri} is an Iceberg table, which PyIceberg reads: pip install 'xcompat[iceberg]'")
    parquet.require(uri)


def read(uri: str) -> Source:
    """Look at the files of a version.

    Raises:
        XcompatError: it cannot be read, or it has rows that were deleted but are in its files, or files of another kind, or
            columns that had other names in some files.
    """
    from pyarrow import fs

    require(uri)
    from pyiceberg.manifest import FileFormat

    metadata, tasks = _planned(uri)
    system, paths = located(uri)[0], list[str]()
    for file, deletes in tasks:
        if deletes:
            raise XcompatError(
                f"{uri} marks rows of {file.file_path} as deleted; rewrite its data files, and name the new metadata"
            )
        if file.file_format != FileFormat.PARQUET:
            raise XcompatError(f"{uri} has {file.file_path}, which is no Parquet; rewrite its data files as Parquet")
        other, path = located(file.file_path)
        if other != system:
            raise XcompatError(f"{uri} has {file.file_path}, which is in another file system; keep a table in one")
        paths.append(path)
    found: list[fs.FileInfo] = system.get_file_info(sorted(paths))
    if gone := [info.path for info in found if info.type != fs.FileType.File]:
        raise XcompatError(f"{uri} has {gone[0]}, which does not exist; name newer metadata")
    ids = {column.name: column.field_id for column in metadata.schema().fields}
    return parquet.read_files(uri, found, lambda path, own: _require_names(uri, ids, path, own))


def _planned(uri: str) -> tuple[Any, list[tuple[Any, Any]]]:
    """Return a table's metadata, and its data files with what deletes rows of them.

    Arrow reads all files: metadata may name a class that PyIceberg would import to read them.
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
        raise XcompatError(f"{uri} cannot be read as metadata of an Iceberg table ({what_failed(error)})") from error


def _require_names(uri: str, ids: dict[str, int], path: str, own: pa.Schema) -> None:
    """Refuse a file in which a name of the table's columns is that of another column, which was called so once."""
    for field in own:
        number = (field.metadata or {}).get(FIELD_ID)
        if field.name in ids and number is not None and int(number) != ids[field.name]:
            raise XcompatError(
                f"{uri} has {path}, where {field.name!r} is a column that has another name now; rewrite its data files"
            )
