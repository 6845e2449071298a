"""Protection of the user's files in a recipe's output folders."""

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
from xcompat.training.stage import Stage

_ELSEWHERE = "move it, or choose another output_dir"


def require_places(recipe: Recipe) -> None:
    """Refuse output folders with files that this recipe did not write.

    A stage's files need its ``recipe.yaml``. A run's report must name the last stage, or a stage with a folder.

    Args:
        recipe: the validated recipe.

    Raises:
        XcompatError: a file or folder is in the way.
    """
    stages = [Stage(recipe, settings) for settings in recipe.stages]
    for stage in stages:
        if not (stage.folder / RECIPE).is_file():
            written = stage.model_folder.name, stage.checkpoints.name, ENVIRONMENT, DONE, EVALUATED, CHOICE, OLD_MEMORY
            _require_free(stage.folder, written)
        if stage.settings.is_judged:
            require_report_place(stage.report)
    begun = any((stage.folder / RECIPE).is_file() for stage in stages)
    if report_file(recipe.output_dir).is_file():  # stages may be deleted to train again
        _require_own_report(recipe, begun)
    elif not begun:
        _require_free(recipe.output_dir, (EVALUATED, CSV_NAME))


@contextmanager
def lock_run(folder: Path) -> Iterator[None]:
    """Lock a run's folder against other launches.

    Args:
        folder: run folder; created if missing.

    Raises:
        XcompatError: another launch trains there.
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

    if (refused := from_main_process(refusal)) is not None:  # in all processes
        raise XcompatError(refused)
    try:
        yield
    finally:
        for lock in held:
            lock.release()


def _require_own_report(recipe: Recipe, begun: bool) -> None:
    """Refuse a report of another recipe, a map or an evaluation."""
    folder, names = recipe.output_dir, {settings.name for settings in recipe.stages}
    try:
        told = list(load_report(folder).seconds)
    except XcompatError:  # damaged, or of another version: a run's is written again
        is_own = begun or (folder / EVALUATED).is_file()
    else:
        kept = [name for name in told if (folder / name / RECIPE).is_file()]
        is_own = bool(names & {*told[-1:], *kept})
    is_of_one_stage = len(names) > 1 and (folder / DONE).is_file()
    if is_of_one_stage or not is_own:
        raise XcompatError(f"{folder} contains the report of another recipe or command; {_ELSEWHERE}")


def _require_free(folder: Path, names: Iterable[str]) -> None:
    there = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    if not there.is_dir():
        raise XcompatError(f"{there} is not a folder; {_ELSEWHERE}")
    for path in (folder / name for name in names):
        is_empty = path.is_dir() and not path.is_symlink() and not any(path.iterdir())
        if os.path.lexists(path) and not is_empty:
            raise XcompatError(f"{path} would be replaced, but no recipe made it ({folder} has no {RECIPE}); {_ELSEWHERE}")
