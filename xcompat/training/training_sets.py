"""A stage's training data: data set, collator and sampler."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset, Sampler

from xcompat.data import (
    BadSamples,
    ClassBalancedSampler,
    EmbeddingPairDataset,
    LabelledImages,
    PairCollator,
    PairDataset,
    collate_embeddings,
    stream_pairs,
)
from xcompat.data.schema import CAPTION, NEW_EMBEDS, OLD_EMBEDS, OLD_TEXT_EMBEDS
from xcompat.embeddings.embed import EmbeddingCache
from xcompat.encoders.processor import Processor
from xcompat.models.embedder import Embedder
from xcompat.outputs import Views
from xcompat.training.online import OnlineCollator, OnlineEmbedder
from xcompat.training.sections import DataSettings
from xcompat.training.stage_recipe import StageRecipe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    import datasets


class Data(NamedTuple):
    """A stage's training data.

    Args:
        dataset: training set.
        collator: makes batches.
        sampler: for all processes; None for shuffled samples.
        online: frozen models that embed each batch of the collator in the training step; None without.
    """

    dataset: Dataset[Any] | datasets.IterableDataset
    collator: Callable[[Any], Any]
    sampler: Sampler[int] | None = None
    online: OnlineEmbedder | None = None


def pair_data(
    data: DataSettings,
    pairs: datasets.Dataset | datasets.IterableDataset,
    processor: Processor,
    seed: int,
    old: tuple[EmbeddingCache, EmbeddingCache] | Embedder | None,
    views: Views | None = None,
    frozen_images: EmbeddingCache | None = None,
) -> Data:
    """Return training data of images and captions.

    Args:
        data: the data section.
        pairs: loaded pairs.
        processor: the new encoder's preprocessing.
        seed: random seed for samples.
        old: caches of images and captions, or the old model to embed them during training, or None.
        views: extra views per image.
        frozen_images: the new model's embeddings of the images, if its image tower is not trained.
    """
    both = dict.fromkeys((OLD_EMBEDS, OLD_TEXT_EMBEDS), old) if isinstance(old, Embedder) else {}
    collator, online = _collator(processor, data, views, both)
    if isinstance(old, Embedder):
        old = None
    if data.pairs is not None and data.pairs.streaming:
        assert old is None, "a stream has no rows of a cache: the stage is refused"
        # Shards of ranks differ in length, and the Trainer does not drop a stream's last batch. To keep batches of equal size,
        # which gathering needs, the stream repeats until max_steps.
        unusable = BadSamples(data.pairs.max_bad_share)
        stream = stream_pairs(pairs, shuffle_buffer=data.shuffle_buffer, passes=None, seed=seed, bad=unusable)
        return Data(stream, collator, online=online)
    extra: dict[str, Any] = (
        {} if old is None else {"image_extra": {OLD_EMBEDS: old[0]}, "caption_extra": {OLD_TEXT_EMBEDS: old[1]}}
    )
    reads_images = frozen_images is None
    if frozen_images is not None:
        extra["image_extra"] = extra.get("image_extra", {}) | {NEW_EMBEDS: frozen_images}
    bad = BadSamples(data.pairs.max_bad_share, len(pairs)) if data.pairs is not None else None
    embedded = embedded_rows(extra.get("image_extra", {}).values())
    drawn: dict[str, Any] = {"seed": seed, "one_per_id": data.one_per_id, "reads_images": reads_images}
    return Data(PairDataset(pairs, bad=bad, embedded=embedded, **drawn, **extra), collator, online=online)


def _collator(
    processor: Processor, data: DataSettings, views: Views | None, models: Mapping[str, Embedder]
) -> tuple[PairCollator, OnlineEmbedder | None]:
    """Return the collator, and the frozen models that embed its batches."""
    if not models:
        return PairCollator(processor, data.augmentation, views), None
    processors = {column: model.processor for column, model in models.items()}
    return OnlineCollator(processor, data.augmentation, views, processors), OnlineEmbedder(models)


def labelled_data(
    settings: StageRecipe,
    images: LabelledImages,
    processor: Processor,
    seed: int,
    extra: dict[str, Any],
    views: Views | None = None,
    online: Mapping[str, Embedder] | None = None,
) -> Data:
    """Return training data of labelled images.

    Args:
        settings: the stage; triplet heads get balanced batches.
        images: labelled images.
        processor: the new encoder's preprocessing.
        seed: random seed for samples.
        extra: extra columns, a row per image.
        views: extra views per image.
        online: frozen models that embed each batch, by column.

    Raises:
        XcompatError: too few images or classes for triplets.
    """
    bad = BadSamples(images.max_bad_share, len(images.dataset))
    collator, embedder = _collator(processor, settings.data, views, online or {})
    unread = {CAPTION} & set(images.dataset.column_names)  # only the old model reads captions
    rows = images.dataset.remove_columns(list(unread))
    dataset = PairDataset(rows, seed=seed, image_extra=extra, embedded=embedded_rows(extra.values()), bad=bad)
    return Data(dataset, collator, triplet_sampler(settings, images, seed), embedder)


def triplet_sampler(settings: StageRecipe, images: LabelledImages, seed: int) -> ClassBalancedSampler | None:
    """Return a class-balanced sampler for triplet heads, or None.

    Raises:
        XcompatError: too few images or classes for triplets.
    """
    if not settings.is_balanced:
        return None
    each = settings.data.samples_per_class
    return ClassBalancedSampler(images.labels(), settings.batch_size // each, each, classes=images.classes, seed=seed)


def embedding_data(new: EmbeddingCache, old: EmbeddingCache, extra: Mapping[str, NDArray[np.int64] | EmbeddingCache]) -> Data:
    """Return training data of cached embeddings, without unreadable rows.

    Args:
        new: new embeddings.
        old: old embeddings in the same order.
        extra: extra columns, a row per sample.
    """
    embedded_N = embedded_rows([new, old, *extra.values()])
    rows = None if embedded_N is None else np.flatnonzero(embedded_N)
    return Data(EmbeddingPairDataset(new, old, rows, extra), collate_embeddings)


def embedded_rows(columns: Iterable[object]) -> NDArray[np.bool_] | None:
    """Return which rows are in every cache: (N,) bool; None without images."""
    caches = [column for column in columns if isinstance(column, EmbeddingCache)]
    if not any(cache.info.kind == "images" for cache in caches):
        return None
    return np.asarray(np.all([cache.readable() for cache in caches], axis=0))
