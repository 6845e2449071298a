"""What a method reads beside pixels and texts: embeddings of the old and of the new model, classes, and columns of its own."""

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
    """Prepare a map over cached embeddings, and make its training set.

    Args:
        model: the map.
        new: embeddings of the new model.
        old: embeddings of the old model, in the same order.
        images: what was embedded, for its classes; None where samples have none. If several views of each image were, one after
            the other, each view has the image's class.
        sides: side-information by the name of its column.

    Returns:
        The data set and its collator.
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
) -> tuple[dict[str, Any], dict[str, Embedder]]:
    """Tell a method that trains on labelled images what is known of the old model, and return the columns that follow from it.

    Args:
        model: as its method built it.
        settings: the stage.
        images: the labelled images.
        old: the old model, or what is left of it.
        independent: loads the independent new model, for a method that reads its embeddings.
        cache: embeds the images with a model.

    Returns:
        More columns, one row for each image, and the models that embed each batch anew, by the column that they fill.

    Raises:
        XcompatError: the method reads old embeddings, and only prototypes are known, or a model cannot embed batches.
    """
    online = _online(settings, old, independent)  # refuses before anything is embedded
    knowledge = old_knowledge(images, old, cache)
    new_ND: Rows | None = None
    if NEW_EMBEDS in online:
        new_ND = np.empty((0, online[NEW_EMBEDS].dim), np.float32)  # no row, but its dimension, which is checked
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
    """Return the frozen models that embed the augmented images of each batch, by the column they fill."""
    online: dict[str, Embedder] = {}
    if "old" in settings.online_roles:
        online[OLD_EMBEDS] = old.require_model("holds embeddings and no model: set data.old_embeddings to cached")
        if online[OLD_EMBEDS].reads == "captions":
            raise XcompatError("captions are not augmented with their images: set data.old_embeddings to cached")
    if "independent" in settings.online_roles:
        online[NEW_EMBEDS] = independent()
    return online


def old_knowledge(images: LabelledImages, old: FrozenModel, cache: Callable[[FrozenModel], EmbeddingCache]) -> OldKnowledge:
    """Gather what is known of the old model on training images.

    Args:
        images: the labelled images.
        old: the old model, or what is left of it.
        cache: embeds the images with a model.

    Returns:
        What is known.
    """
    prototypes_Cd = old.prototypes_of(images.classes)
    embeds_Nd = cache(old) if prototypes_Cd is None else None
    return OldKnowledge(len(images.classes), images.labels(), embeds_Nd, old.classifier_of(images.classes), prototypes_Cd)
