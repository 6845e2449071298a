"""Methods that train on labelled images, and their data."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from transformers import set_seed

from xcompat.data.schema import NEW_EMBEDS
from xcompat.models import CompatModel
from xcompat.models.embedder import Embedder
from xcompat.training.columns import labelled_columns, old_knowledge
from xcompat.training.stage import Stage
from xcompat.training.training_sets import labelled_data

if TYPE_CHECKING:
    from xcompat.training.training_sets import Data


def labelled_model_and_data(stage: Stage) -> tuple[CompatModel, Data]:
    """Return a stage's prepared model and its data.

    Raises:
        XcompatError: too little of the old model is stored.
    """
    method, images = stage.method, stage.images
    old = stage.frozen("old") if method.compares_with_old else None
    encoder = stage.new_encoder()
    set_seed(stage.seed)
    known = {"classes": images.classes} if method.learns_classes else {}
    model = method.from_encoder(encoder, old=old.describe_old() if old is not None else None, **known, **stage.settings.options)
    extra: dict[str, Any] = {}
    online: dict[str, Embedder] = {}
    if old is not None:
        independent = partial(stage.embedder, "independent")
        extra, online = labelled_columns(model, stage.settings, images, old, independent, stage.cache)
        if stage.settings.is_judged:
            old.lookup([])  # raises before training if there are only prototypes
    return model, labelled_data(stage.settings, images, model.processor, stage.seed, extra, model.views, online)


def fill_labelled_caches(stage: Stage, role: str) -> None:
    """Embed labelled images with the model in a role, if needed."""
    if role == "old" and stage.method.compares_with_old:
        old_knowledge(stage.images, stage.frozen(role), stage.cache)
    elif role == "independent" and NEW_EMBEDS in stage.method.columns and stage.settings.data.new_embeddings == "cached":
        stage.cache(stage.embedder(role))
