"""Check the values that a recipe gives to the Trainer and to a method, before anything is loaded."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, get_type_hints

from pydantic import Field, TypeAdapter, ValidationError

from xcompat.encoders import AdapterConfig
from xcompat.errors import nearest

BOUNDS: dict[str, Any] = {
    **dict.fromkeys(("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"), Field(ge=1)),
    **dict.fromkeys(("save_total_limit", "torch_empty_cache_steps", "dataloader_prefetch_factor"), Field(ge=1)),
    **dict.fromkeys(("learning_rate", "adam_epsilon", "logging_steps", "save_steps", "eval_steps"), Field(gt=0)),
    **dict.fromkeys(("warmup_steps", "weight_decay", "max_grad_norm", "dataloader_num_workers"), Field(ge=0)),
    **dict.fromkeys(("adam_beta1", "adam_beta2"), Field(ge=0, lt=1)),
}
"""Bounds of ``TrainingArguments`` that transformers does not check, and outside of which training fails or does nothing."""


def check_training(given: Mapping[str, Any]) -> None:
    """Refuse keys that ``TrainingArguments`` does not have, and values that cannot be trained with.

    Args:
        given: the training section of a stage.

    Raises:
        ValueError: naming the key and what is wrong, in one line.
    """
    from transformers import TrainingArguments

    known = {field.name for field in fields(TrainingArguments)} - {"output_dir", "seed", "data_seed"}
    hints = get_type_hints(TrainingArguments)
    for key, value in given.items():
        if key not in known:
            raise ValueError(f"unknown key 'training.{key}'; {nearest(key, known)}")
        _check(f"training.{key}", hints[key], value, BOUNDS.get(key))
    epochs = given.get("num_train_epochs", 1)
    if not epochs > 0 and not given.get("max_steps", -1) > 0:
        raise ValueError(f"training.num_train_epochs: {epochs} trains nothing; give more than 0, or training.max_steps")
    if "max_steps" in given and given["max_steps"] != -1 and given["max_steps"] < 1:
        raise ValueError(
            f"training.max_steps: {given['max_steps']} trains nothing; give 1 or more, or leave it out for num_train_epochs"
        )


def check_options(method: str, given: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Refuse options that a method does not have, and values of the wrong type.

    Args:
        method: its name in `xcompat.methods`.
        given: the options section of a stage.
        known: the method's options.

    Raises:
        ValueError: naming the option and what is wrong, in one line.
    """
    import torch

    from xcompat.methods import METHODS

    hints = get_type_hints(METHODS[method].config_class, localns={"torch": torch})
    for key, value in given.items():
        if key not in known:
            raise ValueError(f"unknown key 'options.{key}' for method {method}; {nearest(key, known)}")
        is_adapters = key == "adapters" and value is not None
        _check(f"options.{key}", AdapterConfig if is_adapters else hints[key], value)


def _check(key: str, hint: Any, value: Any, bound: Any = None) -> None:  # noqa: ANN401 - a type annotation, a Field
    try:
        read = TypeAdapter(hint if bound is None else Annotated[hint, bound]).validate_python(value)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, (key, *(first["loc"] if isinstance(value, dict) else ()))))
        raise ValueError(f"{place}: {first['msg'].removeprefix('Value error, ')} (found {first['input']!r})") from None
    if isinstance(read, int | float) and (isinstance(value, str) or not math.isfinite(read)):
        raise ValueError(f"{key}: Input should be a finite number, without quotes (found {value!r})")
