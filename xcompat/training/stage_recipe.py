"""Validated settings of a recipe's stage."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, Tag, ValidationInfo, field_validator, model_validator

from xcompat.core.errors import XcompatError, nearest, require_no_problems
from xcompat.core.plugins import class_file, is_file_class
from xcompat.data import PairSource, View
from xcompat.encoders import EncoderSource
from xcompat.encoders.scratch import ScratchSource, is_quick
from xcompat.mapping.folds import Searched
from xcompat.training.optimiser import Decayed
from xcompat.training.sections import DataSettings, EvaluationSettings, Section, one_of
from xcompat.training.static_options import method_names, method_options
from xcompat.training.stored_models import is_stored
from xcompat.training.values import check_options, check_training
from xcompat.vectors.codecs import require_codec

if TYPE_CHECKING:
    from xcompat.models import CompatModel

STAGE_PREFIX = "stage:"
LONGEST_NAME, LONGEST_NAME_BYTES = 100, 200
"""Limits of stage names, which are folder names of at most 255 bytes."""
AUTO_MAP = "map"
"""The method of a recipe without one: the query map with the best validation score."""
ROLES = ("old", "new", "independent", "side_info", "new_side_info")
"""Keys of a stage that name a model whose embeddings are cached."""
SET_BY_TRAINER = ("classes", "for_training", "keeps_classifier")
"""Keys of a configuration that training sets, not the recipe."""

NewEncoder = Annotated[
    Annotated[EncoderSource, Tag("EncoderSource")] | Annotated[ScratchSource, Tag("ScratchSource")],
    one_of(EncoderSource, ScratchSource),
]


class StageRecipe(Section):
    """Settings of a stage.

    Args:
        name: name of stage and folder; default: the method's.
        method: name of a method, or ``path.py:Class`` to run your own file. The default ``map`` chooses the solved query map
            and memory with the best validation score.
        old: model to stay compatible with: a name, folder, or ``stage:NAME``.
        new: encoder to train: the same, or an architecture to train from scratch.
        independent: new model trained without the old model, for comparison.
        side_info: model of embeddings stored beside old ones, for gallery maps (fct).
        new_side_info: the new model's side-information, for chains of updates.
        projection: φ to start from: a ``projection`` checkpoint or ``stage:NAME``.
        options: options of the method.
        data: training and test data.
        training: fields of ``transformers.TrainingArguments``.
        seed_offset: added to the recipe's seed, to repeat a training.
        mini_batch_size: samples embedded at a time, to save memory; it must divide ``training.per_device_train_batch_size``. Loss
            and gradient stay those of the whole batch, and samples are embedded twice (Gao et al. 2021, GradCache).
        prompt_lr_factor: learning rate of visual prompts over the learning rate of everything else (100 in XBT §4.1).
        encoder_lr_factor: learning rate of the encoder's weights over the learning rate of heads and adapters. Below 1, it
            protects pretrained weights from untrained heads.
        weight_decay_on: decayed weights: ``matrices`` (no biases, norms, prompts), or ``all``, as in most papers with SGD.
        sync_batch_norm: whether batch norms of all GPUs share their statistics. Default: only for simclr, as in its paper.
        memory: training data to remember, chosen on a validation split: ``classes`` of ``data.images``, or for queries ``pairs``
            of ``data.remembered`` or ``data.pairs``.
        memory_codec: storage of memory entries: ``float32``, ``SQ8``, ``SQ4``, ``SQfp16`` or e.g. ``PQ64``; compressed ones are
            read by nearest entries. Default: ``SQ8`` above 2^24 numbers in keys.
        searched_classes: searched classes in ``data.images``: all (known), some (open), or unknown; determines the memory's
            validation split.
        allow_worse: whether a run succeeds with a chosen map not surely at or above old queries on held-out items; else its exit
            code is 1. The map is written either way.
        evaluation: evaluation settings; null for none.
    """

    name: str = ""
    method: str = AUTO_MAP
    old: EncoderSource | None = None
    new: NewEncoder | None = None
    independent: EncoderSource | None = None
    side_info: EncoderSource | None = None
    new_side_info: EncoderSource | None = None
    projection: str | None = None
    options: dict[str, Any] = Field(default_factory=dict)
    data: DataSettings = DataSettings()
    training: dict[str, Any] = Field(default_factory=dict)
    seed_offset: int = Field(0, ge=0)
    mini_batch_size: int | None = Field(None, ge=1)
    prompt_lr_factor: float = Field(100.0, gt=0)
    encoder_lr_factor: float = Field(1.0, gt=0)
    weight_decay_on: Decayed = "matrices"
    sync_batch_norm: bool | None = None
    memory: Literal["classes", "pairs"] | None = None
    memory_codec: str | None = None
    searched_classes: Searched = "unknown"
    allow_worse: bool = False
    evaluation: EvaluationSettings | None = EvaluationSettings()

    @field_validator(*ROLES, mode="before")
    @classmethod
    def _name_alone(cls, value: object) -> object:
        return {"name": value} if isinstance(value, str) else value

    @field_validator("name")
    @classmethod
    def _names_a_folder(cls, value: str) -> str:
        if value in (".", "..") or not value.isprintable() or set(value) & {"/", "\\"}:
            raise ValueError(f"{value!r} cannot be a folder name; remove slashes and control characters")
        if len(value) > LONGEST_NAME or len(value.encode()) > LONGEST_NAME_BYTES:
            raise ValueError(
                f"{value[:20]!r}… is longer than {LONGEST_NAME} characters or {LONGEST_NAME_BYTES} bytes; choose a shorter name"
            )
        return value

    @field_validator("method")
    @classmethod
    def _known_method(cls, value: str, info: ValidationInfo) -> str:
        if is_file_class(value):
            class_file(value) if is_quick(info) else method_class(value)
        elif value not in (known := [AUTO_MAP, *method_names()]):
            raise ValueError(f"unknown method {value!r}; {nearest(value, known)}")
        return value

    @field_validator("memory_codec")
    @classmethod
    def _known_codec(cls, value: str | None) -> str | None:
        require_codec(value)
        return value

    @field_validator("training")
    @classmethod
    def _known_training(cls, value: dict[str, object], info: ValidationInfo) -> dict[str, object]:
        return check_training(value, is_quick(info))

    @field_validator("options")
    @classmethod
    def _known_options(cls, value: dict[str, object], info: ValidationInfo) -> dict[str, object]:
        method = info.data.get("method")
        if method == AUTO_MAP and value:
            raise ValueError(f"options {', '.join(value)} need a method; set method: query_map, or another method")
        if method is not None and method != AUTO_MAP:
            known = declared_options(method) if is_quick(info) else usual_options(method)
            return check_options(method, value, known, is_quick(info))
        return value

    @property
    def batch_size(self) -> int:
        """Samples per process and step."""
        from transformers import TrainingArguments

        return int(self.training.get("per_device_train_batch_size", TrainingArguments.per_device_train_batch_size))

    @property
    def is_balanced(self) -> bool:
        """Whether batches need equally many images per class, for triplets."""
        return method_class(self.method).balances_batches(self.options)

    @property
    def learns_from_pairs(self) -> bool:
        """Whether memory or map choice use captioned images."""
        chosen = self.method == AUTO_MAP and self.data.images is None and self.remembered_pairs is not None
        return chosen or self.memory == "pairs"

    @property
    def remembered_pairs(self) -> PairSource | None:
        """Captioned images for the queries' memory."""
        return self.data.remembered or self.data.pairs

    @property
    def is_trained(self) -> bool:
        """Whether the model is trained in steps, not solved."""
        return self.method != AUTO_MAP and not method_class(self.method).is_solved

    @property
    def trains_on_labelled(self) -> bool:
        """Whether an encoder is trained on labelled images."""
        method = method_class(self.method)
        return not method.embeds_in_memory and (self.data.images is not None or "labels" in method.columns)

    @property
    def trains_on_captions(self) -> bool:
        """Whether an encoder learns from ``data.pairs`` or ``data.text_pairs``, if set."""
        return not method_class(self.method).embeds_in_memory and not self.trains_on_labelled

    @property
    def compares_pairs_with_old(self) -> bool:
        """Whether training reads old embeddings of ``data.pairs``."""
        return self.data.pairs is not None and self.trains_on_captions and "old_embeds" in method_class(self.method).columns

    @property
    def embeds_pairs_online(self) -> bool:
        """Whether the old model embeds each batch of ``data.pairs``."""
        return self.compares_pairs_with_old and self.data.old_embeddings == "online"

    @property
    def online_roles(self) -> list[str]:
        """Roles of frozen models that embed each batch."""
        columns = method_class(self.method).columns if self.trains_on_labelled else ()
        old = "old_embeds" in columns and self.data.old_embeddings == "online"
        roles = {"old": old or self.embeds_pairs_online}
        roles["independent"] = "new_embeds" in columns and self.data.new_embeddings == "online"
        return [role for role, is_online in roles.items() if is_online]

    @property
    def is_judged(self) -> bool:
        """Whether the stage ends with a report."""
        return self.evaluation is not None and self.data.tests() and method_class(self.method).compares_with_old

    @property
    def learns_from_texts(self) -> bool:
        """Whether the stage learns from texts, without test captions."""
        if method_class(self.method).embeds_in_memory:
            return self.data.images is None and self.data.embeddings_of == "texts"
        return isinstance(self.new, ScratchSource) and not self.new.image_only

    @property
    def embeds_images(self) -> bool:
        """Whether the stage trains a map on embeddings of images."""
        images = self.data.images is not None or self.data.embeddings_of == "images"
        return method_class(self.method).embeds_in_memory and self.method != AUTO_MAP and images

    def views(self, seed: int) -> list[View]:
        """Return a map's augmented views; empty for plain data."""
        drawn = self.data.augmentation
        if not self.embeds_images or drawn is None or drawn.is_none:
            return []
        return [View(drawn, seed, number) for number in range(self.data.views)]

    def missing_inputs(self) -> Iterator[str]:
        """Yield a message for each model or data set that the method needs and the recipe does not set."""
        method, data, what = method_class(self.method), self.data, f"method {self.method}"
        if self.new is None:
            yield f"{self.name}: new: {what} needs a new model; set new"
        elif method.embeds_in_memory and not isinstance(self.new, EncoderSource):
            yield f"{self.name}: new: {what} maps embeddings and does not train an encoder; set new to a trained model"
        if self.old is None and method.compares_with_old and (self.is_judged or not method.starts_from_projection):
            yield f"{self.name}: old: {what} needs an old model; set old"
        if self.projection is None and method.starts_from_projection:
            yield f"{self.name}: projection: {what} starts from a pretrained φ; set projection to its folder or stage:NAME"
        if self.trains_on_labelled and data.images is None:
            yield f"{self.name}: data.images: {what} needs labelled images; set data.images"
        elif self.trains_on_labelled and "new_embeds" in method.columns and self.independent is None:
            yield f"{self.name}: independent: {what} learns from an independent new model; set independent"
        if self.trains_on_captions and data.pairs is None and data.text_pairs is None:
            yield f"{self.name}: data.pairs: {what} needs images with captions; set data.pairs"

    def require_old_queries(self) -> None:
        """Raise if ``evaluation.slerp`` or ``evaluation.fallback`` lacks old queries.

        Raises:
            XcompatError: the method maps galleries, the old model is stored or reads captions, or ``fallback`` has no memory.
        """
        if self.evaluation is None or not self.is_judged:
            return
        if self.evaluation.slerp is not None:
            where = f"{self.name}: evaluation.slerp needs old queries"
        elif self.evaluation.fallback is not None:
            where = f"{self.name}: evaluation.fallback needs old queries"
        else:
            return
        fix = "set it to null"
        if self.evaluation.fallback is not None and self.memory is None and self.method != AUTO_MAP:
            unsure = "evaluation.fallback needs the confidence of new queries, but without a memory they have none"
            raise XcompatError(f"{self.name}: {unsure}; set memory, or evaluation.fallback to null")
        if method_class(self.method).maps_galleries_with(self.options):
            raise XcompatError(f"{where}, but method {self.method} moves the old gallery to the new space; {fix}")
        if self.old is not None and is_stored(self.old.name):
            raise XcompatError(f"{where}, but {self.old.name} contains embeddings and cannot embed a query; {fix}")
        if self.data.old_reads == "captions":
            raise XcompatError(f"{where}, but the old model reads captions and the new model reads images; {fix}")

    def resolve_training(self) -> dict[str, object]:
        """Return the settings of training as JSON, with defaults."""
        described = self.model_dump(mode="json", exclude={"evaluation"})
        return described | {"options": usual_options(self.method) | described["options"]}

    def own_classes(self) -> list[str]:
        """Return each ``path.py:Class`` in the stage."""
        architecture = self.new.model.get("model_type") if isinstance(self.new, ScratchSource) else None
        return [name for name in (self.method, str(architecture)) if is_file_class(name)]

    def source_stages(self) -> list[str]:
        """Return the earlier stages that this stage takes models from."""
        sources = [source for role in ROLES if isinstance(source := getattr(self, role), EncoderSource)]
        named = dict.fromkeys([self.projection or "", *(source.name for source in sources)])
        return [name.removeprefix(STAGE_PREFIX) for name in named if name.startswith(STAGE_PREFIX)]

    @model_validator(mode="after")
    def _default_name(self) -> StageRecipe:
        self.name = self.name or (class_file(self.method).stem if is_file_class(self.method) else self.method)
        return self

    @model_validator(mode="after")
    def _method_fits(self, info: ValidationInfo) -> StageRecipe:
        if not is_quick(info):
            memory = self._auto_map_problems() if self.method == AUTO_MAP else self._memory_problems()
            require_no_problems((*memory, *self._data_problems(), *self._stream_problems(), *self._batch_problems()))
        return self

    def _auto_map_problems(self) -> Iterator[str]:
        labelled, pairs = self.data.images is not None, self.remembered_pairs
        if self.memory is not None:
            yield "memory: without a method, the memory is chosen with the map; remove memory"
        if self.data.texts and (labelled or pairs is not None):
            yield "data.texts: without a method, the map learns from data.images or pairs; remove texts, or set method"
        if not labelled and pairs is not None and pairs.streaming:
            yield "data.pairs: without a method, pairs are read more than once; remove streaming, or set method"

    def _memory_problems(self) -> Iterator[str]:
        method, pairs = method_class(self.method), self.remembered_pairs
        if self.memory is None and self.memory_codec is not None:
            yield "memory_codec needs a memory; set memory: classes or pairs, or remove memory_codec"
        if self.memory is not None and not method.compares_with_old:
            yield f"memory: method {self.method} does not map queries to an old space; remove memory"
        elif self.memory == "classes" and self.data.images is None:
            yield "memory: classes needs labelled images; set data.images"
        elif self.memory == "pairs" and method.maps_galleries_with(self.options):
            yield f"memory: method {self.method} maps galleries, which only remember classes; set memory: classes"
        elif self.memory == "pairs" and (pairs is None or pairs.streaming):
            yield "memory: pairs are read more than once; set data.remembered or data.pairs, without streaming"
        if self.memory != "pairs" and self.data.remembered is not None:
            yield "data.remembered: only memory: pairs remembers images with captions; set it, or remove data.remembered"

    def _data_problems(self) -> Iterator[str]:
        from xcompat.outputs import PASSAGES

        pairs, method = self.data.text_pairs, method_class(self.method)
        if self.trains_on_labelled and "input_ids" in method.columns and not method.learns_classes:
            yield (
                f"data.images: method {self.method} learns from images with captions, not from classes; remove images "
                "(null in this stage, if another one uses them)"
            )
        if pairs is None or method.embeds_in_memory:
            return
        if not set(PASSAGES) <= set(method.columns_if_known):
            yield f"data.text_pairs: method {self.method} does not learn from text pairs; remove them"
            return
        if pairs.negative_column is not None and "old_embeds" in method.columns:
            yield (
                f"data.text_pairs: method {self.method} needs old embeddings of the pairs, which negatives do not have; "
                "remove negative_column"
            )
        if (self.options.get("adapters") or {}).get("prompts"):
            yield "options.adapters.prompts need images, but data.text_pairs has none; remove prompts"

    def _stream_problems(self) -> Iterator[str]:
        pairs = self.data.pairs
        if self.compares_pairs_with_old and not self.embeds_pairs_online and pairs is not None and pairs.streaming:
            yield (
                f"data.pairs: method {self.method} reads old embeddings, which are cached by row, but a stream has no rows; set "
                "data.old_embeddings: online, or remove streaming"
            )

    def _batch_problems(self) -> Iterator[str]:
        each, batch, size, method = self.data.samples_per_class, self.batch_size, self.mini_batch_size, method_class(self.method)
        if self.is_balanced and (batch % each or batch < 2 * each):
            yield (
                f"a batch of triplets needs {each} images (data.samples_per_class) of two or more classes, but "
                f"training.per_device_train_batch_size is {batch}; set it to a multiple of {each}, at least {2 * each}"
            )
        classified = self.data.images is not None and not method.embeds_in_memory  # the loss also reads the classifier
        if size is None:
            return
        if self.method == AUTO_MAP:
            yield "mini_batch_size: without a method, the map is solved, not trained; remove mini_batch_size"
        elif classified or not method.loss_of_embeddings:
            yield (
                f"mini_batch_size: the loss of method {self.method}{' on classes' * classified} reads more than embeddings; "
                "remove mini_batch_size (null in this stage, if another one sets it for all)"
            )
        elif batch % size:
            yield f"mini_batch_size {size} does not divide training.per_device_train_batch_size {batch}; choose a divisor"


def method_class(method: str) -> type[CompatModel]:
    """Return a method's class; ``map`` is a query map."""
    import xcompat.methods  # noqa: F401 - registers them
    from xcompat.models.registry import load_method

    return load_method("query_map" if method == AUTO_MAP else method)


def usual_options(method: str) -> dict[str, Any]:
    """Return a method's options with defaults, or nothing for ``map``.

    Example:
        >>> usual_options("ridge")["regularisation"]
        0.01
    """
    from xcompat.models import CompatConfig

    if method == AUTO_MAP:
        return {}
    usual = method_class(method).config_class()
    not_given = {field.name for field in fields(CompatConfig)} - {"adapters", "logit_scale"} | {*ROLES, *SET_BY_TRAINER}
    return {field.name: getattr(usual, field.name) for field in fields(usual) if field.name not in not_given}


def declared_options(method: str) -> set[str]:
    """Return names of :func:`usual_options` without importing the method."""
    return {"adapters", "logit_scale", *method_options(method)} - {*ROLES, *SET_BY_TRAINER}
