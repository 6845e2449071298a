"""What is wrong with a recipe or a run, said before torch and transformers are imported: that takes longer than to read it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from xcompat.core.errors import XcompatError, nearest
from xcompat.data.sources import local_files
from xcompat.encoders import require_model
from xcompat.training.declared import is_solved, trackers
from xcompat.training.headers import said_with_layout
from xcompat.training.paths import check_paths
from xcompat.training.recipe import Recipe, load_recipe
from xcompat.training.record import DONE, require_ended
from xcompat.training.stage_recipe import CHOSEN, StageRecipe

SEVERAL = ("all", "none")
ALSO = {"tensorboard": ("tensorboard", "tensorboardX"), "azure_ml": (), "flyte": (), "kubeflow": ()}
"""Tracker -> libraries of which it needs one, where that is not one of its own name; of none, transformers itself looks."""


def load_to_compare(target: Path, overrides: Sequence[str], more: Path | None = None, check_data: bool = True) -> list[Recipe]:
    """Read and check a recipe, or all of a folder in the order of their names, before the first of them runs.

    Args:
        target: a YAML file, or a folder of them.
        overrides: of each of them.
        more: YAML file with one more stage for each of them.
        check_data: as :func:`load_checked` takes it.

    Raises:
        XcompatError: as :func:`load_checked` raises it, a folder holds no recipe, or two of them write into one folder.
    """
    if not target.is_dir():
        return [load_checked(target, overrides, every_seed=True, check_data=check_data, more=more)]
    files = sorted(target.glob("*.yaml"))
    if not files:
        raise XcompatError(f"{target} holds no recipe; name a folder of YAML files, such as recipes/bench")
    recipes = [load_checked(file, overrides, every_seed=True, check_data=check_data, more=more) for file in files]
    places = Counter(recipe.output_dir for recipe in recipes)
    if (shared := next((place for place, count in places.items() if count > 1), None)) is not None:
        raise XcompatError(f"{target}: two recipes write into {shared}; give each an output_dir of its own")
    return recipes


def load_checked(
    path: str | Path,
    overrides: Sequence[str],
    every_stage: bool = False,
    every_seed: bool = False,
    check_data: bool = True,
    more: Path | None = None,
) -> Recipe:
    """Read and validate a recipe; first, and quickly, what its text and the names of files tell.

    Args:
        path: its YAML.
        overrides: as :func:`~xcompat.training.recipe.load_recipe` takes them.
        every_stage: whether the data of trained stages are looked for too.
        every_seed: whether it runs once for each of its seeds.
        check_data: whether to refuse paths that do not exist; a dry run lists them.
        more: as :func:`~xcompat.training.recipe.load_recipe` takes it.

    Returns:
        The recipe.

    Raises:
        XcompatError: as :func:`~xcompat.training.recipe.load_recipe` and :func:`~xcompat.training.paths.check_paths` raise it, or
            a tracker is unknown or not installed, or ``seed`` is overridden where each of ``seeds`` runs.
    """
    recipe = load_recipe(path, overrides, is_quick=True, more=more)
    if every_seed and recipe.seeds:
        _refuse_seed(recipe, overrides)
    runs = [recipe.of_seed(seed) for seed in recipe.seeds or [recipe.seed]] if every_seed else [recipe]
    for settings in recipe.stages:
        if every_stage or not all(_is_trained(run, settings) for run in runs):
            if check_data:
                with said_with_layout(recipe.layout):
                    check_paths(settings)
            check_trackers(settings)
    return load_recipe(path, overrides, more=more)


def _refuse_seed(recipe: Recipe, overrides: Sequence[str]) -> None:
    """Refuse the override of a seed that no run has; one in a file is what ``train`` takes."""
    typed = next((override for override in overrides if override.startswith("seed=")), None)
    if typed is not None:
        seed = typed.removeprefix("seed=")
        raise XcompatError(f"{typed} is not read where each of seeds runs, {recipe.seeds}; write seeds=[{seed}], or leave it out")


def _is_trained(run: Recipe, settings: StageRecipe) -> bool:
    return (run.stage_dir(settings.name) / DONE).exists()


def check_trackers(settings: StageRecipe) -> None:
    """Refuse trackers under ``training.report_to`` that do not exist or are not installed.

    Args:
        settings: a stage; one that is solved trains nothing, and nothing is tracked.

    Raises:
        XcompatError: naming the tracker, with the line that installs it.
    """
    given = settings.training.get("report_to")
    if given is None or settings.method == CHOSEN or is_solved(settings.method):
        return
    known = trackers()
    for name in [given] if isinstance(given, str) else given:
        if name in SEVERAL or not known:
            continue
        if name not in known:
            raise XcompatError(f"{settings.name}: training.report_to names {name!r}, which is no tracker; {nearest(name, known)}")
        libraries = ALSO.get(name, (name,))
        if libraries and not any(map(find_spec, libraries)):
            raise XcompatError(not_installed(settings.name, name))


def not_installed(stage: str, tracker: str) -> str:
    """Return what is said of a tracker that is not installed."""
    return f"{stage}: training.report_to names {tracker}, which is not installed; `pip install {tracker.replace('_', '-')}`"


def require_served(target: str, model: str | None, images: Sequence[Path]) -> None:
    """Refuse to serve what is neither a gallery with a model nor a run.

    Args:
        target: folder of the gallery or the run.
        model: the new model.
        images: what a gallery was built from.

    Raises:
        XcompatError: naming what is missing.
    """
    from xcompat.retrieval.manifest import CURRENT  # with faiss's part of a gallery, which takes as long as all else here

    folder = Path(target)
    if "://" in target:
        raise XcompatError(f"{target} is no folder; search a store with `xcompat gallery search`, and serve a gallery or a run")
    if (folder / CURRENT).is_file():
        if not model:
            raise XcompatError("name the model that asks with --model: a run's folder, a checkpoint, or a model by name")
        for place in images:
            local_files(str(place))
    elif images:
        raise XcompatError("--images and --texts are of a gallery; a run knows its test set: leave them out")
    else:
        require_ended(folder)
    if model:
        require_model(model)
