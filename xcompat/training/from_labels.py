"""Methods that train the backbone on labelled images: how a stage builds one, and what it learns from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xcompat.data.schema import NEW_EMBEDS, OLD_EMBEDS, SECOND_PIXEL_VALUES
from xcompat.errors import XcompatError
from xcompat.models import CompatModel
from xcompat.models.embedder import Embedder
from xcompat.models.frozen import FrozenModel
from xcompat.training.columns import labelled_columns, old_knowledge
from xcompat.training.stage import StageData, StageModels, seed_everything
from xcompat.training.stage_recipe import StageRecipe
from xcompat.training.trainer import labelled_data

if TYPE_CHECKING:
    from xcompat.training.trainer import Data


def labelled_model_and_data(models: StageModels, data: StageData) -> tuple[CompatModel, Data]:
    """Build a method that trains the backbone on labelled images, and tell it what is known of the old model.

    Args:
        models: the old model, if there is one, and the new encoder.
        data: the labelled images.

    Returns:
        The model, prepared, and its data.

    Raises:
        XcompatError: the method needs an old model or a new encoder, or more of the old one than is known.
    """
    settings, method, images = models.settings, models.method, data.images
    if settings.old is None and method.compares_with_old:
        raise XcompatError(f"{settings.name}: method {settings.method} needs an old model; name it under old")
    old = models.frozen("old") if method.compares_with_old else None
    encoder = models.new_encoder(data)
    seed_everything(models.recipe.seed)
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
            old.lookup([])  # says that nothing can be judged by prototypes, before anything is trained
    two_views = SECOND_PIXEL_VALUES in model.columns
    return model, labelled_data(settings, images, model.processor, models.recipe.seed, extra, two_views, online)


def fill_labelled_caches(models: StageModels, data: StageData, role: str) -> None:
    """Embed what a method for labelled images reads of the model in a role."""
    if role == "old" and models.method.compares_with_old:
        old_knowledge(data.images, models.frozen(role), data.cache)
    elif role == "independent" and NEW_EMBEDS in models.method.columns:
        data.cache(models.embedder(role))


def _online(old: FrozenModel, settings: StageRecipe) -> Embedder:
    """Return the old model if it can embed each batch anew."""
    model = old.require_model("holds embeddings and no model: set data.old_embeddings to cached")
    if model.reads == "captions":
        raise XcompatError("captions are not augmented with their images: set data.old_embeddings to cached")
    if settings.training.get("dataloader_num_workers"):
        raise XcompatError(
            "with data.old_embeddings online the old model makes part of each batch: leave out dataloader_num_workers"
        )
    return model
