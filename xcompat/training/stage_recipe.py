"""One stage of a recipe: all settings of one training, validated."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from xcompat.core.errors import XcompatError, nearest
from xcompat.data import PairSource, View
from xcompat.encoders import EncoderSource
from xcompat.encoders.scratch import ScratchSource, is_quick
from xcompat.mapping.folds import Searched
from xcompat.training.declared import method_names, method_options
from xcompat.training.optimiser import Decayed
from xcompat.training.sections import DataSettings, EvaluationSettings, Section
from xcompat.training.values import check_options, check_training
from xcompat.vectors import is_stored, require_codec

if TYPE_CHECKING:
    from xcompat.models import CompatModel

STAGE_PREFIX = "stage:"
LONGEST_NAME, LONGEST_NAME_BYTES = 100, 200
"""Of a stage, whose name is that of its folder: file systems take up to 255 bytes."""
CHOSEN = "map"
"""The method of a recipe that names none: the query map that finds most of a held-out part of the training set."""
ROLES = ("old", "new", "independent", "side_info", "new_side_info")
"""Keys of a stage that name a model whose embeddings are cached."""
OF_THE_COURSE = ("classes", "for_training", "keeps_classifier")
"""Keys of a configuration that training sets, not the recipe."""


class StageRecipe(Section):
    """The settings of one training stage.

    Args:
        name: name of the stage and of its folder; the method's name unless given.
        method: the method's name in ``xcompat.methods``. Unless given, ``map``: of all solved maps, with metrics and memories of
            queries, the one that finds most of a held-out part of the training set.
        old: the model to stay compatible with: a name, a folder, or ``stage:NAME`` for an earlier stage's result.
        new: the encoder to train: the same, or an architecture to train from scratch.
        independent: the new model trained without an old one, which new/old and new/new are compared with.
        side_info: the model whose embeddings are stored beside the old ones, for methods that map galleries (fct).
        new_side_info: the new model's own side-information, to which the old one is mapped too; for chains of updates.
        projection: the φ to start from: a checkpoint of method ``projection`` or ``stage:NAME``.
        options: the method's own configuration.
        data: training and test data.
        training: fields of ``transformers.TrainingArguments``.
        seed_offset: added to the recipe's seed for this stage's training: the same settings trained once more.
        mini_batch_size: samples embedded at a time if the graph of a whole batch does not fit into memory. Loss and gradient stay
            those of the whole batch of all processes, and every sample is embedded twice (Gao et al. 2021, GradCache). It must
            divide ``training.per_device_train_batch_size``; None for the whole batch at once.
        prompt_lr_factor: learning rate of visual prompts over that of everything else (100 in XBT §4.1).
        encoder_lr_factor: learning rate of the encoder's own weights over that of heads and adapters. Below 1 it protects
            pretrained weights from the first gradients of an untrained head.
        weight_decay_on: what ``training.weight_decay`` draws towards zero: ``matrices``, the weights of layers without biases,
            norms and prompts, or ``all`` that is trained, as SGD does in most papers.
        memory: which training data queries or mapped galleries remember, chosen on a held-out part: ``classes`` of
            ``data.images``, or for queries ``pairs`` of images and captions of ``data.remembered`` or ``data.pairs``; null for
            none.
        memory_codec: how a memory stores its entries: uncompressed (``float32``), or compressed (``SQ8``, ``SQ4``, ``SQfp16``, or
            such as ``PQ64``), in which case a query reads only its nearest entries. Unless given, ``SQ8`` for more than 2^24
            numbers in keys.
        searched_classes: how many of the classes that will be searched are in ``data.images``: all (known), some (open), or
            nobody knows (unknown). It decides what is held out to choose the memory.
        allow_worse: whether a run counts as done with a chosen map that is not surely at or above old queries on held-out items;
            else its exit code is 1. The map is written and marked in either case.
        evaluation: how the result is evaluated; null for no evaluation.
    """

    name: str = ""
    method: str = CHOSEN
    old: EncoderSource | None = None
    new: EncoderSource | ScratchSource | None = None
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
    memory: Literal["classes", "pairs"] | None = None
    memory_codec: str | None = None
    searched_classes: Searched = "unknown"
    allow_worse: bool = False
    evaluation: EvaluationSettings | None = EvaluationSettings()

    @field_validator(*ROLES, mode="before")
    @classmethod
    def _name_alone(cls, value: Any) -> Any:  # noqa: ANN401 - whatever the YAML holds
        return {"name": value} if isinstance(value, str) else value

    @field_validator("name")
    @classmethod
    def _names_a_folder(cls, value: str) -> str:
        if value in (".", "..") or not value.isprintable() or set(value) & {"/", "\\"}:
            raise ValueError(f"{value!r} cannot be the name of a folder; leave slashes and control characters out")
        if len(value) > LONGEST_NAME or len(value.encode()) > LONGEST_NAME_BYTES:
            raise ValueError(
                f"{value[:20]!r}… is longer than {LONGEST_NAME} characters or {LONGEST_NAME_BYTES} bytes; choose a shorter name"
            )
        return value

    @field_validator("method")
    @classmethod
    def _known_method(cls, value: str, info: ValidationInfo) -> str:
        if value not in (known := [CHOSEN, *(method_names() if is_quick(info) else _methods())]):
            raise ValueError(f"unknown method {value!r}; {nearest(value, known)}")
        return value

    @field_validator("memory_codec")
    @classmethod
    def _known_codec(cls, value: str | None) -> str | None:
        require_codec(value)
        return value

    @field_validator("training")
    @classmethod
    def _known_training(cls, value: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        return check_training(value, is_quick(info))

    @field_validator("options")
    @classmethod
    def _known_options(cls, value: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        method = info.data.get("method")
        if method == CHOSEN and value:
            raise ValueError(f"options {', '.join(value)} are a method's, and none is named; set method: query_map, or another")
        if method is not None and method != CHOSEN:
            known = declared_options(method) if is_quick(info) else usual_options(method)
            return check_options(method, value, known, is_quick(info))
        return value

    @property
    def batch_size(self) -> int:
        """Return the number of samples per process and step."""
        from transformers import TrainingArguments

        return int(self.training.get("per_device_train_batch_size", TrainingArguments.per_device_train_batch_size))

    @property
    def is_balanced(self) -> bool:
        """Return whether every batch must hold equally many images of each of its classes, as triplets need."""
        return method_class(self.method).balances_batches(self.options)

    @property
    def learns_from_pairs(self) -> bool:
        """Return whether the memory, or the choice of a map, is learned from images with captions."""
        chosen = self.method == CHOSEN and self.data.images is None and self.remembered_pairs is not None
        return chosen or self.memory == "pairs"

    @property
    def remembered_pairs(self) -> PairSource | None:
        """Return the images with captions that queries may remember."""
        return self.data.remembered or self.data.pairs

    @property
    def is_trained(self) -> bool:
        """Return whether the model is trained in steps, and not solved."""
        return self.method != CHOSEN and not method_class(self.method).is_solved

    @property
    def trains_on_labelled(self) -> bool:
        """Return whether an encoder is trained on labelled images."""
        method = method_class(self.method)
        return not method.embeds_in_memory and (self.data.images is not None or "labels" in method.columns)

    @property
    def trains_on_captions(self) -> bool:
        """Return whether ``data.pairs`` or ``data.text_pairs`` are what is learned from, as far as they are named."""
        return not method_class(self.method).embeds_in_memory and not self.trains_on_labelled

    @property
    def compares_pairs_with_old(self) -> bool:
        """Return whether training reads old embeddings of ``data.pairs``."""
        return self.data.pairs is not None and self.trains_on_captions and "old_embeds" in method_class(self.method).columns

    @property
    def embeds_pairs_online(self) -> bool:
        """Return whether the old model embeds each batch of ``data.pairs``."""
        return self.compares_pairs_with_old and self.data.old_embeddings == "online"

    @property
    def online_roles(self) -> list[str]:
        """Return the roles of the frozen models that embed each batch as the new model sees it."""
        columns = method_class(self.method).columns if self.trains_on_labelled else ()
        old = "old_embeds" in columns and self.data.old_embeddings == "online"
        roles = {"old": old or self.embeds_pairs_online}
        roles["independent"] = "new_embeds" in columns and self.data.new_embeddings == "online"
        return [role for role, is_online in roles.items() if is_online]

    @property
    def is_judged(self) -> bool:
        """Return whether the stage ends with a report."""
        return self.evaluation is not None and self.data.tests() and method_class(self.method).compares_with_old

    @property
    def learns_from_texts(self) -> bool:
        """Return whether the stage learns from texts, from which the captions of the test set are excluded."""
        if method_class(self.method).embeds_in_memory:
            return self.data.images is None and self.data.embeddings_of == "texts"
        return isinstance(self.new, ScratchSource) and not self.new.image_only

    @property
    def embeds_images(self) -> bool:
        """Return whether the stage learns a map from embeddings of images; a map that is chosen tries several on plain ones."""
        images = self.data.images is not None or self.data.embeddings_of == "images"
        return method_class(self.method).embeds_in_memory and self.method != CHOSEN and images

    def views(self, seed: int) -> list[View]:
        """Return the augmented views that a map learns from, drawn by a seed; none for plain images and texts."""
        drawn = self.data.augmentation
        if not self.embeds_images or drawn is None or drawn.is_none:
            return []
        return [View(drawn, seed, number) for number in range(self.data.views)]

    def require_old_queries(self) -> None:
        """Refuse ``evaluation.slerp`` and ``evaluation.fallback`` if there are no old queries for them.

        Raises:
            XcompatError: one of them is set, and the method maps the old gallery, the old model is stored embeddings, or it reads
                captions; or ``fallback`` is set, and the queries have no memory and so no confidence.
        """
        if self.evaluation is None or not self.is_judged:
            return
        if self.evaluation.slerp is not None:
            where = f"{self.name}: evaluation.slerp mixes new queries with old ones"
        elif self.evaluation.fallback is not None:
            where = f"{self.name}: evaluation.fallback asks old queries where new ones are not sure"
        else:
            return
        mend = "set it to null"
        if self.evaluation.fallback is not None and self.memory is None and self.method != CHOSEN:
            unsure = "evaluation.fallback asks old queries where new ones are not sure, and none that remembers nothing says so"
            raise XcompatError(f"{self.name}: {unsure}; set memory, or evaluation.fallback to null")
        if method_class(self.method).maps_galleries_with(self.options):
            raise XcompatError(f"{where}, and method {self.method} maps the old gallery to where old ones have no place; {mend}")
        if self.old is not None and is_stored(self.old.name):
            raise XcompatError(f"{where}, and {self.old.name} holds embeddings and no model that could embed a query; {mend}")
        if self.data.old_reads == "captions":
            raise XcompatError(f"{where}, and the old model reads captions where the new one reads images; {mend}")

    def resolved(self) -> dict[str, Any]:
        """Return all settings that training depends on, as JSON, with the defaults of those that are not given."""
        described = self.model_dump(mode="json", exclude={"evaluation"})
        return described | {"options": usual_options(self.method) | described["options"]}

    def made_from(self) -> list[str]:
        """Return the names of the earlier stages whose models this stage is made from."""
        sources = [source for role in ROLES if isinstance(source := getattr(self, role), EncoderSource)]
        named = dict.fromkeys([self.projection or "", *(source.name for source in sources)])
        return [name.removeprefix(STAGE_PREFIX) for name in named if name.startswith(STAGE_PREFIX)]

    @model_validator(mode="after")
    def _default_name(self) -> StageRecipe:
        self.name = self.name or self.method
        return self

    @model_validator(mode="after")
    def _method_fits(self, info: ValidationInfo) -> StageRecipe:
        if not is_quick(info):
            self._there_is_something_to_remember()
            self._classes_are_learned()
            self._text_pairs_are_read()
            self._old_embeddings_are_to_be_had()
            self._whole_classes_fill_a_batch()
            self._mini_batches_make_a_batch()
        return self

    def _there_is_something_to_remember(self) -> None:
        method = method_class(self.method)
        if self.method == CHOSEN and self.memory is not None:
            raise ValueError("memory: without a method what queries remember is chosen with the map; leave memory out")
        if self.method == CHOSEN and self.data.texts and (self.data.images is not None or self.remembered_pairs is not None):
            raise ValueError(
                "data.texts: a map that is chosen learns from data.images or pairs; leave texts out, or name a method"
            )
        if self.method != CHOSEN and self.memory is None and self.memory_codec is not None:
            raise ValueError("memory_codec: nothing is remembered; set memory: classes or pairs, or leave memory_codec out")
        if self.memory is not None and not method.compares_with_old:
            raise ValueError(f"memory: method {self.method} brings no queries to an old space; leave memory out")
        if self.memory == "pairs" and method.maps_galleries_with(self.options):
            raise ValueError(f"memory: method {self.method} maps galleries, which remember classes alone; set memory: classes")
        if self.memory == "classes" and self.data.images is None:
            raise ValueError("memory: classes are those of labelled images; name them under data.images")
        pairs = self.remembered_pairs
        if self.method == CHOSEN and self.data.images is None and pairs is not None and pairs.streaming:
            raise ValueError("data.pairs: a map that is chosen reads them more than once; leave streaming out, or name a method")
        if self.memory == "pairs" and (pairs is None or pairs.streaming):
            raise ValueError(
                "memory: pairs are read more than once; name them under data.remembered or data.pairs, without streaming"
            )
        if self.memory != "pairs" and self.method != CHOSEN and self.data.remembered is not None:
            raise ValueError("data.remembered: images with captions are remembered with memory: pairs; set it, or leave them out")

    def _classes_are_learned(self) -> None:
        method = method_class(self.method)
        if self.trains_on_labelled and "input_ids" in method.columns and not method.learns_classes:
            raise ValueError(
                f"data.images: method {self.method} learns from images with captions, and from no classes; leave images out "
                "(null in this stage, where another one reads them)"
            )

    def _text_pairs_are_read(self) -> None:
        from xcompat.models.learning import PASSAGES

        pairs, method = self.data.text_pairs, method_class(self.method)
        if pairs is None or method.embeds_in_memory:
            return
        if not set(PASSAGES) <= set(method.columns_if_known):
            raise ValueError(f"data.text_pairs: method {self.method} does not learn from texts that search texts; leave them out")
        if pairs.negative_column is not None and "old_embeds" in method.columns:
            raise ValueError(
                f"data.text_pairs: method {self.method} compares with old embeddings of the pairs, of which negatives have none; "
                "leave negative_column out"
            )
        if (self.options.get("adapters") or {}).get("prompts"):
            raise ValueError("options.adapters.prompts are of images, and data.text_pairs has none; leave prompts out")

    def _old_embeddings_are_to_be_had(self) -> None:
        pairs = self.data.pairs
        if self.online_roles and self.training.get("dataloader_num_workers"):
            role = self.online_roles[0]
            setting = "old_embeddings" if role == "old" else "new_embeddings"
            raise ValueError(
                f"data.{setting}: online has the {role} model make part of each batch; leave training.dataloader_num_workers out "
                "(0 in this stage, where another one sets it for all)"
            )
        if self.compares_pairs_with_old and not self.embeds_pairs_online and pairs is not None and pairs.streaming:
            raise ValueError(
                f"data.pairs: method {self.method} reads old embeddings, which are cached by row, and a stream has no rows; set "
                "data.old_embeddings: online, or leave streaming out"
            )

    def _whole_classes_fill_a_batch(self) -> None:
        each, batch = self.data.samples_per_class, self.batch_size
        if self.is_balanced and (batch % each or batch < 2 * each):
            raise ValueError(
                f"a batch of triplets holds {each} images (data.samples_per_class) of each of its classes, two or more, and "
                f"training.per_device_train_batch_size is {batch}; make it a multiple of {each}, at least {2 * each}"
            )

    def _mini_batches_make_a_batch(self) -> None:
        size, method = self.mini_batch_size, method_class(self.method)
        if size is None:
            return
        if self.method == CHOSEN:
            raise ValueError("mini_batch_size: a map that is chosen is solved and not trained; leave mini_batch_size out")
        classified = self.data.images is not None and not method.embeds_in_memory  # the loss then reads the classifier too
        if classified or not method.loss_of_embeddings:
            raise ValueError(
                f"mini_batch_size: the loss of method {self.method}{' on classes' * classified} is not one of embeddings alone; "
                "leave mini_batch_size out (null in this stage, where another one sets it for all)"
            )
        if self.batch_size % size:
            raise ValueError(
                f"mini_batch_size is {size}, which does not divide training.per_device_train_batch_size, {self.batch_size}; "
                "choose a divisor"
            )


def method_class(method: str) -> type[CompatModel]:
    """Return the class of a method by its name in a recipe; of ``map``, that of query maps."""
    return _methods()["query_map" if method == CHOSEN else method]


def _methods() -> dict[str, type[CompatModel]]:
    from xcompat.methods import METHODS

    return METHODS


def usual_options(method: str) -> dict[str, Any]:
    """Return the options of a method, by its name in a recipe, with their defaults; ``map`` has none.

    Example:
        >>> usual_options("ridge")["regularisation"]
        0.01
    """
    from xcompat.models import CompatConfig

    if method == CHOSEN:
        return {}
    usual = method_class(method).config_class()
    not_given = {field.name for field in fields(CompatConfig)} - {"adapters", "logit_scale"} | {*ROLES, *OF_THE_COURSE}
    return {field.name: getattr(usual, field.name) for field in fields(usual) if field.name not in not_given}


def declared_options(method: str) -> set[str]:
    """Return the names that :func:`usual_options` has, without importing the method."""
    return {"adapters", "logit_scale", *method_options(method)} - {*ROLES, *OF_THE_COURSE}
