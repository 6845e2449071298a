"""What is tried in the short form, which the normal suite runs, and in the long one, of which ``docs/faults.md`` tells."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import attacks
import mutations
import readers
from command_lines import command_scenes, make_world
from full_disks import cannot_mount, full
from histories import histories
from injections import injected
from kills import Stage, killed
from migrations import SCENES, killed_migrations
from power_cuts import power_cut
from pushes import killed_pushes
from rows import Row
from scenes import Scene, cached_scene, gallery_scenes, image_scenes, text_scenes

INDEXES = ("Flat", "IVF2,Flat", "HNSW8")
PARTS = {"xcompat train recipe.yaml": 12, "xcompat compare recipe.yaml": 12}
"""Into how many parts the injected errors go of commands of over a thousand file operations that take seconds each: a long run
that is stopped goes on with the next part."""
Trials = Iterator[str | None]


@dataclass(frozen=True)
class Campaign:
    """Trials of one kind on one operation, not begun yet.

    Args:
        group: the kind.
        name: the operation.
        trials: begins them in an empty folder.
        part: which of several parts of the trials these are; nothing where they are all.
    """

    group: str
    name: str
    trials: Callable[[Path], Trials]
    part: str = ""

    def run(self, folder: Path, tell: Callable[[], object] = lambda: None) -> Row:
        """Make all trials.

        Args:
            folder: an empty folder.
            tell: called after each.
        """
        row, started = Row(self.group, self.name), time.monotonic()
        try:
            for problem in self.trials(folder):
                row.take(problem)
                tell()
        except AssertionError as error:  # it does not even work undisturbed
            row.take(f"given up: {error}")
        row.end(time.monotonic() - started)
        return row


@cache
def scenes(shared: Path) -> tuple[dict[str, Scene], dict[str, Scene]]:
    """Return the operations on galleries and caches, and the commands, by their names."""
    operations = [scene for index in INDEXES for scene in gallery_scenes(index)]
    operations += [*image_scenes(shared), *text_scenes(shared), cached_scene()]
    commands = command_scenes(make_world(shared))
    return {scene.name: scene for scene in operations}, {scene.name: scene for scene in commands}


def campaigns(shared: Path, long: bool) -> Iterator[Campaign]:
    """Return all campaigns.

    Args:
        shared: where models and images are kept that they share.
        long: whether as much is tried as ``docs/faults.md`` tells of.
    """
    operations, commands = scenes(shared)
    slow = [name for name, scene in commands.items() if scene.slow]
    resyncs = [name for name in commands if "resync" in name]
    kills = _kills(operations, long) | (dict.fromkeys(slow, (5, 0)) | dict.fromkeys(resyncs, (60, 10)) if long else {})
    for name, (most, at_random) in kills.items():
        scene = operations.get(name) or commands[name]
        yield Campaign("kills", name, lambda folder, s=scene, m=most, r=at_random: killed(Stage(s, folder), m, r))
    for name, most in _power_cuts(operations, long).items():
        scene = operations.get(name) or commands[name]
        yield Campaign("power cuts", name, lambda folder, s=scene, m=most: power_cut(Stage(s, folder), m))
    for scene in commands.values():
        if long or not scene.slow:
            yield from _injections(scene, long)
    if not (reason := cannot_mount(shared)):
        for name in ("xcompat gallery build photos", "xcompat gallery add gallery more", "xcompat gallery compact gallery"):
            if long or "add" in name:
                yield Campaign("full disks", name, lambda folder, s=commands[name]: full(Stage(s, folder), 1 if long else 4))
    else:
        yield Campaign("full disks", f"left out: {reason}", lambda folder: iter(()))
    yield Campaign("histories", "gallery beside a dictionary", lambda folder: histories(200 if long else 6))
    yield Campaign("attacks", "xcompat serve", lambda folder: attacks.attacks(folder, 5000 if long else 100))
    if long:  # their short forms are tests of their own
        yield Campaign("kills", "xcompat push model user/name", lambda folder: killed_pushes(folder, 60))
        for store in SCENES:
            yield Campaign("killed migrations", store, lambda folder, s=store: killed_migrations(s, folder, 200))
        yield Campaign("readers", "two writers, three readers", lambda folder: read_beside_writers(10_000))
        yield Campaign("damaged inputs", "every kind of file that is read", lambda folder: damaged_inputs(10_000))


def read_beside_writers(reads: int) -> Trials:
    outcome = readers.run(reads)
    yield from outcome.problems
    yield from [None] * (outcome.reads - len(outcome.problems))


def damaged_inputs(trials: int) -> Trials:
    for tally in mutations.run(trials, seed=0):
        for trial in tally.failures:
            yield f"{trial.subject} {trial.number}: {trial.damage}: {trial.outcome}: {trial.detail}"
        yield from [None] * (tally.trials - len(tally.failures))


def _kills(operations: dict[str, Scene], long: bool) -> dict[str, tuple[int | None, int]]:
    """Return at how many calls, and how often at random, each operation is killed."""
    if long:
        long_form: dict[str, tuple[int | None, int]] = {"Flat": (None, 20)}
        return {name: long_form.get(name.partition(":")[0], (60, 10)) for name in operations}
    short = {"Flat": (3, 1), "IVF2,Flat": (1, 1), "HNSW8": (1, 1)}
    return {name: short.get(name.partition(":")[0], (1, 1)) for name in operations}


def _power_cuts(operations: dict[str, Scene], long: bool) -> dict[str, int | None]:
    """Return how many of the states on disk of each operation are gone on from."""
    alone = [name for name in operations if name != "new embeddings"]  # SQLite's own memory
    if long:
        return dict.fromkeys([*alone, "xcompat export faiss old.faiss"], 60)
    return dict.fromkeys(["Flat: add and replace", "Flat: compact", "Flat: roll back", "cache of images"], 2)


def _injections(scene: Scene, long: bool) -> Iterator[Campaign]:
    """Return the errors that a command meets: all, in parts, or one."""
    parts = PARTS.get(scene.name, 1) if long else 1
    for part in range(parts):

        def trials(folder: Path, part: int = part) -> Trials:
            return injected(Stage(scene, folder), every=long, most=None if long else 1, part=(part, parts))

        yield Campaign("injected errors", scene.name, trials, f", part {part + 1} of {parts}" if parts > 1 else "")
