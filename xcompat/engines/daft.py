"""Engine for Daft processes, on a single machine or with Ray on a cluster."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch

from xcompat.core.errors import XcompatError, describe_error
from xcompat.core.threads import usable_cores
from xcompat.engines.partitions import Job, PartResult
from xcompat.engines.sources import Part


def run(job: Job, parts: Sequence[Part], workers: int | None = None, gpus: float | None = None) -> Iterator[PartResult]:
    """Make the files of parts.

    Args:
        job: makes one file.
        parts: parts to make.
        workers: processes, default 1 per GPU of this machine, else per core.
        gpus: GPUs per process, default 1 if available.

    Yields:
        Results in any order.

    Raises:
        XcompatError: Daft is not installed, GPUs are missing, or a worker died.
    """
    os.environ.setdefault("DAFT_ANALYTICS_ENABLED", "0")  # no telemetry unless the user enables it
    try:
        import daft
        from daft.runners import get_or_infer_runner_type
    except ImportError:
        raise XcompatError('--engine daft needs Daft; install it with `pip install -e ".[daft]"` in a clone of xcompat') from None
    there = torch.cuda.device_count()
    gpus = gpus if gpus is not None else min(there, 1)
    most = int(there / gpus) if gpus else usable_cores()
    if gpus and most < (workers or 1) and (workers is None or get_or_infer_runner_type() != "ray"):  # a cluster has its own GPUs
        raise XcompatError(
            f"this machine has {there} GPUs, too few for {workers or 1} workers with {gpus:g} each; lower --workers or "
            "--gpus-per-worker, or set --workers and DAFT_RUNNER=ray for a cluster"
        )
    count = min(workers or most, len(parts))
    threads = max(1, min(usable_cores() // count, torch.get_num_threads()))  # not more than OMP_NUM_THREADS allows

    @daft.cls(use_process=True, max_concurrency=count, gpus=gpus)
    class Worker:
        """Loads the model with its first part."""

        def __init__(self) -> None:
            torch.set_num_threads(threads)

        @daft.method.batch(return_dtype=daft.DataType.string(), batch_size=1)
        def make(self, told: daft.Series) -> list[str]:
            return [job.answer(each) for each in told.to_pylist()]

    told = daft.from_pydict({"part": [json.dumps(asdict(part)) for part in parts]})
    worker: Any = Worker()  # its methods work on expressions
    try:
        for row in told.select(worker.make(daft.col("part")).alias("done")).iter_rows():
            yield PartResult(**json.loads(row["done"]))
    except RuntimeError as error:
        raise XcompatError(f"a Daft worker died ({describe_error(error)}); run the command again to continue") from error
