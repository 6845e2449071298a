"""Check the output folders of a recipe before training, so that no file of the user is replaced."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import BaseFileLock

from xcompat.core.distributed import from_main_process
from xcompat.core.errors import XcompatError
from xcompat.report import load_report, report_file, require_report_place
from xcompat.retrieval.lock import lock_writer
from xcompat.training.recipe import Recipe
from xcompat.training.record import CHOICE, DONE, ENVIRONMENT, EVALUATED, OLD_MEMORY, RECIPE
from xcompat.training.sequence import CSV_NAME
from xcompat.training.stage import StagePaths

_ELSEWHERE = "move it, or choose another output_dir"


def require_places(recipe: Recipe) -> None:
    """Refuse output folders with files that this recipe did not write.

    A stage's own files have its ``recipe.yaml`` beside them. The run's report names its stages, of which the recipe still has the
    last one, or one whose folder is there.

    Args:
        recipe: validated.

    Raises:
        XcompatError: a file or folder is in the way.
    """
    stages = [(settings, StagePaths(recipe, settings)) for settings in recipe.stages]
    for settings, paths in stages:
        if not (paths.folder / RECIPE).is_file():
            written = paths.model.name, paths.checkpoints.name, ENVIRONMENT, DONE, EVALUATED, CHOICE, OLD_MEMORY
            _require_free(paths.folder, written)
        if settings.is_judged:
            require_report_place(paths.report)
    begun = any((paths.folder / RECIPE).is_file() for _, paths in stages)
    if report_file(recipe.output_dir).is_file():  # the user may have deleted a run's stages to make them again
        _require_own_report(recipe, begun)
    elif not begun:
        _require_free(recipe.output_dir, (EVALUATED, CSV_NAME))


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Keep the processes of another launch from training in a run's folder; they would remove each other's checkpoints.

    Args:
        folder: the run's; it is made.

    Raises:
        XcompatError: others are training there.
    """
    held: list[BaseFileLock] = []

    def refusal() -> str | None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            held.append(lock_writer(folder))
        except XcompatError as error:
            return str(error)
        except OSError as error:
            return f"cannot write to {folder}: {error.strerror}"
        return None

    if (refused := from_main_process(refusal)) is not None:  # all processes of this launch end alike
        raise XcompatError(refused)
    try:
        yield
    finally:
        for lock in held:
            lock.release()


def _require_own_report(recipe: Recipe, begun: bool) -> None:
    """Refuse a run's folder whose report is that of another recipe, of a map or of an evaluation."""
    folder, names = recipe.output_dir, {settings.name for settings in recipe.stages}
    try:
        told = list(load_report(folder).seconds)
    except XcompatError:  # damaged, or of another version: it is made again if it is a run's
        is_own = begun or (folder / EVALUATED).is_file()
    else:
        kept = [name for name in told if (folder / name / RECIPE).is_file()]
        is_own = bool(names & {*told[-1:], *kept})
    is_of_one_stage = len(names) > 1 and (folder / DONE).is_file()
    if is_of_one_stage or not is_own:
        raise XcompatError(f"{folder} has a report that another recipe or command made, and would be replaced; {_ELSEWHERE}")


def _require_free(folder: Path, names: Iterable[str]) -> None:
    there = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    if not there.is_dir():
        raise XcompatError(f"{there} is no folder, and {folder} is where a recipe writes; {_ELSEWHERE}")
    for path in (folder / name for name in names):
        is_empty = path.is_dir() and not path.is_symlink() and not any(path.iterdir())
        if os.path.lexists(path) and not is_empty:
            raise XcompatError(f"{path} was made by no recipe, as {folder} has no {RECIPE}, and would be replaced; {_ELSEWHERE}")
