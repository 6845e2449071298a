"""Checks of training settings and method options."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import fields
from functools import cache
from typing import Annotated, Any, Literal, get_args, get_type_hints

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from xcompat.core.errors import XcompatError, collect_problems, nearest, require_no_problems
from xcompat.encoders.adapter_settings import AdapterConfig
from xcompat.training.optimiser import check_optimiser
from xcompat.training.static_options import method_options, trainer_fields

BOUNDS: dict[str, object] = {
    **dict.fromkeys(("per_device_train_batch_size", "gradient_accumulation_steps"), Field(ge=1)),
    **dict.fromkeys(("save_total_limit", "torch_empty_cache_steps", "dataloader_prefetch_factor"), Field(ge=1)),
    **dict.fromkeys(("learning_rate", "adam_epsilon", "logging_steps", "save_steps"), Field(gt=0)),
    **dict.fromkeys(("warmup_steps", "weight_decay", "max_grad_norm", "dataloader_num_workers"), Field(ge=0)),
    **dict.fromkeys(("adam_beta1", "adam_beta2"), Field(ge=0, lt=1)),
}
"""Bounds of ``TrainingArguments`` that transformers does not check, but training needs."""
_LEVELS = Literal["detail", "debug", "info", "warning", "error", "critical", "passive"]
CHOICES: dict[str, object] = {
    "log_level": _LEVELS,
    "log_level_replica": _LEVELS,
    "dataloader_multiprocessing_context": Literal["fork", "spawn", "forkserver"] | None,
}
"""The same for fields with a few valid words."""

_JUDGED = "the evaluation section, not the Trainer, evaluates a stage; remove it"
_OURS = "every stage sets it itself; remove it"
REFUSED: dict[str, str] = {
    **dict.fromkeys(
        (
            *("eval_strategy", "eval_steps", "eval_delay", "eval_on_start", "eval_do_concat_batches", "eval_use_gather_object"),
            *("eval_accumulation_steps", "per_device_eval_batch_size", "prediction_loss_only", "include_for_metrics"),
            *("batch_eval_metrics", "load_best_model_at_end", "metric_for_best_model", "greater_is_better"),
            *("do_train", "do_eval", "do_predict"),
        ),
        _JUDGED,
    ),
    **dict.fromkeys(
        (
            *("remove_unused_columns", "logging_nan_inf_filter", "disable_tqdm", "accelerator_config", "local_rank"),
            *("train_sampling_strategy", "length_column_name", "label_names", "average_tokens_across_devices"),
        ),
        _OURS,
    ),
    "resume_from_checkpoint": "a stage resumes from its last checkpoint by itself; remove it",
    "label_smoothing_factor": "the method has its own loss; remove it",
    "neftune_noise_alpha": "noise is a method's option (options.noise_std); remove it",
    "auto_find_batch_size": "the loss depends on the batch size; set mini_batch_size, which does not change the loss",
    "optim_target_modules": "no supported optimiser reads it; remove it",
    "save_only_model": "a resume needs complete checkpoints; remove it",
    **dict.fromkeys(("use_liger_kernel", "liger_kernel_config", "use_cache"), "it is for models that generate text; remove it"),
    "include_num_input_tokens_seen": "images have no tokens; remove it",
    "deepspeed": "the launcher sets it up; start with accelerate_configs/deepspeed_zero2.yaml",
    "ddp_backend": "the launcher chooses it; remove it",
    "ddp_timeout": "processes wait six hours for each other, as one may be evaluating; remove it",
    "parallelism_config": "every process needs whole embeddings; remove it",
}
"""Fields of ``TrainingArguments`` that have no effect or must not change, and why."""
_NEED_A_TEST_SET = {"lr_scheduler_type": ("reduce_lr_on_plateau", "greedy"), "save_strategy": ("best",)}


def check_training(given: Mapping[str, object], is_quick: bool = False) -> dict[str, object]:
    """Refuse unknown or invalid fields of ``TrainingArguments``.

    Args:
        given: a stage's training section.
        is_quick: whether to parse transformers' source, without all types.

    Returns:
        The section, with whole numbers (``1e3``) as integers if needed.

    Raises:
        XcompatError: a line for each mistake, with key and cause.
    """
    hints = trainer_fields() if is_quick else _imported_hints()
    known = hints.keys() - {"output_dir", "seed", "data_seed"}

    def check(key: str, value: object) -> Any:  # noqa: ANN401 - what the YAML holds
        if key not in known and hints:
            raise ValueError(f"unknown key 'training.{key}'; {nearest(key, known)}")
        read = _check(f"training.{key}", CHOICES.get(key, hints.get(key, Any)), value, BOUNDS.get(key))
        if key in REFUSED and not is_quick and not is_default(key, value):
            raise ValueError(f"training.{key}: {REFUSED[key]}")
        if value in _NEED_A_TEST_SET.get(key, ()):
            raise ValueError(f"training.{key}: {value} needs a metric of the Trainer, but {_JUDGED}")
        return read

    checked, problems = _check_each(given, check)
    with collect_problems(problems):
        check_optimiser(checked)
    require_no_problems([*problems, *_duration_problems(checked)])
    return checked


def _duration_problems(given: Mapping[str, Any]) -> Iterator[str]:
    epochs = given.get("num_train_epochs", 1)
    if not epochs > 0 and not given.get("max_steps", -1) > 0:
        yield f"training.num_train_epochs: {epochs} trains nothing; set more than 0, or training.max_steps"
    if given.get("max_steps", -1) != -1 and given["max_steps"] < 1:
        yield f"training.max_steps: {given['max_steps']} trains nothing; set 1 or more, or remove it for num_train_epochs"


def _check_each(given: Mapping[str, Any], check: Callable[[str, object], object]) -> tuple[dict[str, object], list[str]]:
    """Return the checked values, and the problems of the others."""
    checked: dict[str, Any] = {}
    problems: list[str] = []
    for key, value in given.items():
        with collect_problems(problems):
            checked[key] = check(key, value)
    return checked, problems


def dependent_fields(given: Mapping[str, object]) -> Iterator[tuple[str, bool, str]]:
    """Yield fields that depend on others: name, whether they are read, and why not.

    Args:
        given: a stage's training section.
    """
    usual = {"save_strategy": "steps", "logging_strategy": "steps", "lr_scheduler_type": "linear"}
    saved, logged, schedule = (_plain_value(given.get(name, value)) for name, value in usual.items())
    hub = ("model_id", "strategy", "token", "private_repo", "always_push", "revision")
    workers = ("persistent_workers", "multiprocessing_context", "in_order")
    tracked = given.get("report_to") not in (None, "none", [], ["none"])
    shown = ("run_name", "project", *(f"trackio_{name}_id" for name in ("space", "bucket", "static_space")))
    recomputed = bool(given.get("activation_checkpointing") or given.get("gradient_checkpointing"))
    decided: list[tuple[tuple[str, ...], bool, str]] = [
        (("save_steps",), saved == "steps", f"training.save_strategy is {saved}, not steps"),
        (("logging_steps",), logged == "steps", f"training.logging_strategy is {logged}, not steps"),
        (tuple(f"hub_{name}" for name in hub), bool(given.get("push_to_hub")), "nothing is pushed without training.push_to_hub"),
        (shown, tracked, "training.report_to has no tracker"),
        (("fsdp_config",), bool(given.get("fsdp")), "nothing is sharded without training.fsdp"),
        (("warmup_steps",), schedule != "constant", "lr_scheduler_type constant has no warm-up; constant_with_warmup has one"),
        (("lr_scheduler_kwargs",), not schedule.startswith("constant"), f"training.lr_scheduler_type {schedule} takes none"),
        (
            tuple(f"dataloader_{name}" for name in workers),
            bool(given.get("dataloader_num_workers")),
            "there are no workers without training.dataloader_num_workers",
        ),
        (
            ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"),
            recomputed,
            "nothing is recomputed without training.activation_checkpointing",
        ),
    ]
    for names, is_read, why in decided:
        yield from ((name, is_read, why) for name in names)


def _plain_value(value: object) -> str:
    return str(getattr(value, "value", value))


@cache
def _imported_hints() -> dict[str, object]:
    from transformers import TrainingArguments

    hints = get_type_hints(TrainingArguments)
    return {field.name: hints[field.name] for field in fields(TrainingArguments)}


def is_default(key: str, value: object) -> bool:
    """Return whether a field of ``TrainingArguments`` has its default."""
    from transformers import TrainingArguments

    return bool(value == getattr(TrainingArguments, key, []))  # default lists are no class attributes


def check_options(method: str, given: Mapping[str, object], known: Collection[str], is_quick: bool = False) -> dict[str, object]:
    """Refuse unknown or invalid options of a method.

    Args:
        method: name in `xcompat.methods`.
        given: a stage's options section.
        known: the method's options.
        is_quick: whether to parse the method's source, without all types.

    Returns:
        The section, with whole numbers (``1e3``) as integers if needed.

    Raises:
        XcompatError: a line for each mistake, with option and cause.
    """
    hints = {"logit_scale": float} | method_options(method) if is_quick else _option_hints(method)

    def check(key: str, value: object) -> Any:  # noqa: ANN401 - what the YAML holds
        if key not in known:
            raise ValueError(f"unknown key 'options.{key}' for method {method}; {nearest(key, known)}")
        return _check(f"options.{key}", AdapterConfig if key == "adapters" and value is not None else hints[key], value)

    checked, problems = _check_each(given, check)
    require_no_problems(problems)
    return checked


def _option_hints(method: str) -> dict[str, object]:
    from xcompat.models.registry import load_method

    return _hints_of(load_method(method).config_class)


@cache
def _hints_of(config: type) -> dict[str, object]:
    import torch

    return get_type_hints(config, localns={"torch": torch}, include_extras=True)


def _check(key: str, hint: Any, value: Any, bound: Any = None) -> object:  # noqa: ANN401 - a type annotation, a Field
    """Return the value, as an integer if needed."""
    try:
        read = TypeAdapter(hint if bound is None else Annotated[hint, bound]).validate_python(value)
    except ValidationError as error:
        inside = isinstance(value, dict)
        raise XcompatError(
            *(
                _explain(".".join(map(str, (key, *each["loc"] * inside))), hint, each)
                for each in (error.errors() if inside else error.errors()[:1])
            )
        ) from None
    if isinstance(read, int | float) and (isinstance(value, str) or not math.isfinite(read)):
        raise ValueError(f"{key}: Input should be a finite number, without quotes (found {value!r})")
    return read if isinstance(value, float) and type(read) is int else value


def _explain(place: str, hint: object, error: Any) -> str:  # noqa: ANN401 - a type annotation, pydantic's error
    if error["type"] == "extra_forbidden":
        return f"unknown key {place!r}; {nearest(str(error['loc'][-1]), keys_at(hint, error['loc'][:-1]))}"
    return f"{place}: {error['msg'].removeprefix('Value error, ')} (found {error['input']!r})"


def keys_at(model: object, location: tuple[int | str, ...]) -> list[str]:
    """Return the keys that a place in nested models can have."""

    def models_in(annotation: object) -> list[type[BaseModel]]:
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            return [annotation]
        return [found for argument in get_args(annotation) for found in models_in(argument)]

    candidates = models_in(model)
    for part in location:
        named = [candidate for candidate in candidates if candidate.__name__ == part]
        inner = [
            found
            for candidate in candidates
            if part in candidate.model_fields
            for found in models_in(candidate.model_fields[part].annotation)
        ]
        candidates = named or inner or candidates
    return list(dict.fromkeys(key for candidate in candidates for key in candidate.model_fields))
