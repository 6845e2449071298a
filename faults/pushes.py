"""SIGKILL pushes at their requests to the Hub: a branch holds one revision or the other, never half of one."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests"))  # where this is run as a script
from hub_server import Hub, served
from scenes import encoder

from xcompat.methods import XbtModel
from xcompat.training.push import push

REPO = "me/model"


def killed_pushes(folder: Path, trials: int) -> Iterator[str | None]:
    """Kill pushes of two states of one model, by turns.

    Args:
        folder: an empty one.
        trials: how many pushes to kill.

    Yields:
        What is wrong after each; None when nothing is.
    """
    versions = [folder / name / "model" for name in ("first", "second")]
    old, _ = encoder(folder, 1), encoder(folder, 2)
    model = XbtModel.from_encoder(str(folder / "encoder 2"), old=old.describe_old())
    for version in versions:
        next(model.parameters()).data.add_(0.1)
        model.export(version)
    with served(folder / "cache") as hub:
        yield from pushes_that_are_killed(hub, versions, trials)


def pushes_that_are_killed(hub: Hub, versions: list[Path], trials: int) -> Iterator[str | None]:
    """Kill pushes at one request after the other: the branch holds one state or the other, and the same command ends the push.

    Args:
        hub: empty.
        versions: two states of one model.
        trials: how many pushes to kill.

    Yields:
        What is wrong after each; None when nothing is.
    """
    push(versions[0], REPO)
    states = [dict(hub.files(REPO))]
    steps = requests_of_a_push(hub, versions[1])
    states.append(dict(hub.files(REPO)))
    for trial in range(trials):
        hub.large.clear()
        held, coming = states[(trial + 1) % 2], states[trial % 2]
        assert hub.files(REPO) == held
        status = push_and_die(hub, versions[trial % 2], trial % steps)
        if status == 0 and hub.files(REPO) == coming:
            continue  # it asked less often than the one that was counted, and was done before
        problem = None if os.WIFSIGNALED(status) else f"it ended with status {status}"
        if hub.files(REPO) not in (held, coming):
            problem = "half of a revision is visible"
        push(versions[trial % 2], REPO)
        if hub.files(REPO) != coming:
            problem = problem or "the same command does not end it"
        yield problem and f"killed at request {trial % steps + 1} of {steps}: {problem}"


def requests_of_a_push(hub: Hub, folder: Path) -> int:
    """Push, and return how often the Hub was asked."""
    before = len(hub.asked)
    push(folder, REPO)
    return len(hub.asked) - before


def push_and_die(hub: Hub, folder: Path, at: int) -> int:
    """Push in a process of its own that is killed when it asks the Hub for the ``at``-th time; return how it ended."""
    count = 0
    child = os.fork()
    if child == 0:
        try:
            push(folder, REPO)
        finally:
            os._exit(0)

    def kill(asked: str) -> int | None:
        nonlocal count
        count += 1
        if count > at:
            os.kill(child, signal.SIGKILL)
        return 0 if count > at else None

    hub.fault = kill  # type: ignore[method-assign]
    _, status = os.waitpid(child, 0)
    del hub.fault
    return status
