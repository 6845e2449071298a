"""One stage of a recipe: its folders, its models, and its training data."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from xcompat.core.distributed import device
from xcompat.core.errors import XcompatError
from xcompat.core.files import listed
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
    select,
)
from xcompat.data.scenarios import known_share
from xcompat.data.schema import NEW_SIDE_INFO, PASSAGE, QUERY, SIDE_INFO
from xcompat.embeddings.embed import EmbeddingCache
from xcompat.encoders import EncoderSource, load_encoder
from xcompat.encoders.base import Encoder
from xcompat.encoders.penultimate import IMAGES_ALONE
from xcompat.encoders.processor import Processor
from xcompat.encoders.scratch import encoder_from_scratch
from xcompat.methods import ProjectionModel
from xcompat.models import CompatModel
from xcompat.models.embedder import Embedder, load_checkpoint, load_embedder, penultimate
from xcompat.models.frozen import FrozenModel, load_frozen
from xcompat.models.stored import StoredModel
from xcompat.training.caches import cached_captions, cached_images, cached_texts
from xcompat.training.evaluation_sets import load_pair_test_set
from xcompat.training.judged_texts import load_judged_texts
from xcompat.training.recipe import Recipe
from xcompat.training.record import DONE, Done, read_record
from xcompat.training.stage_recipe import STAGE_PREFIX, StageRecipe, method_class
from xcompat.vectors import is_stored

if TYPE_CHECKING:
    import datasets

MOSTLY = 0.9
"""Share of the new model's images above which the old model has hardly seen others."""

SIDES = (SIDE_INFO, NEW_SIDE_INFO)
"""Roles of models of side-information."""
STORED_ROLES = ("old", *SIDES)
"""Roles in which stored embeddings can replace the model."""


_kept: ContextVar[dict[tuple[str, torch.dtype | None], Embedder] | None] = ContextVar("kept", default=None)


@contextmanager
def keep_frozen_models() -> Iterator[None]:
    """Load each frozen model once in the block. All of them stay in memory, so they must be small and must not change on disk."""
    token = _kept.set({})
    try:
        yield
    finally:
        _kept.reset(token)


class StagePaths:
    """The folders that a stage writes to.

    Args:
        recipe: the whole recipe.
        settings: the stage's settings.
    """

    def __init__(self, recipe: Recipe, settings: StageRecipe) -> None:
        self.folder = recipe.stage_dir(settings.name)
        self.model, self.checkpoints = self.folder / "model", self.folder / "checkpoints"
        # the report of the last stage is the result of the run
        self.report = recipe.output_dir if settings is recipe.stages[-1] else self.folder


class StageModels:
    """The models that a stage names, each in its role.

    Args:
        recipe: the whole recipe.
        settings: the stage's settings.
    """

    def __init__(self, recipe: Recipe, settings: StageRecipe) -> None:
        self.recipe, self.settings = recipe, settings
        self.method = method_class(settings.method)

    def embedder(self, role: str) -> Embedder:
        """Load the frozen model in a role; it embeds in half precision if ``training`` sets one of the ``*16_full_eval``.

        Args:
            role: one of :data:`~xcompat.training.stage_recipe.ROLES`.

        Raises:
            XcompatError: the recipe names no model in that role.
        """
        settings, source = self.settings, getattr(self.settings, role)
        if not isinstance(source, EncoderSource):
            raise XcompatError(f"{settings.name}: method {settings.method} needs a trained {role} model; name it under {role}")
        if is_stored(source.name):
            raise XcompatError(f"{settings.name}: {source.name} holds embeddings and no model; name one under {role}")
        halves = {"bf16_full_eval": torch.bfloat16, "fp16_full_eval": torch.float16}
        chosen = next((dtype for key, dtype in halves.items() if settings.training.get(key)), None)
        resolved, kept = self._resolved(source), _kept.get()
        if kept is None:
            return load_embedder(resolved, device(), chosen)
        key = (resolved.model_dump_json(), chosen)
        if key not in kept:
            kept[key] = load_embedder(resolved, device(), chosen)
        return kept[key]

    def frozen(self, role: str) -> FrozenModel:
        """Load the model in a role, or its stored embeddings if it is the old model or one of side-information.

        Args:
            role: one of :data:`~xcompat.training.stage_recipe.ROLES`.

        Raises:
            XcompatError: the recipe names nothing in that role, or stored embeddings in a role that needs a model.
        """
        source = getattr(self.settings, role)
        if role in STORED_ROLES and isinstance(source, EncoderSource) and is_stored(source.name):
            return load_frozen(source)
        embedder = self.embedder(role)
        return replace(embedder, reads=self.settings.data.old_reads) if role == "old" else embedder

    def sides(self) -> Iterator[tuple[str, FrozenModel]]:
        """Load, one after the other, the models of side-information that the stage names and its method reads, by their roles."""
        for role in SIDES:
            if role in self.method.columns_if_known and getattr(self.settings, role) is not None:
                yield role, self.frozen(role)

    def as_input(self, new: Embedder) -> Embedder:
        """Return the new model, or its penultimate features if the method maps these.

        Raises:
            XcompatError: the model has no penultimate features, or the test set has captions.
        """
        if not self.method.maps_features(self.settings.options):
            return new
        if self.settings.data.test is not None:
            raise XcompatError(f"{self.settings.name}: data.test has captions, and {IMAGES_ALONE}")
        if self.settings.data.judged_texts is not None:
            raise XcompatError(f"{self.settings.name}: data.judged_texts are no images, and {IMAGES_ALONE}")
        return penultimate(new)

    def independent(self) -> Embedder | None:
        """Load the plain new model: the one named under ``independent``, else the new model if it is trained already."""
        if self.settings.independent is not None:
            return self.embedder("independent")
        # a backbone that a method for labelled images starts from has no trained embedding to compare with
        data = self.settings.data
        plain = self.method.embeds_in_memory or (data.queries is None and data.templates is None)
        return self.embedder("new") if plain and isinstance(self.settings.new, EncoderSource) else None

    def new_encoder(self, data: StageData) -> tuple[Encoder, Processor]:
        """Load the encoder that is to be trained with its processor, or make one with random weights.

        Args:
            data: a new tokenizer is learned from its texts.

        Raises:
            XcompatError: the recipe names no new encoder, or no texts for a new tokenizer.
        """
        source, seed = self.settings.new, self.recipe.seed_of(self.settings)
        if source is None:
            raise XcompatError(f"{self.settings.name}: method {self.settings.method} needs a new encoder; name it under new")
        if isinstance(source, EncoderSource):
            return load_encoder(self._resolved(source))
        return encoder_from_scratch(source, () if source.image_only else data.texts_of_pairs(), seed)

    def projection(self) -> ProjectionModel:
        """Load the pretrained φ that the stage starts from.

        Raises:
            XcompatError: the recipe names none.
        """
        settings = self.settings
        if settings.projection is None:
            raise XcompatError(
                f"{settings.name}: method {settings.method} starts from a pretrained φ; name its folder (or stage:NAME) under "
                "projection"
            )
        return ProjectionModel.from_pretrained(self.recipe.resolve(settings.projection))

    def trained(self, name: str) -> CompatModel:
        """Load a stage's finished model."""
        return torch.nn.Module.to(load_checkpoint(str(self.recipe.stage_dir(name) / "model")), device())

    def digest_of(self, name: str) -> str:
        """Return the digest of a finished stage's model."""
        return read_record(self.recipe.stage_dir(name) / DONE, Done).model

    def inputs(self) -> dict[str, str]:
        """Return the digest of every earlier stage's model that this one is made from."""
        return {name: self.digest_of(name) for name in sorted(self.settings.made_from())}

    def old_dim(self) -> int | None:
        """Return the old model's dimension if it is known before earlier stages are trained."""
        name = self.settings.old.name if self.settings.old is not None else ""
        if not name.startswith(STAGE_PREFIX):
            return StoredModel(name).dim if name and is_stored(name) else None
        made_by = next(stage for stage in self.recipe.stages if stage.name == name.removeprefix(STAGE_PREFIX))
        return StageModels(self.recipe, made_by).planned_dim()

    def planned_dim(self) -> int | None:
        """Return the dimension of the stage's model if it does not depend on the backbone."""
        return self.method.planned_dim(self.old_dim() if self.method.compares_with_old else None, self.settings.options)

    def _resolved(self, source: EncoderSource) -> EncoderSource:
        """Return the source with ``stage:NAME`` replaced by its folder."""
        return source.model_copy(update={"name": self.recipe.resolve(source.name)})


class StageData:
    """The training data of a stage, and their embeddings.

    Args:
        recipe: the whole recipe.
        settings: the stage's settings.
    """

    def __init__(self, recipe: Recipe, settings: StageRecipe) -> None:
        self.recipe, self.cache_dir, self.settings = recipe, recipe.cache_dir, settings

    @cached_property
    def images(self) -> LabelledImages:
        """The labelled training images of the recipe's ``subset``."""
        data = self.settings.data
        if data.images is None:
            raise XcompatError(
                f"{self.settings.name}: method {self.settings.method} learns from labelled images; name them under data.images"
            )
        labelled = load_labelled(data.images, captions=data.old_reads == "captions")
        if data.subset is None:
            return labelled
        self._warn_of_known_images(labelled, data.subset)
        return select(labelled, data.subset).reindexed()

    def _warn_of_known_images(self, labelled: LabelledImages, subset: Subset) -> None:
        """Say if a limit leaves the new model hardly any image that the old one has not seen, where it should have more."""
        name = self.settings.old.name if isinstance(self.settings.old, EncoderSource) else ""
        old = next((each.data.subset for each in self.recipe.stages if name == f"{STAGE_PREFIX}{each.name}"), None)
        if subset.scenario != "extended-data" or subset.limit_per_class is None or old is None:
            return
        if (share := known_share(labelled, subset, old)) > MOSTLY:
            notice_once(
                f"extended-data: the old model was trained on {share:.0%} of the new model's images, because limit_per_class "
                "keeps the first ones of both; give the old model's stage a smaller one"
            )

    def test_texts(self) -> list[str]:
        """Return the captions of the test set, or its queries and passages, which no corpus may hold."""
        data = self.settings.data
        if data.judged_texts is not None:
            return load_judged_texts(data.judged_texts).texts()
        return load_pair_test_set(data.test).texts if data.test is not None else []

    def texts_of_pairs(self) -> list[str]:
        """Return the texts from which a new encoder's tokenizer is learned.

        Raises:
            XcompatError: the recipe names no pairs.
        """
        data = self.settings.data
        if data.pairs is None:
            raise XcompatError(
                f"{self.settings.name}: the tokenizer of a new image-text encoder is learned from data.pairs; name them"
            )
        return load_texts([data.pairs, *data.texts], exclude=self.test_texts())["text"]

    def learned(self, frozen: FrozenModel) -> EmbeddingCache:
        """Embed what a map learns from with one model: the views of its images if there are some, else what :meth:`cache` has."""
        return self.cache(frozen, self.settings.views(self.recipe.seed_of(self.settings)))

    def cache(self, frozen: FrozenModel, views: Sequence[View] = ()) -> EmbeddingCache:
        """Embed the plain training data of a map with one model, or views of its images, or open what was embedded before."""
        data, name = self.settings.data, self.settings.name
        frozen.require_embeddings(self.settings.method)
        if data.images is not None:
            return cached_images(frozen, self.images.dataset, self.cache_dir, self.images.max_bad_share, views)
        embedder = frozen.require_model("holds embeddings of images by their ids; name labelled images under data.images")
        if data.embeddings_of == "texts":
            if not data.texts:
                raise XcompatError(f"{name}: empty corpus, data.texts names none; name some, or set data.embeddings_of to images")
            texts = load_texts(data.texts, exclude=self.test_texts(), limit=data.texts_limit)
            return cached_texts(embedder, texts, self.cache_dir)
        if data.pairs is None:
            raise XcompatError(f"{name}: data.embeddings_of is images, but data.pairs names none")
        return cached_images(embedder, load_pairs(data.pairs), self.cache_dir, data.pairs.max_bad_share, views)

    def as_mapped(self, new: Embedder) -> Embedder:
        """Return the new model as it embeds the training data of a map: texts as queries, if the map is one of queries."""
        settings = self.settings
        asks = settings.learns_from_texts and not method_class(settings.method).maps_galleries_with(settings.options)
        return new.for_queries() if asks else new

    def cache_of_new(self, new: Embedder) -> EmbeddingCache:
        """Embed the training data of a map with the new model."""
        return self.cache(self.as_mapped(new))

    @cached_property
    def text_pairs(self) -> datasets.Dataset | None:
        """The training queries with their passages; None if the recipe names none."""
        source = self.settings.data.text_pairs
        return load_text_pairs(source) if source is not None else None

    def pair_caches(self, old: Embedder) -> tuple[EmbeddingCache, EmbeddingCache]:
        """Embed the images of the pairs, and their captions one by one; or passages, and their queries as queries."""
        if self.text_pairs is not None:
            passages = cached_captions(old, self.text_pairs[PASSAGE][:], self.cache_dir)
            return passages, cached_captions(old.for_queries(), self.text_pairs[QUERY][:], self.cache_dir)
        source = self.settings.data.pairs
        assert source is not None
        pairs = load_pairs(source)
        captions, _ = flatten_captions(pairs)
        return cached_images(old, pairs, self.cache_dir, source.max_bad_share), cached_captions(old, captions, self.cache_dir)

    @cached_property
    def remembered(self) -> datasets.Dataset:
        """The images with captions that queries may remember."""
        assert self.settings.remembered_pairs is not None
        return load_pairs(self.settings.remembered_pairs)

    def remembered_caches(self, embedder: Embedder) -> tuple[EmbeddingCache, EmbeddingCache]:
        """Embed the images with captions that queries may remember, and the distinct captions, sorted."""
        assert self.settings.remembered_pairs is not None
        images = cached_images(embedder, self.remembered, self.cache_dir, self.settings.remembered_pairs.max_bad_share)
        distinct = sorted(set(flatten_captions(self.remembered)[0]))
        return images, cached_captions(embedder, distinct, self.cache_dir)


def weights_digest(folder: Path) -> str:
    """Return the SHA-256 of a saved model's safetensors files, as 64 hexadecimal digits."""
    digest = hashlib.sha256()
    for file in listed(folder, "*.safetensors"):
        with file.open("rb") as handle:
            digest.update(hashlib.file_digest(handle, "sha256").digest())
    return digest.hexdigest()
