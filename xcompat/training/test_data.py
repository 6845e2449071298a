"""Checks of test data before any stage trains."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from xcompat.core.errors import XcompatError
from xcompat.data import LabelledImages
from xcompat.data.ids import disambiguate_ids
from xcompat.data.schema import ID
from xcompat.training.evaluation_sets import check_zero_shot, load_pair_test_set, load_test_images
from xcompat.training.input_checks import error_prefix
from xcompat.training.judged_templates import require_images_of_templates
from xcompat.training.judged_texts import load_judged_texts
from xcompat.training.stage_recipe import StageRecipe

TEST_SETS = ("test", "zero_shot", "queries", "gallery", "test_subset", "judged_texts", "templates", "old_reads")
"""Keys of the data section that define a stage's test data."""


def check_test_sets(stages: Sequence[StageRecipe]) -> None:
    """Raise if test data cannot be read or evaluated on.

    Distinct test sets are checked once, without decoding images; rows read stay cached.

    Args:
        stages: all stages of a recipe.

    Raises:
        XcompatError: with stage, key and cause.
    """
    known: set[str] = set()
    for settings in filter(lambda stage: stage.is_judged, stages):
        fpirs = settings.evaluation is not None and bool(settings.evaluation.fpirs)
        key = f"{settings.data.model_dump_json(include=set(TEST_SETS))} {fpirs}"
        if key not in known:
            _check_test_set(settings, fpirs)
        known.add(key)


def _check_test_set(settings: StageRecipe, fpirs: bool) -> None:
    data, name = settings.data, settings.name
    for shot, images in data.zero_shot_sets().items():
        with error_prefix(name):
            check_zero_shot(images, shot)
    if data.queries is not None:
        with error_prefix(f"{name}: data.queries"):
            queries = load_test_images(data.queries, data)
        with error_prefix(f"{name}: data.gallery"):
            gallery = load_test_images(data.gallery, data) if data.gallery is not None else queries
        _require_matches(queries, gallery, name, fpirs)
    elif data.judged_texts is not None:
        with error_prefix(f"{name}: data.judged_texts"):
            load_judged_texts(data.judged_texts).require_judgements()
    elif data.templates is not None:
        with error_prefix(f"{name}: data.templates"):
            require_images_of_templates(data.templates)
    elif data.test is not None:
        with error_prefix(f"{name}: data.test"):
            load_pair_test_set(data.test)


def _require_matches(queries: LabelledImages, gallery: LabelledImages, stage: str, fpirs: bool) -> None:
    """Raise if no query can be found, or with ``fpirs`` if all can."""
    found = gallery.class_names()
    others, itself = Counter(found), dict(zip(disambiguate_ids(gallery.dataset, queries.dataset), found, strict=True))
    asked = zip(queries.dataset[ID], queries.class_names(), strict=True)
    matched = [others[name] > (itself.get(item) == name) for item, name in asked]
    if not any(matched):
        raise XcompatError(
            f"{stage}: data.queries: no query has another image of its class in the gallery, so nothing can be found; "
            "use queries and a gallery of the same classes"
        )
    if fpirs and all(matched):
        raise XcompatError(
            f"{stage}: evaluation.fpirs: every query's class is in the gallery, so there is no impostor to refuse; "
            "add queries of other classes, or remove fpirs"
        )
