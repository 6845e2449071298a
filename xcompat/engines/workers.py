"""Choice of the engine and its workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from xcompat.core.distributed import world_size
from xcompat.core.errors import XcompatError

if TYPE_CHECKING:
    from xcompat.core.parallel import Executor
    from xcompat.engines.partitions import Job, PartResult
    from xcompat.engines.sources import Part
    from xcompat.models.base import CompatModel
    from xcompat.models.embedder import Embedder

ENGINES = {"ray": "xcompat.engines.ray", "daft": "xcompat.engines.daft"}
"""Name -> module with ``run``."""


@dataclass(frozen=True)
class Workers:
    """Engine and its resources.

    Args:
        engine: name in :data:`ENGINES`, or None for this process or those of ``accelerate launch``.
        count: workers, default 1 per engine GPU, else per core.
        gpus: GPUs per worker, can be fractional. Default 1 if available.

    Raises:
        XcompatError: options need an engine, or a launcher has started processes too.
    """

    engine: str | None = None
    count: int | None = None
    gpus: float | None = None

    def __post_init__(self) -> None:
        if self.engine is None and (self.count is not None or self.gpus is not None):
            raise XcompatError("--workers and --gpus-per-worker need an engine; choose one with --engine")
        if self.engine is not None and world_size() > 1:
            raise XcompatError("--engine starts its own workers; use either accelerate launch or --engine")

    def run(self, job: Job, parts: Sequence[Part]) -> Iterator[PartResult]:
        """Make the files of parts, in any order."""
        if self.engine is None:
            return map(job, parts)
        run: Callable[..., Iterator[PartResult]] = import_module(ENGINES[self.engine]).run
        return run(job, parts, self.count, self.gpus)

    @contextmanager
    def pool(self, name: str, model: CompatModel | Embedder) -> Iterator[Executor | None]:
        """Start workers that apply a model to blocks.

        Args:
            name: name of the model.
            model: the model in this process.

        Yields:
            Executor for blocks, or None without an engine.

        Raises:
            XcompatError: the engine only supports files.
        """
        if self.engine is None:
            yield None
        elif self.engine != "ray":
            raise XcompatError(
                f"--engine {self.engine} only works with files, but this command reads and writes in a single process; "
                "use --engine ray or accelerate launch"
            )
        else:
            from xcompat.engines.models import NamedModel
            from xcompat.engines.ray import Pool

            with Pool(NamedModel.from_loaded(name, model), self.count, self.gpus) as pool:
                yield pool
