"""Direct contrastive training against old embeddings: XBT's baselines full-tune, lora-only and base."""

from __future__ import annotations

from torch import Tensor
from typing_extensions import override

from xcompat.losses import clip_contrastive_loss
from xcompat.models.projected import ProjectedConfig, ProjectedModel
from xcompat.models.registry import register
from xcompat.outputs import Batch, CompatOutput


class DirectConfig(ProjectedConfig):
    """Configuration of :class:`DirectModel`.

    For the paper's full-tune, use ``train_encoder: all`` without adapters; for its lora-only, LoRA alone; for its base, LoRA with
    prompts.
    """

    model_type = "xcompat-direct"


@register
class DirectModel(ProjectedModel):
    """L = L_c(φ(v_new), w_old) + L_c(φ(w_new), v_old), φ from random initialisation and all of it trained (XBT Eqn. 6)."""

    config_class = DirectConfig
    columns = ("pixel_values", "input_ids", "old_embeds", "old_text_embeds")
    citation = "Towards cross-modal backward-compatible representation learning for vision-language models (XBT), Eqn. 6"

    @override
    def loss(self, output: CompatOutput, batch: Batch) -> Tensor:
        scale = self.config.logit_scale
        items_B = batch.get("passage_ids")
        of_searched = clip_contrastive_loss(batch["old_text_embeds"], output.searched_embeds, scale, items_B)
        return of_searched + clip_contrastive_loss(output["text_embeds"], batch["old_embeds"], scale, items_B)
