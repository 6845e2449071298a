"""LoRA of ``nn.MultiheadAttention``, whose projections are one weight and no layer, without a write into the frozen weights."""

from __future__ import annotations

from typing import Any

from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.func import functional_call

PROJECTION = "in_proj_weight"
"""The weight of queries, keys and values in one."""


class AttentionLora(nn.Module, LoraLayer):
    """Low-rank update of the projection to queries, keys and values, as PEFT's ``MultiheadAttention`` has it.

    PEFT's own adds the update to the weights before each call and subtracts it afterwards: the original weights drift by rounding
    and could not be had back bit for bit. It counts the update of ``out_proj`` twice, which is therefore left out. Neither has
    dropout: the update is of the weight, and the layer sees no input of its own.

    Args:
        base_layer: the attention.
        adapter_name: PEFT's name of the adapter.
        config: rank and the rest, as PEFT passes it on.
        r: rank.
        lora_alpha: the update is scaled by ``lora_alpha / r``.
        kwargs: of PEFT's layers.
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

    def _adapted(self) -> Tensor:
        """Return the weight with its update, (3W, W)."""
        (name,) = self.active_adapters
        weight = self.get_base_layer().get_parameter(PROJECTION)
        up, down = (factors.get_parameter(f"{name}.weight") for factors in (self.lora_B, self.lora_A))
        return weight + (up @ down * self.scaling[name]).to(weight.dtype)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Fold the update into the weight, as PEFT's layers do."""
        self.get_base_layer().get_parameter(PROJECTION).data = self._adapted().detach()

    def forward(self, *inputs: Any, **named: Any) -> Any:  # noqa: ANN401 - as the attention takes and returns them
        """Attend with the updated weight, or with the original one where adapters are off."""
        if self.disable_adapters:
            return self.base_layer(*inputs, **named)
        return functional_call(self.base_layer, {PROJECTION: self._adapted()}, inputs, named)
