"""One stage of a recipe: where it writes, which models it names, and what is embedded for it."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch

from xcompat.data import LabelledImages, load_labelled, load_pairs, load_texts, select
from xcompat.distributed import device
from xcompat.embedding import EmbeddingCache
from xcompat.encoders import EncoderSource
from xcompat.encoders.penultimate import IMAGES_ALONE
from xcompat.encoders.scratch import ScratchSource
from xcompat.errors import XcompatError
from xcompat.files import listed
from xcompat.models import CompatModel
from xcompat.models.embedder import Embedder, load_checkpoint, load_embedder, penultimate
from xcompat.models.frozen import FrozenModel
from xcompat.models.stored import StoredModel, is_stored
from xcompat.training.caches import cached_images, cached_texts
from xcompat.training.evaluation_sets import load_pair_test_set
from xcompat.training.recipe import CHOSEN, STAGE_PREFIX, Recipe, StageRecipe, method_class
from xcompat.training.record import DONE, Done, read_record

REMEMBERED = ("old", "side_info", "new_side_info")
"""Roles in which embeddings will do where the model itself is gone."""


class Stage:
    """A stage in its recipe.

    Args:
        recipe: the whole recipe.
        part: the stage.
    """

    def __init__(self, recipe: Recipe, part: StageRecipe) -> None:
        self.recipe = recipe
        self.part = part
        self.method = method_class(part.method)
        self.folder = recipe.stage_dir(part.name)
        self.model_dir, self.checkpoints_dir = self.folder / "model", self.folder / "checkpoints"
        # what a recipe is run for is its last stage: that report stands at the top
        self.report_dir = recipe.output_dir if part is recipe.stages[-1] else self.folder

    @property
    def is_judged(self) -> bool:
        """Return whether the stage ends with a report."""
        return self.part.evaluation is not None and self.part.data.tests() and self.method.compares_with_old

    @property
    def learns_from_texts(self) -> bool:
        """Return whether the stage learns from texts, which leave out the captions of the test set."""
        data = self.part.data
        if self.method.embeds_in_memory:
            return data.images is None and data.embeddings_of == "texts"
        return isinstance(self.part.new, ScratchSource) and not self.part.new.image_only

    def require_old_queries(self) -> None:
        """Refuse to mix new queries with old ones where there are none for the same things, or no old gallery that both search.

        Raises:
            XcompatError: ``evaluation.slerp`` or ``evaluation.fallback`` is set, and the method maps the old gallery, the old
                model is gone, or it reads captions where the new one reads images; or what is to fall back remembers nothing.
        """
        part = self.part
        if part.evaluation is None or not self.is_judged:
            return
        if part.evaluation.slerp is not None:
            where = f"{part.name}: evaluation.slerp mixes new queries with old ones"
        elif part.evaluation.fallback is not None:
            where = f"{part.name}: evaluation.fallback asks old queries where new ones are not sure"
        else:
            return
        mend = "set it to null"
        if part.evaluation.fallback is not None and part.memory is None and part.method != CHOSEN:
            unsure = "evaluation.fallback asks old queries where new ones are not sure, and none that remembers nothing says so"
            raise XcompatError(f"{part.name}: {unsure}; set memory, or evaluation.fallback to null")
        if self.method.maps_galleries_with(part.options):
            raise XcompatError(f"{where}, and method {part.method} maps the old gallery to where old ones have no place; {mend}")
        if part.old is not None and is_stored(part.old.name):
            raise XcompatError(f"{where}, and {part.old.name} holds embeddings and no model that could embed a query; {mend}")
        if part.data.old_reads == "captions":
            raise XcompatError(f"{where}, and the old model reads captions where the new one reads images; {mend}")

    def made(self, name: str) -> str:
        """Return the digest of an earlier stage's model."""
        return read_record(self.recipe.stage_dir(name) / DONE, Done).model

    def inputs(self) -> dict[str, str]:
        """Return the digest of every earlier stage's model that this one is made from."""
        named = [self.part.projection or "", *(source.name for source in self.part.sources())]
        stages = sorted({name.removeprefix(STAGE_PREFIX) for name in named if name.startswith(STAGE_PREFIX)})
        return {name: self.made(name) for name in stages}

    def resolved(self, source: EncoderSource) -> EncoderSource:
        """Return the source with ``stage:NAME`` replaced by its folder."""
        return source.model_copy(update={"name": self.recipe.resolve(source.name)})

    def embedder(self, role: str) -> Embedder:
        """Load the frozen model in a role; ``training.bf16_full_eval`` has it embed in bfloat16, ``fp16_full_eval`` in float16.

        Args:
            role: one of :data:`~xcompat.training.recipe.ROLES`.

        Raises:
            XcompatError: the recipe names none.
        """
        source = getattr(self.part, role)
        if not isinstance(source, EncoderSource):
            raise XcompatError(f"{self.part.name}: method {self.part.method} needs a trained {role} model; name it under {role}")
        if is_stored(source.name):
            raise XcompatError(f"{self.part.name}: {source.name} holds embeddings and no model; name one under {role}")
        halves = {"bf16_full_eval": torch.bfloat16, "fp16_full_eval": torch.float16}
        chosen = next((dtype for key, dtype in halves.items() if self.part.training.get(key)), None)
        return load_embedder(self.resolved(source), device(), chosen)

    def as_input(self, new: Embedder) -> Embedder:
        """Return the new model as a map over cached embeddings reads it.

        Args:
            new: the new model.

        Returns:
            The model itself, or in the role of its penultimate features.

        Raises:
            XcompatError: its penultimate features are asked for, and it has none, or there are captions to be judged on.
        """
        if not self.method.maps_features(self.part.options):
            return new
        if self.part.data.test is not None:
            raise XcompatError(f"{self.part.name}: data.test has captions, and {IMAGES_ALONE}")
        return penultimate(new)

    def remembered(self, role: str) -> FrozenModel:
        """Load the model in a role; the old one, and those of side-information, may be gone but for what they once computed.

        Args:
            role: one of :data:`~xcompat.training.recipe.ROLES`.

        Raises:
            XcompatError: the recipe names none, or embeddings where it takes a model.
        """
        source = getattr(self.part, role)
        if role in REMEMBERED and isinstance(source, EncoderSource) and is_stored(source.name):
            return StoredModel(source.name)
        return self.embedder(role) if role != "old" else replace(self.embedder(role), reads=self.part.data.old_reads)

    def old(self) -> FrozenModel:
        """Load the old model, or what is left of one that is gone (see :meth:`remembered`)."""
        return self.remembered("old")

    def old_dim(self) -> int | None:
        """Return the old model's dimension where it is known before earlier stages are trained; else None."""
        name = self.part.old.name if self.part.old is not None else ""
        if not name.startswith(STAGE_PREFIX):
            return StoredModel(name).dim if name and is_stored(name) else None
        made_by = next(part for part in self.recipe.stages if part.name == name.removeprefix(STAGE_PREFIX))
        return Stage(self.recipe, made_by).planned_dim()

    def planned_dim(self) -> int | None:
        """Return the dimension that the stage's model will have where that does not depend on its backbone; else None."""
        return self.method.planned_dim(self.old_dim() if self.method.compares_with_old else None, self.part.options)

    def independent(self) -> Embedder | None:
        """Load the plain new model: the one named under ``independent``, else the new model itself when it is a trained one."""
        if self.part.independent is not None:
            return self.embedder("independent")
        # the backbone that a method for labelled images starts from has no embedding of its own to compare with
        plain = self.method.embeds_in_memory or self.part.data.queries is None
        return self.embedder("new") if plain and isinstance(self.part.new, EncoderSource) else None

    @cached_property
    def images(self) -> LabelledImages:
        """The labelled training images, after the recipe's choice of classes and samples."""
        data = self.part.data
        if data.images is None:
            raise XcompatError(
                f"{self.part.name}: method {self.part.method} learns from labelled images; name them under data.images"
            )
        labelled = load_labelled(data.images, captions=data.old_reads == "captions")
        return select(labelled, data.subset).reindexed() if data.subset is not None else labelled

    def test_captions(self) -> list[str]:
        """Return the captions that no corpus may hold."""
        return load_pair_test_set(self.part.data.test).texts if self.part.data.test is not None else []

    def cache(self, frozen: FrozenModel) -> EmbeddingCache:
        """Embed what a map over cached embeddings learns from."""
        data, cache_dir = self.part.data, self.recipe.cache_dir
        frozen.require_embeddings(self.part.method)
        if data.images is not None:
            return cached_images(frozen, self.images.dataset, cache_dir, self.images.max_bad_share)
        embedder = frozen.require_model("holds embeddings of images by their ids; name labelled images under data.images")
        if data.embeddings_of == "texts":
            if not data.texts:
                raise XcompatError(
                    f"{self.part.name}: empty corpus, data.texts names none; name some, or set data.embeddings_of to images"
                )
            texts = load_texts(data.texts, exclude=self.test_captions(), limit=data.texts_limit)
            return cached_texts(embedder, texts, cache_dir)
        if data.pairs is None:
            raise XcompatError(f"{self.part.name}: data.embeddings_of is images, but data.pairs names none")
        return cached_images(embedder, load_pairs(data.pairs), cache_dir, data.pairs.max_bad_share)

    def load_model(self, name: str) -> CompatModel:
        """Load a stage's finished model."""
        return torch.nn.Module.to(load_checkpoint(str(self.recipe.stage_dir(name) / "model")), device())


def weights_digest(folder: Path) -> str:
    """Hash the weights of a saved model.

    Args:
        folder: with one or more safetensors files.

    Returns:
        64 hexadecimal digits.
    """
    digest = hashlib.sha256()
    for file in listed(folder, "*.safetensors"):
        with file.open("rb") as handle:
            digest.update(hashlib.file_digest(handle, "sha256").digest())
    return digest.hexdigest()


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and torch."""
    from transformers import set_seed

    set_seed(seed)
