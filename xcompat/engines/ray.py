"""Engine for Ray actors, on a single machine or a cluster."""

from __future__ import annotations

import json
import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from importlib import import_module
from typing import Any, Self

from xcompat.core.errors import XcompatError, describe_error
from xcompat.core.parallel import Block, Kept, Result, call_or_error, unwrap
from xcompat.engines.models import NamedModel
from xcompat.engines.partitions import Job, PartResult
from xcompat.engines.sources import Part


def run(job: Job, parts: Sequence[Part], workers: int | None = None, gpus: float | None = None) -> Iterator[PartResult]:
    """Make the files of parts.

    Uses the cluster at ``RAY_ADDRESS`` or on this machine, else starts one. Ray restarts dead workers with their parts.

    Args:
        job: makes one file.
        parts: parts to make.
        workers: actors, default 1 per GPU, else per core.
        gpus: GPUs per actor, default 1 if available.

    Yields:
        Results in any order.

    Raises:
        XcompatError: Ray is not installed, or GPUs are missing.
    """
    with _cluster("Ray Data", "ray.data") as there:
        count, gpus = _spread(there, workers, gpus)
        yield from _run(job, parts, min(count, len(parts)), gpus)


class Pool:
    """Actors that apply a model to blocks in order. Use it in a ``with`` block.

    Args:
        model: loaded by each actor.
        workers: actors, default 1 per GPU, else per core.
        gpus: GPUs per actor, default 1 if available.

    Raises:
        XcompatError: Ray is not installed, or GPUs are missing.
    """

    def __init__(self, model: NamedModel, workers: int | None = None, gpus: float | None = None) -> None:
        self.model, self.wanted = model, (workers, gpus)
        self.ends, self.actors = ExitStack(), list[Any]()

    def __enter__(self) -> Self:
        there = self.ends.enter_context(_cluster("Ray", "ray"))
        try:
            self.count, self.gpus = _spread(there, *self.wanted)
        except XcompatError:
            self.ends.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        import ray

        for actor in self.actors:
            ray.kill(actor)
        self.ends.close()

    def __call__(
        self, function: Callable[[Any, Block], Result], model: object, blocks: Iterable[tuple[Kept, Block]]
    ) -> Iterator[tuple[Kept, Result]]:
        """Run blocks, two per actor at a time. Ray restarts dead actors with their blocks."""
        import ray

        under_way: deque[tuple[Kept, Any]] = deque()
        try:
            for number, (kept, block) in enumerate(blocks):
                if number % self.count == len(self.actors):
                    self.actors.append(self._actor())
                if len(under_way) == 2 * self.count:
                    before, made = under_way.popleft()
                    yield before, unwrap(ray.get(made))
                under_way.append((kept, self.actors[number % self.count].make.remote(function, block)))
            while under_way:
                kept, made = under_way.popleft()
                yield kept, unwrap(ray.get(made))
        except ray.exceptions.RayError as error:
            raise XcompatError(f"a Ray worker died ({describe_error(error)}); run the command again to continue") from error

    def _actor(self) -> object:
        import ray

        worker = ray.remote(_Worker).options(num_cpus=1, num_gpus=self.gpus, max_restarts=-1, max_task_retries=-1)
        return worker.remote(self.model)


class _Worker:
    """Loads the model with its first block."""

    def __init__(self, model: NamedModel) -> None:
        self.model = model

    def make(self, function: Callable[[Any, Block], Result], block: Block) -> Result | XcompatError:
        """Return the result or the error."""
        return call_or_error(lambda named, given: function(named.load(), given), self.model, block)


@contextmanager
def _cluster(name: str, module: str) -> Iterator[dict[str, float]]:
    """Connect to a cluster or start a new cluster, and yield its resources."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no telemetry unless the user enables it
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # it logs actor restarts as errors
    try:
        import ray

        import_module(module)
    except ImportError:
        raise XcompatError(
            f'--engine ray needs {name}; install it with `pip install -e ".[ray]"` in a clone of xcompat'
        ) from None
    begun = not ray.is_initialized()
    if begun:
        ray.init(include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
    try:
        yield ray.cluster_resources()
    finally:
        if begun:
            ray.shutdown()


def _spread(there: dict[str, float], workers: int | None, gpus: float | None) -> tuple[int, float]:
    """Return the number of actors and the GPUs per actor."""
    of_all = there.get("GPU", 0.0)
    gpus = gpus if gpus is not None else min(of_all, 1.0)
    most = int(of_all / gpus) if gpus else int(there.get("CPU", 1.0))
    if most < (workers or 1):
        what = f"{of_all:g} GPUs" if gpus else f"{most} cores"
        raise XcompatError(f"Ray has {what}, too few for {workers or 1} workers; lower --workers or --gpus-per-worker")
    return workers or most, gpus


def _run(job: Job, parts: Sequence[Part], count: int, gpus: float) -> Iterator[PartResult]:
    import ray.data
    from ray.data import ActorPoolStrategy, DataContext

    logging.getLogger("ray.data").setLevel(logging.ERROR)
    context = DataContext.get_current()
    context.enable_progress_bars = False

    class Worker:
        """Loads the model with its first part."""

        def __call__(self, rows: dict[str, Any]) -> dict[str, Any]:
            return {"done": [job.answer(each) for each in rows["part"]]}

    told = ray.data.from_items([{"part": json.dumps(asdict(part))} for part in parts], override_num_blocks=len(parts))
    pool = ActorPoolStrategy(size=count, max_tasks_in_flight_per_actor=2)
    made = told.map_batches(Worker, batch_size=1, compute=pool, num_cpus=1, num_gpus=gpus)
    for row in made.iter_rows():
        yield PartResult(**json.loads(row["done"]))
