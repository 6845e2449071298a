"""``xcompat compare``: several methods and seeds in a single protocol and table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from xcompat.core.distributed import barrier, is_main_process
from xcompat.core.errors import XcompatError
from xcompat.core.progress import console, literal, notice
from xcompat.encoders.base import Encoder
from xcompat.losses.classification import ClassificationHead
from xcompat.models import CompatModel
from xcompat.report import load_report
from xcompat.report.comparison import (
    Comparison,
    EvaluatedMethod,
    compare,
    comparison_file,
    print_comparison,
    require_comparison_place,
    write_comparison,
)
from xcompat.training.item_cost import measure_item_cost
from xcompat.training.output_checks import require_places
from xcompat.training.plain_map import run_plain_map
from xcompat.training.recipe import Recipe
from xcompat.training.record import DONE, Done, read_record, trained_length
from xcompat.training.run import run_recipe
from xcompat.training.stage import Stage
from xcompat.training.stage_recipe import StageRecipe

WHOLE_PASS = 0.99
"""Passes over the training data that count as a whole one: the last, smaller batch can be dropped."""


def compare_recipe(recipe: Recipe) -> Path:
    """Run a recipe once per seed and compare its evaluated stages.

    Each seed has a folder ``seed-N``; finished stages and embedding caches are reused.

    Args:
        recipe: the validated recipe; without ``seeds``, only ``seed`` runs.

    Returns:
        Path of ``compare.html``.

    Raises:
        XcompatError: no stage is evaluated, cases differ, or other files are in the way.
    """
    evaluated = _evaluated_stages(recipe)  # raises before hours of training
    require_comparison_place(recipe.output_dir)
    runs = {seed: recipe.of_seed(seed) for seed in recipe.seeds or [recipe.seed]}
    for run in runs.values():
        require_places(run)
    folders = {seed: run_recipe(run) for seed, run in runs.items()}
    plain = run_plain_map(runs)
    if is_main_process():
        contenders = [_contender(settings, runs, folders) for settings in evaluated]
        settings = evaluated[0].evaluation
        assert settings is not None
        notes = [line for run in runs.values() if (line := describe_few_steps(run, evaluated))][:1]
        comparison = _compare_with_plain_map(recipe.name, contenders, plain, settings.resamples, notes)
        page = write_comparison(recipe.output_dir, comparison)
        print_comparison(comparison, console)
        console.print(f"comparison: {literal(page)}", soft_wrap=True)
    barrier()
    return comparison_file(recipe.output_dir).with_suffix(".html")


def _compare_with_plain_map(
    name: str, contenders: list[EvaluatedMethod], plain: list[EvaluatedMethod], resamples: int, notes: list[str]
) -> Comparison:
    """Compare methods and the plain map, or only the methods if their cases differ."""
    try:
        return compare(name, [*contenders, *plain], resamples, notes)
    except XcompatError as error:
        if not plain:
            raise
        notice(f"no plain map beside the methods: {error}")
    return compare(name, contenders, resamples, notes)


def describe_few_steps(recipe: Recipe, evaluated: Sequence[StageRecipe]) -> str:
    """Return a sentence about stages that trained for less than a pass over their data, or than their warm-up; else "".

    Args:
        recipe: a finished run's recipe.
        evaluated: compared stages.
    """
    found = []
    for settings in evaluated:
        if (length := trained_length(recipe.stage_dir(settings.name))) is not None:
            steps, passes = length
            warmup = settings.training.get("warmup_steps", 0)
            is_warming = 0 < steps <= (warmup if warmup >= 1 else warmup * steps)
            if is_warming or passes < WHOLE_PASS:
                why = "warm-up not over" if is_warming else f"{passes:.2g} passes over the data"
                found.append(f"{settings.name} {steps:,} steps, {why}")
    if not found:
        return ""
    return f"few training steps ({'; '.join(found)}): the comparison says little about these methods; increase training.max_steps"


def dry_run_comparison(recipe: Recipe) -> None:
    """Check that a recipe can be compared, and dry-run its first seed.

    Args:
        recipe: the validated recipe.

    Raises:
        XcompatError: as in :func:`compare_recipe` and :func:`~xcompat.training.dry_run.dry_run_recipe`.
    """
    from xcompat.training.dry_run import dry_run_recipe

    _evaluated_stages(recipe)
    require_comparison_place(recipe.output_dir)
    seeds = recipe.seeds or [recipe.seed]
    for seed in seeds:
        require_places(recipe.of_seed(seed))
    dry_run_recipe(recipe.of_seed(seeds[0]))


def _evaluated_stages(recipe: Recipe) -> list[StageRecipe]:
    evaluated = [settings for settings in recipe.stages if settings.is_judged]
    if not evaluated:
        raise XcompatError(
            f"{recipe.name} has no stage to compare: a stage needs an old model, a test set in data, and evaluation"
        )
    return evaluated


def _contender(settings: StageRecipe, runs: Mapping[int, Recipe], folders: Mapping[int, Mapping[str, Path]]) -> EvaluatedMethod:
    model = Stage(next(iter(runs.values())), settings).load_trained(settings.name)
    return EvaluatedMethod(
        settings.name,
        settings.method,
        {seed: load_report(reports[settings.name]) for seed, reports in folders.items()},
        outside_parameters(model),
        model.maps_galleries,
        [read_record(run.stage_dir(settings.name) / DONE, Done).seconds for run in runs.values()],
        item_cost=measure_item_cost(model),
    )


def outside_parameters(model: CompatModel) -> int:
    """Count a model's parameters outside its encoder.

    Classifiers kept for later upgrades do not count.
    """
    aside = [module for module in model.modules() if isinstance(module, Encoder | ClassificationHead)]
    left_out = {id(parameter) for module in aside for parameter in module.parameters()}
    return sum(parameter.numel() for parameter in model.parameters() if id(parameter) not in left_out)
