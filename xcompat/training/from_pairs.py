"""Build a stage's method that learns from images with captions, and its training data."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

from transformers import set_seed

from xcompat.data import load_pairs
from xcompat.data.schema import OLD_EMBEDS, SECOND_PIXEL_VALUES
from xcompat.errors import XcompatError
from xcompat.fingerprint import Fingerprint
from xcompat.models import CompatModel
from xcompat.training.overlap import warn_of_shared_captions
from xcompat.training.stage import Stage, StageModels
from xcompat.training.trainer import pair_data

if TYPE_CHECKING:
    from xcompat.training.trainer import Data


def pair_model_and_data(stage: Stage) -> tuple[CompatModel, Data]:
    """Return a stage's model and its images with captions.

    Raises:
        XcompatError: the recipe names no pairs, no new encoder, or no φ to start from.
    """
    settings, models, data = stage.settings, stage.models, stage.data
    source = settings.data.pairs
    if source is None:
        raise XcompatError(
            f"{settings.name}: method {settings.method} learns from images with captions; name them under data.pairs"
        )
    old_caches = data.pair_caches(models.embedder("old")) if OLD_EMBEDS in models.method.columns else None
    model = _model(stage)
    pairs = load_pairs(source)
    if not source.streaming:
        warn_of_shared_captions(data, pairs, "data.pairs")
    two_views = SECOND_PIXEL_VALUES in model.columns
    return model, pair_data(settings.data, pairs, model.processor, stage.seed, old_caches, two_views)


def fill_pair_caches(stage: Stage, role: str) -> None:
    """Embed images and captions with the old model, if the method reads its embeddings."""
    if role == "old" and OLD_EMBEDS in stage.models.method.columns:
        stage.data.pair_caches(stage.models.embedder(role))


def _model(stage: Stage) -> CompatModel:
    models, method = stage.models, stage.models.method
    loaded = models.new_encoder(stage.data)
    start = models.projection() if method.starts_from_projection else None
    if start is not None:
        wanted = Fingerprint(start.config.encoder["fingerprint"], start.config.encoder["name"])
        wanted.require(loaded[0].fingerprint(loaded[1]), f"the new encoder {loaded[0].name}")
    old = start.config.old if start is not None else _described_old(models)
    set_seed(stage.seed)
    model = method.from_encoder(loaded, old=old, **stage.settings.options)
    if start is not None:
        model.start_from(start)
    return model


def _described_old(models: StageModels) -> dict[str, Any] | None:
    if models.settings.old is None or not models.method.compares_with_old:
        return None
    described = models.embedder("old").describe_old()
    gc.collect()
    return described
