"""AdamW with separate learning rates for prompts and pretrained weights, as a factory that the stock Trainer calls."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

_OF_ENCODER = re.compile(r"(module\.|_orig_mod\.)*encoder\.(?!.*(lora_|prompts\.))")
"""Matches names of the encoder's own weights, in a model that may be compiled or wrapped for several processes."""


class AdamWFactory:
    """Build AdamW over the trainable parameters: no weight decay on biases and norms, own rates for prompts and encoder.

    The parameter groups are made here, as the Trainer builds the optimiser only after it has wrapped the model.
    """

    def __call__(
        self,
        model: nn.Module,
        *,
        lr: float,
        prompt_lr_factor: float,
        encoder_lr_factor: float,
        weight_decay: float,
        **options: Any,  # noqa: ANN401
    ) -> torch.optim.AdamW:
        """Make the optimiser.

        Args:
            model: the possibly wrapped model.
            lr: learning rate.
            prompt_lr_factor: learning rate of visual prompts over ``lr`` (100 in xbt.txt §4.1).
            encoder_lr_factor: learning rate of the encoder's own weights over ``lr``.
            weight_decay: of matrices, except prompts.
            options: betas and eps of AdamW.

        Returns:
            The optimiser.
        """
        groups: dict[tuple[float, float], list[nn.Parameter]] = {}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                prompt = "prompts." in name
                factor = prompt_lr_factor if prompt else encoder_lr_factor if _OF_ENCODER.match(name) else 1.0
                decay = weight_decay if parameter.ndim > 1 and not prompt else 0.0
                groups.setdefault((lr * factor, decay), []).append(parameter)
        return torch.optim.AdamW(
            [{"params": parameters, "lr": rate, "weight_decay": decay} for (rate, decay), parameters in groups.items()],
            lr=lr,
            **options,
        )
