"""Cache of memory-mapped Arrow files, rebuilt when the user's files change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from xcompat.core.checksums import FileRecord, difference, file_record, json_digest
from xcompat.core.errors import XcompatError
from xcompat.core.files import atomic_path, read_json, write_json
from xcompat.core.lazy import datasets
from xcompat.core.progress import notice

if TYPE_CHECKING:
    import pyarrow as pa

_FILE = "arrow_file"  # record key for the state of the Arrow file
FORMAT = 1  # increase it when builders change their output, to invalidate older caches
ROWS = 256  # per batch: a column of large images must stay below Arrow's 2 GB


def cache_folder() -> Path:
    """Return xcompat's folder in the cache of ``datasets``; create it if missing."""
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "xcompat"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def file_stamps(paths: Iterable[str | Path]) -> list[list[Any]]:
    """Identify files by resolved path, size and modification time, without reading them.

    Args:
        paths: existing files.

    Returns:
        ``[path, bytes, nanoseconds]`` for each.
    """
    stamps: list[list[object]] = []
    for path in map(Path, paths):
        stat = path.stat()
        stamps.append([str(path.resolve()), stat.st_size, stat.st_mtime_ns])
    return stamps


def cached_dataset(
    kind: str,
    key: Mapping[str, object],
    features: datasets.Features,
    build: Callable[[dict[str, Any]], Iterator[pa.RecordBatch]],
) -> tuple[datasets.Dataset, dict[str, Any]]:
    """Open a memory-mapped data set, and build it first if it is not in the cache.

    Concurrent processes are safe: the first writes, the others wait. If the size or time of a file has changed, its checksum is
    compared, and a damaged file is rebuilt. Damage without such a change is not detected.

    Args:
        kind: kind of content, used as file name prefix.
        key: all inputs of the content, JSON-like.
        features: the columns.
        build: fills an empty record (JSON-like, stored with the data) and yields batches.

    Returns:
        The data set, and its record.
    """
    import pyarrow as pa
    from filelock import FileLock

    # not Dataset.from_generator: it opens damaged files and keeps no record
    schema = features.arrow_schema
    digest = json_digest({"format": FORMAT, "schema": str(schema), **key})
    stem = f"{kind}-{digest[:24]}"
    folder = cache_folder()
    arrow_file, record_file = folder / f"{stem}.arrow", folder / f"{stem}.json"
    with FileLock(str(folder / f"{stem}.lock")):
        record = _load_valid_record(arrow_file, record_file)
        if record is None:
            record = {}
            with atomic_path(arrow_file) as temporary:
                with pa.OSFile(str(temporary), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
                    for batch in build(record):
                        writer.write_batch(batch)
                # written before the data file is moved, so that data never exists without a record
                write_json(record_file, record | {_FILE: _FileState.from_file(temporary, record).model_dump()})
    try:
        dataset = datasets.Dataset.from_file(str(arrow_file))
    except (pa.ArrowException, OSError, ValueError) as error:  # a cache file without checksum
        raise XcompatError(f"{arrow_file} cannot be read ({str(error)[:200]}); delete the file to rebuild it") from error
    dataset._fingerprint = digest  # derived from the source, so that caches keyed by it outlive a rebuild
    return dataset, record


class _FileState(FileRecord):
    """State of an Arrow file when written, with its time in nanoseconds and a digest of its record."""

    changed: int
    record: str

    @classmethod
    def from_file(cls, path: Path, record: dict[str, object]) -> _FileState:
        return cls(**file_record(path).model_dump(), changed=path.stat().st_mtime_ns, record=json_digest(record))


def _load_valid_record(arrow_file: Path, record_file: Path) -> dict[str, object] | None:
    """Return the record of an intact file, else None. Print a notice if it is damaged."""
    if not arrow_file.exists():
        return None
    record: Any = None
    try:
        record = read_json(record_file)
        written = _FileState(**record.pop(_FILE)) if _FILE in record else None
        is_damaged = written is not None and written.record != json_digest(record)
    except (XcompatError, ValidationError, TypeError):
        is_damaged = True
    if is_damaged or not isinstance(record, dict):
        notice(f"{record_file} of {arrow_file.name} is missing or damaged; rebuilding both")
        return None
    stat = arrow_file.stat()
    if written is None or (stat.st_size, stat.st_mtime_ns) == (written.size, written.changed):
        return record
    if found := difference(arrow_file, FileRecord(size=written.size, xxh3=written.xxh3)):
        notice(f"{found[0]}; rebuilding it")
        return None
    # a copied file has a new time: record it, so that the checksum is compared only once
    write_json(record_file, record | {_FILE: written.model_copy(update={"changed": stat.st_mtime_ns}).model_dump()})
    return record


def rows_to_batches(rows: Iterable[Mapping[str, object]], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Pack rows into Arrow record batches.

    Args:
        rows: mappings from column to value.
        schema: columns and their types.

    Yields:
        Batches of `ROWS` rows; the last can be shorter.
    """
    import pyarrow as pa

    remaining = iter(rows)
    while batch := list(islice(remaining, ROWS)):
        yield pa.RecordBatch.from_pylist(batch, schema=schema)
