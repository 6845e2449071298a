"""The independently trained model: no compatibility, the floor of new/old and the ceiling of new/new."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from xcompat.encoders.base import Encoder
from xcompat.losses import clip_contrastive_loss
from xcompat.models.base import CompatConfig, CompatModel
from xcompat.outputs import CompatOutput


class IndependentConfig(CompatConfig):
    """Configuration of :class:`IndependentModel`."""

    model_type = "xcompat-independent"


class IndependentModel(CompatModel):
    """An image-text encoder trained with its own contrastive loss and a learned scale (Radford et al. 2021).

    Args:
        config: the configuration.
        encoder: an encoder already loaded; built without weights from the configuration if None.
    """

    config_class = IndependentConfig
    columns: ClassVar[tuple[str, ...]] = ("pixel_values", "input_ids")
    citation = "Radford et al., Learning transferable visual models from natural language supervision, ICML 2021"

    def __init__(self, config: IndependentConfig, encoder: Encoder | None = None) -> None:
        super().__init__(config, encoder)
        self.post_init()

    def forward(
        self,
        pixel_values: Tensor | None = None,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        return_loss: bool = True,
    ) -> CompatOutput:
        """Compute the contrastive loss between images and their texts.

        Args:
            pixel_values: (B, C, H, W) float32.
            input_ids: (B, L) int64.
            attention_mask: (B, L) int64, or None.
            return_loss: whether to compute the loss.

        Returns:
            Loss and the embeddings it compared.
        """
        self._require(pixel_values=pixel_values, input_ids=input_ids)
        image_embeds, text_embeds = self.embed_images(pixel_values), self.embed_texts(input_ids, attention_mask)
        loss = clip_contrastive_loss(image_embeds, text_embeds, self._scale()) if return_loss else None
        return CompatOutput(loss=loss, image_embeds=image_embeds, text_embeds=text_embeds)

    def _scale(self) -> Tensor | float:
        parameter = getattr(self.encoder.model, "logit_scale", None)
        # CLIP clips the scale at 100, so that one batch cannot make the logits explode
        return parameter.clamp(max=torch.log(torch.tensor(100.0))).exp() if isinstance(parameter, nn.Parameter) else self.config.logit_scale
