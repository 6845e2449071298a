"""CompatTrainer: training without a recipe, for notebooks and programs."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import datasets
from pydantic import ValidationError
from transformers import TrainerCallback, TrainingArguments

from xcompat.core.distributed import device
from xcompat.core.errors import XcompatError
from xcompat.core.fingerprint import Fingerprint
from xcompat.data import flatten_captions, load_labelled, load_pairs
from xcompat.data.schema import LABEL_COLUMNS, LABELS, OLD_EMBEDS, TEXT
from xcompat.embeddings.embed import EmbeddingCache
from xcompat.encoders import EncoderSource
from xcompat.models import CompatModel
from xcompat.models.embedder import Embedder, load_embedder, penultimate_embedder
from xcompat.models.frozen import FrozenModel
from xcompat.training.caches import cached_captions, cached_images, cached_texts
from xcompat.training.columns import labelled_columns, map_data
from xcompat.training.recipe import explain
from xcompat.training.stage_recipe import StageRecipe, usual_options
from xcompat.training.stored_models import load_frozen
from xcompat.training.trainer import DEFAULTS, NEEDED, StageTrainer
from xcompat.training.training_sets import Data, labelled_data, pair_data
from xcompat.training.unused_settings import refuse_unused

AT_HAND = "train_dataset"
"""Name of the data in messages."""


class CompatTrainer(StageTrainer):
    """Transformers' Trainer for a compatible model and a data set in memory.

    Batches, losses and steps equal those of a recipe. ``args`` apply unchanged, except for unused columns, incomplete batches and
    the dispatch of streams.

    Args:
        model: from ``from_encoder``; XBT after ``start_from``.
        args: transformers' arguments.
        train_dataset: images with captions or labels, in columns that :func:`~xcompat.data.load_pairs` finds. For maps: images,
            or texts in a column ``text``.
        old: old model, name or folder, for methods that read its embeddings.
        independent: new model trained without the old model, for methods that read its embeddings (bt2).
        cache_dir: cache folder; default: ``cache`` in the output folder.
        callbacks: Trainer callbacks.
        stage: other settings of a stage: ``mini_batch_size``, ``prompt_lr_factor``, ``encoder_lr_factor``, ``weight_decay_on``,
            ``sync_batch_norm``, and ``data`` with ``augmentation``, ``one_per_id``, ``samples_per_class``, ``old_embeddings``
            (pairs), and column names under ``pairs`` or ``images``.

    Raises:
        XcompatError: the model is solved, the old model is missing or wrong, or data and settings do not fit.

    Example:
        ``CompatTrainer(model, TrainingArguments("runs/bct"), photos, old="runs/old").train()``
    """

    def __init__(
        self,
        model: CompatModel,
        args: TrainingArguments,
        train_dataset: datasets.Dataset | datasets.IterableDataset,
        *,
        old: FrozenModel | str | None = None,
        independent: Embedder | str | None = None,
        cache_dir: str | Path | None = None,
        callbacks: Sequence[TrainerCallback] = (),
        **stage: object,
    ) -> None:
        name = type(model).__name__
        if model.is_solved:
            raise XcompatError(f"{name} is solved, not trained: call fit() with pairs of new and old embeddings")
        args = copy.copy(args)
        for key, value in {**NEEDED, "dataloader_drop_last": DEFAULTS["dataloader_drop_last"]}.items():
            setattr(args, key, value)
        reading: Any = args.accelerator_config
        if reading.dispatch_batches is None:
            # as in a recipe: each process reads its own shards, so that the first does not decode for all
            args.accelerator_config = replace(reading, dispatch_batches=False)
        if stage.get("seed_offset"):
            raise XcompatError("CompatTrainer: seed_offset is only for recipes; set args.seed")
        kind = _kind(model, train_dataset)
        settings = _stage(model, args, kind, isinstance(train_dataset, datasets.IterableDataset), stage)
        learner = _TrainingSets(model, settings, args.seed, Path(cache_dir or Path(str(args.output_dir)) / "cache"))
        super().__init__(model, args, getattr(learner, kind)(train_dataset, old, independent), settings, callbacks)


def _kind(model: CompatModel, dataset: datasets.Dataset | datasets.IterableDataset) -> str:
    """Return the kind of data: ``texts``, ``unlabelled`` images, labelled ``images`` or captioned ``pairs``."""
    if not model.embeds_in_memory:
        return "pairs" if "input_ids" in model.columns else "images"
    features = dataset.features or {}
    if TEXT in features and not any(isinstance(feature, datasets.Image) for feature in features.values()):
        return "texts"
    labelled = any(name in LABEL_COLUMNS or isinstance(feature, datasets.ClassLabel) for name, feature in features.items())
    return "images" if LABELS in model.columns or (LABELS in model.columns_if_known and labelled) else "unlabelled"


def _stage(model: CompatModel, args: TrainingArguments, kind: str, streaming: bool, given: dict[str, Any]) -> StageRecipe:
    """Return the equivalent stage of a recipe."""
    method = model.config.model_type.removeprefix("xcompat-")
    data = dict(given.pop("data", {}))
    if kind in ("pairs", "unlabelled"):
        own = {"path": AT_HAND, "captions": kind == "pairs", "streaming": streaming}
        data["pairs"] = {**own, **data.get("pairs", {})}
        if kind == "unlabelled":
            data["embeddings_of"] = "images"
    elif kind == "images":
        data["images"] = {"path": AT_HAND, **data.get("images", {})}
    options = {name: getattr(model.config, name) for name in usual_options(method)}
    training: dict[str, float] = {"per_device_train_batch_size": args.per_device_train_batch_size}
    if args.weight_decay:
        training["weight_decay"] = args.weight_decay
    if args.dataloader_num_workers:
        training["dataloader_num_workers"] = args.dataloader_num_workers
    try:
        settings = StageRecipe(**{"method": method, "options": options, "training": training, "data": data, **given})
        refuse_unused([settings])
    except ValidationError as error:
        raise XcompatError(*(f"CompatTrainer: {problem}" for problem in explain(error, StageRecipe))) from None
    except XcompatError as error:
        raise XcompatError(*(f"CompatTrainer: {problem}" for problem in error.args)) from None
    return settings


class _TrainingSets:
    def __init__(self, model: CompatModel, settings: StageRecipe, seed: int, cache_dir: Path) -> None:
        self.model = model
        self.settings = settings
        self.seed = seed
        self.cache_dir = cache_dir

    def pairs(self, dataset: object, old: FrozenModel | str | None, _: object) -> Data:
        assert self.settings.data.pairs is not None
        pairs = load_pairs(self.settings.data.pairs, dataset)
        known: tuple[EmbeddingCache, EmbeddingCache] | Embedder | None = None
        if OLD_EMBEDS in self.model.columns:
            known = self._load_old(old).require_model("contains embeddings and cannot embed captions; set old to a model")
            if not self.settings.embeds_pairs_online:
                images = cached_images(known, pairs, self.cache_dir, self.settings.data.pairs.max_bad_share)
                known = images, cached_captions(known, flatten_captions(pairs)[0], self.cache_dir)
        return pair_data(self.settings.data, pairs, self.model.processor, self.seed, known, self.model.views)

    def images(self, dataset: object, old: FrozenModel | str | None, independent: Embedder | str | None) -> Data:
        model, source = self.model, self.settings.data.images
        assert source is not None
        images = load_labelled(source, getattr(model.config, "classes", None), dataset=dataset)

        def cache(embedder: FrozenModel) -> EmbeddingCache:
            views = self.settings.views(self.seed)
            return cached_images(embedder, images.dataset, self.cache_dir, images.max_bad_share, views)

        if model.embeds_in_memory:
            return map_data(model, cache(self._new()), cache(self._load_old(old)), images)
        extra: dict[str, Any] = {}
        online: dict[str, Embedder] = {}
        if model.config.old is not None:
            alone = partial(self._independent, independent)
            extra, online = labelled_columns(model, self.settings, images, self._load_old(old), alone, cache)
        return labelled_data(self.settings, images, model.processor, self.seed, extra, model.views, online)

    def unlabelled(self, dataset: object, old: FrozenModel | str | None, _: object) -> Data:
        assert self.settings.data.pairs is not None
        images = load_pairs(self.settings.data.pairs, dataset)
        share, views = self.settings.data.pairs.max_bad_share, self.settings.views(self.seed)
        new, knows = (cached_images(one, images, self.cache_dir, share, views) for one in (self._new(), self._load_old(old)))
        return map_data(self.model, new, knows)

    def texts(self, dataset: object, old: FrozenModel | str | None, _: object) -> Data:
        knows = self._load_old(old).require_model("contains image embeddings by id; set old to a model")
        new = self._new() if self.model.maps_galleries else self._new().for_queries()
        new_ND, old_Nd = (cached_texts(one, dataset, self.cache_dir) for one in (new, knows))
        return map_data(self.model, new_ND, old_Nd)

    def _load_old(self, old: FrozenModel | str | None) -> FrozenModel:
        """Load the old model; raise if it is not the new model's."""
        name, described = type(self.model).__name__, self.model.config.old
        if old is None:
            raise XcompatError(f"{name} learns from embeddings of the old model; pass old, the model, its name or its folder")
        if isinstance(old, str):
            old = load_frozen(old, device())
        Fingerprint(described["fingerprint"], described["name"]).require(old.fingerprint, f"the old model {old.name}")
        return old

    def _independent(self, independent: Embedder | str | None) -> Embedder:
        if independent is None:
            raise XcompatError(
                f"{type(self.model).__name__} reads embeddings of a new model trained without the old model: set independent"
            )
        return load_embedder(independent, device()) if isinstance(independent, str) else independent

    def _new(self) -> Embedder:
        described = self.model.config.encoder
        new = load_embedder(EncoderSource.from_description(described), device())
        Fingerprint(described["fingerprint"], described["name"]).require(new.fingerprint, f"the new model {new.name}")
        return penultimate_embedder(new) if self.model.maps_features(self.settings.options) else new
