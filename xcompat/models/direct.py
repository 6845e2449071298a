"""Direct contrastive training against old embeddings: XBT's baselines full-tune, lora-only and base."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from xcompat.losses import clip_contrastive_loss
from xcompat.models.projected import ProjectedConfig, ProjectedModel
from xcompat.outputs import CompatOutput


class DirectConfig(ProjectedConfig):
    """Configuration of :class:`DirectModel`.

    ``train_encoder: all`` without adapters is the paper's full-tune, LoRA alone its lora-only, LoRA with prompts its base.
    """

    model_type = "xcompat-direct"


class DirectModel(ProjectedModel):
    """L = L_c(φ(v_new), w_old) + L_c(φ(w_new), v_old), φ from random initialisation and all of it trained (xbt.txt Eqn. 6)."""

    config_class = DirectConfig
    columns: ClassVar[tuple[str, ...]] = ("pixel_values", "input_ids", "old_embeds", "old_text_embeds")
    citation = "Towards cross-modal backward-compatible representation learning for vision-language models (XBT), Eqn. 6"

    def forward(
        self,
        pixel_values: Tensor | None = None,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        old_embeds: Tensor | None = None,
        old_text_embeds: Tensor | None = None,
        return_loss: bool = True,
    ) -> CompatOutput:
        """Compute the contrastive loss of each new modality against the other old one.

        Args:
            pixel_values: (B, C, H, W) float32.
            input_ids: (B, L) int64.
            attention_mask: (B, L) int64, or None.
            old_embeds: (B, d) old embeddings of the images, L2-normalised.
            old_text_embeds: (B, d) old embeddings of the texts, L2-normalised.
            return_loss: whether to compute the loss.

        Returns:
            Loss and the synthetic old embeddings it compared.
        """
        self._require(pixel_values=pixel_values, input_ids=input_ids, old_embeds=old_embeds, old_text_embeds=old_text_embeds)
        assert pixel_values is not None and input_ids is not None
        image_embeds, text_embeds = self.project_pair(pixel_values, input_ids, attention_mask)
        output = CompatOutput(image_embeds=image_embeds, text_embeds=text_embeds)
        old = {"old_embeds": old_embeds, "old_text_embeds": old_text_embeds}
        return CompatOutput(loss=self.embeds_loss(output, old), **output) if return_loss else output

    def embeds_loss(self, output: CompatOutput, batch: Mapping[str, Tensor | None]) -> Tensor:
        """See :class:`DirectModel`."""
        new_images, new_texts = output.image_embeds, output.text_embeds
        old_images, old_texts = batch["old_embeds"], batch["old_text_embeds"]
        assert new_images is not None and new_texts is not None and old_images is not None and old_texts is not None
        scale = self.config.logit_scale
        return clip_contrastive_loss(new_images, old_texts, scale) + clip_contrastive_loss(new_texts, old_images, scale)
