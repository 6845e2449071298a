"""XBT: cross-modal backward-compatible training of image-text encoders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from xcompat.losses import clip_contrastive_loss
from xcompat.models.projected import ProjectedConfig, ProjectedModel, TrainedPart
from xcompat.outputs import CompatOutput


class XbtConfig(ProjectedConfig):
    """Configuration of :class:`XbtModel`.

    The paper contradicts itself on what trains beside LoRA and prompts. §3.3: the LayerNorms of φ, the default here.
    §4.1: those of the encoders too (``train_encoder: layer_norm``). The count in Table 7: all of φ
    (``train_projection: all``).
    """

    model_type = "xcompat-xbt"

    train_projection: TrainedPart = "layer_norm"


class XbtModel(ProjectedModel):
    """The pair stage: L = L_c(φ(v_new), φ(w_new)), the old encoders nowhere in memory (xbt.txt Eqn. 5).

    φ comes from text-only pretraining. With adapters and prompts switched off the encoder is the original new model, bit
    for bit.
    """

    config_class = XbtConfig
    starts_from_projection: ClassVar[bool] = True
    citation = "Towards cross-modal backward-compatible representation learning for vision-language models (XBT), Eqn. 5"

    def forward(
        self,
        pixel_values: Tensor | None = None,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        return_loss: bool = True,
    ) -> CompatOutput:
        """Compute the contrastive loss between synthetic old embeddings of images and of their texts.

        Args:
            pixel_values: (B, C, H, W) float32.
            input_ids: (B, L) int64.
            attention_mask: (B, L) int64, or None.
            return_loss: whether to compute the loss.

        Returns:
            Loss and the synthetic old embeddings it compared.
        """
        self._require(pixel_values=pixel_values, input_ids=input_ids)
        assert pixel_values is not None and input_ids is not None
        image_embeds, text_embeds = self.project_pair(pixel_values, input_ids, attention_mask)
        output = CompatOutput(image_embeds=image_embeds, text_embeds=text_embeds)
        return CompatOutput(loss=self.embeds_loss(output, {}), **output) if return_loss else output

    def embeds_loss(self, output: CompatOutput, batch: Mapping[str, Tensor | None]) -> Tensor:
        """See :class:`XbtModel`."""
        assert output.image_embeds is not None and output.text_embeds is not None
        return clip_contrastive_loss(output.image_embeds, output.text_embeds, self.config.logit_scale)
