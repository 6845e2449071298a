"""Score scales of a trained model, from its training data."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import datasets
import numpy as np
from numpy.typing import NDArray

from xcompat.core.errors import XcompatError
from xcompat.core.progress import notice
from xcompat.data import flatten_captions, load_pairs
from xcompat.data.schema import ID, PASSAGE, QUERY, SIDE_INFO
from xcompat.mapping.candidates import Paired
from xcompat.mapping.paired import CaptionedEmbeddings, PairedEmbeddings, SwappedEmbeddings, number_groups
from xcompat.models import CompatModel
from xcompat.models.closed_form import LeastSquaresModel
from xcompat.models.embedder import Embedder
from xcompat.models.old_knowledge import Rows
from xcompat.training.caches import cached_captions, cached_images
from xcompat.training.memory import without_unreadable
from xcompat.training.stage import Stage

if TYPE_CHECKING:
    from xcompat.models.mapped import MappedConfig

FOLDER = "score_scales"
"""Temporary folder of a stage for score scales."""
SAMPLE = 1024
"""Maximum number of images or passages for score scales."""


def solver_of(model: CompatModel) -> Callable[[Paired], CompatModel] | None:
    """Return a function that solves the same map on other pairs; None for trained models, memories and gallery maps."""
    if not isinstance(model, LeastSquaresModel) or model.memory is not None or model.maps_galleries:
        return None
    config = cast("MappedConfig", model.config)
    return lambda pairs: type(model)(copy.deepcopy(config)).fit(pairs.batches()).eval()


def pairs_to_scale(stage: Stage, model: CompatModel, folder: Path) -> PairedEmbeddings | CaptionedEmbeddings | None:
    """Embed a sample of training data with trained and old model (all processes).

    Args:
        stage: the stage.
        model: the trained model.
        folder: temporary; the caller deletes it.

    Returns:
        The embeddings; None if the models are incompatible or plain old embeddings unavailable.
    """
    if model.config.old is None or stage.settings.old is None:
        return None
    try:
        if stage.frozen("old").fingerprint not in model.compatible_with:  # the evaluation raises
            return None
        return _of_map(stage, model) if model.embeds_in_memory else _of_backbone(stage, model, folder)
    except XcompatError as error:
        notice(f"scores of a partly re-embedded gallery are calibrated on its own items only: {error}")
        return None


def _of_map(stage: Stage, model: CompatModel) -> PairedEmbeddings:
    new = stage.embed_training_data(stage.with_query_prompt(stage.as_input(stage.embedder("new"))))
    old = stage.embed_training_data(stage.frozen("old"))
    if not model.maps_galleries:
        return without_unreadable(PairedEmbeddings(new, old), new, old)
    sides = [stage.embed_training_data(stage.frozen(SIDE_INFO))] if getattr(model.config, SIDE_INFO, None) is not None else []
    return without_unreadable(SwappedEmbeddings(old, new, side_NS=sides[0] if sides else None), new, old, *sides)


def _of_backbone(stage: Stage, model: CompatModel, folder: Path) -> PairedEmbeddings | CaptionedEmbeddings:
    settings, own = stage.settings.data, Embedder.from_model(model, "own")
    if settings.images is not None:
        rows = _spread(len(stage.images))
        images, share = stage.images.dataset.select(rows), stage.images.max_bad_share
        new = cached_images(own, images, folder, share)
        if "old" in stage.settings.online_roles:
            of_old: Rows = cached_images(stage.frozen("old"), images, folder, share)
        else:
            of_old = stage.cache(stage.frozen("old"))[rows]  # cached by the training
        return _readable(PairedEmbeddings(new, of_old))
    old = stage.embedder("old")
    if stage.text_pairs is not None:
        texts = stage.text_pairs.select(_spread(len(stage.text_pairs)))
        passages = _captions(texts[PASSAGE][:], own, old, folder)
        return CaptionedEmbeddings(passages, _captions(texts[QUERY][:], own.for_queries(), old.for_queries(), folder))
    assert settings.pairs is not None
    loaded = load_pairs(settings.pairs)
    pairs = _first_rows(loaded) if isinstance(loaded, datasets.IterableDataset) else loaded.select(_spread(len(loaded)))
    captions, ids = flatten_captions(pairs)
    image_groups_N, text_groups_M = number_groups(pairs[ID], ids, captions)
    new, of_old = (cached_images(each, pairs, folder, settings.pairs.max_bad_share) for each in (own, old))
    readable = _readable(PairedEmbeddings(new, of_old, image_groups_N))
    return CaptionedEmbeddings.join_complete(readable, replace(_captions(captions, own, old, folder), labels_N=text_groups_M))


def _captions(texts: list[str], own: Embedder, old: Embedder, folder: Path) -> PairedEmbeddings:
    new, of_old = (cached_captions(each, texts, folder) for each in (own, old))
    return PairedEmbeddings(new, of_old)


def _readable(pairs: PairedEmbeddings) -> PairedEmbeddings:
    kept_N = np.isfinite(np.array(pairs.new_ND[:])[:, 0]) & np.isfinite(np.array(pairs.old_Nd[:])[:, 0])
    return pairs.take(np.flatnonzero(kept_N))


def _spread(rows: int) -> NDArray[np.int64]:
    """Return evenly spaced rows, from all classes of a sorted data set."""
    return np.arange(0, rows, max(1, -(-rows // SAMPLE)))


def _first_rows(stream: datasets.IterableDataset) -> datasets.Dataset:
    rows = list(itertools.islice(stream, SAMPLE))
    return datasets.Dataset.from_list([{ID: str(number), **row} for number, row in enumerate(rows)])
