"""LoRA (through PEFT) and visual prompts, which can be switched off bit for bit and merged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from xcompat.core.errors import XcompatError
from xcompat.encoders.adapter_settings import LoraSettings


class VisualPrompts(nn.Module):
    """Learned tokens after the patch tokens, so a class token stays first (XBT §3.3).

    Args:
        count: number of prompts n.
        width: token width W in the image tower.
    """

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Parameter(torch.empty(count, width))
        nn.init.normal_(self.tokens, std=0.02)  # as vision transformers initialise their class token
        self.enabled = True

    def forward(self, tokens_BNW: Tensor) -> Tensor:
        """Append the prompts and return ``(B, N + n, W)``."""
        if tokens_BNW.ndim != 3:
            raise XcompatError("visual prompts need a vision transformer as image tower")
        prompts_BnW = self.tokens.to(tokens_BNW.dtype).expand(tokens_BNW.shape[0], -1, -1)
        return torch.cat([tokens_BNW, prompts_BnW], dim=1)


def _adaptable(tower: nn.Module) -> dict[str, nn.Module]:
    """Return linear layers and attentions in repeated blocks."""
    blocks = [name for name, module in tower.named_modules() if isinstance(module, nn.ModuleList | nn.Sequential)]
    return {
        name: module
        for name, module in tower.named_modules()
        # exact type: nn.MultiheadAttention bypasses the forward of its projection, a NonDynamicallyQuantizableLinear
        if (type(module) is nn.Linear or (type(module) is nn.MultiheadAttention and module.in_proj_weight is not None))
        and any(name.startswith(f"{block}.") for block in blocks)
        and "crossattention" not in name
    }


def inject_lora(towers: Mapping[str, nn.Module], settings: LoraSettings) -> None:
    """Replace the towers' linear layers and ``nn.MultiheadAttention`` by LoRA layers, in place.

    Args:
        towers: towers by name (``image``, ``text``).
        settings: rank, scale, dropout, targets.

    Raises:
        XcompatError: a target matches no layer, or a tower does not exist.
    """
    from peft import LoraConfig, inject_adapter_in_model

    from xcompat.encoders.attention_lora import AttentionLora

    for tower_name in settings.towers or towers:
        if tower_name not in towers:
            raise XcompatError(f"lora.towers: no tower {tower_name!r}; known: {', '.join(towers)}")
        layers = _adaptable(towers[tower_name])
        if not layers:
            raise XcompatError(
                f"the {tower_name} tower has no linear layers in its blocks, only convolutions; remove adapters.lora"
            )
        if settings.targets is None:
            chosen = list(layers)
        else:
            chosen = [name for name in layers if name.rsplit(".", 1)[-1] in settings.targets]
        if not chosen:
            known = sorted({name.rsplit(".", 1)[-1] for name in layers})
            raise XcompatError(
                f"lora.targets {settings.targets} match no linear layer of the {tower_name} tower; known: {', '.join(known)}"
            )
        config = LoraConfig(
            r=settings.rank,
            lora_alpha=settings.alpha,  # type: ignore[arg-type]  # PEFT declares an int, but accepts a float
            lora_dropout=settings.dropout,
            target_modules=chosen,
            bias="none",
        )
        config._register_custom_module({nn.MultiheadAttention: AttentionLora})
        inject_adapter_in_model(config, towers[tower_name])


def save_lora(model: nn.Module, settings: LoraSettings, base: str, revision: str | None, folder: Path) -> None:
    """Write a model's LoRA in PEFT's format, for ``PeftModel.from_pretrained`` with the base.

    Args:
        model: the library's module, with LoRA.
        settings: rank, scale and dropout.
        base: the base model's name or folder.
        revision: its commit on the Hub.
        folder: output folder.
    """
    from peft import LoraConfig
    from peft.tuners.lora import LoraLayer
    from safetensors.torch import save_file

    layers = [name for name, layer in model.named_modules() if isinstance(layer, LoraLayer)]
    weights = {
        f"base_model.model.{name}.{side}.weight": model.get_parameter(f"{name}.{side}.default.weight").detach().cpu().contiguous()
        for name in layers
        for side in ("lora_A", "lora_B")
    }
    config = LoraConfig(
        base_model_name_or_path=base,
        revision=revision,
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]  # PEFT declares an int, but accepts a float
        lora_dropout=settings.dropout,
        target_modules=layers,
        bias="none",
        inference_mode=True,
    )
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(str(folder))


@contextmanager
def adapters_disabled(module: nn.Module) -> Iterator[None]:
    """Switch off a module's LoRA layers and prompts inside the block, without changing ``requires_grad``."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    trainable = {parameter for parameter in module.parameters() if parameter.requires_grad}
    layers = [layer for layer in module.modules() if isinstance(layer, BaseTunerLayer)]
    prompts = [layer for layer in module.modules() if isinstance(layer, VisualPrompts)]
    for layer in layers:
        layer.enable_adapters(False)
    for prompt in prompts:
        prompt.enabled = False
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
        for prompt in prompts:
            prompt.enabled = True
        for parameter in module.parameters():
            parameter.requires_grad_(parameter in trainable)


def merge_lora(module: nn.Module) -> None:
    """Merge each LoRA update into its layer and restore the plain layer."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, layer in [(n, m) for n, m in module.named_modules() if isinstance(m, BaseTunerLayer)]:
        layer.merge()
        parent_name, _, child = name.rpartition(".")
        setattr(module.get_submodule(parent_name), child, layer.get_base_layer())
