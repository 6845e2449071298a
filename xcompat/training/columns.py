"""What a method reads beside pixels and texts: embeddings of the old and of the new model, classes, and columns of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from xcompat.data import LabelledImages
from xcompat.data.schema import INDEX, LABELS, NEW_EMBEDS, OLD_EMBEDS
from xcompat.embedding import EmbeddingCache
from xcompat.models import CompatModel
from xcompat.models.frozen import FrozenModel
from xcompat.models.old_knowledge import OldKnowledge, Rows
from xcompat.training.trainer import Data, embedding_data


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
        images: what was embedded, for its classes; None where samples have none.
        sides: side-information by the name of its column.

    Returns:
        The data set and its collator.
    """
    labels_N, classes = (images.labels(), images.classes) if images is not None else (np.empty(0, dtype=np.int64), [])
    model.prepare(OldKnowledge(len(classes), labels_N, old), new)
    known: dict[str, Any] = {INDEX: np.arange(len(new)), **(sides or {})}
    if images is not None:
        known[LABELS] = labels_N
    wanted = {*model.columns, *model.columns_if_known}
    return embedding_data(new, old, {name: column for name, column in known.items() if name in wanted})


def labelled_columns(model: CompatModel, old: OldKnowledge, new_ND: Rows | None) -> dict[str, Any]:
    """Tell a method that trains on labelled images what is known of the old model, and return the columns that follow from it.

    Args:
        model: as its method built it.
        old: what is known.
        new_ND: embeddings of the independent new model, for a method that reads them.

    Returns:
        More columns, one row for each image.

    Raises:
        XcompatError: the method reads old embeddings, and only prototypes are known.
    """
    model.prepare(old, new_ND)
    extra: dict[str, Any] = {} if new_ND is None else {NEW_EMBEDS: new_ND}
    if OLD_EMBEDS in model.columns:
        extra[OLD_EMBEDS] = old.embeddings(model.config.model_type.removeprefix("xcompat-"))
    return extra | model.extra_columns(old)


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
