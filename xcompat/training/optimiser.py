"""Optimisers with separate learning rates for prompts and pretrained weights."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from xcompat.core.errors import nearest, require_no_problems

if TYPE_CHECKING:
    import torch
    from torch import nn

_OF_ENCODER = re.compile(r"(module\.|_orig_mod\.)*encoder\.(?!.*(lora_|prompts\.))")
"""Matches the encoder's own weights, also in compiled or wrapped models."""

Decayed = Literal["matrices", "all"]
"""Decayed weights: all, or those of layers without biases, norms and prompts."""


class Reads(NamedTuple):
    """Settings that an optimiser reads.

    Args:
        fields: Adam's fields of ``TrainingArguments``.
        options: keys in ``optim_args``.
    """

    fields: tuple[str, ...] = ()
    options: tuple[str, ...] = ()


_BETAS = ("adam_beta1", "adam_beta2")
ADAM = (*_BETAS, "adam_epsilon")
_OF_SGD = ("momentum", "dampening", "nesterov")
OPTIMISERS = {
    "adamw_torch": Reads(ADAM),
    "adamw_torch_fused": Reads(ADAM),
    "sgd": Reads(options=_OF_SGD),
    "lars": Reads(options=_OF_SGD),  # of timm
    "adafactor": Reads(),
    "adagrad": Reads(options=("lr_decay", "eps")),
    "rmsprop": Reads(options=("momentum", "alpha", "eps", "centered")),
    # of bitsandbytes
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_32bit", "paged_adamw_8bit"), Reads(ADAM)),
    **dict.fromkeys(("lion_32bit", "lion_8bit", "paged_lion_32bit", "paged_lion_8bit"), Reads(_BETAS)),
}
"""Optimisers with parameter groups, by transformers' names, with their settings."""
LARS = "lars"
"""SGD with a rate that follows the norms of each layer's weights and gradient (You et al. 2017); not in transformers."""
USUAL = "adamw_torch"
"""Default optimiser of recipes."""
MOMENTUM = "momentum=0.9"
"""Momentum of ``sgd`` and ``lars`` in recipes, as in papers; transformers' default is 0."""
_BY_LAYER = "lars needs the norm of each layer's weights, but {} splits layers; launch without it, or use sgd"


def check_optimiser(given: Mapping[str, object]) -> None:
    """Raise if an optimiser is unsupported or would ignore a setting.

    Args:
        given: explicitly set fields of ``TrainingArguments``.

    Raises:
        XcompatError: a line for each mistake, with field and cause.
    """
    require_no_problems(_problems(given))


def _problems(given: Mapping[str, Any]) -> Iterator[str]:
    name = given.get("optim", USUAL)
    if name not in OPTIMISERS:
        yield f"training.optim: unsupported optimiser {name!r}; {nearest(str(name), OPTIMISERS)}"
        return
    reads = OPTIMISERS[name]
    for field in ADAM:
        if field in given and field not in reads.fields:
            yield f"training.{field}: {name} ignores it; remove it"
    for key, value in _options(given.get("optim_args")).items():
        if key == "weight_decay":
            yield "training.optim_args: weight_decay has its own field; set training.weight_decay"
        elif key not in reads.options:
            known = f"known: {', '.join(reads.options)}" if reads.options else "it has none"
            yield f"training.optim_args: {name} has no option {key!r}; {known}"
        elif not _is_value(value):
            yield f"training.optim_args: {key} must be a number, true or false (found {value!r})"
    if name == LARS and not given.get("weight_decay"):
        yield "training.optim: lars only adapts the rates of decayed weights; set training.weight_decay, or use sgd"


def with_momentum(optim: str, optim_args: str | None) -> str | None:
    """Add the default momentum of ``sgd`` and ``lars`` to ``optim_args``."""
    if optim not in ("sgd", LARS) or "momentum" in _options(optim_args):
        return optim_args
    return MOMENTUM if optim_args is None else f"{MOMENTUM},{optim_args}"


def in_transformers(optim: str) -> str:
    """Return transformers' name for an optimiser: ``sgd`` for LARS."""
    return "sgd" if optim == LARS else optim


def class_of(optim: str | None, read: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """Return an optimiser's class: timm's LARS (norms and biases as in SGD), or transformers'.

    Args:
        optim: name in the recipe, or None.
        read: transformers' class.

    Raises:
        ValueError: FSDP or DeepSpeed would split layers.
    """
    if optim != LARS:
        return read
    from accelerate.utils import parse_flag_from_env
    from timm.optim.lars import Lars

    for variable, launcher in (("ACCELERATE_USE_FSDP", "FSDP"), ("ACCELERATE_USE_DEEPSPEED", "DeepSpeed")):
        if parse_flag_from_env(variable):
            raise ValueError(_BY_LAYER.format(launcher))
    return Lars


def _options(optim_args: str | None) -> dict[str, str]:
    pieces = [piece.partition("=") for piece in (optim_args or "").replace(" ", "").split(",") if piece]
    for key, equals, _ in pieces:
        if not equals:
            raise ValueError(f"training.optim_args: {key!r} has no value; write e.g. '{MOMENTUM},nesterov=true'")
    return {key: value for key, _, value in pieces}


def _is_value(value: str) -> bool:
    try:
        return value.lower() in ("true", "false") or float(value) >= 0
    except ValueError:
        return False


class OptimiserFactory:
    """Factory of an optimiser with separate learning rates.

    The Trainer builds the optimiser after it has wrapped the model, so the groups are built here.
    """

    def __call__(
        self,
        model: nn.Module,
        *,
        optimiser: type[torch.optim.Optimizer],
        lr: float,
        prompt_lr_factor: float,
        encoder_lr_factor: float,
        weight_decay: float,
        decayed: Decayed,
        **options: Any,  # noqa: ANN401
    ) -> torch.optim.Optimizer:
        """Build the optimiser.

        Args:
            model: possibly wrapped.
            optimiser: its class.
            lr: learning rate.
            prompt_lr_factor: learning rate of visual prompts over ``lr`` (100 in XBT §4.1).
            encoder_lr_factor: learning rate of the encoder's own weights over ``lr``.
            weight_decay: weight decay.
            decayed: which weights decay.
            options: other options of the optimiser.
        """
        groups: dict[tuple[float, float], list[nn.Parameter]] = {}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                prompt = "prompts." in name
                factor = prompt_lr_factor if prompt else encoder_lr_factor if _OF_ENCODER.match(name) else 1.0
                shrinks = decayed == "all" or (parameter.ndim > 1 and not prompt)
                groups.setdefault((lr * factor, weight_decay if shrinks else 0.0), []).append(parameter)
        listed = [{"params": parameters, "lr": rate, "weight_decay": decay} for (rate, decay), parameters in groups.items()]
        built: torch.optim.Optimizer = optimiser(listed, **{"lr": lr, **options})
        return built
