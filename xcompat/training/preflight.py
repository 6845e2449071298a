"""Fast checks of recipes and runs, without torch and transformers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from xcompat.core.errors import MissingPathError, XcompatError, collect_problems, nearest, require_no_problems
from xcompat.core.paths import nearest_path
from xcompat.core.progress import announce_loading
from xcompat.data.sources import local_files
from xcompat.encoders import require_model
from xcompat.stores.places import is_index
from xcompat.training.headers import add_layout_to_errors
from xcompat.training.input_checks import check_paths
from xcompat.training.recipe import Recipe, examine_recipe, load_recipe
from xcompat.training.record import DONE, require_ended
from xcompat.training.stage_recipe import AUTO_MAP, StageRecipe
from xcompat.training.static_options import is_solved, trackers

SEVERAL = ("all", "none")
ALSO = {"tensorboard": ("tensorboard", "tensorboardX"), "azure_ml": (), "flyte": (), "kubeflow": ()}
"""Tracker -> packages, any of which suffices, if not named like the tracker; empty: transformers checks."""


def load_to_compare(target: Path, overrides: Sequence[str], more: Path | None = None, check_data: bool = True) -> list[Recipe]:
    """Load and check a recipe, or all recipes of a folder by name.

    Args:
        target: YAML file, or folder of them.
        overrides: ``key=value`` for each recipe.
        more: YAML file with an extra stage for each recipe.
        check_data: as in :func:`load_checked`.

    Raises:
        XcompatError: a recipe is invalid, the folder has none, or two write to the same folder.
    """
    if not target.is_dir():
        return [load_checked(target, overrides, every_seed=True, check_data=check_data, more=more)]
    files = sorted(target.glob("*.yaml"))
    if not files:
        raise XcompatError(f"{target} contains no recipe; choose a folder of YAML files, e.g. recipes/bench")
    recipes = [load_checked(file, overrides, every_seed=True, check_data=check_data, more=more) for file in files]
    places = Counter(recipe.output_dir for recipe in recipes)
    if (shared := next((place for place, count in places.items() if count > 1), None)) is not None:
        raise XcompatError(f"{target}: two recipes write to {shared}; give each its own output_dir")
    return recipes


def load_checked(
    path: str | Path,
    overrides: Sequence[str],
    every_stage: bool = False,
    every_seed: bool = False,
    check_data: bool = True,
    more: Path | None = None,
) -> Recipe:
    """Load and validate a recipe, fast checks first.

    Args:
        path: YAML file.
        overrides: as in :func:`~xcompat.training.recipe.load_recipe`.
        every_stage: whether to check data of trained stages too.
        every_seed: whether the recipe runs once per seed.
        check_data: whether to refuse missing paths; a dry run lists them.
        more: as in :func:`~xcompat.training.recipe.load_recipe`.

    Returns:
        The recipe.

    Raises:
        XcompatError: a line for each mistake in the recipe, its paths and trackers, or ``seed`` is overridden while each of
            ``seeds`` runs.
    """
    recipe, problems = examine_recipe(path, overrides, is_quick=True, more=more)
    if recipe is not None:
        if every_seed and recipe.seeds:
            _refuse_seed(recipe, overrides)
        runs = [recipe.of_seed(seed) for seed in recipe.seeds or [recipe.seed]] if every_seed else [recipe]
        stages = [each for each in recipe.stages if every_stage or not all(_is_trained(run, each) for run in runs)]
        said: dict[str, str] = {}  # what stages inherit is one problem
        for settings in stages:
            found: list[str] = []
            with collect_problems(found):
                check_trackers(settings)
            if check_data:
                with collect_problems(found), add_layout_to_errors(recipe.layout):
                    check_paths(settings)
            for problem in found:
                said.setdefault(problem.removeprefix(f"{settings.name}: "), problem)
        problems += said.values()
    require_no_problems(problems)
    announce_loading()
    return load_recipe(path, overrides, more=more)


def _refuse_seed(recipe: Recipe, overrides: Sequence[str]) -> None:
    """Refuse an override of ``seed``; in the file it is for ``train``."""
    typed = next((override for override in overrides if override.startswith("seed=")), None)
    if typed is not None:
        seed = typed.removeprefix("seed=")
        raise XcompatError(f"compare runs all seeds {recipe.seeds} and ignores {typed}; use seeds=[{seed}] instead")


def _is_trained(run: Recipe, settings: StageRecipe) -> bool:
    return (run.stage_dir(settings.name) / DONE).exists()


def check_trackers(settings: StageRecipe) -> None:
    """Refuse unknown or missing trackers in ``training.report_to``.

    Args:
        settings: the stage; solved stages are skipped.

    Raises:
        XcompatError: with the install command.
    """
    given = settings.training.get("report_to")
    if given is None or settings.method == AUTO_MAP or is_solved(settings.method):
        return
    known, problems = trackers(), list[str]()
    for name in [given] if isinstance(given, str) else given:
        if name in SEVERAL or not known:
            continue
        if name not in known:
            problems.append(f"{settings.name}: training.report_to: unknown tracker {name!r}; {nearest(name, known)}")
        elif (libraries := ALSO.get(name, (name,))) and not any(map(find_spec, libraries)):
            problems.append(not_installed(settings.name, name))
    require_no_problems(problems)


def not_installed(stage: str, tracker: str) -> str:
    """Return the error message for a missing tracker."""
    return f"{stage}: training.report_to: {tracker} is not installed; run `pip install {tracker.replace('_', '-')}`"


def require_served(
    target: str, model: str | None, images: Sequence[Path], ids: Path | None = None, allow_changes: bool = False
) -> None:
    """Raise if ``xcompat serve`` cannot serve the target.

    Args:
        target: folder of a gallery or run, or a faiss index.
        model: the new model.
        images: sources of the gallery's images.
        ids: file with the ids of an index.
        allow_changes: whether the page may change galleries.

    Raises:
        XcompatError: something is missing.
    """
    from xcompat.retrieval.manifest import CURRENT  # imports faiss, which takes as long as all the rest

    folder = Path(target)
    if "://" in target:
        raise XcompatError(f"{target} is not a folder of a gallery or a run; search a store with `xcompat gallery search`")
    if not folder.exists():
        raise MissingPathError(f"{target} does not exist; {nearest_path(target)}")
    opens_index = is_index(folder)
    if ids is not None:
        _require_ids(ids, target, opens_index)
    if opens_index and allow_changes:
        raise XcompatError(f"--allow-changes needs a gallery; adopt {target} first with `xcompat gallery adopt`")
    if (folder / CURRENT).is_file() or opens_index:
        if not model:
            raise XcompatError("set the query model with --model: a run's folder, a checkpoint, or a model name")
        for place in images:
            local_files(str(place))
    elif images:
        raise XcompatError("--images and --texts apply to galleries and indexes; remove them, as a run has its own test set")
    else:
        require_ended(folder)
    if model:
        require_model(model)


def _require_ids(ids: Path, target: str, opens_index: bool) -> None:
    if not opens_index:
        raise XcompatError(f"--ids gives the ids of a faiss index, but {target} is not a faiss index; remove --ids")
    if not ids.is_file():
        raise MissingPathError(f"--ids {ids} does not exist; choose a text file with an id per line")
