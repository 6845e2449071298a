"""SIGKILL operations anywhere: before each call that changes a file, and at random moments."""

from __future__ import annotations

import gc
import importlib
import random
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from scenes import Scene, contents, copied, leftovers, same
from syscalls import KILL, Answer, Call, Outcome, run_watched

LONG = 60.0  # seconds, after which an operation hangs


class Stage:
    """Where one scene is played again and again.

    Args:
        scene: what is played.
        folder: an empty folder of its own.
    """

    def __init__(self, scene: Scene, folder: Path) -> None:
        self.scene, self.place, self.prepared = scene, folder / "place", folder / "prepared"
        self.work = self.place / "work"
        self.place.mkdir(parents=True, exist_ok=True)
        undisturbed(run_watched(lambda: scene.prepare(self.work), self.place, None))
        if self.work.exists():
            shutil.copytree(self.work, self.prepared, symlinks=True)
        before = contents(scene, self.work)
        undisturbed(self.play())
        copied(self.prepared, self.work)
        self.calls = 0
        started = time.monotonic()
        undisturbed(self.play(self._count))
        self.seconds = time.monotonic() - started
        after = contents(scene, self.work)
        gc.freeze()  # else collecting garbage in a child copies every page of its parent
        self.states = scene.states or (before, *scene.between, after)
        assert after is not None, f"{scene.name} leaves nothing that could be looked at"
        for found, expected in ((before, self.states[0]), (after, self.states[-1])):
            assert not isinstance(found, str), found
            assert same(found, expected), f"{scene.name} does not work even if nothing disturbs it"

    def _count(self, call: Call) -> Answer:
        self.calls += call.changes
        return None

    def play(self, answer: Callable[[Call], Answer] | None = None, kill_after: float | None = None) -> Outcome:
        """Run the operation in a child, on what is there."""
        return run_watched(lambda: self.scene.run(self.work), self.place, answer, kill_after)

    def wrong(self, reported: bool) -> str | None:
        """Return what is wrong with what is there; None if it is a state that may be there."""
        found = contents(self.scene, self.work)
        if isinstance(found, str):
            return found
        if not any(same(found, state) for state in (self.states[-1:] if reported else self.states)):
            return f"{len(found or ())} items are there, which is no state that was committed"
        return None

    def continued(self) -> str | None:
        outcome = self.play(kill_after=LONG)
        if outcome.code:
            return f"it does not continue: {outcome.errors.strip()[-600:]}"
        if wrong := self.wrong(reported=True):
            return f"continued: {wrong}"
        if leftovers(self.work) and self.scene.after is not None:
            undisturbed(run_watched(lambda: self.scene.after(self.work), self.place, None))
        return f"left behind: {', '.join(left)}" if (left := leftovers(self.work)) else None


def undisturbed(outcome: Outcome) -> None:
    """Stop where an operation fails of itself; import what it needs, so that the next child need not."""
    assert outcome.code == 0, outcome.errors
    for name in outcome.imported:
        if name.startswith("triton"):
            continue  # which complains when a process ends that has imported it so
        with suppress(Exception):
            importlib.import_module(name)


def killed_before(number: int) -> Callable[[Call], Answer]:
    """Return an answer that kills at the n-th call that changes something, counted from 1."""
    seen = 0

    def answer(call: Call) -> Answer:
        nonlocal seen
        seen += call.changes
        return KILL if call.changes and seen == number else None

    return answer


def killed(stage: Stage, most: int | None = None, at_random: int = 0, seed: int = 0) -> Iterator[str | None]:
    """Kill a scene at every call that changes something (or at so many), then at random moments.

    Args:
        stage: where it is played.
        most: calls at most, spread over all of them.
        at_random: further kills at random moments.
        seed: of these moments.

    Yields:
        What is wrong after each kill; None when nothing is.
    """
    numbers: Sequence[int] = range(1, stage.calls + 1)
    if most is not None and most < len(numbers):
        numbers = sorted(random.Random(seed).sample(numbers, most))
    for number in numbers:
        copied(stage.prepared, stage.work)
        outcome = stage.play(killed_before(number))
        problem = stage.wrong(outcome.reported) or stage.continued()
        yield problem and f"killed before change {number} of {stage.calls}: {problem}"
    moments = random.Random(seed)
    for _ in range(at_random):
        copied(stage.prepared, stage.work)
        moment = moments.uniform(0, stage.seconds)
        outcome = stage.play(kill_after=moment)
        problem = stage.wrong(outcome.reported) or stage.continued()
        yield problem and f"killed after {moment:.4f} of {stage.seconds:.4f} s: {problem}"
