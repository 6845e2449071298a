"""Methods that learn from captions, and their data."""

from __future__ import annotations

import gc
from typing import Any

from transformers import set_seed

from xcompat.core.errors import XcompatError
from xcompat.core.fingerprint import Fingerprint
from xcompat.data import TextPairCollator, TextPairDataset, flatten_captions, load_pairs
from xcompat.data.schema import NEW_EMBEDS, OLD_EMBEDS, OLD_TEXT_EMBEDS, PASSAGE, QUERY
from xcompat.embeddings.embed import EmbeddingCache
from xcompat.encoders import EncoderSource
from xcompat.models import CompatModel
from xcompat.training.caches import cached_images
from xcompat.training.overlap import warn_of_shared_texts
from xcompat.training.stage import StageData, StageModels
from xcompat.training.stage_recipe import StageRecipe
from xcompat.training.training_sets import Data, pair_data


def pair_model_and_data(settings: StageRecipe, models: StageModels, data: StageData, seed: int) -> tuple[CompatModel, Data]:
    """Return a stage's model and its captions, or its queries with passages.

    Raises:
        XcompatError: pairs, encoder or φ are missing.
    """
    source, text_pairs = settings.data.pairs, data.text_pairs
    if text_pairs is None and source is None:
        raise XcompatError(f"{settings.name}: method {settings.method} needs images with captions; set data.pairs")
    old_caches = data.pair_caches(models.embedder("old")) if _reads_cache(models) else None
    model = _model(settings, models, data, seed)
    if text_pairs is not None:
        assert model.encoder is not None
        model.encoder.freeze_images()
        warn_of_shared_texts(data, [*text_pairs[QUERY], *text_pairs[PASSAGE]], "data.text_pairs")
        extra = dict(zip((OLD_EMBEDS, OLD_TEXT_EMBEDS), old_caches, strict=True)) if old_caches is not None else {}
        dataset = TextPairDataset(text_pairs, extra=extra, one_per_id=settings.data.one_per_id, seed=seed)
        return model, Data(dataset, TextPairCollator(model.processor))
    assert source is not None
    pairs = load_pairs(source)
    if not source.streaming:
        warn_of_shared_texts(data, flatten_captions(pairs)[0], "data.pairs")
    old = models.embedder("old") if settings.embeds_pairs_online else old_caches
    images = _frozen_images(model, settings, models, data)
    return model, pair_data(settings.data, pairs, model.processor, seed, old, model.views, images)


def _frozen_images(model: CompatModel, settings: StageRecipe, models: StageModels, data: StageData) -> EmbeddingCache | None:
    """Embed the pairs' images with the new model if training changes neither its image tower nor the images; otherwise None."""
    source, augmentation, encoder = settings.data.pairs, settings.data.augmentation, model.encoder
    assert source is not None and encoder is not None
    is_plain = (augmentation is None or augmentation.is_none) and not source.streaming and not settings.embeds_pairs_online
    if NEW_EMBEDS not in model.columns_if_known or not is_plain or not isinstance(settings.new, EncoderSource):
        return None
    if any(parameter.requires_grad for parameter in encoder.image_parameters()):
        return None
    return cached_images(models.embedder("new"), load_pairs(source), data.cache_dir, source.max_bad_share)


def fill_pair_caches(models: StageModels, data: StageData, role: str) -> None:
    """Embed pairs with the old model, if needed."""
    if role == "old" and _reads_cache(models):
        data.pair_caches(models.embedder(role))


def _reads_cache(models: StageModels) -> bool:
    return OLD_EMBEDS in models.method.columns and not models.settings.embeds_pairs_online


def _model(settings: StageRecipe, models: StageModels, data: StageData, seed: int) -> CompatModel:
    loaded, method = models.new_encoder(data), models.method
    start = models.projection() if method.starts_from_projection else None
    old: dict[str, Any] | None = None
    if start is not None:
        wanted = Fingerprint(start.config.encoder["fingerprint"], start.config.encoder["name"])
        wanted.require(loaded[0].fingerprint(loaded[1]), f"the new encoder {loaded[0].name}")
        old = start.config.old
    elif settings.old is not None and method.compares_with_old:
        old = models.embedder("old").describe_old()
        gc.collect()
    set_seed(seed)
    model = method.from_encoder(loaded, old=old, **settings.options)
    if start is not None:
        model.start_from(start)
    return model
