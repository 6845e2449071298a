"""Ordered processing of blocks with a model, in this process or on all processes from a launcher."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, Protocol, TypeVar

from xcompat.core.distributed import is_main_process, process_state, world_size
from xcompat.core.errors import XcompatError
from xcompat.core.lazy import dist

Kept = TypeVar("Kept")
Model = TypeVar("Model")
Block = TypeVar("Block")
Result = TypeVar("Result")


class Executor(Protocol):
    """Function that applies a model to blocks in this process (:func:`run_locally`) or on workers with their own model copies."""

    def __call__(
        self, function: Callable[[Model, Block], Result], model: Model, blocks: Iterable[tuple[Kept, Block]]
    ) -> Iterator[tuple[Kept, Result]]:
        """Apply a function to a model and each block.

        Args:
            function: module-level function, which pickles by name.
            model: this process's model. A worker passes its own copy.
            blocks: pairs: a local value, and the block to send. Few are read ahead of their results.

        Yields:
            The local value and the result, in order.

        Raises:
            XcompatError: the function rejected a block, or a worker the model.
        """


def run_locally(
    function: Callable[[Model, Block], Result], model: Model, blocks: Iterable[tuple[Kept, Block]]
) -> Iterator[tuple[Kept, Result]]:
    """Apply a model to blocks sequentially in this process (see :class:`Executor`).

    Example:
        >>> list(run_locally(lambda model, block: model * block, 3, [("a", 1), ("b", 2)]))
        [('a', 3), ('b', 6)]
    """
    for kept, block in blocks:
        yield kept, function(model, block)


def run_across_ranks(work: Callable[[Executor], None], model: object) -> None:
    """Run work on the first process, which distributes its blocks over all processes. Every process must call this.

    Args:
        work: receives the :class:`Executor` for its blocks.
        model: the same model on each process.

    Raises:
        XcompatError: raised by the work.
    """
    process_state()
    if world_size() == 1:
        work(run_locally)
    elif not is_main_process():
        _follow(model)
    else:
        try:
            work(_run_on_ranks)
        finally:
            _scatter_from_main([None] * world_size())


def call_or_error(function: Callable[[Model, Block], Result], model: Model, block: Block) -> Result | XcompatError:
    """Apply a function, and return an :class:`XcompatError` instead of raising it, as launchers and engines wrap errors."""
    try:
        return function(model, block)
    except XcompatError as error:
        return error


def unwrap(answer: Result | XcompatError) -> Result:
    """Return a result of :func:`call_or_error`, or raise its error."""
    if isinstance(answer, XcompatError):
        raise answer
    return answer


def _run_on_ranks(
    function: Callable[[Model, Block], Result], model: Model, blocks: Iterable[tuple[Kept, Block]]
) -> Iterator[tuple[Kept, Result]]:
    """Send a block to each process and wait for all results, round by round."""
    coming = iter(blocks)
    while dealt := list(islice(coming, world_size())):
        mine = _scatter_from_main([(function, *block) for _, *block in dealt] + [()] * (world_size() - len(dealt)))
        answers = _gather_to_main(call_or_error(mine[0], model, mine[1]))
        for (kept, _), answer in zip(dealt, answers, strict=False):  # at the end, some have no block
            yield kept, unwrap(answer)


def _follow(model: object) -> None:
    while (given := _scatter_from_main([])) is not None:
        _gather_to_main(call_or_error(given[0], model, given[1]) if given else None)


def _scatter_from_main(each: list[Any]) -> Any:  # noqa: ANN401
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, each if is_main_process() else None, src=0)
    return mine[0]


def _gather_to_main(mine: object) -> list[Any]:
    gathered: list[Any] | None = [None] * dist.get_world_size() if is_main_process() else None
    dist.gather_object(mine, gathered, dst=0)
    return gathered or []
