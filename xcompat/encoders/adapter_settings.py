"""Adapter settings in recipes and checkpoints."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class LoraSettings(BaseModel):
    """Low-rank tower adaptation (Hu et al. 2021) with XBT's defaults.

    Args:
        rank: rank r of the two factors.
        alpha: the update is scaled by alpha / rank.
        dropout: dropout on the first factor's input.
        targets: layer names (last component, e.g. ``q_proj``); None to use all linear layers in repeated blocks. ``attn`` is
            open_clip's joint query, key and value projection.
        towers: towers to adapt; None to adapt all.
    """

    model_config = ConfigDict(extra="forbid")
    rank: int = Field(16, ge=1)
    alpha: float = 16.0
    dropout: float = Field(0.1, ge=0, lt=1)
    targets: list[str] | None = None
    towers: list[str] | None = None


class AdapterConfig(BaseModel):
    """Adapters for a frozen encoder.

    Args:
        lora: LoRA settings; None for no LoRA.
        prompts: number of visual prompts on the image tower (Jia et al. 2022; 10 in XBT); 0 for none.
    """

    model_config = ConfigDict(extra="forbid")
    lora: LoraSettings | None = None
    prompts: int = Field(0, ge=0)
