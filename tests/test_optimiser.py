"""Which parameters learn at which rate: prompts, the encoder's own weights, and what is new."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from xcompat.training.optimiser import AdamWFactory


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


@pytest.mark.parametrize("wrappers", [[], ["module"], ["_orig_mod"], ["module", "_orig_mod"]])
def test_every_kind_of_parameter_has_its_rate_and_decay_in_any_wrapper(wrappers: list[str]) -> None:
    trained = model()
    names = {id(parameter): name for name, parameter in trained.named_parameters()}
    for wrapper in reversed(wrappers):
        trained = Wrapped(**{wrapper: trained})
    optimiser = AdamWFactory()(trained, lr=1.0, prompt_lr_factor=100, encoder_lr_factor=0.01, weight_decay=0.1, eps=1e-7)
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
    assert all(group["eps"] == 1e-7 for group in optimiser.param_groups)
