"""The independently trained model: no compatibility, the floor of new/old and the ceiling of new/new."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from xcompat.encoders.base import Encoder
from xcompat.encoders.model_files import record_model
from xcompat.errors import XcompatError
from xcompat.losses import clip_contrastive_loss, siglip_loss
from xcompat.models.classified import ClassifiedConfig, ClassifiedModel
from xcompat.outputs import CompatOutput


class IndependentConfig(ClassifiedConfig):
    """Configuration of :class:`IndependentModel`; with ``classes`` it learns from labels, else from captions.

    Args:
        mixup: α of mixup, for a model trained on classes; 0 for none. fct.txt §5.1 trains side-information with it and gives no
            value; 0.2 is a usual one.
    """

    model_type = "xcompat-independent"

    mixup: float = 0.0


class IndependentModel(ClassifiedModel):
    """An encoder trained with its own loss: classification where there are classes, else contrast with a learned scale.

    The contrastive losses are CLIP's (Radford et al. 2021) and SigLIP's (Zhai et al. 2023).

    Args:
        config: the configuration.
        encoder: an encoder already loaded; built without weights from the configuration if None.
    """

    config_class = IndependentConfig
    columns: ClassVar[tuple[str, ...]] = ("pixel_values", "input_ids")
    compares_with_old = False
    citation = "Radford et al., Learning transferable visual models from natural language supervision, ICML 2021"

    def __init__(self, config: IndependentConfig, encoder: Encoder | None = None) -> None:
        super().__init__(config, encoder)
        if config.mixup and config.head == "triplet":
            raise XcompatError("a mixed image is of two classes, and triplets are of one; set options.mixup to 0 or another head")
        if config.classes is not None:
            self.columns = ClassifiedModel.columns  # type: ignore[misc]  # what it reads depends on what it is trained on

    def set_trainable(self) -> None:
        """Train all that the loss depends on; with captions that is the towers, the scale and the bias."""
        if self.config.classes is not None:
            super().set_trainable()
            return
        assert self.encoder is not None
        for name, parameter in self.encoder.named_parameters():
            parameter.requires_grad_("logit" in name or not any(word in name for word in self.encoder.unused))

    def forward(  # type: ignore[override]  # it reads captions too
        self,
        pixel_values: Tensor | None = None,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        return_loss: bool = True,
    ) -> CompatOutput:
        """Compute the classification loss, or the contrastive loss between images and their texts.

        Args:
            pixel_values: (B, C, H, W) float32.
            input_ids: (B, L) int64, for a model trained on captions.
            attention_mask: (B, L) int64, or None.
            labels: (B,) int64, for a model trained on classes.
            return_loss: whether to compute the loss.

        Returns:
            Loss and the embeddings.
        """
        if self.config.classes is not None:
            if self.training and self.config.mixup > 0:
                return self._mixed(pixel_values, labels)
            return super().forward(pixel_values=pixel_values, labels=labels, return_loss=return_loss)
        self._require(pixel_values=pixel_values, input_ids=input_ids)
        assert pixel_values is not None and input_ids is not None
        image_embeds, text_embeds = self.embed_images(pixel_values), self.embed_texts(input_ids, attention_mask)
        output = CompatOutput(image_embeds=image_embeds, text_embeds=text_embeds)
        return CompatOutput(loss=self.embeds_loss(output, {}), **output) if return_loss else output

    def _mixed(self, pixel_values: Tensor | None, labels: Tensor | None) -> CompatOutput:
        """Return L = λ·CE(W, f, y) + (1 − λ)·CE(W, f, y'), f of λx + (1 − λ)x', λ ~ Beta(α, α) (Zhang et al. 2018, mixup)."""
        self._require(pixel_values=pixel_values, labels=labels)
        assert pixel_values is not None and labels is not None
        share = float(torch.distributions.Beta(self.config.mixup, self.config.mixup).sample())
        order_B = torch.randperm(len(labels), device=labels.device)
        features = self.features(share * pixel_values + (1 - share) * pixel_values[order_B]).float()
        own, other = (self.classification_loss(features, wanted) for wanted in (labels, labels[order_B]))
        return CompatOutput(loss=share * own + (1 - share) * other, image_embeds=F.normalize(features, dim=-1))

    def embeds_loss(self, output: CompatOutput, batch: Mapping[str, Tensor | None]) -> Tensor:
        """Return the loss the encoder's family is trained with: sigmoid when it has a logit bias (SigLIP), else softmax."""
        image_embeds, text_embeds = output.image_embeds, output.text_embeds
        assert self.encoder is not None and image_embeds is not None and text_embeds is not None
        log_scale = getattr(self.encoder.model, "logit_scale", None)
        bias = getattr(self.encoder.model, "logit_bias", None)
        if not isinstance(log_scale, nn.Parameter):  # BLIP's retrieval heads have none
            return clip_contrastive_loss(image_embeds, text_embeds, self.config.logit_scale)
        if bias is not None:
            return siglip_loss(image_embeds, text_embeds, log_scale.exp(), bias)
        # CLIP clips the scale at 100, so that one batch cannot make the logits explode
        return clip_contrastive_loss(image_embeds, text_embeds, log_scale.clamp(max=math.log(100)).exp())

    def export(self, folder: str | Path) -> None:
        """Write an image-text encoder in its own library's format; a classified model with its projection and classifier."""
        if self.config.classes is not None:
            super().export(folder)
            return
        assert self.encoder is not None
        self.encoder.save_pretrained(folder)
        self.processor.save_pretrained(folder)
        record_model(folder)
