"""Maps over cached embeddings: how a stage builds one, and what it learns from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from xcompat.data.schema import NEW_SIDE_INFO, SIDE_INFO
from xcompat.embedding import EmbeddingCache
from xcompat.models import CompatModel
from xcompat.models.closed_form import readable_pairs
from xcompat.training.columns import map_data
from xcompat.training.stage import StageData, StageModels, seed_everything
from xcompat.training.stage_recipe import StageRecipe

if TYPE_CHECKING:
    from xcompat.training.trainer import Data

SIDES = (SIDE_INFO, NEW_SIDE_INFO)


def solved_map(models: StageModels, data: StageData) -> CompatModel:
    """Solve for a map in closed form.

    Args:
        models: the old and the new model.
        data: what both embed.

    Returns:
        The map.
    """
    model, new, old = _map_and_caches(models, data)
    return model.fit(readable_pairs(new, old))


def map_and_data(models: StageModels, data: StageData) -> tuple[CompatModel, Data]:
    """Build a map, and batches of the embeddings that it is trained on.

    Args:
        models: the old and the new model, and those of side-information.
        data: what all of them embed.

    Returns:
        The map, prepared, and its data.
    """
    settings = models.settings
    model, new, old = _map_and_caches(models, data)
    labels_N, classes = np.empty(0, dtype=np.int64), 0
    if settings.data.images is not None:
        labels_N, classes = data.images.labels(), len(data.images.classes)
    sides = {role: data.cache(models.frozen(role)) for role in SIDES if _reads(settings, role, models.method)}
    return model, map_data(model, new, old, labels_N, classes, sides)


def fill_map_caches(models: StageModels, data: StageData, role: str) -> None:
    """Embed what a map reads of the model in a role."""
    if role == "new":
        data.cache(models.as_input(models.embedder(role)))
    elif role == "old" or (role in SIDES and _reads(models.settings, role, models.method)):
        data.cache(models.frozen(role))


def _map_and_caches(models: StageModels, data: StageData) -> tuple[CompatModel, EmbeddingCache, EmbeddingCache]:
    """Build a map and what it learns from; the encoders are gone when this returns."""
    method, settings = models.method, models.settings
    plain, old = models.embedder("new"), models.frozen("old")
    described, new = plain.describe_encoder(), models.as_input(plain)
    sides: dict[str, Any] = {role: models.frozen(role).describe_old() for role in SIDES if _reads(settings, role, method)}
    config = method.config_class(encoder=described, old=old.describe_old(), embedding_dim=new.dim, **sides, **settings.options)
    seed_everything(models.recipe.seed)
    return method(config), data.cache(new), data.cache(old)


def _reads(settings: StageRecipe, role: str, method: type[CompatModel]) -> bool:
    """Return whether a stage has side-information of a kind, and its method reads it."""
    return role in method.columns_if_known and getattr(settings, role) is not None
