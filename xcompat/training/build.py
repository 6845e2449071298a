"""What a stage trains, and on what: a model as its method builds it, and the batches it learns from."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import numpy as np

from xcompat.data import flatten_captions, load_pairs, load_texts
from xcompat.data.corpora import normalise
from xcompat.data.notices import notice
from xcompat.data.overlap import shared_images
from xcompat.data.schema import (
    ID,
    INDEX,
    LABELS,
    NEW_EMBEDS,
    NEW_SIDE_INFO,
    OLD_EMBEDS,
    SECOND_PIXEL_VALUES,
    SIDE_INFO,
)
from xcompat.distributed import is_main_process
from xcompat.embedding import EmbeddingCache
from xcompat.encoders import EncoderSource, load_encoder
from xcompat.encoders.scratch import ScratchSource, encoder_from_scratch
from xcompat.errors import XcompatError
from xcompat.fingerprint import Fingerprint
from xcompat.methods import ProjectionModel
from xcompat.models import CompatModel
from xcompat.models.closed_form import readable_pairs
from xcompat.models.embedder import Embedder
from xcompat.models.frozen import FrozenModel
from xcompat.models.old_knowledge import OldKnowledge
from xcompat.models.stored import StoredModel, is_stored
from xcompat.training.caches import cached_captions, cached_images
from xcompat.training.evaluation_sets import judged_images
from xcompat.training.stage import Stage, seed_everything
from xcompat.training.trainer import (
    check_services,
    embedding_data,
    labelled_data,
    pair_data,
    train,
    training_arguments,
    triplet_sampler,
)

if TYPE_CHECKING:
    import datasets

    from xcompat.training.trainer import Data


SIDES = (SIDE_INFO, NEW_SIDE_INFO)


def train_stage(stage: Stage) -> CompatModel:
    """Build a stage's model and train or solve it.

    Args:
        stage: the stage.

    Returns:
        The trained model.
    """
    if stage.part.data.images is not None:
        warn_of_shared_images(stage)
    if stage.method.is_solved:
        model, new, old = _map_and_caches(stage)
        return model.fit(readable_pairs(new, old))
    if stage.method.embeds_in_memory:
        model, data = _map_and_data(stage)
    elif stage.part.data.images is not None or "labels" in stage.method.columns:
        model, data = _model_and_labelled_data(stage)
    else:
        model, data = _model_and_pairs(stage)
    return train(model, data, stage.part, stage.recipe.seed, stage.checkpoints_dir)


def check_inputs(stage: Stage) -> None:
    """Refuse what can be seen of a stage before it begins, so that no earlier stage is trained for nothing.

    Raises:
        XcompatError: the training section does not fit, a tracker is not installed, dimensions do not fit, a class is unknown or
            without images, triplets cannot be made, or a stored old embedding is missing.
    """
    part = stage.part
    if not stage.method.is_solved:
        check_services(part, training_arguments(part, stage.recipe.seed, stage.checkpoints_dir))
    if (dim := stage.old_dim()) is not None:
        stage.method.check_plan(dim, part.options)
    if part.data.images is None:
        return
    triplet_sampler(part, stage.images, stage.recipe.seed)
    if part.old is not None and is_stored(part.old.name):
        old = StoredModel(part.old.name)
        if old.embeds_Nd is not None:
            old.lookup(stage.images.dataset[ID])


def fill_caches(stage: Stage, role: str) -> None:
    """Embed what the stage's training will read of the model in a role."""
    method, part = stage.method, stage.part
    if method.embeds_in_memory:
        if role == "new":
            stage.cache(stage.as_input(stage.embedder(role)))
        elif role == "old" or (role in SIDES and _reads(stage, role)):
            stage.cache(stage.remembered(role))
    elif part.data.images is not None:
        if role == "old" and method.compares_with_old:
            _old_knowledge(stage, stage.old())
        elif role == "independent" and NEW_EMBEDS in method.columns:
            stage.cache(stage.embedder(role))
    elif role == "old" and OLD_EMBEDS in method.columns:
        _pair_caches(stage, stage.embedder(role))


# ------------------------------------------------------------------------------------------------ maps over embeddings


def _map_and_caches(stage: Stage) -> tuple[CompatModel, EmbeddingCache, EmbeddingCache]:
    """Build a map and what it learns from; the encoders are gone when this returns."""
    plain, old = stage.embedder("new"), stage.old()
    described, new = plain.describe_encoder(), stage.as_input(plain)
    sides: dict[str, Any] = {role: stage.remembered(role).describe_old() for role in SIDES if _reads(stage, role)}
    config = stage.method.config_class(
        encoder=described, old=old.describe_old(), embedding_dim=new.dim, **sides, **stage.part.options
    )
    seed_everything(stage.recipe.seed)
    return stage.method(config), stage.cache(new), stage.cache(old)


def _reads(stage: Stage, role: str) -> bool:
    """Return whether a stage has side-information of a kind, and its method reads it."""
    return role in stage.method.columns_if_known and getattr(stage.part, role) is not None


def _map_and_data(stage: Stage) -> tuple[CompatModel, Data]:
    model, new, old = _map_and_caches(stage)
    labels_N, classes = np.empty(0, dtype=np.int64), 0
    if stage.part.data.images is not None:
        labels_N, classes = stage.images.labels(), len(stage.images.classes)
    model.prepare(OldKnowledge(classes, labels_N, old), new)
    known: dict[str, Any] = {INDEX: np.arange(len(new))}
    if len(labels_N):
        known[LABELS] = labels_N
    known |= {role: stage.cache(stage.remembered(role)) for role in SIDES if _reads(stage, role)}
    wanted = {*model.columns, *model.columns_if_known}
    return model, embedding_data(new, old, {name: column for name, column in known.items() if name in wanted})


# ---------------------------------------------------------------------------------------------------- labelled images


def _model_and_labelled_data(stage: Stage) -> tuple[CompatModel, Data]:
    """Build a method that trains the backbone on labelled images, and tell it what is known of the old model."""
    part, images = stage.part, stage.images
    old = stage.old() if part.old is not None and stage.method.compares_with_old else None
    if old is None and stage.method.compares_with_old:
        raise XcompatError(f"{part.name}: method {part.method} needs an old model; name it under old")
    if part.new is None:
        raise XcompatError(f"{part.name}: method {part.method} needs a new encoder; name it under new")
    encoder = _new_encoder(stage, part.new)
    seed_everything(stage.recipe.seed)
    described = old.describe_old() if old is not None else None
    known = {"classes": images.classes} if stage.method.learns_classes else {}
    model = stage.method.from_encoder(encoder, old=described, **known, **part.options)
    extra: dict[str, Any] = {}
    online: Embedder | None = None
    if old is not None:
        knowledge = _old_knowledge(stage, old)
        if NEW_EMBEDS in model.columns:
            extra[NEW_EMBEDS] = stage.cache(stage.embedder("independent"))
        model.prepare(knowledge, extra.get(NEW_EMBEDS))
        if OLD_EMBEDS in model.columns:
            if part.data.old_embeddings == "online":
                online = _online(stage, old)
            else:
                extra[OLD_EMBEDS] = knowledge.embeddings(part.method)
        extra |= model.extra_columns(knowledge)
        if stage.is_judged:
            old.lookup([])  # says that nothing can be judged by prototypes, before anything is trained
    two_views = SECOND_PIXEL_VALUES in model.columns
    return model, labelled_data(part, images, model.processor, stage.recipe.seed, extra, two_views, online)


def _old_knowledge(stage: Stage, old: FrozenModel) -> OldKnowledge:
    """Gather what is known of the old model on the stage's training images."""
    images = stage.images
    prototypes_Cd = old.prototypes_of(images.classes)
    embeds_Nd = stage.cache(old) if prototypes_Cd is None else None
    return OldKnowledge(len(images.classes), images.labels(), embeds_Nd, old.classifier_of(images.classes), prototypes_Cd)


def _online(stage: Stage, old: FrozenModel) -> Embedder:
    """Return the old model if it can embed each batch anew."""
    model = old.require_model("holds embeddings and no model: set data.old_embeddings to cached")
    if old.reads == "captions":
        raise XcompatError("captions are not augmented with their images: set data.old_embeddings to cached")
    if stage.part.training.get("dataloader_num_workers"):
        raise XcompatError(
            "with data.old_embeddings online the old model makes part of each batch: leave out dataloader_num_workers"
        )
    return model


# -------------------------------------------------------------------------------------------------- images and captions


def _model_and_pairs(stage: Stage) -> tuple[CompatModel, Data]:
    part, data = stage.part, stage.part.data
    if data.pairs is None:
        raise XcompatError(f"{part.name}: method {part.method} learns from images with captions; name them under data.pairs")
    old_caches = _pair_caches(stage, stage.embedder("old")) if "old_embeds" in stage.method.columns else None
    model = _model_for_pairs(stage)
    pairs = load_pairs(data.pairs)
    if not data.pairs.streaming:
        warn_of_overlap(stage, pairs, "data.pairs")
    two_views = SECOND_PIXEL_VALUES in model.columns
    return model, pair_data(data, pairs, model.processor, stage.recipe.seed, old_caches, two_views)


def _model_for_pairs(stage: Stage) -> CompatModel:
    part = stage.part
    if part.new is None:
        raise XcompatError(f"{part.name}: method {part.method} needs a new encoder; name it under new")
    loaded = _new_encoder(stage, part.new)
    start = _projection(stage) if stage.method.starts_from_projection else None
    if start is not None:
        wanted = Fingerprint(start.config.encoder["fingerprint"], start.config.encoder["name"])
        wanted.require(loaded[0].fingerprint(loaded[1]), f"the new encoder {loaded[0].name}")
    old = start.config.old if start is not None else _described_old(stage)
    seed_everything(stage.recipe.seed)
    model = stage.method.from_encoder(loaded, old=old, **part.options)
    if start is not None:
        model.start_from(start)
    return model


def _projection(stage: Stage) -> ProjectionModel:
    part = stage.part
    if part.projection is None:
        raise XcompatError(
            f"{part.name}: method {part.method} starts from a pretrained φ; name its folder (or stage:NAME) under projection"
        )
    return ProjectionModel.from_pretrained(stage.recipe.resolve(part.projection))


def _new_encoder(stage: Stage, source: EncoderSource | ScratchSource) -> tuple[Any, Any]:
    if isinstance(source, EncoderSource):
        return load_encoder(stage.resolved(source))
    if source.image_only:
        return encoder_from_scratch(source, seed=stage.recipe.seed)
    if stage.part.data.pairs is None:
        raise XcompatError(f"{stage.part.name}: the tokenizer of a new image-text encoder is learned from data.pairs; name them")
    texts = load_texts([stage.part.data.pairs, *stage.part.data.texts], exclude=stage.test_captions())
    return encoder_from_scratch(source, texts["text"], stage.recipe.seed)


def _described_old(stage: Stage) -> dict[str, Any] | None:
    if stage.part.old is None or not stage.method.compares_with_old:
        return None
    described = stage.embedder("old").describe_old()
    gc.collect()
    return described


def _pair_caches(stage: Stage, old: Embedder) -> tuple[EmbeddingCache, EmbeddingCache]:
    assert stage.part.data.pairs is not None
    pairs = load_pairs(stage.part.data.pairs)
    captions, _ = flatten_captions(pairs)
    images = cached_images(old, pairs, stage.recipe.cache_dir, stage.part.data.pairs.max_bad_share)
    return images, cached_captions(old, captions, stage.recipe.cache_dir)


def warn_of_shared_images(stage: Stage) -> None:
    """Say when images that are judged on are learned from: which ones these are is the user's own choice.

    Args:
        stage: with labelled images.
    """
    if not stage.is_judged or not is_main_process():
        return
    for key, searched in judged_images(stage.part.data).items():
        if shared := shared_images(searched.dataset, stage.images.dataset):
            notice(f"{shared} of {len(searched)} images of data.{key} are in data.images too: the result will flatter the model")


def warn_of_overlap(stage: Stage, pairs: datasets.Dataset, key: str) -> None:
    """Say when captions of the test set are learned from: texts leave them out, pairs are the user's own choice.

    Args:
        stage: the stage.
        pairs: what it learns from.
        key: where the recipe names them.
    """
    test = {normalise(text) for text in stage.test_captions()}
    shared = test & {normalise(text) for text in flatten_captions(pairs)[0]} if test else set()
    if shared:
        notice(f"{len(shared)} of {len(test)} captions of data.test are in {key} too: the result will flatter the model")
