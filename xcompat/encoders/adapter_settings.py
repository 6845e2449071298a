"""Which adapters an encoder gets, as recipes and checkpoints say it."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class LoraSettings(BaseModel):
    """Low-rank adaptation of the towers (Hu et al. 2021); the defaults are XBT's.

    Args:
        rank: r of the two factors.
        alpha: the update is scaled by alpha / rank.
        dropout: on the input of the first factor.
        targets: names of layers (their last component, such as ``q_proj``); None for every linear layer of the towers' repeated
            blocks. Of open_clip's towers, ``attn`` is the projection to queries, keys and values in one.
        towers: the towers to adapt; None for all.
    """

    model_config = ConfigDict(extra="forbid")
    rank: int = Field(16, ge=1)
    alpha: float = 16.0
    dropout: float = Field(0.1, ge=0, lt=1)
    targets: list[str] | None = None
    towers: list[str] | None = None


class AdapterConfig(BaseModel):
    """The adapters of a frozen encoder.

    Args:
        lora: LoRA settings, or None for no LoRA.
        prompts: number of visual prompts on the image tower (Jia et al. 2022; 10 in XBT); 0 for none.
    """

    model_config = ConfigDict(extra="forbid")
    lora: LoraSettings | None = None
    prompts: int = Field(0, ge=0)
