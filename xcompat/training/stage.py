"""A stage's folders, models and training data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from xcompat.core.checksums import digest_of_files
from xcompat.core.distributed import device
from xcompat.core.errors import XcompatError
from xcompat.core.files import list_entries
from xcompat.core.precision import Autocast
from xcompat.core.progress import notice_once
from xcompat.data import (
    LabelledImages,
    Subset,
    View,
    flatten_captions,
    load_labelled,
    load_pairs,
    load_text_pairs,
    load_texts,
    select_subset,
)
from xcompat.data.scenarios import compute_shared_fraction
from xcompat.data.schema import NEW_SIDE_INFO, PASSAGE, QUERY, SIDE_INFO
from xcompat.embeddings.embed import EmbeddingCache
from xcompat.encoders import EncoderSource, load_encoder
from xcompat.encoders.base import Encoder
from xcompat.encoders.penultimate import TEXTS_UNSUPPORTED
from xcompat.encoders.processor import Processor
from xcompat.encoders.scratch import encoder_from_scratch
from xcompat.methods import ProjectionModel
from xcompat.models import CompatModel
from xcompat.models.embedder import Embedder, load_checkpoint, load_embedder, penultimate_embedder
from xcompat.models.frozen import FrozenModel
from xcompat.training.caches import cached_captions, cached_images, cached_texts
from xcompat.training.evaluation_sets import load_pair_test_set
from xcompat.training.judged_texts import load_judged_texts
from xcompat.training.recipe import Recipe
from xcompat.training.record import DONE, Done, read_record
from xcompat.training.stage_recipe import STAGE_PREFIX, StageRecipe, method_class
from xcompat.training.stored_models import is_stored, load_stored

if TYPE_CHECKING:
    import datasets

MAX_KNOWN_SHARE = 0.9
"""Warn if the old model was trained on a larger share of the new model's images."""

SIDES = (SIDE_INFO, NEW_SIDE_INFO)
"""Roles of side-information models."""
STORED_ROLES = ("old", *SIDES)
"""Roles that accept stored embeddings instead of a model."""


_kept: ContextVar[dict[tuple[str, Autocast], Embedder] | None] = ContextVar("kept", default=None)


@contextmanager
def keep_frozen_models() -> Iterator[None]:
    """Load each frozen model once in the block. They stay in memory, so they must be small and unchanged on disk."""
    token = _kept.set({})
    try:
        yield
    finally:
        _kept.reset(token)


class Stage:
    """A stage of a recipe: its folders, models, training data and their embeddings.

    Args:
        recipe: the recipe.
        settings: stage settings.
    """

    def __init__(self, recipe: Recipe, settings: StageRecipe) -> None:
        self.recipe, self.settings, self.cache_dir = recipe, settings, recipe.cache_dir
        self.method, self.seed = method_class(settings.method), recipe.seed_of(settings)
        self.folder = recipe.stage_dir(settings.name)
        self.model_folder, self.checkpoints = self.folder / "model", self.folder / "checkpoints"
        # the report of the last stage is the result of the run
        self.report = recipe.output_dir if settings is recipe.stages[-1] else self.folder

    # ------------------------------------------------------------------------------------------------ models

    @property
    def autocast(self) -> Autocast:
        """Precision of frozen models: ``*16_full_eval``, or the default of the device if the recipe sets neither."""
        return embedding_autocast(self.settings.training)

    def embedder(self, role: str) -> Embedder:
        """Load a frozen model, in the precision of :attr:`autocast`.

        Args:
            role: a name in :data:`~xcompat.training.stage_recipe.ROLES`.

        Raises:
            XcompatError: the role has embeddings, not a model.
        """
        settings, source = self.settings, getattr(self.settings, role)
        assert isinstance(source, EncoderSource), "the stage is refused"
        if is_stored(source.name):
            raise XcompatError(f"{settings.name}: {source.name} contains embeddings, not a model; set {role} to a model")
        resolved, kept = self._resolve(source), _kept.get()
        if kept is None:
            return load_embedder(resolved, device(), self.autocast)
        key = (resolved.model_dump_json(), self.autocast)
        if key not in kept:
            kept[key] = load_embedder(resolved, device(), self.autocast)
        return kept[key]

    def frozen(self, role: str) -> FrozenModel:
        """Load a model, or stored embeddings for the old and side-information roles.

        Args:
            role: a name in :data:`~xcompat.training.stage_recipe.ROLES`.

        Raises:
            XcompatError: the role needs a model.
        """
        source = getattr(self.settings, role)
        if role in STORED_ROLES and isinstance(source, EncoderSource) and is_stored(source.name):
            return load_stored(source)
        embedder = self.embedder(role)
        return replace(embedder, reads=self.settings.data.old_reads) if role == "old" else embedder

    def sides(self) -> Iterator[tuple[str, FrozenModel]]:
        """Load the method's side-information models in turn, by role."""
        for role in SIDES:
            if role in self.method.columns_if_known and getattr(self.settings, role) is not None:
                yield role, self.frozen(role)

    def as_input(self, new: Embedder) -> Embedder:
        """Return the new model, or penultimate features if the method maps them.

        Raises:
            XcompatError: there are none, or the test set has texts.
        """
        if not self.method.maps_features(self.settings.options):
            return new
        if self.settings.data.test is not None:
            raise XcompatError(f"{self.settings.name}: data.test has captions, but {TEXTS_UNSUPPORTED}")
        if self.settings.data.judged_texts is not None:
            raise XcompatError(f"{self.settings.name}: data.judged_texts has texts, but {TEXTS_UNSUPPORTED}")
        return penultimate_embedder(new)

    def independent(self) -> Embedder | None:
        """Load ``independent``. If not set, load the new model as it is before training, or return None for a backbone."""
        if self.settings.independent is not None:
            return self.embedder("independent")
        # methods for labelled images start from a backbone without a trained embedding
        data = self.settings.data
        plain = self.method.embeds_in_memory or (data.queries is None and data.templates is None)
        return self.embedder("new") if plain and isinstance(self.settings.new, EncoderSource) else None

    def new_encoder(self) -> tuple[Encoder, Processor]:
        """Load the encoder to train, or make an encoder with random weights.

        Raises:
            XcompatError: texts are missing.
        """
        source = self.settings.new
        assert source is not None, "the stage is refused"
        if isinstance(source, EncoderSource):
            return load_encoder(self._resolve(source))
        return encoder_from_scratch(source, () if source.image_only else self.texts_of_pairs(), self.seed)

    def projection(self) -> ProjectionModel:
        """Load the stage's pretrained φ."""
        assert self.settings.projection is not None, "the stage is refused"
        return ProjectionModel.from_pretrained(self.recipe.resolve(self.settings.projection))

    def load_trained(self, name: str) -> CompatModel:
        """Load a stage's finished model."""
        return torch.nn.Module.to(load_checkpoint(str(self.recipe.stage_dir(name) / "model")), device())

    def digest_of(self, name: str) -> str:
        """Return the digest of a finished stage's model."""
        return read_record(self.recipe.stage_dir(name) / DONE, Done).model

    def inputs(self) -> dict[str, str]:
        """Return stage name -> digest of the models it is made from."""
        return {name: self.digest_of(name) for name in sorted(self.settings.source_stages())}

    def old_dim(self) -> int | None:
        """Return the old model's dimension, if known before training."""
        old = self.settings.old
        if old is None or not (name := old.name).startswith(STAGE_PREFIX):
            return load_stored(old).dim if old is not None and is_stored(old.name) else None
        made_by = next(stage for stage in self.recipe.stages if stage.name == name.removeprefix(STAGE_PREFIX))
        return Stage(self.recipe, made_by).planned_dim()

    def planned_dim(self) -> int | None:
        """Return the model's dimension, if independent of the backbone."""
        return self.method.planned_dim(self.old_dim() if self.method.compares_with_old else None, self.settings.options)

    def _resolve(self, source: EncoderSource) -> EncoderSource:
        return source.model_copy(update={"name": self.recipe.resolve(source.name)})

    # ------------------------------------------------------------------------------------------------ data

    @cached_property
    def images(self) -> LabelledImages:
        """Labelled training images of ``subset``."""
        data = self.settings.data
        assert data.images is not None, "the stage is refused"
        labelled = load_labelled(data.images, captions=data.old_reads == "captions")
        if data.subset is None:
            return labelled
        self._warn_of_known_images(labelled, data.subset)
        return select_subset(labelled, data.subset).reindex_labels()

    def _warn_of_known_images(self, labelled: LabelledImages, subset: Subset) -> None:
        """Warn if ``limit_per_class`` leaves hardly any images new to the old model."""
        name = self.settings.old.name if isinstance(self.settings.old, EncoderSource) else ""
        old = next((each.data.subset for each in self.recipe.stages if name == f"{STAGE_PREFIX}{each.name}"), None)
        if subset.scenario != "extended-data" or subset.limit_per_class is None or old is None:
            return
        if (share := compute_shared_fraction(labelled, subset, old)) > MAX_KNOWN_SHARE:
            notice_once(
                f"extended-data: the old model was trained on {share:.0%} of the new model's images, because limit_per_class "
                "keeps the first samples for both models; set a smaller limit_per_class in the old model's stage"
            )

    def test_texts(self) -> list[str]:
        """Return captions or queries to exclude from training."""
        data = self.settings.data
        if data.judged_texts is not None:
            return load_judged_texts(data.judged_texts).texts()
        return load_pair_test_set(data.test).texts if data.test is not None else []

    def texts_of_pairs(self) -> list[str]:
        """Return texts for a tokenizer.

        Raises:
            XcompatError: the recipe has no pairs.
        """
        data = self.settings.data
        if data.pairs is None:
            raise XcompatError(
                f"{self.settings.name}: a new image-text encoder learns its tokenizer from data.pairs; set data.pairs"
            )
        return load_texts([data.pairs, *data.texts], exclude=self.test_texts())["text"]

    def embed_training_data(self, frozen: FrozenModel) -> EmbeddingCache:
        """Embed a map's training data: views of images, or plain data."""
        return self.cache(frozen, self.settings.views(self.seed))

    def cache(self, frozen: FrozenModel, views: Sequence[View] = ()) -> EmbeddingCache:
        """Embed a map's plain training data or views, or open the cache."""
        data, name = self.settings.data, self.settings.name
        frozen.require_embeddings(self.settings.method)
        if data.images is not None:
            return cached_images(frozen, self.images.dataset, self.cache_dir, self.images.max_bad_share, views)
        embedder = frozen.require_model("contains image embeddings by id; set data.images to labelled images")
        if data.embeddings_of == "texts":
            if not data.texts:
                raise XcompatError(
                    f"{name}: empty corpus: data.texts is not set; set data.texts, or set data.embeddings_of to images"
                )
            return cached_texts(embedder, self.training_texts(), self.cache_dir)
        if data.pairs is None:
            raise XcompatError(f"{name}: data.embeddings_of is images, but data.pairs is not set; set data.pairs")
        return cached_images(embedder, load_pairs(data.pairs), self.cache_dir, data.pairs.max_bad_share, views)

    def training_texts(self) -> datasets.Dataset:
        """Return the distinct texts that a map learns from."""
        data = self.settings.data
        return load_texts(data.texts, exclude=self.test_texts(), limit=data.texts_limit)

    def with_query_prompt(self, new: Embedder) -> Embedder:
        """Return the new model with its query prompt if the map is for queries, and unchanged otherwise."""
        settings = self.settings
        asks = settings.learns_from_texts and not self.method.maps_galleries_with(settings.options)
        return new.for_queries() if asks else new

    def cache_of_new(self, new: Embedder) -> EmbeddingCache:
        """Embed the training data of a map with the new model."""
        return self.cache(self.with_query_prompt(new))

    @cached_property
    def text_pairs(self) -> datasets.Dataset | None:
        """Training queries with passages, or None."""
        source = self.settings.data.text_pairs
        return load_text_pairs(source) if source is not None else None

    def pair_caches(self, old: Embedder) -> tuple[EmbeddingCache, EmbeddingCache]:
        """Embed images and captions of the pairs, or passages and queries."""
        if self.text_pairs is not None:
            passages = cached_captions(old, self.text_pairs[PASSAGE][:], self.cache_dir)
            return passages, cached_captions(old.for_queries(), self.text_pairs[QUERY][:], self.cache_dir)
        source = self.settings.data.pairs
        assert source is not None
        pairs = load_pairs(source)
        captions, _ = flatten_captions(pairs)
        return cached_images(old, pairs, self.cache_dir, source.max_bad_share), cached_captions(old, captions, self.cache_dir)

    @cached_property
    def remembered_images(self) -> datasets.Dataset:
        """Captioned images for the memory."""
        assert self.settings.remembered_pairs is not None
        return load_pairs(self.settings.remembered_pairs)

    def remembered_caches(self, embedder: Embedder) -> tuple[EmbeddingCache, EmbeddingCache]:
        """Embed images for the memory, and distinct captions, sorted."""
        assert self.settings.remembered_pairs is not None
        images = cached_images(embedder, self.remembered_images, self.cache_dir, self.settings.remembered_pairs.max_bad_share)
        distinct = sorted(set(flatten_captions(self.remembered_images)[0]))
        return images, cached_captions(embedder, distinct, self.cache_dir)


def embedding_autocast(training: Mapping[str, Any]) -> Autocast:
    """Return the precision of frozen models that a training section sets.

    Args:
        training: a stage's training section.

    Example:
        >>> embedding_autocast({}), embedding_autocast({"bf16_full_eval": False}), embedding_autocast({"fp16_full_eval": True})
        ('auto', None, torch.float16)
    """
    halves = {"bf16_full_eval": torch.bfloat16, "fp16_full_eval": torch.float16}
    chosen = next((dtype for key, dtype in halves.items() if training.get(key)), None)
    return "auto" if chosen is None and not halves.keys() & training.keys() else chosen


def weights_digest(folder: Path) -> str:
    """Return the SHA-256 of a model's safetensors files, 64 hexadecimal digits."""
    return digest_of_files(list_entries(folder, "*.safetensors"))
