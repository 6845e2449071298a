"""Parts made by a pool of Daft's processes, on one machine or, through its runner for Ray, on a cluster."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from xcompat.core.errors import XcompatError, what_failed
from xcompat.core.threads import usable_cores
from xcompat.engines.parts import Done, Job
from xcompat.engines.sources import Part


def run(job: Job, parts: Sequence[Part], workers: int | None = None, gpus: float | None = None) -> Iterator[Done]:
    """Make files of parts.

    Args:
        job: makes a file of a part.
        parts: the work.
        workers: number of processes; one for each GPU of this machine, or else for each core, unless given.
        gpus: of each process; 1 where there are any, unless given.

    Yields:
        What became of each part, in any order.

    Raises:
        XcompatError: Daft is not installed, this machine has not enough GPUs, or a worker died.
    """
    os.environ.setdefault("DAFT_ANALYTICS_ENABLED", "0")  # nothing is told to anybody unless the user says so
    try:
        import daft
        from daft.runners import get_or_infer_runner_type
    except ImportError:
        raise XcompatError("--engine daft needs Daft: pip install 'xcompat[daft]'") from None
    import torch

    there = torch.cuda.device_count()
    gpus = gpus if gpus is not None else min(there, 1)
    most = int(there / gpus) if gpus else usable_cores()
    if gpus and most < (workers or 1) and (workers is None or get_or_infer_runner_type() != "ray"):  # whose GPUs are elsewhere
        raise XcompatError(
            f"this machine has {there} GPUs, too few for {workers or 1} workers with {gpus:g} each; lower --workers or "
            "--gpus-per-worker, or say --workers for a cluster with DAFT_RUNNER=ray"
        )
    count = min(workers or most, len(parts))
    threads = max(1, usable_cores() // count)

    @daft.cls(use_process=True, max_concurrency=count, gpus=gpus)
    class Worker:
        """Makes the file of one part at a time; the model is loaded with the first."""

        def __init__(self) -> None:
            torch.set_num_threads(threads)

        @daft.method.batch(return_dtype=daft.DataType.string(), batch_size=1)
        def make(self, told: daft.Series) -> list[str]:
            return [job.answer(each) for each in told.to_pylist()]

    told = daft.from_pydict({"part": [json.dumps(asdict(part)) for part in parts]})
    worker: Any = Worker()  # whose methods take and give expressions
    try:
        for row in told.select(worker.make(daft.col("part")).alias("done")).iter_rows():
            yield Done(**json.loads(row["done"]))
    except RuntimeError as error:
        raise XcompatError(f"a worker of Daft ended ({what_failed(error)}); start again to continue") from error
