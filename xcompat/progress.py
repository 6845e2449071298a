"""Progress on the main process only: one line per stage with its time, one bar with its rate."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from xcompat.distributed import is_main_process

T = TypeVar("T")

console = Console(stderr=False, quiet=not is_main_process(), highlight=False)


def progress_bar() -> Progress:
    """Return a rich progress display with a rate column, silent on all but the main process."""
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(show_speed=False),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not is_main_process(),
    )


def track(items: Iterable[T], description: str, *, total: int | None = None, unit: str = "it", step: int = 1) -> Iterator[T]:
    """Iterate with a progress bar that shows the rate.

    Args:
        items: what to iterate over.
        description: what is being done.
        total: how many units there are in all; unknown if None.
        unit: what is counted, such as ``"texts"``.
        step: units per item (a batch of 256 texts counts 256).

    Yields:
        The items.
    """
    with progress_bar() as bar:
        task = bar.add_task(description, total=total, rate="")
        started = time.perf_counter()
        done = 0
        for item in items:
            yield item
            done += step
            seconds = max(time.perf_counter() - started, 1e-9)
            bar.update(task, completed=min(done, total) if total is not None else done, rate=f"{done / seconds:,.0f} {unit}/s")


@contextmanager
def stage(title: str, seconds: dict[str, float] | None = None) -> Iterator[None]:
    """Print one line for a stage when it is done, with the seconds it took.

    Args:
        title: what the stage does.
        seconds: a record to which the stage's seconds are added under ``title``.
    """
    started = time.perf_counter()
    console.print(f"[bold]▸[/] {title} …")
    yield
    took = time.perf_counter() - started
    if seconds is not None:
        seconds[title] = round(took, 3)
    console.print(f"[green]✓[/] {title} [dim]({took:.1f} s)[/]")
