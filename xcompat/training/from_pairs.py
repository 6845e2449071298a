"""Methods that learn from images with captions: how a stage builds one, and what it learns from."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

from xcompat.data import load_pairs
from xcompat.data.schema import OLD_EMBEDS, SECOND_PIXEL_VALUES
from xcompat.errors import XcompatError
from xcompat.fingerprint import Fingerprint
from xcompat.models import CompatModel
from xcompat.training.overlap import warn_of_shared_captions
from xcompat.training.stage import StageData, StageModels, seed_everything
from xcompat.training.trainer import pair_data

if TYPE_CHECKING:
    from xcompat.training.trainer import Data


def pair_model_and_data(models: StageModels, data: StageData) -> tuple[CompatModel, Data]:
    """Build a method that learns from images with captions.

    Args:
        models: the old model where the method embeds with it, the new encoder, and φ where it starts from one.
        data: the pairs.

    Returns:
        The model and its data.

    Raises:
        XcompatError: there are no pairs, no new encoder, or no φ to start from.
    """
    settings = models.settings
    source = settings.data.pairs
    if source is None:
        raise XcompatError(
            f"{settings.name}: method {settings.method} learns from images with captions; name them under data.pairs"
        )
    old_caches = data.pair_caches(models.embedder("old")) if OLD_EMBEDS in models.method.columns else None
    model = _model(models, data)
    pairs = load_pairs(source)
    if not source.streaming:
        warn_of_shared_captions(data, pairs, "data.pairs")
    two_views = SECOND_PIXEL_VALUES in model.columns
    return model, pair_data(settings.data, pairs, model.processor, models.recipe.seed, old_caches, two_views)


def fill_pair_caches(models: StageModels, data: StageData, role: str) -> None:
    """Embed what a method for images with captions reads of the model in a role."""
    if role == "old" and OLD_EMBEDS in models.method.columns:
        data.pair_caches(models.embedder(role))


def _model(models: StageModels, data: StageData) -> CompatModel:
    method, settings = models.method, models.settings
    loaded = models.new_encoder(data)
    start = models.projection() if method.starts_from_projection else None
    if start is not None:
        wanted = Fingerprint(start.config.encoder["fingerprint"], start.config.encoder["name"])
        wanted.require(loaded[0].fingerprint(loaded[1]), f"the new encoder {loaded[0].name}")
    old = start.config.old if start is not None else _described_old(models)
    seed_everything(models.recipe.seed)
    model = method.from_encoder(loaded, old=old, **settings.options)
    if start is not None:
        model.start_from(start)
    return model


def _described_old(models: StageModels) -> dict[str, Any] | None:
    if models.settings.old is None or not models.method.compares_with_old:
        return None
    described = models.embedder("old").describe_old()
    gc.collect()
    return described
