"""Check the values that a recipe gives to the Trainer and to a method, before anything is loaded."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields
from functools import cache
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import Field, TypeAdapter, ValidationError

from xcompat.core.errors import nearest
from xcompat.encoders.adapter_settings import AdapterConfig
from xcompat.training.declared import method_options, trainer_fields
from xcompat.training.optimiser import check_optimiser

BOUNDS: dict[str, Any] = {
    **dict.fromkeys(("per_device_train_batch_size", "gradient_accumulation_steps"), Field(ge=1)),
    **dict.fromkeys(("save_total_limit", "torch_empty_cache_steps", "dataloader_prefetch_factor"), Field(ge=1)),
    **dict.fromkeys(("learning_rate", "adam_epsilon", "logging_steps", "save_steps"), Field(gt=0)),
    **dict.fromkeys(("warmup_steps", "weight_decay", "max_grad_norm", "dataloader_num_workers"), Field(ge=0)),
    **dict.fromkeys(("adam_beta1", "adam_beta2"), Field(ge=0, lt=1)),
}
"""Bounds of ``TrainingArguments`` that transformers does not check, and outside of which training fails or does nothing."""
_LEVELS = Literal["detail", "debug", "info", "warning", "error", "critical", "passive"]
CHOICES: dict[str, Any] = {
    "log_level": _LEVELS,
    "log_level_replica": _LEVELS,
    "dataloader_multiprocessing_context": Literal["fork", "spawn", "forkserver"] | None,
}
"""The same for fields that take one of a few words."""

_JUDGED = "a stage is judged by its evaluation section, not by the Trainer; leave it out"
_OURS = "every stage sets it itself; leave it out"
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
    "resume_from_checkpoint": "a stage continues from its own last checkpoint by itself; leave it out",
    "label_smoothing_factor": "the loss is the method's own; leave it out",
    "neftune_noise_alpha": "noise is an option of methods that have it (options.noise_std); leave it out",
    "auto_find_batch_size": "the loss depends on the size of the batch; set mini_batch_size, which does not change it",
    "optim_target_modules": "no optimiser that can be used here reads it; leave it out",
    "save_only_model": "a checkpoint must hold all that a stage continues from; leave it out",
    **dict.fromkeys(("use_liger_kernel", "liger_kernel_config", "use_cache"), "it is for models that write texts; leave it out"),
    "include_num_input_tokens_seen": "images have no tokens; leave it out",
    "deepspeed": "the launcher sets it up; start with accelerate_configs/deepspeed_zero2.yaml",
    "ddp_backend": "the launcher chooses it; leave it out",
    "ddp_timeout": "processes wait six hours for each other, as one of them may be evaluating; leave it out",
    "parallelism_config": "every process must hold whole embeddings; leave it out",
}
"""Fields of ``TrainingArguments`` that would change nothing, or what must not change, and why."""
_NEED_A_TEST_SET = {"lr_scheduler_type": ("reduce_lr_on_plateau", "greedy"), "save_strategy": ("best",)}


def check_training(given: Mapping[str, Any], is_quick: bool = False) -> dict[str, Any]:
    """Refuse keys that ``TrainingArguments`` does not have, and values that cannot be trained with.

    Args:
        given: the training section of a stage.
        is_quick: whether to look at transformers' source alone, without importing it; some types then pass unchecked.

    Returns:
        The section, with integers for whole numbers such as ``1e3`` where integers are asked for.

    Raises:
        ValueError: naming the key and what is wrong, in one line.
    """
    checked: dict[str, Any] = {}
    hints = trainer_fields() if is_quick else _imported_hints()
    known = hints.keys() - {"output_dir", "seed", "data_seed"}
    for key, value in given.items():
        if key not in known and hints:
            raise ValueError(f"unknown key 'training.{key}'; {nearest(key, known)}")
        checked[key] = _check(f"training.{key}", CHOICES.get(key, hints.get(key, Any)), value, BOUNDS.get(key))
        if key in REFUSED and not is_quick and not is_usual(key, value):
            raise ValueError(f"training.{key}: {REFUSED[key]}")
        if value in _NEED_A_TEST_SET.get(key, ()):
            raise ValueError(f"training.{key}: {value} follows a metric of the Trainer's, and {_JUDGED}")
    check_optimiser(given)
    epochs = given.get("num_train_epochs", 1)
    if not epochs > 0 and not given.get("max_steps", -1) > 0:
        raise ValueError(f"training.num_train_epochs: {epochs} trains nothing; give more than 0, or training.max_steps")
    if "max_steps" in given and given["max_steps"] != -1 and given["max_steps"] < 1:
        raise ValueError(
            f"training.max_steps: {given['max_steps']} trains nothing; give 1 or more, or leave it out for num_train_epochs"
        )
    return checked


def dependent_fields(given: Mapping[str, Any]) -> Iterator[tuple[str, bool, str]]:
    """Yield fields of ``TrainingArguments`` that others decide about: whether something reads them, and if not, why.

    Args:
        given: the training section of a stage.
    """
    usual = {"save_strategy": "steps", "logging_strategy": "steps", "lr_scheduler_type": "linear"}
    saved, logged, schedule = (_named(given.get(name, value)) for name, value in usual.items())
    hub = ("model_id", "strategy", "token", "private_repo", "always_push", "revision")
    workers = ("persistent_workers", "multiprocessing_context", "in_order")
    tracked = given.get("report_to") not in (None, "none", [], ["none"])
    shown = ("run_name", "project", *(f"trackio_{name}_id" for name in ("space", "bucket", "static_space")))
    recomputed = bool(given.get("activation_checkpointing") or given.get("gradient_checkpointing"))
    decided: list[tuple[tuple[str, ...], bool, str]] = [
        (("save_steps",), saved == "steps", f"training.save_strategy is {saved}, which counts no steps"),
        (("logging_steps",), logged == "steps", f"training.logging_strategy is {logged}, which counts no steps"),
        (tuple(f"hub_{name}" for name in hub), bool(given.get("push_to_hub")), "nothing is pushed without training.push_to_hub"),
        (shown, tracked, "training.report_to names no tracker"),
        (("fsdp_config",), bool(given.get("fsdp")), "nothing is sharded without training.fsdp"),
        (("warmup_steps",), schedule != "constant", "lr_scheduler_type constant has no warm-up; constant_with_warmup has one"),
        (("lr_scheduler_kwargs",), not schedule.startswith("constant"), f"training.lr_scheduler_type {schedule} reads none"),
        (
            tuple(f"dataloader_{name}" for name in workers),
            bool(given.get("dataloader_num_workers")),
            "there are no workers without training.dataloader_num_workers",
        ),
        (
            ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"),
            recomputed,
            "nothing is computed again without training.activation_checkpointing",
        ),
    ]
    for names, is_read, why in decided:
        yield from ((name, is_read, why) for name in names)


def _named(value: Any) -> str:  # noqa: ANN401 - a text, or one of transformers' enumerations
    return str(getattr(value, "value", value))


@cache
def _imported_hints() -> dict[str, Any]:
    from transformers import TrainingArguments

    hints = get_type_hints(TrainingArguments)
    return {field.name: hints[field.name] for field in fields(TrainingArguments)}


def is_usual(key: str, value: Any) -> bool:  # noqa: ANN401 - whatever the YAML holds
    """Return whether a field of ``TrainingArguments`` has the value that it has unless given."""
    from transformers import TrainingArguments

    return bool(value == getattr(TrainingArguments, key, []))  # lists alone are no attributes of the class


def check_options(method: str, given: Mapping[str, Any], known: Collection[str], is_quick: bool = False) -> dict[str, Any]:
    """Refuse options that a method does not have, and values of the wrong type or out of the range that it declares.

    Args:
        method: its name in `xcompat.methods`.
        given: the options section of a stage.
        known: the method's options.
        is_quick: whether to look at the method's source alone, without importing it; some types then pass unchecked.

    Returns:
        The section, with integers for whole numbers such as ``1e3`` where integers are asked for.

    Raises:
        ValueError: naming the option and what is wrong, in one line.
    """
    checked: dict[str, Any] = {}
    hints = {"logit_scale": float} | method_options(method) if is_quick else _option_hints(method)
    for key, value in given.items():
        if key not in known:
            raise ValueError(f"unknown key 'options.{key}' for method {method}; {nearest(key, known)}")
        is_adapters = key == "adapters" and value is not None
        checked[key] = _check(f"options.{key}", AdapterConfig if is_adapters else hints[key], value)
    return checked


def _option_hints(method: str) -> dict[str, Any]:
    from xcompat.methods import METHODS

    return _hints_of(METHODS[method].config_class)


@cache
def _hints_of(config: type) -> dict[str, Any]:
    import torch

    return get_type_hints(config, localns={"torch": torch}, include_extras=True)


def _check(key: str, hint: Any, value: Any, bound: Any = None) -> Any:  # noqa: ANN401 - a type annotation, a Field
    """Return the value, as an integer if it is a whole number where an integer is asked for."""
    try:
        read = TypeAdapter(hint if bound is None else Annotated[hint, bound]).validate_python(value)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, (key, *(first["loc"] if isinstance(value, dict) else ()))))
        raise ValueError(f"{place}: {first['msg'].removeprefix('Value error, ')} (found {first['input']!r})") from None
    if isinstance(read, int | float) and (isinstance(value, str) or not math.isfinite(read)):
        raise ValueError(f"{key}: Input should be a finite number, without quotes (found {value!r})")
    return read if isinstance(value, float) and type(read) is int else value
