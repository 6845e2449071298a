"""Build a stage's method that trains the backbone on labelled images, and its training data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import set_seed

from xcompat.data.schema import NEW_EMBEDS, OLD_EMBEDS, SECOND_PIXEL_VALUES
from xcompat.errors import XcompatError
from xcompat.models import CompatModel
from xcompat.models.embedder import Embedder
from xcompat.models.frozen import FrozenModel
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
    online: Embedder | None = None
    if old is not None:
        knowledge = old_knowledge(images, old, data.cache)
        new_ND = data.cache(models.embedder("independent")) if NEW_EMBEDS in model.columns else None
        if OLD_EMBEDS in model.columns and settings.data.old_embeddings == "online":
            online = _online(old, settings)
        extra = labelled_columns(model, knowledge, new_ND, with_old=online is None)
        if settings.is_judged:
            old.lookup([])  # prototypes alone cannot be judged: raises before anything is trained
    two_views = SECOND_PIXEL_VALUES in model.columns
    return model, labelled_data(settings, images, model.processor, seed, extra, two_views, online)


def fill_labelled_caches(models: StageModels, data: StageData, role: str) -> None:
    """Embed the labelled images with the model in a role, if the method reads its embeddings."""
    if role == "old" and models.method.compares_with_old:
        old_knowledge(data.images, models.frozen(role), data.cache)
    elif role == "independent" and NEW_EMBEDS in models.method.columns:
        data.cache(models.embedder(role))


def _online(old: FrozenModel, settings: StageRecipe) -> Embedder:
    """Return the old model, or refuse if it cannot embed the augmented images of each batch."""
    model = old.require_model("holds embeddings and no model: set data.old_embeddings to cached")
    if model.reads == "captions":
        raise XcompatError("captions are not augmented with their images: set data.old_embeddings to cached")
    if settings.training.get("dataloader_num_workers"):
        raise XcompatError(
            "with data.old_embeddings online the old model makes part of each batch: leave out dataloader_num_workers"
        )
    return model
