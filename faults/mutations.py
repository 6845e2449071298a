"""Damaged inputs: every file that is read, mutated in every way, must give the right answer or one line, and nothing else.

A trial copies a subject's folder, damages one of its files and asks the question whose answer on the whole folder is known. It
happens in a worker that is forked from this process, where everything is imported, with limits of time and memory. A worker that
dies or hangs is replaced; what went wrong in one that had run other trials is tried again in a fresh one.

    python faults/mutations.py [TRIALS [SEED [SUBJECT ...]]]
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from mutation_damage import damage_file
from mutation_specimens import all_subjects
from mutation_subjects import Subject

SECONDS = 10.0
"""Of a trial's own work; a machine that does other things may take longer."""
STALLED = 60.0
MEMORY = 4 << 30
TRIALS_OF_A_WORKER = 100


class Outcome(StrEnum):
    RIGHT = "right answer"
    REFUSED = "one line"
    CONTENT = "read as it stands"  # files that carry no checksum: a changed caption is a caption
    TRACEBACK = "traceback"
    SIGNAL = "signal"
    HANG = "hang"
    WRONG = "wrong answer"

    @property
    def is_failure(self) -> bool:
        return self not in (Outcome.RIGHT, Outcome.REFUSED, Outcome.CONTENT)


class Trial(NamedTuple):
    subject: str
    number: int
    damage: str
    outcome: Outcome
    detail: str


@dataclass
class Tally:
    """One row of the table."""

    subject: str
    counts: Counter[Outcome] = field(default_factory=Counter)
    failures: list[Trial] = field(default_factory=list)

    @property
    def trials(self) -> int:
        return self.counts.total()


def run(trials: int, seed: int, names: Sequence[str] = ()) -> list[Tally]:
    """Damage inputs and count what comes of it.

    Args:
        trials: how many in all, dealt to the subjects by their weights; each gets one at least.
        seed: of the damage; the same seed damages the same bytes.
        names: only these subjects.

    Returns:
        A tally for each subject, whose failures name the damage.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary, all_subjects(Path(temporary)) as made:
        subjects = [subject for subject in made if not names or subject.name in names]
        total = sum(subject.weight for subject in subjects)
        return [tally(subject, max(1, round(trials * subject.weight / total)), seed) for subject in subjects]


def as_markdown(tallies: Sequence[Tally]) -> str:
    """Return the table for people: a row for each subject, and one for all."""
    everything = Tally("**all**")
    for each in tallies:
        everything.counts.update(each.counts)
    lines = [" | ".join(["damaged", "trials", *Outcome]), " | ".join(["---", *["---:"] * (1 + len(Outcome))])]
    for each in [*tallies, everything]:
        lines.append(" | ".join([each.subject, f"{each.trials:,}", *(f"{each.counts[outcome]:,}" for outcome in Outcome)]))
    return "".join(f"| {line} |\n" for line in lines)


def tally(subject: Subject, trials: int, seed: int) -> Tally:
    """Run the trials of one subject."""
    result = Tally(subject.name)
    with _Workers(subject, seed) as workers:
        for number in range(trials):
            trial = workers.run(number)
            result.counts[trial.outcome] += 1
            if trial.outcome.is_failure:
                result.failures.append(trial)
    return result


class _Workers:
    """Runs trials one after another, in a process that is replaced when it breaks."""

    def __init__(self, subject: Subject, seed: int) -> None:
        self.subject, self.seed = subject, seed
        self.process: psutil.Process | None = None
        self.done = 0
        self.answer: Any = None

    def __enter__(self) -> _Workers:
        kind, whole = self._exchange(None)
        assert kind is Outcome.RIGHT, f"{self.subject.name} whole: {kind}: {whole}"
        self._end()
        self.answer = whole
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def run(self, number: int) -> Trial:
        if self.done >= TRIALS_OF_A_WORKER:
            self._end()
        alone = self.done == 0
        outcome, detail = self._exchange(number)
        if outcome.is_failure:
            self._end()
            if not alone:  # what an earlier trial left in memory is no fault of this one
                outcome, detail = self._exchange(number)
                self._end()
        damage, said = detail if outcome not in (Outcome.SIGNAL, Outcome.HANG) else ("?", detail)
        if damage == "?":
            with _damaged(self.subject, self.seed, number) as (_, damage):
                pass
        return Trial(self.subject.name, number, damage, outcome, said)

    def _exchange(self, number: int | None) -> tuple[Outcome, Any]:
        """Let the worker run one trial (None: the whole folder) and wait for what it says."""
        if self.process is None:
            self._start()
        assert self.process is not None
        self._talk.send(number)
        self.done += 1
        began, before = time.monotonic(), self._cpu_seconds()
        while not self._talk.poll(0.25):
            waited = time.monotonic() - began
            if waited > STALLED or (waited > SECONDS and self._cpu_seconds() - before > SECONDS):
                return Outcome.HANG, f"{waited:.0f} s"
        try:
            return self._talk.recv()
        except (EOFError, ConnectionError):
            status = os.waitpid(self.process.pid, 0)[1]
            self.process = None
            return Outcome.SIGNAL, signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else f"exit {status >> 8}"

    def _cpu_seconds(self) -> float:
        assert self.process is not None
        try:
            used = self.process.cpu_times()
            running = [child.cpu_times() for child in self.process.children(recursive=True)]
        except psutil.Error:
            return 0.0
        return used.user + used.system + sum(each.user + each.system for each in running)

    def _start(self) -> None:
        self._talk, theirs = Pipe()
        pid = os.fork()
        if not pid:
            self._talk.close()
            _work(self.subject, self.seed, self.answer, theirs)
        theirs.close()
        self.process, self.done = psutil.Process(pid), 0

    def _end(self) -> None:
        self.done = 0
        if self.process is None:
            return
        children = self.process.children(recursive=True)
        for process in [self.process, *children]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        os.waitpid(self.process.pid, 0)
        self._talk.close()
        self.process = None


def _work(subject: Subject, seed: int, answer: Any, talk: Connection) -> None:
    """Run trials until nobody asks for more; never returns."""
    faulthandler.disable()  # a signal is counted, its place is found by the trial's number
    used = psutil.Process().memory_info().vms
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    silent = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(silent, stream)
    try:
        while True:
            number = talk.recv()
            talk.send(_ask_whole(subject) if number is None else _try(subject, seed, number, answer))
    except BaseException:  # the parent has closed its end, or a trial broke out of what guards it
        os._exit(70)


def _ask_whole(subject: Subject) -> tuple[Outcome, Any]:
    with subject.copy() as folder:
        try:
            answer = subject.ask(folder)
        except BaseException:
            return Outcome.TRACEBACK, traceback.format_exc()
    return Outcome.RIGHT, answer


def _try(subject: Subject, seed: int, number: int, whole: Any) -> tuple[Outcome, tuple[str, str]]:
    from xcompat import XcompatError

    with _damaged(subject, seed, number) as (folder, damage):
        try:
            value, said = subject.ask(folder)
        except XcompatError as error:
            lines = str(error).splitlines()
            outcome, detail = (Outcome.REFUSED if len(lines) == 1 else Outcome.TRACEBACK), str(error)
        except BaseException as error:
            frames = traceback.extract_tb(error.__traceback__)
            ours = [frame for frame in frames if "/xcompat/" in frame.filename] or frames
            place = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}"
            outcome, detail = Outcome.TRACEBACK, f"{type(error).__name__} at {place}: {' '.join(str(error).split())[:200]}"
        else:
            detail = "" if value == whole.value else _difference(whole.value, value)
            if value == whole.value:
                outcome = Outcome.RIGHT
            elif said != whole.said:
                outcome = Outcome.REFUSED
            else:
                outcome = Outcome.WRONG if subject.has_checksum else Outcome.CONTENT
    return outcome, (damage, detail)


def _difference(whole: Any, value: Any) -> str:
    """Return the first place where two answers differ."""
    if type(whole) is type(value) and isinstance(whole, list | tuple) and len(whole) == len(value):
        for number, (one, other) in enumerate(zip(whole, value, strict=True)):
            if one != other:
                return f"[{number}]{_difference(one, other)}"
    return f" {str(value)[:100]} instead of {str(whole)[:100]}"


@contextlib.contextmanager
def _damaged(subject: Subject, seed: int, number: int) -> Iterator[tuple[Path, str]]:
    """Copy the folder and damage one file of it, the same for the same seed and number."""
    chance = random.Random(f"{seed} {subject.name} {number}")
    paths = subject.paths()
    with subject.copy() as folder:
        path = chance.choice(paths)
        twin = folder / chance.choice(paths) if subject.foreign is None else subject.foreign / path
        how = damage_file(folder / path, twin if twin.is_file() else folder / path, chance)
        yield folder, f"{path}: {how}"


def main() -> None:
    arguments = sys.argv[1:]
    trials, seed = int((arguments or ["10000"])[0]), int((arguments[1:] or ["0"])[0])
    began = time.monotonic()
    tallies = run(trials, seed, arguments[2:])
    for each in tallies:
        for trial in each.failures:
            sys.stdout.write(f"{trial.subject} {trial.number}: {trial.damage}: {trial.outcome}: {trial.detail}\n")
    sys.stdout.write(f"{as_markdown(tallies)}{time.monotonic() - began:.0f} s\n")


if __name__ == "__main__":
    main()
