"""Progress on the main process only: a line per stage with its time, bars with rates, and notices about skipped samples."""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar, cast

from rich.console import Console, ConsoleDimensions
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    Task,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from typing_extensions import override

from xcompat.core.distributed import is_main_process
from xcompat.core.errors import visible, visible_line

T = TypeVar("T")
WIDE = 10_000
SECONDS = 10.0
"""Between two lines of progress where there is no terminal."""


class _Terminal(Console):
    """A console that wraps lines and tables at the edge of a terminal, and not where there is none: in files and pipes."""

    @property
    @override
    def size(self) -> ConsoleDimensions:
        if self.is_terminal or self.is_jupyter or "COLUMNS" in os.environ:
            return super().size
        return ConsoleDimensions(WIDE, super().size.height)

    @size.setter
    def size(self, new_size: tuple[int, int]) -> None:
        self.width, self.height = new_size


console: Console = _Terminal(quiet=not is_main_process(), highlight=False)


def literal(text: object) -> str:
    r"""Escape a text for rich: brackets are shown and not read as markup, control characters are spelled out.

    Args:
        text: a name, an id, a path, or any other text that a file or a stranger may have chosen.

    Example:
        >>> literal("[red]shoe")
        '\\[red]shoe'
    """
    shown = visible(str(text))
    before = shown.rstrip("\\")
    # rich reads backslashes before a tag as escapes: with an empty tag after them they are escapes, whatever text follows
    return escape(before) + ("\\" * 2 * (len(shown) - len(before)) + "[default][/]" if before != shown else "")


def snippet(text: object, longest: int = 80) -> str:
    r"""Return the beginning of a text as one line.

    Args:
        text: of any length.
        longest: most characters of the line.

    Example:
        >>> snippet("bears sleep\n in winter"), len(snippet("long " * 1000, 20))
        ('bears sleep in winter', 20)
    """
    line = " ".join(str(text).split())
    return line if len(line) <= longest else f"{line[: longest - 2].rstrip()} …"


@contextmanager
def results_on_stdout() -> Iterator[None]:
    """Show progress and notices on stderr, so that stdout holds nothing but results."""
    before, console.stderr = console.stderr, True
    try:
        yield
    finally:
        console.stderr = before


class _Console(logging.Handler):
    """Shows what the library logs as the command line shows its own lines."""

    @override
    def emit(self, record: logging.LogRecord) -> None:
        console.print(f"! {record.getMessage()}", style="yellow", markup=False, soft_wrap=True)


logger = logging.getLogger("xcompat")
"""Where warnings of the library go; like transformers' own, it shows them itself, until it is told otherwise."""
logger.addHandler(_Console())
logger.propagate = False


def notice(line: str) -> None:
    """Warn in plain text of samples, shards or texts that were left out; brackets in it are no markup."""
    logger.warning("%s", visible_line(line))


@functools.cache
def notice_once(line: str) -> None:
    """Warn only the first time; each worker of a data loader warns once."""
    notice(line)


def shortened(text: str, longest: int = 40) -> str:
    """Leave out the middle of a long text: names of models are paths, whose end tells them apart.

    Example:
        >>> shortened("embedding pictures with /data/models/clip-vit-base-patch32/run-7", 40)
        'embedding pictures … -base-patch32/run-7'
    """
    if len(text) <= longest:
        return text
    half = longest // 2 - 1
    return f"{text[:half].rstrip()} … {text[-half:].lstrip()}"


_followed: ContextVar[Callable[[Task], None] | None] = ContextVar("followed", default=None)


@contextmanager
def followed_by(show: Callable[[Task], None]) -> Iterator[None]:
    """Give a function what bars would draw: of a page, which has bars of its own.

    Args:
        show: gets the task of a bar after each of its steps.
    """
    before = _followed.set(show)
    try:
        yield
    finally:
        _followed.reset(before)


class Bar(Progress):
    """A bar on a terminal; where there is none, a line now and then. Silent on all but the main process."""

    def __init__(self) -> None:
        self._follower = _followed.get()
        super().__init__(
            SpinnerColumn(),
            TextColumn("{task.description}", table_column=Column(no_wrap=True)),
            BarColumn(bar_width=20),
            TaskProgressColumn(show_speed=False),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=self._follower is not None or not (is_main_process() and (console.is_terminal or console.is_jupyter)),
        )
        self._said = 0.0  # seconds of the task at the last line

    @override
    def add_task(self, description: str, *arguments: Any, **fields: Any) -> TaskID:
        """See :class:`Progress`; a long description is shortened."""
        return super().add_task(literal(shortened(description)), *arguments, **fields)

    @override
    def update(self, task_id: TaskID, **changes: Any) -> None:
        """See :class:`Progress`; print a line if there is no terminal and none was printed for :data:`SECONDS`."""
        super().update(task_id, **changes)
        task = self.tasks[self.task_ids.index(task_id)]
        if self._follower is not None:
            self._follower(task)
            return
        elapsed = task.elapsed or 0.0
        if self.disable and not task.finished and elapsed - self._said >= SECONDS:
            self._said = elapsed
            total = f" of {task.total:,.0f} ({task.percentage:.0f} %)" if task.total else ""
            said = f"  {task.description}: {task.completed:,.0f}{total}, {task.fields['rate']}, {elapsed:.0f} s"
            console.print(said, style="dim", soft_wrap=True)


def progress_bar() -> Bar:
    """Return a display of how far something is, with a rate."""
    return Bar()


class Waiting:
    """Measures the seconds in which a model waits for data."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._begun = 0.0

    def begin(self) -> None:
        """Start the clock, or start it again."""
        self._begun = time.perf_counter()

    def end(self) -> None:
        """Stop the clock."""
        self.seconds += time.perf_counter() - self._begun

    def of(self, items: Iterable[T]) -> Iterator[T]:
        """Yield items, and count the seconds until each arrives."""
        iterator = iter(items)
        while True:
            self.begin()
            item = next(iterator, self)
            self.end()
            if item is self:
                return
            yield cast(T, item)

    def share_of(self, seconds: float) -> str:
        """Describe the share of some seconds that was spent waiting."""
        return f"{self.seconds / max(seconds, 1e-9):.0%} waiting for data"


def rate_of(bar: Progress, task: TaskID, done: float, unit: str, waiting: Waiting | None = None) -> None:
    """Advance a bar and show its mean rate so far.

    Args:
        bar: the display.
        task: its task, made with the field ``rate``.
        done: units done since the last call.
        unit: plural of the unit, such as ``"texts"``.
        waiting: the time spent waiting for data; its share is shown too.
    """
    state = bar.tasks[bar.task_ids.index(task)]
    elapsed = max(state.elapsed or 0.0, 1e-9)
    waited = "" if waiting is None else f", {waiting.share_of(elapsed)}"
    bar.update(task, advance=done, rate=f"{(state.completed + done) / elapsed:,.0f} {unit}/s{waited}")


@contextmanager
def stage(title: str, seconds: dict[str, float] | None = None) -> Iterator[None]:
    """Print a stage's title when it begins, and again with its seconds when it ends.

    Args:
        title: what the stage does.
        seconds: a dictionary that gets the stage's seconds under ``title``.
    """
    started = time.perf_counter()
    shown = literal(title)
    console.print(f"[bold]▸[/] {shown} …")
    yield
    took = time.perf_counter() - started
    if seconds is not None:
        seconds[title] = round(took, 3)
    console.print(f"[green]✓[/] {shown} [dim]({took:.1f} s)[/]")


def silence_libraries() -> None:
    """Silence the progress bars of datasets and transformers: the stages show their own."""
    import datasets
    import transformers

    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
