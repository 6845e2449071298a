"""Parts made by a pool of Ray's actors, on one machine or on a cluster."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from xcompat.engines.parts import Done, Job, Part
from xcompat.errors import XcompatError


def run(job: Job, parts: Sequence[Part], workers: int | None = None, gpus: float | None = None) -> Iterator[Done]:
    """Make files of parts.

    A cluster is found as Ray finds it (``RAY_ADDRESS``, or one that runs on this machine); else a local one is started. A worker
    that dies is started again, and its part with it.

    Args:
        job: makes a file of a part.
        parts: the work.
        workers: number of actors; one for each GPU, or else for each core, unless given.
        gpus: of each actor; 1 where there are any, unless given.

    Yields:
        What became of each part, in any order.

    Raises:
        XcompatError: Ray is not installed, or has not enough GPUs.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is told to anybody unless the user says so
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # it calls an error that it would start actors again
    try:
        import ray
        import ray.data
    except ImportError:
        raise XcompatError("--engine ray needs Ray Data: pip install 'xcompat[ray]'") from None
    begun = not ray.is_initialized()
    if begun:
        ray.init(include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
    try:
        count, gpus = _spread(ray.cluster_resources(), workers, gpus)
        yield from _run(job, parts, min(count, len(parts)), gpus)
    finally:
        if begun:
            ray.shutdown()


def _spread(there: dict[str, float], workers: int | None, gpus: float | None) -> tuple[int, float]:
    """Return how many actors there are, and the GPUs of each."""
    of_all = there.get("GPU", 0.0)
    gpus = gpus if gpus is not None else min(of_all, 1.0)
    most = int(of_all / gpus) if gpus else int(there.get("CPU", 1.0))
    if most < (workers or 1):
        what = f"{of_all:g} GPUs" if gpus else f"{most} cores"
        raise XcompatError(f"Ray has {what}, too few for {workers or 1} workers; lower --workers or --gpus-per-worker")
    return workers or most, gpus


def _run(job: Job, parts: Sequence[Part], count: int, gpus: float) -> Iterator[Done]:
    import ray.data
    from ray.data import ActorPoolStrategy, DataContext

    logging.getLogger("ray.data").setLevel(logging.ERROR)
    context = DataContext.get_current()
    context.enable_progress_bars = False

    class Worker:
        """Makes the file of one part at a time; the model is loaded with the first."""

        def __call__(self, rows: dict[str, Any]) -> dict[str, Any]:
            return {"done": [job.answer(each) for each in rows["part"]]}

    told = ray.data.from_items([{"part": json.dumps(asdict(part))} for part in parts], override_num_blocks=len(parts))
    pool = ActorPoolStrategy(size=count, max_tasks_in_flight_per_actor=2)
    made = told.map_batches(Worker, batch_size=1, compute=pool, num_cpus=1, num_gpus=gpus)
    for row in made.iter_rows():
        yield Done(**json.loads(row["done"]))
