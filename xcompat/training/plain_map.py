"""Closed-form map of a comparison, as a yardstick for its methods."""

from __future__ import annotations

from typing import Any

from xcompat.core.errors import XcompatError
from xcompat.core.progress import notice
from xcompat.encoders import EncoderSource
from xcompat.report import load_report
from xcompat.report.comparison import EvaluatedMethod
from xcompat.training.recipe import Recipe
from xcompat.training.record import DONE, Done, read_record
from xcompat.training.run import run_recipe
from xcompat.training.stage_recipe import StageRecipe
from xcompat.training.stored_models import is_stored

NAME, HALF_WAY, METHOD = "plain map", "half-way", "whitened"
"""Names of the rows, and their method."""
STAGE = "plain_map"
"""Name of the map's stage and folder."""
MIXED = "slerp"
"""Case of half-way queries in reports."""


def plain_map_recipe(recipe: Recipe) -> Recipe | None:
    """Return the recipe of a plain map from the models and data of a stage.

    Args:
        recipe: a recipe of ``compare``, for one seed.

    Returns:
        The recipe, or None if the recipe compares this method itself, or no stage has an old and a new model.
    """
    judged = [settings for settings in recipe.stages if settings.is_judged]
    if not recipe.plain_map or any(settings.method == METHOD for settings in judged):
        return None
    stage = next(filter(None, (_plain_stage(recipe, settings) for settings in judged)), None)
    if stage is None:
        return None
    return recipe.model_copy(update={"output_dir": recipe.output_dir / STAGE, "stages": [stage]})


def _plain_stage(recipe: Recipe, settings: StageRecipe) -> StageRecipe | None:
    """Return the stage of a plain map for a stage, or None if its models or data do not fit."""
    new = settings.independent or settings.new
    data = _embedded_data(settings)
    if settings.old is None or not isinstance(new, EncoderSource) or data is None or settings.evaluation is None:
        return None
    old, new = (each.model_copy(update={"name": recipe.resolve(each.name)}) for each in (settings.old, new))
    slerp = None if is_stored(old.name) else 0.5
    unused: dict[str, Any] = {"fallback": None, "rerank": 0, "rerank_weight": None, "compare_with": []}
    evaluation = settings.evaluation.model_copy(update={"slerp": slerp, **unused})
    parts = {"old": old, "new": new, "data": data, "evaluation": evaluation}
    return StageRecipe(name=STAGE, method=METHOD).model_copy(update=parts)


def _embedded_data(settings: StageRecipe) -> Any:  # noqa: ANN401 - settings of data, or None
    """Return the data from which a map learns, or None if both models cannot embed it once."""
    data, kept = settings.data, {"augmentation": None, "views": 0, "one_per_id": False, "remembered": None, "text_pairs": None}
    if data.old_reads == "captions":
        return None
    if data.images is not None or data.texts:
        return data.model_copy(update=kept | {"embeddings_of": "texts"})
    if data.pairs is not None and not data.pairs.streaming:
        return data.model_copy(update=kept | {"embeddings_of": "images"})
    return None


def run_plain_map(runs: dict[int, Recipe]) -> list[EvaluatedMethod]:
    """Solve and evaluate the plain map of each seed.

    Args:
        runs: seed -> recipe.

    Returns:
        The rows of new queries and of half-way queries; none if no plain map is possible.
    """
    found = {seed: recipe for seed, run in runs.items() if (recipe := plain_map_recipe(run)) is not None}
    if not found:
        return []
    try:
        folders = {seed: run_recipe(recipe)[STAGE] for seed, recipe in found.items()}
    except XcompatError as error:
        notice(f"no plain map beside the methods: {error}")
        return []
    reports = {seed: load_report(folder) for seed, folder in folders.items()}
    seconds = [read_record(recipe.output_dir / DONE, Done).seconds for recipe in found.values()]
    first = next(iter(reports.values()))
    parameters = first.new.dim * first.old.dim
    plain = EvaluatedMethod(NAME, METHOD, reports, parameters, False, seconds)
    if not all(any(case.label == f"{MIXED}/old" for case in report.cases) for report in reports.values()):
        return [plain]
    return [plain, EvaluatedMethod(HALF_WAY, METHOD, reports, parameters, False, seconds, MIXED)]
