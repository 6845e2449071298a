"""The recipe: one validated YAML file that says what is trained, on what, and how it is judged."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from xcompat.data import PairSource
from xcompat.encoders import EncoderSource
from xcompat.encoders.scratch import ScratchSource
from xcompat.errors import XcompatError, nearest
from xcompat.mapping.folds import Searched
from xcompat.report.storage import FOLDER_NAME as REPORT
from xcompat.training.overrides import RecipeLoader, apply_override, refuse_shadowed
from xcompat.training.sections import DataSettings, EvaluationSettings, Section
from xcompat.training.values import check_options, check_training
from xcompat.training.yaml_files import read_yaml

if TYPE_CHECKING:
    from xcompat.models import CompatModel

STAGE_PREFIX = "stage:"
CHOSEN = "map"
"""The method of a recipe that names none: which map of queries finds most of what is held out of the training set."""
ROLES = ("old", "new", "independent", "side_info", "new_side_info")
"""Parts of a stage that name a model whose embeddings are cached."""
OF_THE_COURSE = ("classes", "for_training")
"""Parts of a configuration that the data say, and whether training is over."""


class StageRecipe(Section):
    """Everything one training stage needs.

    Args:
        name: name of the stage; the method's name unless given.
        method: which method, by its name in ``xcompat.methods``; ``map`` unless given: of maps that are solved, with metrics and
            memories of queries, the one that finds most of what is held out.
        old: the model to stay compatible with: a name, a folder, or ``stage:NAME`` for an earlier stage's result.
        new: the encoder that learns: the same, or an architecture to train from scratch.
        independent: the new model trained without an old one, the floor of new/old and the ceiling of new/new.
        side_info: the model whose embeddings are stored beside the old ones, for methods that map galleries (fct).
        new_side_info: the new model's own side-information, that the old one is mapped to as well; for chains of updates.
        projection: where φ starts from: a checkpoint of method ``projection`` or ``stage:NAME``.
        options: the method's own configuration.
        data: what it learns from.
        training: fields of ``transformers.TrainingArguments``.
        mini_batch_size: samples embedded at a time, where the graph of a whole batch does not fit into memory: loss and gradient
            stay those of the whole batch of all processes, and every sample is embedded twice (Gao et al. 2021, GradCache).
            It must divide ``training.per_device_train_batch_size``; None for the whole batch at once.
        prompt_lr_factor: learning rate of visual prompts over that of everything else (100 in xbt.txt §4.1).
        encoder_lr_factor: learning rate of the encoder's own weights over that of heads and adapters; below 1 where they are
            pretrained and the head is not, whose first gradients would undo them.
        memory: what queries or mapped galleries remember of what was learned from, chosen by what is held out: ``classes`` of
            ``data.images``, for queries ``pairs`` of images and captions of ``data.remembered`` or ``data.pairs``; null for none.
        memory_codec: in which a memory keeps its entries: ``float32`` for as they are, ``SQ8``, ``SQ4``, ``SQfp16`` or such as
            ``PQ64``, of which a query looks at the nearest alone; unless given ``SQ8`` for more than 2^24 numbers in keys.
        searched_classes: what is known of the classes that will be searched, which decides what is held out for that choice: all
            are in ``data.images`` (known), some are (open), or nothing (unknown).
        evaluation: how the result is judged; null for no evaluation.
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
    mini_batch_size: int | None = Field(None, ge=1)
    prompt_lr_factor: float = Field(100.0, gt=0)
    encoder_lr_factor: float = Field(1.0, gt=0)
    memory: Literal["classes", "pairs"] | None = None
    memory_codec: str | None = None
    searched_classes: Searched = "unknown"
    evaluation: EvaluationSettings | None = EvaluationSettings()

    @field_validator(*ROLES, mode="before")
    @classmethod
    def _name_alone(cls, value: Any) -> Any:  # noqa: ANN401 - whatever the YAML holds
        return {"name": value} if isinstance(value, str) else value

    @field_validator("method")
    @classmethod
    def _known_method(cls, value: str) -> str:
        from xcompat.methods import METHODS

        if value not in (known := [CHOSEN, *METHODS]):
            raise ValueError(f"unknown method {value!r}; {nearest(value, known)}")
        return value

    @field_validator("memory_codec")
    @classmethod
    def _known_codec(cls, value: str | None) -> str | None:
        from xcompat.models.codes import require_codec

        require_codec(value)
        return value

    @field_validator("training")
    @classmethod
    def _known_training(cls, value: dict[str, Any]) -> dict[str, Any]:
        check_training(value)
        return value

    @field_validator("options")
    @classmethod
    def _known_options(cls, value: dict[str, Any], info: Any) -> dict[str, Any]:  # noqa: ANN401 - pydantic's ValidationInfo
        method = info.data.get("method")
        if method == CHOSEN and value:
            raise ValueError(f"options {', '.join(value)} are a method's, and none is named; set method: query_map, or another")
        if method is not None and method != CHOSEN:
            check_options(method, value, usual_options(method))
        return value

    @property
    def batch_size(self) -> int:
        """Return how many samples each process learns from at a time."""
        from transformers import TrainingArguments

        return int(self.training.get("per_device_train_batch_size", TrainingArguments.per_device_train_batch_size))

    @property
    def is_balanced(self) -> bool:
        """Return whether every batch holds equally many images of each of its classes, without which there are no triplets."""
        return method_class(self.method).balances_batches(self.options)

    @property
    def learns_from_pairs(self) -> bool:
        """Return whether what queries remember, or which map is chosen, is learned from images with captions."""
        chosen = self.method == CHOSEN and self.data.images is None and self.remembered_pairs is not None
        return chosen or self.memory == "pairs"

    @property
    def remembered_pairs(self) -> PairSource | None:
        """Return the images with captions that queries may remember."""
        return self.data.remembered or self.data.pairs

    def resolved(self) -> dict[str, Any]:
        """Return all that the stage is trained by, as JSON: every setting and every option of its method, given or usual."""
        described = self.model_dump(mode="json", exclude={"evaluation"})
        return described | {"options": usual_options(self.method) | described["options"]}

    def sources(self) -> list[EncoderSource]:
        """Return the trained models that the stage is made from."""
        return [source for role in ROLES if isinstance(source := getattr(self, role), EncoderSource)]

    @model_validator(mode="after")
    def _default_name(self) -> StageRecipe:
        self.name = self.name or self.method
        return self

    @model_validator(mode="after")
    def _there_is_something_to_remember(self) -> StageRecipe:
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
        return self

    @model_validator(mode="after")
    def _whole_classes_fill_a_batch(self) -> StageRecipe:
        each, batch = self.data.samples_per_class, self.batch_size
        if self.is_balanced and (batch % each or batch < 2 * each):
            raise ValueError(
                f"a batch of triplets holds {each} images (data.samples_per_class) of each of its classes, two or more, and "
                f"training.per_device_train_batch_size is {batch}; make it a multiple of {each}, at least {2 * each}"
            )
        return self

    @model_validator(mode="after")
    def _mini_batches_make_a_batch(self) -> StageRecipe:
        size, method = self.mini_batch_size, method_class(self.method)
        if size is None:
            return self
        classified = self.data.images is not None and not method.embeds_in_memory  # the classifier is part of the loss
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
        return self


def method_class(method: str) -> type[CompatModel]:
    """Return the class of a method; of the map that is chosen, that of those which are trained for it.

    Args:
        method: as a recipe names it.
    """
    from xcompat.methods import METHODS

    return METHODS["query_map" if method == CHOSEN else method]


def usual_options(method: str) -> dict[str, Any]:
    """Return the options that a recipe may give a method, with the values they have unless it does.

    Args:
        method: as a recipe names it.

    Returns:
        Name -> value; nothing of the map that is chosen.

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


class Recipe(Section):
    """A named sequence of stages.

    Args:
        name: name of the run.
        output_dir: where everything is written.
        cache_dir: where embedding caches are kept, shared between runs.
        seed: of weights, data order, augmentation, noise and bootstrap.
        seeds: what ``compare`` runs the recipe with, one after the other; ``train`` takes ``seed``.
        stages: what is done, in order.
    """

    name: str
    output_dir: Path
    cache_dir: Path
    seed: int = 0
    seeds: list[int] = Field(default_factory=list)
    stages: list[StageRecipe]

    @model_validator(mode="after")
    def _stages_exist(self) -> Recipe:
        seen: list[str] = []
        for stage in self.stages:
            named = [stage.projection or "", *(source.name for source in stage.sources())]
            wanted = [name.removeprefix(STAGE_PREFIX) for name in named if name.startswith(STAGE_PREFIX)]
            wanted += stage.evaluation.compare_with if stage.evaluation else []
            for name in wanted:
                if name not in seen:
                    raise ValueError(
                        f"stage {stage.name!r} refers to {name!r}, which is no earlier stage "
                        f"(earlier: {', '.join(seen) or 'none'})"
                    )
            if stage.name == REPORT and len(self.stages) > 1:
                raise ValueError(f"a stage is called {REPORT!r}, which is where the run's report goes; give it another name")
            if stage.name in seen:
                raise ValueError(f"two stages are called {stage.name!r}; give each its own name")
            seen.append(stage.name)
        return self

    def stage_dir(self, name: str) -> Path:
        """Return where a stage writes: its own folder, or the run's when it is the only stage."""
        return self.output_dir if len(self.stages) == 1 else self.output_dir / name

    def resolve(self, name: str) -> str:
        """Return the folder that ``stage:NAME`` means, and any other name as it is."""
        return str(self.stage_dir(name.removeprefix(STAGE_PREFIX)) / "model") if name.startswith(STAGE_PREFIX) else name


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read and validate a recipe.

    A recipe is one stage, or has ``stages:``, each of which inherits every other top-level key and overrides it key by key.

    Args:
        path: YAML file.
        overrides: ``key=value`` with dots for nesting, such as ``training.learning_rate=1e-3`` or
            ``stages.1.training.max_steps=10``. The value is read as YAML.

    Returns:
        The recipe with every stage complete.

    Raises:
        XcompatError: the file is missing or not YAML, a key is unknown, a value does not fit.
    """
    path = Path(path)
    if not path.is_file():
        raise XcompatError(f"the recipe {path} does not exist")
    raw = read_yaml(path, RecipeLoader)
    if not isinstance(raw, dict):
        raise XcompatError(f"{path} must hold keys and values, such as 'method: xbt'")
    for override in overrides:
        apply_override(raw, override)
        refuse_shadowed(raw, override.partition("=")[0])
    return parse_recipe(raw, path.stem, str(path))


def parse_recipe(raw: dict[str, Any], default_name: str, where: str) -> Recipe:
    """Validate a recipe already read.

    Args:
        raw: nested dictionaries as in the YAML.
        default_name: the run's name unless the recipe has one.
        where: what to call the recipe in messages.

    Returns:
        The recipe.
    """
    top: dict[str, Any] = {key: raw[key] for key in ("name", "output_dir", "cache_dir", "seed", "seeds") if key in raw}
    shared = {key: value for key, value in raw.items() if key not in {*top, "stages"}}
    name = str(top.get("name", default_name))
    defaults = {"name": name, "output_dir": f"runs/{name}", "cache_dir": "runs/cache"}
    listed = raw.get("stages", [{}])
    if not isinstance(listed, list) or not listed or not all(isinstance(stage, dict) for stage in listed):
        raise XcompatError(f"{where}: stages must be a list, each with keys and values such as 'method: xbt'")
    stages = [_merge(shared, stage) for stage in listed]
    given: dict[str, Any] = {**defaults, **top, "stages": stages}
    try:
        return Recipe(**given)
    except ValidationError as error:
        raise XcompatError(f"{where}: {explain(error, Recipe)}") from None


def explain(error: ValidationError, model: type[BaseModel]) -> str:
    """Say the first thing that is wrong with a recipe in one line, naming the nearest key for an unknown one.

    Args:
        error: pydantic's error.
        model: the outermost model.

    Returns:
        One line.
    """
    # An unknown key in a union (a source or an architecture) is reported once per member: take the most telling one.
    first = next((e for e in error.errors() if e["type"] == "extra_forbidden"), error.errors()[0])
    place = ".".join(str(part) for part in first["loc"] if not re.fullmatch(r"[A-Z]\w+|function-.*", str(part)))
    if first["type"] == "extra_forbidden":
        return f"unknown key {place!r}; {nearest(str(first['loc'][-1]), _keys_at(model, first['loc'][:-1]))}"
    message = first["msg"].removeprefix("Value error, ")
    return f"{place}: {message}" if place else message


def _keys_at(model: Any, location: tuple[int | str, ...]) -> list[str]:  # noqa: ANN401 - a type annotation
    """Return the keys known at a place in nested models."""
    from typing import get_args

    def models_in(annotation: Any) -> list[type[BaseModel]]:  # noqa: ANN401
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            return [annotation]
        return [found for argument in get_args(annotation) for found in models_in(argument)]

    candidates: list[type[BaseModel]] = [model]
    for part in location:
        named = [candidate for candidate in candidates if candidate.__name__ == part]
        inner = [
            found
            for candidate in candidates
            if part in candidate.model_fields
            for found in models_in(candidate.model_fields[part].annotation)
        ]
        candidates = named or inner or candidates
    return [key for candidate in candidates for key in candidate.model_fields]


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Override nested dictionaries key by key; null removes."""
    merged = copy.deepcopy(base)
    for key, value in over.items():
        merged[key] = _merge(merged[key], value) if isinstance(value, dict) and isinstance(merged.get(key), dict) else value
    return merged
