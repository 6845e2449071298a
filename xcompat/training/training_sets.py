"""What a stage learns from: its training set, what makes batches of it, and what draws from it."""

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
from xcompat.data.schema import CAPTION, OLD_EMBEDS, OLD_TEXT_EMBEDS
from xcompat.embeddings.embed import EmbeddingCache
from xcompat.encoders.processor import Processor
from xcompat.models.embedder import Embedder
from xcompat.outputs import Views
from xcompat.training.online import OnlineCollator
from xcompat.training.sections import DataSettings
from xcompat.training.stage_recipe import StageRecipe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    import datasets


class Data(NamedTuple):
    """What a stage learns from.

    Args:
        dataset: the training set.
        collator: makes a batch of its samples.
        sampler: which samples make a batch, for all processes together; shuffled ones if None.
    """

    dataset: Dataset[Any] | datasets.IterableDataset
    collator: Callable[[Any], Any]
    sampler: Sampler[int] | None = None


def pair_data(
    data: DataSettings,
    pairs: datasets.Dataset | datasets.IterableDataset,
    processor: Processor,
    seed: int,
    old: tuple[EmbeddingCache, EmbeddingCache] | Embedder | None,
    views: Views | None = None,
) -> Data:
    """Make the training set of a method that reads images and captions.

    Args:
        data: the recipe's data section.
        pairs: the loaded pairs.
        processor: the new encoder's preprocessing.
        seed: of everything random that happens to a sample.
        old: for methods that read old embeddings: those of the images and of all captions, cached, or the old model, which then
            embeds each batch anew.
        views: what the method compares of each image beside one view.

    Returns:
        The data set and its collator.
    """
    collator = PairCollator(processor, data.augmentation, views)
    if isinstance(old, Embedder):
        collator = OnlineCollator(processor, data.augmentation, views, dict.fromkeys((OLD_EMBEDS, OLD_TEXT_EMBEDS), old))
        old = None
    if data.pairs is not None and data.pairs.streaming:
        assert old is None, "rows of a cache, which a stream does not have: the stage is refused"
        # Ranks read shards of different lengths. A stream that ended would leave them with batches of unequal size, which
        # cannot be gathered, and the Trainer does not drop a stream's last batch: so it starts again until max_steps.
        unusable = BadSamples(data.pairs.max_bad_share)
        return Data(stream_pairs(pairs, shuffle_buffer=data.shuffle_buffer, passes=None, seed=seed, bad=unusable), collator)
    extra: dict[str, Any] = (
        {} if old is None else {"image_extra": {OLD_EMBEDS: old[0]}, "caption_extra": {OLD_TEXT_EMBEDS: old[1]}}
    )
    bad = BadSamples(data.pairs.max_bad_share, len(pairs)) if data.pairs is not None else None
    embedded = embedded_rows(extra.get("image_extra", {}).values())
    return Data(PairDataset(pairs, seed=seed, one_per_id=data.one_per_id, bad=bad, embedded=embedded, **extra), collator)


def labelled_data(
    settings: StageRecipe,
    images: LabelledImages,
    processor: Processor,
    seed: int,
    extra: dict[str, Any],
    views: Views | None = None,
    online: Mapping[str, Embedder] | None = None,
) -> Data:
    """Make the training set of a method that reads labelled images.

    Args:
        settings: the stage; with a head of triplets every batch holds a few classes, equally many images of each.
        images: the labelled images.
        processor: the new encoder's preprocessing.
        seed: of everything random that happens to a sample.
        extra: more columns, one row for each image.
        views: what the method compares of each image beside one view.
        online: frozen models that embed each batch anew, by the column they fill.

    Returns:
        The data set, its collator, and the sampler of triplets.

    Raises:
        XcompatError: triplets cannot be made, as a class has a single image or there are too few classes.
    """
    bad = BadSamples(images.max_bad_share, len(images.dataset))
    collator = PairCollator(processor, settings.data.augmentation, views)
    if online:
        collator = OnlineCollator(processor, settings.data.augmentation, views, online)
    unread = {CAPTION} & set(images.dataset.column_names)  # captions are the old model's to read
    rows = images.dataset.remove_columns(list(unread))
    dataset = PairDataset(rows, seed=seed, image_extra=extra, embedded=embedded_rows(extra.values()), bad=bad)
    return Data(dataset, collator, triplet_sampler(settings, images, seed))


def triplet_sampler(settings: StageRecipe, images: LabelledImages, seed: int) -> ClassBalancedSampler | None:
    """Return what draws a few classes for each batch and equally many images of each, for a head of triplets; else None.

    Raises:
        XcompatError: triplets cannot be made, as a class has a single image or there are too few classes.
    """
    if not settings.is_balanced:
        return None
    each = settings.data.samples_per_class
    return ClassBalancedSampler(images.labels(), settings.batch_size // each, each, classes=images.classes, seed=seed)


def embedding_data(new: EmbeddingCache, old: EmbeddingCache, extra: Mapping[str, NDArray[np.int64] | EmbeddingCache]) -> Data:
    """Make the training set of a map over cached embeddings; rows that one of the models could not read are left out.

    Args:
        new: embeddings of the new model.
        old: embeddings of the old model, in the same order.
        extra: more columns, one row for each sample.

    Returns:
        The data set and its collator.
    """
    embedded_N = embedded_rows([new, old, *extra.values()])
    rows = None if embedded_N is None else np.flatnonzero(embedded_N)
    return Data(EmbeddingPairDataset(new, old, rows, extra), collate_embeddings)


def embedded_rows(columns: Iterable[Any]) -> NDArray[np.bool_] | None:
    """Return which rows have an embedding in every cache among some columns: (N,) bool; None if no cache is one of images.

    A picture that could not be read when it was embedded may be readable when it is trained on.
    """
    caches = [column for column in columns if isinstance(column, EmbeddingCache)]
    if not any(cache.info.kind == "images" for cache in caches):
        return None
    return np.asarray(np.all([cache.readable() for cache in caches], axis=0))
