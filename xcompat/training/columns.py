"""Training columns of a method: embeddings, classes, and its own columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from xcompat.core.errors import XcompatError
from xcompat.data import LabelledImages
from xcompat.data.schema import INDEX, LABELS, NEW_EMBEDS, OLD_EMBEDS
from xcompat.embeddings.embed import EmbeddingCache
from xcompat.models import CompatModel
from xcompat.models.embedder import Embedder
from xcompat.models.frozen import FrozenModel
from xcompat.models.old_knowledge import OldKnowledge, Rows
from xcompat.training.stage_recipe import StageRecipe
from xcompat.training.training_sets import Data, embedding_data


def map_data(
    model: CompatModel,
    new: EmbeddingCache,
    old: EmbeddingCache,
    images: LabelledImages | None = None,
    sides: Mapping[str, EmbeddingCache] | None = None,
) -> Data:
    """Prepare a map over cached embeddings and return its training data.

    Args:
        model: the map.
        new: new embeddings.
        old: old embeddings in the same order.
        images: source of classes, or None; views follow each other.
        sides: column name -> side-information.

    Returns:
        Data set and collator.
    """
    labels_N, classes = (images.labels(), images.classes) if images is not None else (np.empty(0, dtype=np.int64), [])
    if images is not None:
        labels_N = np.tile(labels_N, len(new) // len(labels_N))
    model.prepare(OldKnowledge(len(classes), labels_N, old), new)
    known: dict[str, Any] = {INDEX: np.arange(len(new)), **(sides or {})}
    if images is not None:
        known[LABELS] = labels_N
    wanted = {*model.columns, *model.columns_if_known}
    return embedding_data(new, old, {name: column for name, column in known.items() if name in wanted})


def labelled_columns(
    model: CompatModel,
    settings: StageRecipe,
    images: LabelledImages,
    old: FrozenModel,
    independent: Callable[[], Embedder],
    cache: Callable[[FrozenModel], EmbeddingCache],
) -> tuple[dict[str, object], dict[str, Embedder]]:
    """Prepare a method for labelled images, and return its extra columns.

    Args:
        model: the untrained model.
        settings: the stage.
        images: the labelled images.
        old: the old model, or its stored embeddings or prototypes.
        independent: loads the independent new model.
        cache: embeds the images with a model.

    Returns:
        Extra columns, a row per image, and the models that embed each batch, by column.

    Raises:
        XcompatError: old embeddings are needed but only prototypes stored, or a model cannot embed batches.
    """
    online = _online(settings, old, independent)  # raises before the slow embedding
    knowledge = old_knowledge(images, old, cache)
    new_ND: Rows | None = None
    if NEW_EMBEDS in online:
        new_ND = np.empty((0, online[NEW_EMBEDS].dim), np.float32)  # for the check of its dimension
    elif NEW_EMBEDS in model.columns:
        new_ND = cache(independent())
    model.prepare(knowledge, new_ND)
    extra: dict[str, Any] = {}
    if NEW_EMBEDS in model.columns and NEW_EMBEDS not in online:
        extra[NEW_EMBEDS] = new_ND
    if OLD_EMBEDS in model.columns and OLD_EMBEDS not in online:
        extra[OLD_EMBEDS] = knowledge.embeddings(model.config.model_type.removeprefix("xcompat-"))
    return extra | model.extra_columns(knowledge), online


def _online(settings: StageRecipe, old: FrozenModel, independent: Callable[[], Embedder]) -> dict[str, Embedder]:
    """Return the frozen models that embed each augmented batch, by column."""
    online: dict[str, Embedder] = {}
    if "old" in settings.online_roles:
        online[OLD_EMBEDS] = old.require_model("contains embeddings, not a model: set data.old_embeddings to cached")
        if online[OLD_EMBEDS].reads == "captions":
            raise XcompatError("captions cannot be augmented like their images: set data.old_embeddings to cached")
    if "independent" in settings.online_roles:
        online[NEW_EMBEDS] = independent()
    return online


def old_knowledge(images: LabelledImages, old: FrozenModel, cache: Callable[[FrozenModel], EmbeddingCache]) -> OldKnowledge:
    """Return the old model's classifier, and its embeddings or prototypes of the images.

    Args:
        images: the labelled images.
        old: the old model, or its stored embeddings or prototypes.
        cache: embeds the images with a model.
    """
    prototypes_Cd = old.prototypes_of(images.classes)
    embeds_Nd = cache(old) if prototypes_Cd is None else None
    return OldKnowledge(len(images.classes), images.labels(), embeds_Nd, old.classifier_of(images.classes), prototypes_Cd)
