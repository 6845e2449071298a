"""Maps over cached embeddings and their training data."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import set_seed

from xcompat.embeddings.embed import EmbeddingCache
from xcompat.models import CompatModel
from xcompat.models.closed_form import readable_pairs
from xcompat.models.frozen import FrozenModel
from xcompat.training.columns import map_data
from xcompat.training.cost import SolvingCost
from xcompat.training.stage import StageData, StageModels
from xcompat.training.stage_recipe import StageRecipe

if TYPE_CHECKING:
    from xcompat.training.training_sets import Data


def solved_map(settings: StageRecipe, models: StageModels, data: StageData, seed: int, cost: Path) -> CompatModel:
    """Solve a stage's map, and write its cost."""
    model, new, old = _map_and_caches(settings, models, data, seed)
    solving = SolvingCost(cost)
    model = model.fit(solving.count_rows(readable_pairs(new, old)))
    solving.write(model)
    return model


def map_and_data(settings: StageRecipe, models: StageModels, data: StageData, seed: int) -> tuple[CompatModel, Data]:
    """Return a stage's prepared map and its training embeddings."""
    model, new, old = _map_and_caches(settings, models, data, seed)
    images = data.images if settings.data.images is not None else None
    return model, map_data(model, new, old, images, {role: data.embed_training_data(frozen) for role, frozen in models.sides()})


def fill_map_caches(models: StageModels, data: StageData, role: str) -> None:
    """Embed a map's training data with the model in a role, if needed."""
    if role == "new":
        frozen: FrozenModel = data.with_query_prompt(models.as_input(models.embedder(role)))
    elif role == "old" or role in models.method.columns_if_known:
        frozen = models.frozen(role)
    else:
        return
    data.embed_training_data(frozen)
    if data.settings.memory == "classes":  # its memory has plain images
        data.cache(frozen)


def _map_and_caches(
    settings: StageRecipe, models: StageModels, data: StageData, seed: int
) -> tuple[CompatModel, EmbeddingCache, EmbeddingCache]:
    plain, old = models.embedder("new"), models.frozen("old")
    described, new = data.with_query_prompt(plain).describe_encoder(), models.as_input(plain)
    known: dict[str, Any] = {role: frozen.describe_old() for role, frozen in models.sides()} | settings.options
    config = models.method.config_class(encoder=described, old=old.describe_old(), embedding_dim=new.dim, **known)
    set_seed(seed)
    return models.method(config), data.embed_training_data(data.with_query_prompt(new)), data.embed_training_data(old)
