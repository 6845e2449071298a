"""Build a stage's method that trains the backbone on labelled images, and its training data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from transformers import set_seed

from xcompat.data.schema import NEW_EMBEDS, OLD_EMBEDS, SECOND_PIXEL_VALUES
from xcompat.errors import XcompatError
from xcompat.models import CompatModel
from xcompat.models.embedder import Embedder
from xcompat.models.frozen import FrozenModel
from xcompat.models.old_knowledge import Rows
from xcompat.training.columns import labelled_columns, old_knowledge
from xcompat.training.stage import StageData, StageModels
from xcompat.training.stage_recipe import StageRecipe
from xcompat.training.trainer import labelled_data

if TYPE_CHECKING:
    from xcompat.training.trainer import Data


def labelled_model_and_data(settings: StageRecipe, models: StageModels, data: StageData, seed: int) -> tuple[CompatModel, Data]:
    """Return a stage's model, prepared with the embeddings, prototypes or classifier of the old one, and its data.

    Raises:
        XcompatError: the method needs an old model or a new encoder, or more of the old one than is known.
    """
    method, images = models.method, data.images
    if settings.old is None and method.compares_with_old:
        raise XcompatError(f"{settings.name}: method {settings.method} needs an old model; name it under old")
    old = models.frozen("old") if method.compares_with_old else None
    encoder = models.new_encoder(data)
    set_seed(seed)
    known = {"classes": images.classes} if method.learns_classes else {}
    model = method.from_encoder(encoder, old=old.describe_old() if old is not None else None, **known, **settings.options)
    extra: dict[str, Any] = {}
    online: dict[str, Embedder] = {}
    if old is not None:
        knowledge = old_knowledge(images, old, data.cache)
        online = _online(model, models, old)
        new_ND = _independent(models, data, online) if NEW_EMBEDS in model.columns else None
        extra = {name: column for name, column in labelled_columns(model, knowledge, new_ND).items() if name not in online}
        if settings.is_judged:
            old.lookup([])  # prototypes alone cannot be judged: raises before anything is trained
    two_views = SECOND_PIXEL_VALUES in model.columns
    return model, labelled_data(settings, images, model.processor, seed, extra, two_views, online)


def fill_labelled_caches(models: StageModels, data: StageData, role: str) -> None:
    """Embed the labelled images with the model in a role, if the method reads its embeddings."""
    if role == "old" and models.method.compares_with_old:
        old_knowledge(data.images, models.frozen(role), data.cache)
    elif role == "independent" and NEW_EMBEDS in models.method.columns and models.settings.data.new_embeddings == "cached":
        data.cache(models.embedder(role))


def _independent(models: StageModels, data: StageData, online: Mapping[str, Embedder]) -> Rows:
    """Return the independent model's embeddings; no row of them, but their dimension, where they are made of each batch."""
    if NEW_EMBEDS in online:
        return np.empty((0, online[NEW_EMBEDS].dim), np.float32)
    return data.cache(models.embedder("independent"))


def _online(model: CompatModel, models: StageModels, old: FrozenModel) -> dict[str, Embedder]:
    """Return the frozen models that embed the augmented images of each batch, by the column they fill."""
    settings = models.settings
    chosen = {OLD_EMBEDS: settings.data.old_embeddings, NEW_EMBEDS: settings.data.new_embeddings}
    columns = [column for column, how in chosen.items() if how == "online" and column in model.columns]
    if columns and settings.training.get("dataloader_num_workers"):
        raise XcompatError(
            f"with data.{columns[0].replace('embeds', 'embeddings')} online a frozen model makes part of each batch: leave out "
            "dataloader_num_workers"
        )
    online: dict[str, Embedder] = {}
    if OLD_EMBEDS in columns:
        online[OLD_EMBEDS] = old.require_model("holds embeddings and no model: set data.old_embeddings to cached")
        if online[OLD_EMBEDS].reads == "captions":
            raise XcompatError("captions are not augmented with their images: set data.old_embeddings to cached")
    if NEW_EMBEDS in columns:
        online[NEW_EMBEDS] = models.embedder("independent")
    return online
