"""Let every file operation of every command fail, one at a time, and some for good, as disks do."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kills import LONG, Stage
from scenes import copied, tree
from syscalls import Answer, Call, Outcome

WRITING = (errno.ENOSPC, errno.EIO, errno.EACCES, errno.EROFS, errno.EDQUOT)
TAKES_SPACE = ("write", "pwrite64", "writev", "sendfile", "copy_file_range", "fallocate", "mkdir", "mkdirat", "ftruncate")
_RANDOM = re.compile(r"[0-9a-f]{16}|(?<=\.)[a-z0-9_]{8}(?=\b)|\d{4}-\d\d-\d\dT[\d.:+-]+")


@dataclass(frozen=True)
class Fault:
    """What fails.

    Args:
        number: of the call, counted from 1.
        error: how it fails.
        lasting: whether all that need the same fail from then on.
    """

    number: int
    error: int
    lasting: bool = False

    def __str__(self) -> str:
        return f"{errno.errorcode[self.error]} at call {self.number}{' and from then on' if self.lasting else ''}"


def watched(call: Call) -> bool:
    """Return whether a call can fail on a disk."""
    return call.name not in ("mmap", "fstat", "close")


def errors_of(call: Call) -> tuple[int, ...]:
    """Return how a call may fail."""
    if not call.changes:
        return (errno.EIO, errno.EACCES) if call.name in ("open", "openat") else (errno.EIO,)
    if call.name in ("fsync", "fdatasync"):
        return errno.EIO, errno.ENOSPC, errno.EDQUOT
    if call.name in ("write", "pwrite64", "writev", "sendfile", "copy_file_range", "ftruncate", "fallocate"):
        return errno.ENOSPC, errno.EIO, errno.EDQUOT
    return (errno.EIO, errno.EACCES, errno.EROFS) if call.name in ("unlink", "unlinkat", "rmdir") else WRITING


def failing(fault: Fault, seen: list[Call]) -> Callable[[Call], Answer]:
    """Return an answer that lets a call fail; what it was is put into ``seen``."""
    number = 0

    def answer(call: Call) -> Answer:
        nonlocal number
        if not watched(call):
            return None
        number += 1
        if number == fault.number:
            seen.append(call)
            return fault.error
        if fault.lasting and number > fault.number and call.changes:
            takes = call.creates or call.name in TAKES_SPACE
            return fault.error if fault.error == errno.EROFS or takes else None
        return None

    return answer


def faults_of(calls: list[Call], every: bool) -> list[Fault]:
    """Return the faults to try, each call failing in one of the ways it can, by turns.

    Args:
        calls: of a run that nothing disturbs.
        every: whether every call that changes something fails; else, as those that only read, the first of its kind on each file.
    """
    found, seen = list[Fault](), set[tuple[str, tuple[str | None, ...]]]()
    for number, call in enumerate(calls, 1):
        kind = call.name, tuple(path and _RANDOM.sub("*", path) for path in call.paths)
        if kind in seen and not (call.changes and every):
            continue
        seen.add(kind)
        errors = errors_of(call)
        found.append(Fault(number, errors[number % len(errors)]))
        if number % 3 == 0 and (call.creates or call.name in TAKES_SPACE):
            found.append(Fault(number, (errno.ENOSPC, errno.EROFS)[number % 2], lasting=True))
    return found


def injected(stage: Stage, every: bool, most: int | None = None, part: tuple[int, int] = (0, 1)) -> Iterator[str | None]:
    """Let the file operations of a command fail.

    Args:
        stage: where it is played.
        every: see :func:`faults_of`.
        most: faults at most, spread evenly.
        part: number, from 0, and count of the parts that they are tried in.

    Yields:
        What is wrong after each; None when nothing is.
    """
    copied(stage.prepared, stage.work)
    calls = list[Call]()
    stage.play(lambda call: calls.append(call) if watched(call) else None)
    faults = faults_of(calls, every)
    if most is not None and most < len(faults):
        faults = [faults[number * len(faults) // most] for number in range(most)]
    before = tree(stage.prepared)
    copied(stage.prepared, stage.work)
    for fault in faults[part[0] :: part[1]]:
        if tree(stage.work) != before:
            copied(stage.prepared, stage.work)
        seen = list[Call]()
        outcome = stage.play(failing(fault, seen), kill_after=LONG)
        problem = said_wrong(stage, outcome) or stage.wrong(outcome.code == 0 and not stage.scene.reads)
        if problem is None and outcome.code and tree(stage.work) != before:
            problem = stage.continued()
        call = f"{seen[0].name} {' '.join(map(str, seen[0].paths))}" if seen else "a call that was not made again"
        yield problem and f"{fault}, {call}: {problem}"


def said_wrong(stage: Stage, outcome: Outcome) -> str | None:
    """Return what is wrong with how a command ended: it is done all the same, or says in one line why not."""
    if outcome.code == 0:
        return None
    lines = [line for line in outcome.errors.splitlines() if line.strip()]
    if outcome.code < 0:
        return f"it died of signal {-outcome.code}"
    if "Traceback" in outcome.errors + outcome.output:
        return f"it ended in a traceback: {lines[-1] if lines else ''}"
    if outcome.code == 1 and stage.scene.name.endswith("verify gallery"):
        return None
    if outcome.code != 2 or len(lines) != 1 or not lines[0].startswith("xcompat: "):
        return f"it ended with code {outcome.code} and {len(lines)} lines: {' / '.join(lines)[-500:]}"
    return None
