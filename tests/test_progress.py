"""What a bar says: rates, and the share of time in which a model waited for data, by a clock that the test moves."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from xcompat.core import progress
from xcompat.core.progress import Waiting, advance_bar, progress_bar, results_on_stdout
from xcompat.training.callbacks import ProgressCallback


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Return the clock that everything in `xcompat.core.progress` looks at."""
    made = Clock()
    monkeypatch.setattr(progress.time, "perf_counter", made)
    return made


def test_a_bar_shows_rate_and_waiting(clock: Clock) -> None:
    bar = progress_bar()
    bar.get_time = clock
    task = bar.add_task("embedding", total=100, rate="")
    waiting = Waiting()

    def slow() -> Iterator[int]:
        clock.now += 1
        yield 0

    for _ in waiting.track(slow()):
        clock.now += 3
    advance_bar(bar, task, 20, "images", waiting)
    assert bar.tasks[0].fields["rate"] == "5 images/s, 25% waiting for data"
    advance_bar(bar, task, 20, "images")
    assert bar.tasks[0].fields["rate"] == "10 images/s"


def test_training_says_how_it_waited_and_learned(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    args = SimpleNamespace(train_batch_size=8, world_size=2, gradient_accumulation_steps=1)
    state = SimpleNamespace(global_step=0, max_steps=2, log_history=[{"loss": 0.5}])
    callback, control = ProgressCallback("xbt"), SimpleNamespace()

    def tell(event: str, seconds: float) -> None:
        clock.now += seconds
        getattr(callback, event)(args, state, control)

    def shown() -> Any:
        assert callback._bar is not None
        return callback._bar.tasks[0].fields["rate"]

    tell("on_train_begin", 0)
    assert callback._bar is not None
    callback._bar.get_time = clock
    callback._bar.tasks[0]._get_time = clock
    callback._bar.tasks[0].start_time = clock.now
    tell("on_step_begin", 1)
    state.global_step = 1
    tell("on_step_end", 3)
    assert shown() == "4 samples/s, 25% waiting for data, loss 0.500"
    tell("on_save", 5)
    tell("on_step_begin", 1)
    state.global_step = 2
    tell("on_step_end", 6)
    assert shown() == "2 samples/s, 12% waiting for data, loss 0.500", "writing a checkpoint is no waiting for data"
    state.log_history = [{"loss": 4.6}, {"grad_norm": 1.0}, {"loss": 0.5}]
    callback.on_train_end(args, state, control)
    assert capsys.readouterr().out.endswith("  xbt: 2 of 2 steps, loss 4.600 at the start, 0.500 at the end\n")


def test_progress_lines_without_tty(clock: Clock, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    bar = progress_bar()
    bar.get_time = clock
    with bar:
        task = bar.add_task("embedding images with /models/a [long] name of a folder/run-7", total=100, rate="")
        bar.tasks[0]._get_time = clock
        bar.tasks[0].start_time = clock.now
        for _ in range(10):
            clock.now += 4
            advance_bar(bar, task, 10, "images")
    said = capsys.readouterr().out.splitlines()
    assert [line.split(":")[1].split(",")[0] for line in said] == [" 30 of 100 (30 %)", " 60 of 100 (60 %)", " 90 of 100 (90 %)"]
    assert all(line.startswith("  embedding images wi … e of a folder/run-7: ") for line in said)
    assert said[0].endswith(", 2 images/s, 12 s")


def test_results_alone_are_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    with results_on_stdout():
        progress.console.print("for people")
        progress.notice("of what was left out")
        print("results")  # noqa: T201
    progress.console.print("for people again")
    assert capsys.readouterr() == ("results\nfor people again\n", "for people\n! of what was left out\n")


def test_nothing_is_wrapped_without_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(progress.console, "_width", None)
    progress.console.print("word " * 100)
    assert capsys.readouterr().out.count("\n") == 1
