"""Mapping Parquet to Parquet, in one process and by Ray's and Daft's workers, against the bare map of the same rows in memory.

    python benchmarks/speed/engines.py [--items 100000] [--workers 1] [--most 400000]

FCT's transformation h of 128 to 128 dimensions with random weights, or a solved linear map of that size. All sides have the same
cores: a thread of the bare map for each worker. A rate counts from the first finished file to the last; the
seconds until the first are told apart: they are an engine's start, which a long run pays once.
"""

from __future__ import annotations

import functools
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from gallery_upgrade import BATCH, DIM, alone, fct, ridge
from measuring import KEPT, Row, in_fresh_process, main, not_installed, peak_memory, timed

from xcompat.core.errors import XcompatError
from xcompat.core.progress import silence_libraries
from xcompat.engines import TableModel, sources
from xcompat.engines.commands import Workers
from xcompat.engines.partitions import Job
from xcompat.engines.source_types import read_source
from xcompat.engines.sources import Source
from xcompat.models import CompatModel
from xcompat.models.embedder import load_checkpoint

MAPS = {"fct": fct, "ridge": ridge}
FILES = 4


def write(folder: Path, items: int) -> Path:
    """Write random unit vectors as four files."""
    folder.mkdir(parents=True)
    draw = np.random.default_rng(0)
    for file in range(FILES):
        rows = draw.standard_normal((items // FILES, DIM), np.float32)
        rows /= np.linalg.norm(rows, axis=1, keepdims=True)
        vectors = pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), DIM)
        table = pa.table({"id": [f"{file}-{row}" for row in range(len(rows))], "embedding": vectors})
        pq.write_table(table, folder / f"{file}.parquet", row_group_size=BATCH)
    return folder


def job_of(model: Path, source: Source, out: Path) -> Job:
    """Return what maps the vectors."""
    out.mkdir(exist_ok=True)
    return Job(TableModel.open(str(model), "vectors"), source.reader, str(out), "id", "a benchmark")


def finished(workers: Workers, job: Job, source: Source) -> Iterator[tuple[float, int]]:
    """Yield the time and the rows of each file that is finished."""
    for done in workers.run(job, source.parts):
        assert done.error is None, done.error
        yield time.perf_counter(), done.rows


def timed_alone(model: CompatModel, embeds_ND: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Map what is in memory, and say in how many seconds."""
    started = time.perf_counter()
    return alone(model, embeds_ND), time.perf_counter() - started


def in_one_process(model: Path, items: Path, out: Path) -> None:
    """Map all, for a fresh process whose memory is looked at."""
    source = read_source(str(items))
    list(Workers().run(job_of(model, source, out), source.parts))


def peak(model: Path, items: Path, out: Path) -> int:
    """Return the rise of memory at its peak."""
    return peak_memory(functools.partial(in_one_process, model, items, out))


def measure(items: int = 100_000, workers: int = 1, most: int = 400_000) -> list[Row]:
    """Measure both maps by all engines, and the memory of one process on ``items`` and ``most`` rows."""
    silence_libraries()
    torch.set_num_threads(workers)
    sources.PART_ROWS = min(sources.PART_ROWS, max(BATCH, items // 16))  # many files for each worker
    rows = []
    KEPT.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=KEPT.resolve()) as name:
        folder = Path(name)
        source = read_source(str(write(folder / "items", items)))
        embeds_ND = torch.from_numpy(np.stack(pq.read_table(source.uri)["embedding"].to_numpy()))
        for map_name, make in MAPS.items():
            make().eval().save_pretrained(folder / map_name)
            model = load_checkpoint(str(folder / map_name))
            truth, bare = timed_alone(model, embeds_ND)
            for engine in (None, "ray", "daft"):
                out = folder / f"{map_name}-{engine}"
                what = f"{map_name}, {items:,} x {DIM}, Parquet to Parquet by {engine or 'one process'}"
                bound = ">= 0.8" if map_name == "fct" else ""
                begun = time.perf_counter()
                try:
                    asked = Workers(engine, workers if engine else None)
                    times = list(finished(asked, job_of(folder / map_name, source, out), source))
                except XcompatError:
                    rows.append(not_installed(what, "the bare map, in memory", bound, f"xcompat[{engine}]"))
                    continue
                found = torch.from_numpy(np.stack(pq.read_table(out)["embedding"].to_numpy()))
                torch.testing.assert_close(found, truth, atol=1e-5, rtol=0)
                took = (times[-1][0] - times[0][0]) * items / sum(count for _, count in times[1:])
                before, bare = bare, timed_alone(model, embeds_ND)[1]  # other load of the machine hits both
                note = f"{items / took:,.0f} rows/s; the first file after {times[0][0] - begun:.1f} s"
                rows.append(timed(what, "the bare map, in memory", bound, took, (before + bare) / 2, note))
                shutil.rmtree(out)
        for count in (items, most):
            used = in_fresh_process(peak, folder / "fct", write(folder / f"items-{count}", count), folder / f"out-{count}")
            rows.append(Row(f"memory of one process, {count:,} x {DIM}", "", None, "", f"{used / 2**20:,.0f} MiB at its peak"))
    return rows


if __name__ == "__main__":
    main(measure)
