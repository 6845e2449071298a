"""Implementation of ``xcompat embed SOURCE``, with its console output."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from rich.filesize import decimal

from xcompat.core.checksums import json_digest
from xcompat.core.distributed import (
    barrier,
    from_main_process,
    gather_objects,
    is_main_process,
    process_state,
    rank,
    world_size,
)
from xcompat.core.errors import XcompatError, without_secrets
from xcompat.core.files import clear_leftovers
from xcompat.core.orientation import ORIENTATION
from xcompat.core.progress import advance_bar, console, literal, notice, progress_bar, silence_libraries
from xcompat.core.threads import map_in_threads
from xcompat.data.schema import IMAGE_COLUMNS, TEXT, pick_column
from xcompat.engines.filesystems import (
    PLAN,
    is_local,
    names_in,
    open_file,
    path_in,
    require_outside,
    resolve_filesystem,
    write_to,
)
from xcompat.engines.parquet import FOOTERS_AT_ONCE, ParquetFiles
from xcompat.engines.partitions import Job
from xcompat.engines.source_types import read_source
from xcompat.engines.sources import Part, Source
from xcompat.engines.tables import Dtype, Reads, TableModel, kind_of
from xcompat.engines.workers import Workers
from xcompat.vectors.formats import EMBEDDING_COLUMNS, ID_COLUMNS, PARQUET

MOST_UNREAD = 0.01
"""Maximum share of unreadable images."""


class _ResumeState(NamedTuple):
    """Parts to make, the number of images missing from the others, and an example id."""

    todo: list[Part]
    unread: int
    example: str | None


def embed(
    uri: str,
    model: str,
    out: str,
    workers: Workers,
    column: str | None = None,
    id_column: str | None = None,
    dtype: Dtype = "float32",
) -> None:
    """Map or embed a table column into Parquet files. Another run continues.

    Args:
        uri: Parquet files or folder, Lance table, Iceberg metadata, or any other place with vectors.
        model: run folder, checkpoint or model name.
        out: output folder. Existing files stay.
        workers: where to compute.
        column: input column, found by its name by default.
        id_column: id column, default the first of :data:`~xcompat.vectors.formats.ID_COLUMNS`.
        dtype: dtype of the new vectors.

    Raises:
        XcompatError: an input is missing or does not fit, or the folder has other content.
    """
    process_state()
    silence_libraries()
    source = read_source(uri, id_column, column)
    if isinstance(source.reader, ParquetFiles):  # each Lance version lists its files
        require_outside(out, source.uri)
    column, reads = _column(source, column)
    usual = tuple(name for name in ID_COLUMNS if name != column)
    id_column = pick_column(id_column, usual, source.schema.names, "--id-column", uri)
    if id_column == column:
        raise XcompatError(f"--column and --id-column both name {column!r}; choose two different columns")
    job = _job(source, TableModel.open(model, reads, column, dtype), out, id_column)
    found = from_main_process(lambda: _inspect_parts(job, source.parts))
    started = time.perf_counter()
    unread = _make(job, source, found, workers)
    if is_main_process():
        _tell(job, source, source.rows - unread, sum(part.rows for part in found.todo), time.perf_counter() - started)


def _column(source: Source, given: str | None) -> tuple[str, Reads]:
    """Return the input column and its kind: lists are vectors, bytes are images, strings are texts or paths."""
    names = source.schema.names
    if given is None:
        usual = [next((name for name in known if name in names), None) for known in (EMBEDDING_COLUMNS, (TEXT,), IMAGE_COLUMNS)]
        found = [name for name in usual if name is not None]
        if len(found) > 1:
            raise XcompatError(f"{source.uri} has {' and '.join(map(repr, found))}; choose one with --column")
        given = found[0] if found else None
    column = pick_column(given, (EMBEDDING_COLUMNS[0], TEXT), names, "--column", source.uri)
    kind = kind_of(source.schema.field(column).type)
    if kind == "other":
        found_type = source.schema.field(column).type
        raise XcompatError(f"column {column!r} of {source.uri} is {found_type}; choose a column of vectors, texts or images")
    is_vector = kind == "vector" or (kind == "text" and column in EMBEDDING_COLUMNS)  # numbers in brackets, or base64
    reads: Reads = "vectors" if is_vector else "images" if kind == "image" or column in IMAGE_COLUMNS else "texts"
    return column, reads


def _job(source: Source, model: TableModel, out: str, id_column: str) -> Job:
    """Write the plan, or raise if the folder has other content."""
    system, path = resolve_filesystem(out)
    plan: dict[str, Any] = {
        "files": source.digest,
        "rows": source.rows,
        "parts": len(source.parts),
        "column": model.column,
        "id_column": id_column,
        "fingerprint": model.made.digest,
        "dtype": model.dtype,
    }
    if model.reads == "images":
        plan["orientation"] = ORIENTATION
    names = names_in(out)
    if PLAN in names:
        with open_file(out, path_in(out, PLAN)) as file:
            _require_same(out, file.read(), plan, source.uri)
    elif names:
        raise XcompatError(f"{out} contains {names[0]}, not written by `xcompat embed`; choose another folder")
    barrier()
    if is_main_process():
        if is_local(system):
            clear_leftovers(Path(path))
        if PLAN not in names:
            system.create_dir(path, recursive=True)
            about = {"source": without_secrets(source.uri), "model": model.made.name}
            with write_to(out, PLAN) as file:
                file.write(json.dumps(plan | about, indent=2).encode() + b"\n")
    barrier()
    digest = json_digest(plan)
    return Job(model, source.reader, out if "://" in out else path, id_column, digest)


def _require_same(out: str, written: bytes, plan: dict[str, object], uri: str) -> None:
    try:
        begun = json.loads(written)
        different = [key for key in plan if begun.get(key) != plan[key]]
        of = without_secrets(begun["source"])  # older releases stored it unmasked
    except (ValueError, TypeError, KeyError, AttributeError):
        raise XcompatError(f"{out} contains a {PLAN} not written by `xcompat embed`; choose another folder") from None
    if different:
        key = different[0]
        if key == "files" and of != without_secrets(uri):
            raise XcompatError(
                f"{out} was started with {of}, not {uri}; use the same input to continue, or choose another folder"
            )
        if key == "files":  # a digest does not help the reader
            raise XcompatError(f"{uri} has changed since {out} was started; choose another folder")
        raise XcompatError(
            f"{out} was started with another {key.replace('_', ' ')} ({begun[key]!r}, now {plan[key]!r}); choose another folder"
        )


def _inspect_parts(job: Job, parts: list[Part]) -> _ResumeState:
    """Check existing files, and raise if readers would take another file for a part.

    Missing and damaged parts are made, and parts with a skipped image that is readable now. Other incomplete parts stay, or
    a gallery with scattered damaged images would start over on every run.
    """
    there = set(names_in(job.out))
    for name in sorted(there - {part.name for part in parts}):
        if name.endswith(PARQUET) and not name.startswith("_"):
            raise XcompatError(
                f"{path_in(job.out, name)} is not a part of this `xcompat embed` run; move it, then run the command again"
            )
    made = [part for part in parts if part.name in there]
    todo, unread, example = [part for part in parts if part.name not in there], 0, None
    for part, written in zip(made, map_in_threads(job.inspect_part, made, FOOTERS_AT_ONCE), strict=True):
        if written is None:
            raise XcompatError(
                f"{path_in(job.out, part.name)} was not written by this `xcompat embed` run; move it, then run the command again"
            )
        if written.damage is not None:
            notice(f"{path_in(job.out, part.name)} {written.damage}; writing this part again")
        if written.can_grow:
            todo.append(part)
        else:
            unread, example = unread + written.unread, example or written.example
    return _ResumeState(sorted(todo, key=lambda part: part.number), unread, example)


def _make(job: Job, source: Source, found: _ResumeState, workers: Workers) -> int:
    """Make the parts, and return the number of skipped images."""
    parts = found.todo[rank() :: world_size()]
    unread, cut, example = 0, 0, found.example
    failed = _too_many(found.unread, source, example)
    if parts and failed is None:
        with progress_bar() as bar:
            total = sum(part.rows for part in parts)
            task = bar.add_task(f"{job.model.reads} through {job.model.made.name}", total=total, unit="rows")
            for done in workers.run(job, parts):
                advance_bar(bar, task, done.rows)
                unread, cut, example = unread + done.unread, cut + done.cut, example or done.example
                failed = done.error or _too_many(found.unread + unread, source, example)
                if failed is not None:
                    break
    failures = list(_share_items([failed]))
    unread, cut = (sum(_share_items([count])) for count in (unread, cut))
    unread, example = unread + found.unread, next(filter(None, _share_items([example])), None)
    for failure in (*failures, _too_many(unread, source, example)):  # per process, then in total
        if failure is not None:
            raise XcompatError(f"{failure}; finished parts are kept, run the command again to continue")
    if unread:
        notice(f"skipped {unread:,} of {source.rows:,} images that cannot be read, e.g. {example!r}")
    if cut:
        notice(f"truncated {cut:,} of {source.rows:,} texts to the maximum length of {job.model.made.name}")
    return unread


def _too_many(unread: int, source: Source, example: str | None) -> str | None:
    """Return an error message if too many images are unreadable."""
    if unread <= MOST_UNREAD * source.rows:
        return None
    return f"{unread:,} of {source.rows:,} images cannot be read, e.g. {example!r}; fix or remove them"


def _share_items(mine: list[Any]) -> Iterable[Any]:
    return (each for of_rank in gather_objects(mine, shared=True) for each in of_rank)


def _tell(job: Job, source: Source, rows: int, made: int, seconds: float) -> None:
    size = rows * job.model.dim * (4 if job.model.dtype == "float32" else 2)
    what = f"{without_secrets(job.out)} holds {rows:,} embeddings of {job.model.made.name} in {len(source.parts):,} files"
    now = f"{made:,} computed in {seconds:.1f} s, {made / max(seconds, 1e-9):,.0f} rows/s" if made else "nothing to do"
    console.print(
        f"[green]✓[/] {literal(what)} [dim]({job.model.dim} of {job.model.dtype}, {decimal(size)}; {now})[/]", soft_wrap=True
    )
