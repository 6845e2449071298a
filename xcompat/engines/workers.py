"""Which engine works, and with how many processes: on parts of files, or on blocks that one process reads and writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from xcompat.core.distributed import world_size
from xcompat.core.errors import XcompatError

if TYPE_CHECKING:
    from xcompat.core.parallel import Spread
    from xcompat.engines.parts import Done, Job
    from xcompat.engines.sources import Part
    from xcompat.models.base import CompatModel
    from xcompat.models.embedder import Embedder

ENGINES = {"ray": "xcompat.engines.ray", "daft": "xcompat.engines.daft"}
"""Name -> the module whose ``run`` spreads parts over workers."""


@dataclass(frozen=True)
class Workers:
    """Where the work is done.

    Args:
        engine: of :data:`ENGINES`; None for this process, or all those of ``accelerate launch``.
        count: how many processes; None for one for each GPU of the engine, or else for each core.
        gpus: of each process, which may be parts of one; None for 1 where there are any.

    Raises:
        XcompatError: there is no engine that this is of, or a launcher has started processes too.
    """

    engine: str | None = None
    count: int | None = None
    gpus: float | None = None

    def __post_init__(self) -> None:
        """Refuse what does not go together."""
        if self.engine is None and (self.count is not None or self.gpus is not None):
            raise XcompatError("--workers and --gpus-per-worker are of an engine: name one with --engine")
        if self.engine is not None and world_size() > 1:
            raise XcompatError("--engine has workers of its own: leave out accelerate launch, or --engine")

    def run(self, job: Job, parts: Sequence[Part]) -> Iterator[Done]:
        """Make files of parts, in any order."""
        if self.engine is None:
            return map(job, parts)
        run: Callable[..., Iterator[Done]] = import_module(ENGINES[self.engine]).run
        return run(job, parts, self.count, self.gpus)

    @contextmanager
    def pool(self, name: str, model: CompatModel | Embedder) -> Iterator[Spread | None]:
        """Start the engine's workers for blocks that go through a model.

        Args:
            name: by which they load it.
            model: what this process loaded by it.

        Yields:
            What spreads blocks over them; None without an engine.

        Raises:
            XcompatError: the engine takes files alone.
        """
        if self.engine is None:
            yield None
        elif self.engine != "ray":
            raise XcompatError(
                f"--engine {self.engine} makes files of files, and here one process reads and writes, in order: "
                "take --engine ray, or accelerate launch"
            )
        else:
            from xcompat.engines.models import NamedModel
            from xcompat.engines.ray import Pool

            with Pool(NamedModel.of(name, model), self.count, self.gpus) as pool:
                yield pool
