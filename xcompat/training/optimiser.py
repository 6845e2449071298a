"""AdamW with the learning rate of visual prompts set apart, as a factory that the stock Trainer calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class AdamWFactory:
    """Build AdamW over the trainable parameters: no weight decay on biases and norms, prompts with their own rate.

    The Trainer builds the optimiser after it has wrapped the model, so groups of parameters are made here and not before.
    """

    def __call__(
        self,
        model: nn.Module,
        *,
        lr: float,
        prompt_lr_factor: float,
        weight_decay: float,
        **options: Any,  # noqa: ANN401
    ) -> torch.optim.AdamW:
        """Make the optimiser.

        Args:
            model: the possibly wrapped model.
            lr: learning rate.
            prompt_lr_factor: learning rate of visual prompts over ``lr`` (100 in xbt.txt §4.1).
            weight_decay: on matrices, prompts left out.
            options: betas and eps of AdamW.

        Returns:
            The optimiser.
        """
        groups: dict[tuple[float, float], list[nn.Parameter]] = {}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                prompt = "prompts." in name
                decay = weight_decay if parameter.ndim > 1 and not prompt else 0.0
                groups.setdefault((lr * prompt_lr_factor if prompt else lr, decay), []).append(parameter)
        return torch.optim.AdamW(
            [{"params": parameters, "lr": rate, "weight_decay": decay} for (rate, decay), parameters in groups.items()],
            lr=lr,
            **options,
        )
