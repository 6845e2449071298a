"""Blocks through a model in order, while few of them are in memory: in this process, or by all those of a launcher."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, Protocol, TypeVar

from xcompat.core.distributed import is_main_process, process_state, world_size
from xcompat.core.errors import XcompatError

Kept = TypeVar("Kept")
Model = TypeVar("Model")
Block = TypeVar("Block")
Result = TypeVar("Result")


class Spread(Protocol):
    """Puts blocks through a model, wherever that is: :func:`here`, or on workers, which have copies of their own."""

    def __call__(
        self, function: Callable[[Model, Block], Result], model: Model, blocks: Iterable[tuple[Kept, Block]]
    ) -> Iterator[tuple[Kept, Result]]:
        """Apply a function to a model and each block.

        Args:
            function: of a module, so that it pickles as its name.
            model: this process's; a worker gives its own to the function.
            blocks: what is kept here of each, and what is sent; of these few are taken before their results are.

        Yields:
            What was kept, and the result, in the order of the blocks.

        Raises:
            XcompatError: the function refused a block, or a worker the model.
        """


def here(
    function: Callable[[Model, Block], Result], model: Model, blocks: Iterable[tuple[Kept, Block]]
) -> Iterator[tuple[Kept, Result]]:
    """Put blocks through a model in this process, one after the other; see :class:`Spread`.

    Example:
        >>> list(here(lambda model, block: model * block, 3, [("a", 1), ("b", 2)]))
        [('a', 3), ('b', 6)]
    """
    for kept, block in blocks:
        yield kept, function(model, block)


def led(work: Callable[[Spread], None], model: object) -> None:
    """Do work on the first process, whose blocks go to all processes of a launcher; all of them call this.

    Args:
        work: takes what spreads its blocks.
        model: the same on each process: what the blocks go through.

    Raises:
        XcompatError: the work did.
    """
    process_state()
    if world_size() == 1:
        work(here)
    elif not is_main_process():
        _follow(model)
    else:
        try:
            work(_over_ranks)
        finally:
            _sent([None] * world_size())


def answered(function: Callable[[Model, Block], Result], model: Model, block: Block) -> Result | XcompatError:
    """Apply a function; an error that people can mend is returned, as launchers and engines end or wrap what is raised."""
    try:
        return function(model, block)
    except XcompatError as error:
        return error


def taken(answer: Result | XcompatError) -> Result:
    """Return what :func:`answered` made, or raise its error."""
    if isinstance(answer, XcompatError):
        raise answer
    return answer


def _over_ranks(
    function: Callable[[Model, Block], Result], model: Model, blocks: Iterable[tuple[Kept, Block]]
) -> Iterator[tuple[Kept, Result]]:
    """Send a block to each process and wait for all results, time after time; see :class:`Spread`."""
    coming = iter(blocks)
    while dealt := list(islice(coming, world_size())):
        mine = _sent([(function, *block) for _, *block in dealt] + [()] * (world_size() - len(dealt)))
        answers = _received(answered(mine[0], model, mine[1]))
        for (kept, _), answer in zip(dealt, answers, strict=False):  # at the end, some have no block
            yield kept, taken(answer)


def _follow(model: object) -> None:
    """Apply what the first process sends to this one, until it sends the end."""
    while (given := _sent([])) is not None:
        _received(answered(given[0], model, given[1]) if given else None)


def _sent(each: list[Any]) -> Any:  # noqa: ANN401
    """Return this process's part of what the first one sends."""
    import torch.distributed as dist

    mine: list[Any] = [None]
    dist.scatter_object_list(mine, each if is_main_process() else None, src=0)
    return mine[0]


def _received(mine: Any) -> list[Any]:  # noqa: ANN401
    """Return, on the first process, what all of them give."""
    import torch.distributed as dist

    gathered: list[Any] | None = [None] * dist.get_world_size() if is_main_process() else None
    dist.gather_object(mine, gathered, dst=0)
    return gathered or []
