"""Arrow files that are built once from the user's files, then memory-mapped, and rebuilt when those files change."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from xcompat.core.checksums import FileRecord, difference, file_record
from xcompat.core.errors import XcompatError
from xcompat.core.files import atomic_path, read_json, write_json
from xcompat.core.progress import notice

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa

_FILE = "arrow_file"  # key of a record for the state of the Arrow file beside it
FORMAT = 1  # raise it when the builders write something else, so that caches of older versions are not reused
ROWS = 256  # per batch: a column of images of some megabytes must stay under Arrow's 2 GB


def cache_folder() -> Path:
    """Return this library's folder in the cache of ``datasets``; made if missing."""
    import datasets

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
    stamps: list[list[Any]] = []
    for path in map(Path, paths):
        stat = path.stat()
        stamps.append([str(path.resolve()), stat.st_size, stat.st_mtime_ns])
    return stamps


def cached_dataset(
    kind: str,
    key: Mapping[str, Any],
    features: datasets.Features,
    build: Callable[[dict[str, Any]], Iterator[pa.RecordBatch]],
) -> tuple[datasets.Dataset, dict[str, Any]]:
    """Open a memory-mapped data set, and write it first if it is not in the cache.

    The files are in the cache folder of ``datasets``. Several processes may call this at once: one writes, the others wait. If a
    file's size or time has changed since it was written, its checksum is compared, and a damaged file is written again. Damage
    that changes neither, such as that of a disk, is not found.

    Args:
        kind: the kind of content, and the start of the file's name.
        key: everything that the content depends on, JSON-like; another key is another file.
        features: the columns.
        build: called with an empty record to fill (JSON-like, kept beside the data), yields the batches.

    Returns:
        The data set, and the record that was filled when it was built.
    """
    import datasets
    import pyarrow as pa
    from filelock import FileLock

    # Dataset.from_generator also locks, writes atomically and takes a key, but it opens damaged files and keeps no record
    schema = features.arrow_schema
    digest = _digest({"format": FORMAT, "schema": str(schema), **key})
    stem = f"{kind}-{digest[:24]}"
    folder = cache_folder()
    arrow_file, record_file = folder / f"{stem}.arrow", folder / f"{stem}.json"
    with FileLock(str(folder / f"{stem}.lock")):
        record = _whole(arrow_file, record_file)
        if record is None:
            record = {}
            with atomic_path(arrow_file) as temporary:
                with pa.OSFile(str(temporary), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
                    for batch in build(record):
                        writer.write_batch(batch)
                # before the data file is moved to its place, so that there is never data without a record
                write_json(record_file, record | {_FILE: _Written.of(temporary, record).model_dump()})
    try:
        dataset = datasets.Dataset.from_file(str(arrow_file))
    except (pa.ArrowException, OSError, ValueError) as error:  # a file from before there were checksums
        raise XcompatError(f"{arrow_file} cannot be read ({str(error)[:200]}); delete it, and it is written again") from error
    dataset._fingerprint = digest  # derived from the source, so that caches keyed by it outlive a rebuild
    return dataset, record


class _Written(FileRecord):
    """The state of an Arrow file when it was written, its time in nanoseconds, and a digest of the record beside it."""

    changed: int
    record: str

    @classmethod
    def of(cls, path: Path, record: dict[str, Any]) -> _Written:
        return cls(**file_record(path).model_dump(), changed=path.stat().st_mtime_ns, record=_digest(record))


def _digest(value: Any) -> str:  # noqa: ANN401 - any JSON value
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _whole(arrow_file: Path, record_file: Path) -> dict[str, Any] | None:
    """Return the record of an undamaged file; None if it must be written, with a notice if it was damaged."""
    if not arrow_file.exists():
        return None
    record: Any = None
    try:
        record = read_json(record_file)
        written = _Written(**record.pop(_FILE)) if _FILE in record else None
        is_damaged = written is not None and written.record != _digest(record)
    except (XcompatError, ValidationError, TypeError):
        is_damaged = True
    if is_damaged or not isinstance(record, dict):
        notice(f"{record_file}, which belongs to {arrow_file.name}, is missing or damaged; both are written again")
        return None
    stat = arrow_file.stat()
    if written is None or (stat.st_size, stat.st_mtime_ns) == (written.size, written.changed):
        return record
    if found := difference(arrow_file, FileRecord(size=written.size, xxh3=written.xxh3)):
        notice(f"{found[0]}; it is written again")
        return None
    # a copied file has a new time: record it, so that the checksum is compared only once
    write_json(record_file, record | {_FILE: written.model_copy(update={"changed": stat.st_mtime_ns}).model_dump()})
    return record


def rows_to_batches(rows: Iterable[Mapping[str, Any]], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Pack rows into Arrow record batches.

    Args:
        rows: mappings from column to value.
        schema: the columns and their types.

    Yields:
        Record batches of `ROWS` rows, the last one possibly shorter.
    """
    import pyarrow as pa

    remaining = iter(rows)
    while batch := list(islice(remaining, ROWS)):
        yield pa.RecordBatch.from_pylist(batch, schema=schema)
