"""Chains of gallery maps: a gallery mapped again after each update (FCT §4.4)."""

from __future__ import annotations

from collections.abc import Sequence

from xcompat.evaluation.evaluated_models import C
from xcompat.models import CompatModel
from xcompat.training.evaluation_models import map_contestant
from xcompat.training.stage_recipe import StageRecipe, method_class


def hops_before(settings: StageRecipe, stages: Sequence[StageRecipe]) -> list[StageRecipe]:
    """Return earlier stages whose mapped galleries a stage maps again, nearest first.

    A map follows another if its old model is the other's new model, and the same holds for its side-information.

    Args:
        settings: the stage.
        stages: all stages in order.
    """
    hops: list[StageRecipe] = []
    for stage in reversed(stages[: stages.index(settings)]):
        if _leads_to(stage, hops[-1] if hops else settings):
            hops.append(stage)
    return hops


def _leads_to(before: StageRecipe, after: StageRecipe) -> bool:
    if not all(method_class(stage.method).maps_galleries_with(stage.options) for stage in (before, after)):
        return False
    same_sides = before.new_side_info == after.side_info and (before.side_info is None) == (after.side_info is None)
    return after.old is not None and before.new == after.old and same_sides


def mapped_along(hops: Sequence[CompatModel], old: C, side_info: C | None) -> C:
    """Map a gallery and its side-information with several maps in sequence.

    Args:
        hops: maps, oldest first.
        old: items embedded by the oldest old model.
        side_info: items embedded by its side-information model.

    Returns:
        The items in the space of the last map's new model.
    """
    mapped, side = old, side_info
    for model in hops:
        fingerprint = mapped.fingerprint.derive(f"upgrade {model.fingerprint().digest}")
        named = f"{old.name}, mapped {len(hops)} times", fingerprint, model.upgrade, model.device
        new_side = None
        if side is not None and model.writes_side_info:
            new_side = map_contestant(mapped, side.name, fingerprint.derive("side"), model.upgrade_side, model.device, side)
        mapped, side = map_contestant(mapped, *named, side), new_side
    return mapped
