"""Build a stage's map over cached embeddings, and its training data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import set_seed

from xcompat.data.schema import NEW_SIDE_INFO, SIDE_INFO
from xcompat.embedding import EmbeddingCache
from xcompat.models import CompatModel
from xcompat.models.closed_form import readable_pairs
from xcompat.training.columns import map_data
from xcompat.training.stage import Stage
from xcompat.training.stage_recipe import StageRecipe

if TYPE_CHECKING:
    from xcompat.training.trainer import Data

SIDES = (SIDE_INFO, NEW_SIDE_INFO)


def solved_map(stage: Stage) -> CompatModel:
    """Solve for a stage's map in closed form."""
    model, new, old = _map_and_caches(stage)
    return model.fit(readable_pairs(new, old))


def map_and_data(stage: Stage) -> tuple[CompatModel, Data]:
    """Return a stage's map, prepared for training, and the embeddings that it is trained on."""
    model, new, old = _map_and_caches(stage)
    images = stage.data.images if stage.settings.data.images is not None else None
    reads = (role for role in SIDES if _reads(stage.settings, role, stage.models.method))
    sides = {role: stage.data.cache(stage.models.frozen(role)) for role in reads}
    return model, map_data(model, new, old, images, sides)


def fill_map_caches(stage: Stage, role: str) -> None:
    """Embed a map's training data with the model in a role, if the map reads its embeddings."""
    models = stage.models
    if role == "new":
        stage.data.cache_of_new(models.as_input(models.embedder(role)))
    elif role == "old" or (role in SIDES and _reads(stage.settings, role, models.method)):
        stage.data.cache(models.frozen(role))


def _map_and_caches(stage: Stage) -> tuple[CompatModel, EmbeddingCache, EmbeddingCache]:
    """Build a map, and embed its training data with the new and the old model; no encoder stays in memory."""
    models, method, settings = stage.models, stage.models.method, stage.settings
    plain, old = models.embedder("new"), models.frozen("old")
    described, new = stage.data.as_mapped(plain).describe_encoder(), models.as_input(plain)
    sides: dict[str, Any] = {role: models.frozen(role).describe_old() for role in SIDES if _reads(settings, role, method)}
    config = method.config_class(encoder=described, old=old.describe_old(), embedding_dim=new.dim, **sides, **settings.options)
    set_seed(stage.seed)
    return method(config), stage.data.cache_of_new(new), stage.data.cache(old)


def _reads(settings: StageRecipe, role: str, method: type[CompatModel]) -> bool:
    """Return whether a stage names a model of side-information in a role, and its method reads its embeddings."""
    return role in method.columns_if_known and getattr(settings, role) is not None
