"""Which parameters learn at which rate, and by which optimiser: prompts, the encoder's own weights, and what is new."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import Adafactor
from transformers.training_args import OptimizerNames

from xcompat import XcompatError
from xcompat.training.optimiser import OPTIMISERS, OptimiserFactory, check_optimiser, class_of, in_transformers, with_momentum
from xcompat.training.stage_recipe import StageRecipe
from xcompat.training.trainer import _optimiser, training_arguments


class Wrapped(nn.Module):
    """A model inside a wrapper's attribute, as DDP and torch.compile put it there."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


def model() -> nn.Module:
    """Return a model with one parameter of every kind, frozen ones too."""
    layer = Wrapped(base_layer=nn.Linear(2, 2, bias=False), lora_A=nn.Linear(2, 1, bias=False))
    encoder = Wrapped(model=Wrapped(layer=layer, norm=nn.LayerNorm(2)))
    encoder.prompts = Wrapped()
    encoder.prompts.tokens = nn.Parameter(torch.zeros(3, 2))
    frozen = nn.Linear(2, 2).requires_grad_(False)
    return Wrapped(encoder=encoder, neck=nn.Linear(2, 2), autoencoder=Wrapped(encoder=nn.Linear(2, 2, bias=False)), old=frozen)


RATES = {"lr": 1.0, "prompt_lr_factor": 100, "encoder_lr_factor": 0.01, "weight_decay": 0.1}


@pytest.mark.parametrize("wrappers", [[], ["module"], ["_orig_mod"], ["module", "_orig_mod"]])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, Adafactor])
def test_every_kind_of_parameter_has_its_rate_and_decay(wrappers: list[str], kind: type[torch.optim.Optimizer]) -> None:
    trained = model()
    names = {id(parameter): name for name, parameter in trained.named_parameters()}
    for wrapper in reversed(wrappers):
        trained = Wrapped(**{wrapper: trained})
    options = {"relative_step": False} if kind is Adafactor else {}
    optimiser = OptimiserFactory()(trained, optimiser=kind, decayed="matrices", **RATES, **options)
    assert type(optimiser) is kind
    found = {
        names[id(parameter)]: (group["lr"], group["weight_decay"])
        for group in optimiser.param_groups
        for parameter in group["params"]
    }
    assert found == {
        "encoder.model.layer.base_layer.weight": (0.01, 0.1),
        "encoder.model.layer.lora_A.weight": (1.0, 0.1),
        "encoder.model.norm.weight": (0.01, 0.0),
        "encoder.model.norm.bias": (0.01, 0.0),
        "encoder.prompts.tokens": (100.0, 0.0),
        "neck.weight": (1.0, 0.1),
        "neck.bias": (1.0, 0.0),
        "autoencoder.encoder.weight": (1.0, 0.1),
    }
    optimiser = OptimiserFactory()(trained, optimiser=kind, decayed="all", **RATES, **options)
    assert {(group["lr"], group["weight_decay"]) for group in optimiser.param_groups} == {(0.01, 0.1), (1.0, 0.1), (100.0, 0.1)}


def test_momentum_is_that_of_the_papers_unless_it_is_given() -> None:
    assert {in_transformers(name) for name in OPTIMISERS} <= {name.value for name in OptimizerNames}
    assert with_momentum("sgd", None) == with_momentum("lars", None) == "momentum=0.9"
    assert with_momentum("sgd", "nesterov=true") == "momentum=0.9,nesterov=true"
    assert with_momentum("sgd", "momentum=0") == "momentum=0"
    assert with_momentum("rmsprop", "alpha=0.5") == "alpha=0.5" and with_momentum("adamw_torch", None) is None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"optim": "galore_adamw"}, "training.optim: unsupported optimiser 'galore_adamw'"),
        ({"optim": "sdg"}, "did you mean 'sgd'"),
        ({"optim": "lamb"}, "unsupported optimiser 'lamb'"),
        ({"optim": "lars"}, "lars only adapts the rates of decayed weights; set training.weight_decay"),
        ({"optim": "lars", "weight_decay": 1e-6, "optim_args": "trust_coeff=1"}, "lars has no option 'trust_coeff'"),
        ({"optim": "sgd", "adam_beta1": 0.8}, "training.adam_beta1: sgd ignores it"),
        ({"optim": "lion_8bit", "adam_epsilon": 0.1}, "training.adam_epsilon: lion_8bit ignores it"),
        ({"optim_args": "momentum=0.9"}, "adamw_torch has no option 'momentum'; it has none"),
        ({"optim": "sgd", "optim_args": "momemtum=0.9"}, "sgd has no option 'momemtum'; known: momentum, dampening, nesterov"),
        ({"optim": "sgd", "optim_args": "weight_decay=0.1"}, "set training.weight_decay"),
        ({"optim": "sgd", "optim_args": "momentum"}, "'momentum' has no value"),
        ({"optim": "sgd", "optim_args": "momentum=much"}, "momentum must be a number, true or false (found 'much')"),
    ],
)
def test_what_an_optimiser_would_not_read_is_refused(given: dict[str, str | float], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        check_optimiser(given)


def test_lars_is_that_of_simclr(tmp_path: Path) -> None:
    trained, stage = (
        model(),
        StageRecipe(
            method="simclr",
            training={"optim": "lars", "learning_rate": 0.3, "weight_decay": 0.1, "optim_args": "momentum=0.5", "use_cpu": True},
            encoder_lr_factor=0.01,
        ),
    )
    kept = {name: parameter for name, parameter in trained.named_parameters() if parameter.requires_grad}
    weights = {name: parameter.detach().clone() for name, parameter in kept.items()}
    momenta = {name: torch.zeros_like(parameter) for name, parameter in weights.items()}
    arguments = training_arguments(stage, 0, tmp_path)
    built = _optimiser(arguments, stage)
    with pytest.raises(XcompatError, match="simclr: training.adam_beta1: .* ignores it"):
        _optimiser(replace(arguments, adam_beta1=0.5), stage)
    optimiser = built.pop("optimiser")
    step = OptimiserFactory()(trained, optimiser=optimiser, **built)
    for number in range(2):
        for place, (name, parameter) in enumerate(kept.items()):
            parameter.grad = torch.sin(torch.arange(parameter.numel()) + place + number).view_as(parameter)
            gradient, rate = parameter.grad.clone(), 0.3
            if name.startswith("encoder.") and "lora_" not in name:
                rate *= 100 if "prompts" in name else 0.01
            if parameter.ndim > 1 and "prompts" not in name:
                whole = gradient.norm() + 0.1 * weights[name].norm()
                gradient = 0.001 * weights[name].norm() / whole * (gradient + 0.1 * weights[name])
            momenta[name] = 0.5 * momenta[name] + gradient
            weights[name] -= rate * momenta[name]
        step.step()
    for name, parameter in kept.items():
        assert torch.allclose(parameter, weights[name], atol=1e-6), name


@pytest.mark.parametrize("variable", ["ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"])
def test_lars_needs_whole_layers(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "true")
    with pytest.raises(ValueError, match="lars needs the norm of each layer's weights"):
        class_of("lars", torch.optim.SGD)
