"""Training images in the test set of a stage: new classes, and the gallery."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from xcompat.evaluation import EmbeddedImages, EvaluatedModel
from xcompat.evaluation.embedded_images import LearnedItems
from xcompat.training.stage import StageData, StageModels
from xcompat.training.stage_recipe import AUTO_MAP, StageRecipe

MOST = 10_000
"""Maximum number of training images in a gallery."""


def add_learned_items(
    old: EvaluatedModel, new: EvaluatedModel | None, settings: StageRecipe, models: StageModels, data: StageData, seed: int
) -> tuple[EvaluatedModel, EvaluatedModel | None]:
    """Add training images to a test set (collective call).

    Args:
        old: old test set embeddings.
        new: independent new embeddings, or None.
        settings: the stage.
        models: the stage's models.
        data: training images.
        seed: random seed for the sample.

    Returns:
        The test sets; galleries contain only cached training images.
    """
    if not isinstance(old, EmbeddedImages) or settings.data.images is None:
        return old, new
    learned = LearnedItems(frozenset(data.images.present_classes()))
    of_new_classes = any(label not in learned.classes for label in old.query_labels)
    if not of_new_classes or not _caches_old_embeddings(settings, models, seed):
        return replace(old, learned=learned), new
    caches, names = [data.cache(models.frozen("old"))], data.images.class_names()
    if isinstance(new, EmbeddedImages) and _caches_new_embeddings(settings, models):
        caches.append(data.cache(models.frozen("new")))
    rows_L = np.flatnonzero(np.logical_and.reduce([cache.readable() for cache in caches]))
    rows_L = np.sort(np.random.default_rng(seed).permutation(rows_L)[:MOST])
    labels_L = [names[row] for row in rows_L.tolist()]
    of_old, *of_new = (replace(learned, embeds_LD=cache[rows_L], labels_L=labels_L) for cache in caches)
    return replace(old, learned=of_old), replace(new, learned=of_new[0]) if of_new else new  # type: ignore[type-var]


def _caches_new_embeddings(settings: StageRecipe, models: StageModels) -> bool:
    return models.method.embeds_in_memory and not models.method.maps_features(settings.options)


def _caches_old_embeddings(settings: StageRecipe, models: StageModels, seed: int) -> bool:
    if settings.method == AUTO_MAP or settings.memory == "classes":
        return True
    if models.method.embeds_in_memory:
        return not settings.views(seed)
    return settings.data.old_embeddings == "cached"
