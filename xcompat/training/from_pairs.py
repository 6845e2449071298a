"""Methods that learn from captions, and their data."""

from __future__ import annotations

import gc
from typing import Any

from transformers import set_seed

from xcompat.core.fingerprint import Fingerprint
from xcompat.data import TextPairCollator, TextPairDataset, flatten_captions, load_pairs
from xcompat.data.schema import NEW_EMBEDS, OLD_EMBEDS, OLD_TEXT_EMBEDS, PASSAGE, QUERY
from xcompat.embeddings.embed import EmbeddingCache
from xcompat.encoders import EncoderSource
from xcompat.models import CompatModel
from xcompat.training.caches import cached_images
from xcompat.training.overlap import warn_of_shared_texts
from xcompat.training.stage import Stage
from xcompat.training.training_sets import Data, pair_data


def pair_model_and_data(stage: Stage) -> tuple[CompatModel, Data]:
    """Return a stage's model and its captions, or its queries with passages.

    Raises:
        XcompatError: texts are missing.
    """
    source, text_pairs = stage.settings.data.pairs, stage.text_pairs
    old_caches = stage.pair_caches(stage.embedder("old")) if _reads_cache(stage) else None
    model = _model(stage)
    if text_pairs is not None:
        assert model.encoder is not None
        model.encoder.freeze_images()
        warn_of_shared_texts(stage, [*text_pairs[QUERY], *text_pairs[PASSAGE]], "data.text_pairs")
        extra = dict(zip((OLD_EMBEDS, OLD_TEXT_EMBEDS), old_caches, strict=True)) if old_caches is not None else {}
        dataset = TextPairDataset(text_pairs, extra=extra, one_per_id=stage.settings.data.one_per_id, seed=stage.seed)
        return model, Data(dataset, TextPairCollator(model.processor))
    assert source is not None
    pairs = load_pairs(source)
    if not source.streaming:
        warn_of_shared_texts(stage, flatten_captions(pairs)[0], "data.pairs")
    old = stage.embedder("old") if stage.settings.embeds_pairs_online else old_caches
    images = _frozen_images(model, stage)
    return model, pair_data(stage.settings.data, pairs, model.processor, stage.seed, old, model.views, images)


def _frozen_images(model: CompatModel, stage: Stage) -> EmbeddingCache | None:
    """Embed the pairs' images with the new model if training changes neither its image tower nor the images; otherwise None."""
    source, augmentation, encoder = stage.settings.data.pairs, stage.settings.data.augmentation, model.encoder
    assert source is not None and encoder is not None
    is_plain = (augmentation is None or augmentation.is_none) and not source.streaming and not stage.settings.embeds_pairs_online
    if NEW_EMBEDS not in model.columns_if_known or not is_plain or not isinstance(stage.settings.new, EncoderSource):
        return None
    if any(parameter.requires_grad for parameter in encoder.image_parameters()):
        return None
    return cached_images(stage.embedder("new"), load_pairs(source), stage.cache_dir, source.max_bad_share)


def fill_pair_caches(stage: Stage, role: str) -> None:
    """Embed pairs with the old model, if needed."""
    if role == "old" and _reads_cache(stage):
        stage.pair_caches(stage.embedder(role))


def _reads_cache(stage: Stage) -> bool:
    return OLD_EMBEDS in stage.method.columns and not stage.settings.embeds_pairs_online


def _model(stage: Stage) -> CompatModel:
    loaded, method = stage.new_encoder(), stage.method
    start = stage.projection() if method.starts_from_projection else None
    old: dict[str, Any] | None = None
    if start is not None:
        wanted = Fingerprint(start.config.encoder["fingerprint"], start.config.encoder["name"])
        wanted.require(loaded[0].fingerprint(loaded[1]), f"the new encoder {loaded[0].name}")
        old = start.config.old
    elif stage.settings.old is not None and method.compares_with_old:
        old = stage.embedder("old").describe_old()
        gc.collect()
    set_seed(stage.seed)
    model = method.from_encoder(loaded, old=old, **stage.settings.options)
    if start is not None:
        model.start_from(start)
    return model
