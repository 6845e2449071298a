"""The parts of every benchmark: interleaved medians, peak memory, and rows that say whether their bound holds.

A script of a row has a function `measure() -> list[Row]` whose arguments, all with defaults, become options of its command line,
and ends in `main(measure)`. It asserts first that both sides give the same. `make bench` finds it by that function.
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

import typer
from rich.console import Console
from rich.table import Table

ROUNDS = 5
KEPT = Path("runs/bench")
"""Folder of each script's rows, NAME.json, for `make bench`."""
COMMAND = """
import sys
from pathlib import Path
try:
    {}
finally:
    Path(sys.argv[1]).write_text(Path("/proc/self/status").read_text())
"""
COLUMNS = ("ours", "against", "ratio", "bound", "")

Result = TypeVar("Result")


@dataclass(frozen=True)
class Row:
    """One comparison.

    Args:
        what: what of ours was measured.
        against: what it was compared with.
        ratio: the figure; None where it was not measured.
        bound: what the figure must be, such as ">= 15" or "<= 6"; empty where nothing is asked of it.
        detail: the two numbers, and what else one must know.

    Example:
        >>> [Row("ranking", "sorting", 4.5, bound).holds for bound in (">= 4", "<= 4", "")]
        [True, False, None]
    """

    what: str
    against: str
    ratio: float | None
    bound: str = ""
    detail: str = ""

    @property
    def holds(self) -> bool | None:
        """Return whether the bound holds; None without bound or figure."""
        if self.ratio is None or not self.bound:
            return None
        comparison, limit = self.bound.split()
        return {">=": self.ratio >= float(limit), "<=": self.ratio <= float(limit)}[comparison]

    def cells(self) -> list[str]:
        """Return the row as text, a column each of :data:`COLUMNS`."""
        verdict = {True: " holds", False: " MISSED", None: ""}[self.holds]
        ratio = "" if self.ratio is None else f"{self.ratio:.2f}" if self.ratio < 10 else f"{self.ratio:.0f}"
        return [self.what, self.against, ratio, f"{self.bound}{verdict}", self.detail]


def interleaved(sides: Mapping[str, Callable[[], float]], rounds: int = ROUNDS) -> dict[str, float]:
    """Run all sides in turn, forwards and backwards, so that other load of the machine hits them alike.

    Args:
        sides: what to run, by name; each returns its own figure.
        rounds: how often.

    Returns:
        Median of each side's figures.
    """
    figures: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(rounds):
        for name in list(sides)[:: -1 if turn % 2 else 1]:  # none always follows the same other
            figures[name].append(sides[name]())
    return {name: statistics.median(values) for name, values in figures.items()}


def medians(sides: Mapping[str, Callable[[], object]], rounds: int = ROUNDS) -> dict[str, float]:
    """Time all sides in turn (see :func:`interleaved`).

    Nothing is warmed up: call each side once before, for the check that they agree.

    Args:
        sides: what to run, by name.
        rounds: how often.

    Returns:
        Median seconds of each side.
    """

    def seconds(run: Callable[[], object]) -> float:
        started = time.perf_counter()
        run()
        return time.perf_counter() - started

    return interleaved({name: functools.partial(seconds, run) for name, run in sides.items()}, rounds)


def timed(what: str, against: str, bound: str, ours: float, theirs: float, note: str = "") -> Row:
    """Compare two times of the same work.

    Args:
        what: what of ours was measured.
        against: what it was compared with.
        bound: of ``>=``, or empty: the ratio is how many times as fast ours is; of ``<=``: how many times the time it takes.
        ours: seconds.
        theirs: seconds.
        note: what else one must know.

    Returns:
        The row.
    """
    ratio = ours / theirs if bound.startswith("<=") else theirs / ours
    return Row(what, against, ratio, bound, f"{ours:.3g} s, {theirs:.3g} s{f'; {note}' if note else ''}")


def not_installed(what: str, against: str, bound: str, packages: str) -> Row:
    """Say how to install a missing peer, instead of failing."""
    return Row(what, against, None, bound, f"not run: pip install {packages}")


def in_fresh_process(run: Callable[..., Result], *args: object) -> Result:
    """Run a function of a module in a process of its own, which inherits neither memory nor threads.

    Args:
        run: a function at the top of a module.
        args: what it is given.

    Returns:
        What it returns.
    """
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(run, *args).result()


def peak_memory(run: Callable[[], object]) -> int:
    """Return the rise of resident memory at its peak, in bytes (Linux); for a fresh process."""

    def kilobytes(field: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(field))

    Path("/proc/self/clear_refs").write_text("5")  # what imports and inputs once took is forgotten
    before = kilobytes("VmRSS:")
    run()
    return 1024 * (kilobytes("VmHWM:") - before)


def run_command(arguments: Sequence[object], folder: Path) -> tuple[float, float, float]:
    """Run xcompat with arguments, imports and all (Linux).

    Args:
        arguments: such as ``["map", "--old", ...]``.
        folder: where its own account of its memory goes.

    Returns:
        Its seconds, those of its processors, and its peak memory in GiB.
    """
    return _run("from xcompat.cli import app; app(sys.argv[2:])", arguments, folder)


def peak_of(code: str, folder: Path) -> float:
    """Return the peak memory in GiB of a process of Python that runs a line of code (Linux)."""
    return _run(code, [], folder)[2]


def _run(code: str, arguments: Sequence[object], folder: Path) -> tuple[float, float, float]:
    said = folder / "status"  # what the system says of a child holds its parent's memory too
    started = time.perf_counter()
    command = [sys.executable, "-c", COMMAND.format(code), str(said), *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    assert not status
    peak = next(line.split()[1] for line in said.read_text().splitlines() if line.startswith("VmHWM"))
    return time.perf_counter() - started, usage.ru_utime + usage.ru_stime, int(peak) / 2**20


def table(rows: Iterable[Row]) -> Table:
    """Return rows as a table of the terminal."""
    drawn = Table(*COLUMNS)
    for row in rows:
        drawn.add_row(*row.cells())
    return drawn


def main(measure: Callable[..., list[Row]]) -> None:
    """Make a command of a script: its arguments are options, its rows are printed and kept for `make bench`."""

    @functools.wraps(measure)
    def command(**options: object) -> None:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # training would take a GPU, and the loop that it is compared with the CPU
        rows = measure(**options)
        Console().print(table(rows))
        KEPT.mkdir(parents=True, exist_ok=True)
        (KEPT / f"{Path(sys.argv[0]).stem}.json").write_text(json.dumps([asdict(row) for row in rows]))

    typer.run(command)
