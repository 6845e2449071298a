"""Methods that train on labelled images, and their data."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from transformers import set_seed

from xcompat.core.errors import XcompatError
from xcompat.data.schema import NEW_EMBEDS
from xcompat.models import CompatModel
from xcompat.models.embedder import Embedder
from xcompat.training.columns import labelled_columns, old_knowledge
from xcompat.training.stage import StageData, StageModels
from xcompat.training.stage_recipe import StageRecipe
from xcompat.training.training_sets import labelled_data

if TYPE_CHECKING:
    from xcompat.training.training_sets import Data


def labelled_model_and_data(settings: StageRecipe, models: StageModels, data: StageData, seed: int) -> tuple[CompatModel, Data]:
    """Return a stage's prepared model and its data.

    Raises:
        XcompatError: a model is missing, or too little of the old model is stored.
    """
    method, images = models.method, data.images
    if settings.old is None and method.compares_with_old:
        raise XcompatError(f"{settings.name}: method {settings.method} needs an old model; set old")
    old = models.frozen("old") if method.compares_with_old else None
    encoder = models.new_encoder(data)
    set_seed(seed)
    known = {"classes": images.classes} if method.learns_classes else {}
    model = method.from_encoder(encoder, old=old.describe_old() if old is not None else None, **known, **settings.options)
    extra: dict[str, Any] = {}
    online: dict[str, Embedder] = {}
    if old is not None:
        independent = partial(models.embedder, "independent")
        extra, online = labelled_columns(model, settings, images, old, independent, data.cache)
        if settings.is_judged:
            old.lookup([])  # raises before training if there are only prototypes
    return model, labelled_data(settings, images, model.processor, seed, extra, model.views, online)


def fill_labelled_caches(models: StageModels, data: StageData, role: str) -> None:
    """Embed labelled images with the model in a role, if needed."""
    if role == "old" and models.method.compares_with_old:
        old_knowledge(data.images, models.frozen(role), data.cache)
    elif role == "independent" and NEW_EMBEDS in models.method.columns and models.settings.data.new_embeddings == "cached":
        data.cache(models.embedder(role))
