"""Optimisers of transformers, and LARS, with separate learning rates for prompts and pretrained weights."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from xcompat.core.errors import nearest

if TYPE_CHECKING:
    import torch
    from torch import nn

_OF_ENCODER = re.compile(r"(module\.|_orig_mod\.)*encoder\.(?!.*(lora_|prompts\.))")
"""Matches names of the encoder's own weights, in a model that may be compiled or wrapped for several processes."""

Decayed = Literal["matrices", "all"]
"""Which weights are decayed: those of layers, without biases, norms and prompts; or all."""


class Reads(NamedTuple):
    """What an optimiser takes.

    Args:
        fields: those of ``TrainingArguments`` for Adam that it reads too.
        options: the keys that it knows in ``optim_args``.
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
"""Optimisers that take parameter groups with rates and decays of their own, by transformers' names, and what each reads."""
LARS = "lars"
"""SGD whose rate follows the norms of each layer's weights and gradient (You et al. 2017), which transformers does not have."""
USUAL = "adamw_torch"
"""The optimiser of a recipe that names none."""
MOMENTUM = "momentum=0.9"
"""Of ``sgd`` and ``lars`` in a recipe that names no momentum: that of the field's papers, where transformers has 0."""
_BY_LAYER = "lars needs the norm of each layer's weights, and {} splits them; start several processes without it, or take sgd"


def check_optimiser(given: Mapping[str, Any]) -> None:
    """Refuse an optimiser that would be replaced by another, and settings that the optimiser does not read.

    Args:
        given: fields of ``TrainingArguments`` that somebody has set.

    Raises:
        ValueError: naming the field and what is wrong, in one line.
    """
    name = given.get("optim", USUAL)
    if name not in OPTIMISERS:
        raise ValueError(f"training.optim: {name!r} is no optimiser that can be used here; {nearest(str(name), OPTIMISERS)}")
    reads = OPTIMISERS[name]
    for field in ADAM:
        if field in given and field not in reads.fields:
            raise ValueError(f"training.{field}: {name} does not read it; leave it out")
    for key, value in _options(given.get("optim_args")).items():
        if key == "weight_decay":
            raise ValueError("training.optim_args: weight_decay has a field of its own; set training.weight_decay")
        if key not in reads.options:
            known = f"it knows {', '.join(reads.options)}" if reads.options else "it knows none"
            raise ValueError(f"training.optim_args: {name} has no option {key!r}; {known}")
        if not _is_value(value):
            raise ValueError(f"training.optim_args: {key} must be a number, true or false (found {value!r})")
    if name == LARS and not given.get("weight_decay"):
        raise ValueError("training.optim: lars adapts the rates of weights that are decayed; set training.weight_decay, or sgd")


def with_momentum(optim: str, optim_args: str | None) -> str | None:
    """Return ``optim_args`` with the momentum that ``sgd`` and ``lars`` usually have."""
    if optim not in ("sgd", LARS) or "momentum" in _options(optim_args):
        return optim_args
    return MOMENTUM if optim_args is None else f"{MOMENTUM},{optim_args}"


def in_transformers(optim: str) -> str:
    """Return the optimiser whose options transformers reads for this one: that of SGD for LARS, else its own name."""
    return "sgd" if optim == LARS else optim


def class_of(optim: str | None, read: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """Return the optimiser's class: timm's LARS as SimCLR has it, where norms and biases learn as by SGD, or transformers' own.

    Args:
        optim: the name in a recipe, None for none.
        read: what transformers takes :func:`in_transformers` for.

    Raises:
        ValueError: parameters will be split over processes, so that none knows a layer's norm.
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
    """Read ``optim_args`` as transformers does."""
    pieces = [piece.partition("=") for piece in (optim_args or "").replace(" ", "").split(",") if piece]
    for key, equals, _ in pieces:
        if not equals:
            raise ValueError(f"training.optim_args: {key!r} has no value; write such as '{MOMENTUM},nesterov=true'")
    return {key: value for key, _, value in pieces}


def _is_value(value: str) -> bool:
    try:
        return value.lower() in ("true", "false") or float(value) >= 0
    except ValueError:
        return False


class OptimiserFactory:
    """Build an optimiser over the trainable parameters, with own rates for prompts and encoder.

    The parameter groups are made here, as the Trainer builds the optimiser only after it has wrapped the model.
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
        """Make the optimiser.

        Args:
            model: the possibly wrapped model.
            optimiser: its class.
            lr: learning rate.
            prompt_lr_factor: learning rate of visual prompts over ``lr`` (100 in XBT §4.1).
            encoder_lr_factor: learning rate of the encoder's own weights over ``lr``.
            weight_decay: of the decayed weights.
            decayed: which they are.
            options: more of the optimiser's own.

        Returns:
            The optimiser.
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
