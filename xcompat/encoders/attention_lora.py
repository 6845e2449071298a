"""LoRA for ``nn.MultiheadAttention`` without changes to the frozen weights."""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

PROJECTION, SHIFT = "in_proj_weight", "in_proj_bias"
"""Joint weight and bias of queries, keys and values."""


class AttentionLora(nn.Module, LoraLayer):
    """Low-rank update for the projection to queries, keys and values, with dropout on its input.

    Use it instead of PEFT's ``MultiheadAttention``, which changes the frozen weights by rounding, counts the update of
    ``out_proj`` twice and lacks dropout. This class does not adapt ``out_proj``.

    Args:
        base_layer: the attention.
        adapter_name: PEFT's adapter name.
        config: PEFT's configuration.
        r: rank.
        lora_alpha: the update is scaled by ``lora_alpha / r``.
        kwargs: arguments for PEFT's layers.
    """

    def __init__(
        self,
        base_layer: nn.MultiheadAttention,
        adapter_name: str,
        config: LoraConfig,
        r: int = 0,
        lora_alpha: int = 1,
        **kwargs: Any,  # noqa: ANN401 - PEFT's
    ) -> None:
        super().__init__()
        LoraLayer.__init__(self, base_layer, **kwargs)
        self._active_adapter = adapter_name
        self.update_layer(adapter_name, r, lora_alpha=lora_alpha, config=config)

    def _bias(self) -> Tensor | None:
        return dict(self.get_base_layer().named_parameters(recurse=False)).get(SHIFT)

    def _merged_weight(self) -> Tensor:
        up, down, scaling = self._factors()
        weight = self.get_base_layer().get_parameter(PROJECTION)
        return weight + (up @ down * scaling).to(weight.dtype)

    def _factors(self) -> tuple[Tensor, Tensor, float]:
        """Return the update's factors (3W, r) and (r, W), and its scale."""
        (name,) = self.active_adapters
        up, down = (factors.get_parameter(f"{name}.weight") for factors in (self.lora_B, self.lora_A))
        return up, down, self.scaling[name]

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Merge the update into the weight."""
        self.get_base_layer().get_parameter(PROJECTION).data = self._merged_weight().detach()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *inputs: Any, **named: Any) -> Any:  # noqa: ANN401 - the attention's
        """Attend with the updated weight, or with the original weight if adapters are off."""
        if self.disable_adapters:
            return self.base_layer(query, key, value, *inputs, **named)
        (name,) = self.active_adapters
        dropout = self.lora_dropout[name]
        given, weights = (query, key, value), {PROJECTION: self._merged_weight()}
        if self.training and isinstance(dropout, nn.Dropout):
            given = self._project(given, dropout)
            # inputs are already projected, so the attention gets an identity projection without bias
            shift = self._bias()
            weights = {PROJECTION: torch.eye(query.shape[-1], dtype=query.dtype, device=query.device).repeat(3, 1)}
            weights |= {SHIFT: torch.zeros_like(shift)} if shift is not None else {}
        return functional_call(self.base_layer, weights, (*given, *inputs), named)

    def _project(self, given: tuple[Tensor, Tensor, Tensor], dropout: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, with dropout on the update's input."""
        weight, bias, (up, down, scaling) = self.get_base_layer().get_parameter(PROJECTION), self._bias(), self._factors()
        shifts = bias.chunk(3) if bias is not None else (None, None, None)
        distinct = {id(each): each for each in given}  # one dropout mask per tensor
        inside = {name: F.linear(dropout(each), down) for name, each in distinct.items()}
        parts = zip(given, weight.chunk(3), shifts, up.chunk(3), strict=True)
        query, key, value = (
            F.linear(each, rows, shift) + F.linear(inside[id(each)], out) * scaling for each, rows, shift, out in parts
        )
        return query, key, value
