"""Arrow files built once from user files, memory-mapped ever after, rebuilt when the user's files change."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xcompat.files import atomic_path, read_json, write_json

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa

FORMAT = 1  # raise it when what the builders write changes, so that caches of older versions are not reused


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
    """Open a memory-mapped data set, writing it first unless it was written before.

    The files lie in the cache folder of ``datasets``. Several processes may ask at once: one writes, the others wait.

    Args:
        kind: what it holds, the start of the file's name.
        key: everything the content depends on, JSON-like; another key is another file.
        features: the columns.
        build: called with an empty record to fill (JSON-like, kept beside the data), yields the batches.

    Returns:
        The data set, and the record filled when it was built.
    """
    import datasets
    import pyarrow as pa
    from filelock import FileLock

    schema = features.arrow_schema
    text = json.dumps({"format": FORMAT, "schema": str(schema), **key}, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    stem = f"{kind}-{digest[:24]}"
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "xcompat"
    folder.mkdir(parents=True, exist_ok=True)
    arrow_file, record_file = folder / f"{stem}.arrow", folder / f"{stem}.json"
    with FileLock(str(folder / f"{stem}.lock")):
        if not arrow_file.exists():
            record: dict[str, Any] = {}
            with atomic_path(arrow_file) as temporary:
                with pa.OSFile(str(temporary), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
                    for batch in build(record):
                        writer.write_batch(batch)
                write_json(record_file, record)  # before the data takes its place: data without record is never seen
    dataset = datasets.Dataset.from_file(str(arrow_file))
    dataset._fingerprint = digest  # of the source, so that what is keyed by it outlives a rebuilt cache
    return dataset, read_json(record_file)


def rows_to_batches(rows: Iterable[Mapping[str, Any]], schema: pa.Schema, batch_size: int = 256) -> Iterator[pa.RecordBatch]:
    """Pack rows into Arrow record batches.

    Args:
        rows: mappings from column to value.
        schema: the columns and their types.
        batch_size: rows in a batch; images of some megabytes must stay under Arrow's 2 GB a column.

    Yields:
        Record batches, the last one possibly shorter.
    """
    import pyarrow as pa

    pending: list[Mapping[str, Any]] = []
    for row in rows:
        pending.append(row)
        if len(pending) == batch_size:
            yield pa.RecordBatch.from_pylist(pending, schema=schema)
            pending = []
    if pending:
        yield pa.RecordBatch.from_pylist(pending, schema=schema)


def strings_digest(values: Sequence[str]) -> str:
    """Hash a list of strings, independent of their order.

    Args:
        values: any strings.

    Returns:
        64 hexadecimal digits.
    """
    digest = hashlib.sha256()
    for value in sorted(values):
        digest.update(value.encode() + b"\0")
    return digest.hexdigest()
