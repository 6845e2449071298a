"""Terminal output of the main process: tables, timed stages, bars with rates, and notices."""

from __future__ import annotations

import functools
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar, cast

import rich.table
import wrapt
from rich.console import Console, ConsoleDimensions
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
)
from rich.table import Column
from rich.text import Text
from typing_extensions import override

from xcompat.core.distributed import is_main_process
from xcompat.core.errors import visible, visible_line
from xcompat.core.lazy import without_collection

T = TypeVar("T")
WIDE = 10_000
SECONDS = 10.0
"""Interval between progress lines without a terminal."""


class _Terminal(Console):
    """Console that wraps only at the edge of a terminal."""

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


class Table(rich.table.Table):
    """Table of rich, whose columns fold long words, e.g. paths and ids, where rich would cut them."""

    @override
    def add_column(self, header: Any = "", footer: Any = "", **options: Any) -> None:
        """Add a column with the options of rich."""
        super().add_column(header, footer, **{"overflow": "fold"} | options)


def literal(text: object) -> str:
    r"""Escape a text for rich, to show brackets and control characters instead of interpreting them.

    Args:
        text: untrusted text, e.g. a name, an id or a path.

    Example:
        >>> literal("[red]shoe")
        '\\[red]shoe'
    """
    shown = visible(str(text))
    before = shown.rstrip("\\")
    # rich reads backslashes before a tag as escapes; an empty tag after them makes this independent of the text that follows
    return escape(before) + ("\\" * 2 * (len(shown) - len(before)) + "[default][/]" if before != shown else "")


def snippet(text: object, longest: int = 80) -> str:
    r"""Return the start of a text as a single line.

    Args:
        text: of any length.
        longest: maximum characters.

    Example:
        >>> snippet("bears sleep\n in winter"), len(snippet("long " * 1000, 20))
        ('bears sleep in winter', 20)
    """
    line = " ".join(str(text).split())
    return line if len(line) <= longest else f"{line[: longest - 2].rstrip()} …"


@contextmanager
def results_on_stdout() -> Iterator[None]:
    """Send progress and notices to stderr, to keep stdout for results."""
    before, console.stderr = console.stderr, True
    try:
        yield
    finally:
        console.stderr = before


def announce_loading(*models: object) -> AbstractContextManager[None]:
    """Print on stderr which models a command loads, before the import of PyTorch, which takes seconds.

    Silent if PyTorch is imported already, and if stdout is for results (:func:`results_on_stdout`).

    Args:
        models: names or folders; None and empty texts are skipped. Without any, the line names PyTorch.

    Returns:
        A context for the imports, to make them faster (:func:`~xcompat.core.lazy.without_collection`).
    """
    if "torch" in sys.modules or console.stderr:
        return without_collection()
    names = ", ".join(dict.fromkeys(visible_line(str(model)) for model in models if model))
    with results_on_stdout():
        console.print(f"Loading models: {names}" if names else "Loading PyTorch", style="dim", markup=False, soft_wrap=True)
    return without_collection()


class _Console(logging.Handler):
    """Log handler that prints like the command line."""

    @override
    def emit(self, record: logging.LogRecord) -> None:
        console.print(f"! {record.getMessage()}", style="yellow", markup=False, soft_wrap=True)


logger = logging.getLogger("xcompat")
"""Logger of the library's warnings. Like transformers' logger it prints them by default."""
logger.addHandler(_Console())
logger.propagate = False


def notice(line: str) -> None:
    """Warn in plain text, e.g. about skipped samples. Brackets are not markup."""
    logger.warning("%s", visible_line(line))


@functools.cache
def notice_once(line: str) -> None:
    """Warn once per process. Each data loader worker warns once."""
    notice(line)


def shorten_middle(text: str, longest: int = 40) -> str:
    """Drop the middle of a long text. Model names are paths, which differ at the end.

    Example:
        >>> shorten_middle("embedding images with /data/models/clip-vit-base-patch32/run-7", 40)
        'embedding images wi … -base-patch32/run-7'
    """
    if len(text) <= longest:
        return text
    half = longest // 2 - 1
    return f"{text[:half].rstrip()} … {text[-half:].lstrip()}"


_followed: ContextVar[Callable[[Task], None] | None] = ContextVar("followed", default=None)


@contextmanager
def redirect_bars(show: Callable[[Task], None]) -> Iterator[None]:
    """Send progress bar tasks to a function, for pages with their own bars.

    Args:
        show: called with a bar's task after each step.
    """
    before = _followed.set(show)
    try:
        yield
    finally:
        _followed.reset(before)


class _ShrinkingColumn(TextColumn):
    """Text that gives way on narrow terminals, so that count, rate and remaining time stay."""

    def __init__(self, text: str) -> None:
        super().__init__(text, table_column=Column())

    @override
    def render(self, task: Task) -> Text:
        shown = super().render(task)
        shown.no_wrap, shown.overflow = True, "ellipsis"
        return shown


class _TimeLeftColumn(ProgressColumn):
    """Estimated time to the end, marked as such."""

    @override
    def render(self, task: Task) -> Text:
        return Text(_time_left(task), style="progress.remaining")


def _time_left(task: Task) -> str:
    """Return the time left at the mean rate so far, e.g. ``3:20 left``, or an empty text if it is unknown."""
    done = task.completed - task.fields["began"]
    if not (task.total and task.elapsed and done):
        return ""
    minutes, seconds = divmod(round(task.elapsed * (task.total - task.completed) / done), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02} left" if hours else f"{minutes}:{seconds:02} left"


class Bar(Progress):
    """Progress bar on a terminal, or occasional lines without a terminal. Only the main process prints."""

    def __init__(self) -> None:
        self._follower = _followed.get()
        super().__init__(
            SpinnerColumn(),
            _ShrinkingColumn("{task.description}"),
            BarColumn(bar_width=10),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            TextColumn("{task.fields[rate]}"),
            _TimeLeftColumn(table_column=Column(no_wrap=True)),
            console=console,
            transient=True,
            disable=self._follower is not None or not (is_main_process() and (console.is_terminal or console.is_jupyter)),
        )
        self._said = 0.0  # seconds of the task at the last line

    @override
    def add_task(self, description: str, *arguments: Any, **fields: Any) -> TaskID:
        fields |= {"rate": "", "began": fields.get("completed", 0)}
        return super().add_task(literal(shorten_middle(description)), *arguments, **fields)

    @override
    def update(self, task_id: TaskID, **changes: Any) -> None:
        super().update(task_id, **changes)
        task = self.tasks[self.task_ids.index(task_id)]
        if self._follower is not None:
            self._follower(task)
            return
        elapsed = task.elapsed or 0.0
        if self.disable and not task.finished and elapsed - self._said >= SECONDS:
            self._said = elapsed
            total = f" of {task.total:,.0f} ({task.percentage:.0f} %)" if task.total else ""
            said = ", ".join(filter(None, (f"{task.completed:,.0f}{total}", task.fields["rate"], _time_left(task))))
            console.print(f"  {task.description}: {said}", style="dim", soft_wrap=True)


def progress_bar() -> Bar:
    """Return a progress display with a rate."""
    return Bar()


class Waiting:
    """Timer of the seconds a model waits for data."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._begun = 0.0

    def begin(self) -> None:
        """Start the clock."""
        self._begun = time.perf_counter()

    def end(self) -> None:
        """Stop the clock."""
        self.seconds += time.perf_counter() - self._begun

    def track(self, items: Iterable[T]) -> Iterator[T]:
        """Yield items and add up the time until each arrives."""
        iterator = iter(items)
        while True:
            self.begin()
            item = next(iterator, self)
            self.end()
            if item is self:
                return
            yield cast(T, item)

    def share_of(self, seconds: float) -> str:
        """Describe the waiting time as a share of ``seconds``."""
        return f"{self.seconds / max(seconds, 1e-9):.0%} waiting"


def advance_bar(bar: Progress, task: TaskID, done: float, waiting: Waiting | None = None) -> None:
    """Advance a bar and show its mean rate so far.

    Args:
        bar: the display.
        task: its task, added with the field ``unit``, a plural, e.g. ``"texts"``.
        done: units done since the last call.
        waiting: waiting time to show as a share.
    """
    state = bar.tasks[bar.task_ids.index(task)]
    elapsed = max(state.elapsed or 0.0, 1e-9)
    waited = "" if waiting is None else f", {waiting.share_of(elapsed)}"
    rate = describe_rate(state.completed - state.fields["began"] + done, elapsed, state.fields["unit"])
    bar.update(task, advance=done, rate=f"{rate}{waited}" if rate else "")


def describe_rate(done: float, seconds: float, unit: str) -> str:
    """Return a mean rate, or an empty text before anything is done.

    Example:
        >>> describe_rate(0, 9, "images"), describe_rate(4, 9, "images"), describe_rate(40_000, 9, "images")
        ('', '0.44 images/s', '4,444 images/s')
    """
    rate = done / max(seconds, 1e-9)
    return f"{rate:,.0f} {unit}/s" if rate >= 10 else f"{rate:.2g} {unit}/s" if done else ""


def describe_duration(seconds: float) -> str:
    """Return an estimated duration in its largest unit.

    Example:
        >>> describe_duration(0.02), describe_duration(61), describe_duration(600), describe_duration(20_000)
        ('less than a second', 'about 61 seconds', 'about 10 minutes', 'about 5.6 hours')
    """
    if seconds < 1:
        return "less than a second"
    if seconds < 120:
        return f"about {seconds:.0f} second{'s' if round(seconds) > 1 else ''}"
    return f"about {seconds / 60:.0f} minutes" if seconds < 7_200 else f"about {seconds / 3_600:,.1f} hours"


@contextmanager
def stage(title: str, seconds: dict[str, float] | None = None, result: Path | None = None) -> Iterator[None]:
    """Print a stage's title at the start, and again with its duration at the end.

    Args:
        title: stage title.
        seconds: dictionary that receives the duration under ``title``.
        result: folder to name at the end.
    """
    started = time.perf_counter()
    shown = literal(title)
    console.print(f"[bold]▸[/] {shown} …")
    yield
    took = time.perf_counter() - started
    if seconds is not None:
        seconds[title] = round(took, 3)
    where = f" in {literal(result)}" if result is not None else ""
    console.print(f"[green]✓[/] {shown}{where} [dim]({took:.1f} s)[/]", soft_wrap=True)


def _disable_progress_bars(module: Any) -> None:  # noqa: ANN401 - a module
    module.disable_progress_bars()


def silence_libraries() -> None:
    """Silence the progress bars of datasets and transformers."""
    import transformers

    wrapt.register_post_import_hook(_disable_progress_bars, "datasets")  # at once, if it is imported already
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
