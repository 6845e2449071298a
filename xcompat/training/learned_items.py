"""Training images in the test set of a stage: new classes, and the gallery."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from xcompat.evaluation import EmbeddedImages, EvaluatedModel
from xcompat.evaluation.embedded_images import LearnedItems
from xcompat.training.stage import Stage
from xcompat.training.stage_recipe import AUTO_MAP

MOST = 10_000
"""Maximum number of training images in a gallery."""


def add_learned_items(
    old: EvaluatedModel, new: EvaluatedModel | None, stage: Stage
) -> tuple[EvaluatedModel, EvaluatedModel | None]:
    """Add training images to a test set (collective call).

    Args:
        old: old test set embeddings.
        new: independent new embeddings, or None.
        stage: the stage.

    Returns:
        The test sets; galleries contain only cached training images.
    """
    if not isinstance(old, EmbeddedImages) or stage.settings.data.images is None:
        return old, new
    learned = LearnedItems(frozenset(stage.images.present_classes()))
    of_new_classes = any(label not in learned.classes for label in old.query_labels)
    if not of_new_classes or not _caches_old_embeddings(stage):
        return replace(old, learned=learned), new
    caches, names = [stage.cache(stage.frozen("old"))], stage.images.class_names()
    if isinstance(new, EmbeddedImages) and _caches_new_embeddings(stage):
        caches.append(stage.cache(stage.frozen("new")))
    rows_L = np.flatnonzero(np.logical_and.reduce([cache.readable() for cache in caches]))
    rows_L = np.sort(np.random.default_rng(stage.seed).permutation(rows_L)[:MOST])
    labels_L = [names[row] for row in rows_L.tolist()]
    of_old, *of_new = (replace(learned, embeds_LD=cache[rows_L], labels_L=labels_L) for cache in caches)
    return replace(old, learned=of_old), replace(new, learned=of_new[0]) if of_new else new  # type: ignore[type-var]


def _caches_new_embeddings(stage: Stage) -> bool:
    return stage.method.embeds_in_memory and not stage.method.maps_features(stage.settings.options)


def _caches_old_embeddings(stage: Stage) -> bool:
    if stage.settings.method == AUTO_MAP or stage.settings.memory == "classes":
        return True
    if stage.method.embeds_in_memory:
        return not stage.settings.views(stage.seed)
    return stage.settings.data.old_embeddings == "cached"
