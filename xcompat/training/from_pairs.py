"""Build a stage's method that learns from images with captions, and its training data."""

from __future__ import annotations

import gc
from typing import Any

from transformers import set_seed

from xcompat.data import TextPairCollator, TextPairDataset, TextPairSource, flatten_captions, load_pairs, load_text_pairs
from xcompat.data.schema import OLD_EMBEDS, OLD_TEXT_EMBEDS, PASSAGE, QUERY, SECOND_PIXEL_VALUES
from xcompat.embedding import EmbeddingCache
from xcompat.errors import XcompatError
from xcompat.fingerprint import Fingerprint
from xcompat.models import CompatModel
from xcompat.training.overlap import warn_of_shared_texts
from xcompat.training.stage import Stage, StageModels
from xcompat.training.trainer import Data, pair_data


def pair_model_and_data(stage: Stage) -> tuple[CompatModel, Data]:
    """Return a stage's model and its images with captions.

    Raises:
        XcompatError: the recipe names no pairs, no new encoder, or no φ to start from.
    """
    settings, models, data = stage.settings, stage.models, stage.data
    if settings.data.text_pairs is not None:
        return _text_model_and_data(stage, settings.data.text_pairs)
    source = settings.data.pairs
    if source is None:
        raise XcompatError(
            f"{settings.name}: method {settings.method} learns from images with captions; name them under data.pairs"
        )
    old_caches = data.pair_caches(models.embedder("old")) if OLD_EMBEDS in models.method.columns else None
    model = _model(stage)
    pairs = load_pairs(source)
    if not source.streaming:
        warn_of_shared_texts(data, flatten_captions(pairs)[0], "data.pairs")
    two_views = SECOND_PIXEL_VALUES in model.columns
    return model, pair_data(settings.data, pairs, model.processor, stage.seed, old_caches, two_views)


def fill_pair_caches(stage: Stage, role: str) -> None:
    """Embed images and captions, or passages and queries, with the old model, if the method reads its embeddings."""
    if role == "old" and OLD_EMBEDS in stage.models.method.columns:
        old, source = stage.models.embedder(role), stage.settings.data.text_pairs
        if source is None:
            stage.data.pair_caches(old)
        else:
            stage.data.text_pair_caches(old, load_text_pairs(source))


def _text_model_and_data(stage: Stage, source: TextPairSource) -> tuple[CompatModel, Data]:
    """Return a stage's model and its queries with passages."""
    pairs, data, models = load_text_pairs(source), stage.data, stage.models
    extra: dict[str, EmbeddingCache] = {}
    if OLD_EMBEDS in models.method.columns:
        extra = dict(zip((OLD_EMBEDS, OLD_TEXT_EMBEDS), data.text_pair_caches(models.embedder("old"), pairs), strict=True))
    model = _model(stage)
    assert model.encoder is not None
    model.encoder.freeze_images()
    warn_of_shared_texts(data, [*pairs[QUERY], *pairs[PASSAGE]], "data.text_pairs")
    dataset = TextPairDataset(pairs, extra=extra, one_per_id=stage.settings.data.one_per_id, seed=stage.seed)
    return model, Data(dataset, TextPairCollator(model.processor))


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
