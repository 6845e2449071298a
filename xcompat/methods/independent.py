"""Independently trained model without compatibility: lower bound for new/old and upper bound for new/new."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn
from typing_extensions import override

from xcompat.core.errors import XcompatError
from xcompat.encoders.base import Encoder
from xcompat.encoders.model_files import record_model
from xcompat.losses import siglip_loss
from xcompat.models.base import CompatModel
from xcompat.models.classified import ClassifiedConfig, ClassifiedModel
from xcompat.models.config import CompatConfig
from xcompat.models.pair_contrast import pair_contrast
from xcompat.models.registry import register
from xcompat.outputs import PASSAGES, Batch, CompatOutput


class IndependentConfig(ClassifiedConfig):
    """Configuration of :class:`IndependentModel`; it learns from labels if it has ``classes``, else from captions.

    Args:
        mixup: α of mixup for a model trained on classes; 0 for none. FCT §5.1 trains side-information with mixup and gives no
            value; 0.2 is usual.
    """

    model_type = "xcompat-independent"

    mixup: Annotated[float, Field(ge=0)] = 0.0


@dataclass
class MixedOutput(CompatOutput):
    """Mixed images' embeddings.

    Args:
        share: λ, scalar.
        order_B: (B,) int64, index of each image's mixing partner.
    """

    share: Tensor | None = None
    order_B: Tensor | None = None


@register
class IndependentModel(ClassifiedModel):
    """Encoder trained on its own: by classification if it has classes, else by contrast with a learned scale.

    The contrastive losses are CLIP's (Radford et al. 2021) and SigLIP's (Zhai et al. 2023).
    """

    config_class = IndependentConfig
    columns: ClassVar[tuple[str, ...]] = ("pixel_values", "input_ids")
    columns_if_known = PASSAGES
    loss_of_embeddings = True
    compares_with_old = False
    compares_by_l2 = True
    citation = "Radford et al., Learning transferable visual models from natural language supervision, ICML 2021"

    def __init__(self, config: IndependentConfig, encoder: Encoder | None = None) -> None:
        super().__init__(config, encoder)
        if config.classes is None and self._own_scale() is not None and config.logit_scale != CompatConfig.logit_scale:
            raise XcompatError("options.logit_scale: this encoder learns its own scale; remove logit_scale")
        if config.classes is not None:
            self.columns = ClassifiedModel.columns  # type: ignore[misc]  # classes or captions: the configuration decides

    @classmethod
    @override
    def reads_logit_scale(cls, options: Mapping[str, object], on_captions: bool) -> bool:
        return on_captions

    @classmethod
    @override
    def refuse_unread(cls, options: Mapping[str, object], on_captions: bool) -> None:
        """Raise for mixup with triplets, and for options other than the encoder's if a model is trained on captions."""
        usual = cls.config_class()
        read = {field.name for field in fields(CompatConfig)} - {"adapters"}
        beside = (name for name, value in options.items() if name not in read and value != getattr(usual, name, value))
        if on_captions and (name := next(beside, None)):
            raise XcompatError(f"options.{name} does not apply to training on captions or texts; remove it, or train on classes")
        super().refuse_unread(options, on_captions)
        if options.get("mixup") and cls.balances_batches(options):
            raise XcompatError(
                "options.mixup: mixed images have two classes, but triplets need one; set options.mixup to 0, or no triplets"
            )

    def set_trainable(self) -> None:
        """Train all weights in the loss; with captions, the towers, the scale and the bias."""
        if self.config.classes is not None:
            super().set_trainable()
            return
        for name, parameter in self.encoder.named_parameters():
            parameter.requires_grad_("logit" in name or not any(word in name for word in self.encoder.unused))

    @override
    def embed_batch(self, batch: Batch) -> CompatOutput:
        """Embed images and texts. A classified model embeds images, mixed ones during training with mixup."""
        if self.config.classes is None:
            return CompatModel.embed_batch(self, batch)
        if not (self.training and self.config.mixup > 0):
            return super().embed_batch(batch)
        self.require_columns(batch, ("pixel_values",))
        images = batch["pixel_values"]
        share = torch.distributions.Beta(self.config.mixup, self.config.mixup).sample()
        order_B = torch.randperm(len(images), device=images.device)
        mixed = super().embed_batch({"pixel_values": float(share) * images + (1 - float(share)) * images[order_B]})
        return MixedOutput(**mixed, share=share, order_B=order_B)

    @override
    def loss(self, output: CompatOutput, batch: Batch) -> Tensor:
        """Return the classification loss, or without classes the contrastive loss between images and texts."""
        if self.config.classes is None:
            return self._contrast(output, batch)
        if not isinstance(output, MixedOutput):
            return super().loss(output, batch)
        # L = λ·CE(W, f, y) + (1 − λ)·CE(W, f, y'), f of λx + (1 − λ)x', λ ~ Beta(α, α) (Zhang et al. 2018, mixup)
        share, labels_B, other_B = float(output["share"]), batch["labels"], batch["labels"][output["order_B"]]
        own, other = (self.classification_loss(output["features"], wanted) for wanted in (labels_B, other_B))
        return share * own + (1 - share) * other

    def _contrast(self, output: CompatOutput, batch: Batch) -> Tensor:
        """Return the loss in the encoder's family: sigmoid with a logit bias (SigLIP), else softmax."""
        log_scale = self._own_scale()
        bias = getattr(self.encoder.model, "logit_bias", None)
        if log_scale is None:
            return pair_contrast(output, batch, self.config.logit_scale)
        if bias is not None and output.passage_embeds is not None:
            raise XcompatError("SigLIP's loss needs images with texts; choose another encoder for data.text_pairs")
        if bias is not None:
            return siglip_loss(output["image_embeds"], output["text_embeds"], log_scale.exp(), bias)
        # like CLIP, so that no batch can make the logits explode
        return pair_contrast(output, batch, log_scale.clamp(max=math.log(100)).exp())

    def _own_scale(self) -> nn.Parameter | None:
        """Return the logarithm of the encoder's scale; None without a scale, e.g. in BLIP's retrieval heads."""
        log_scale = getattr(self.encoder.model, "logit_scale", None)
        return log_scale if isinstance(log_scale, nn.Parameter) else None

    def export(self, folder: str | Path) -> None:
        """Write an image-text encoder in its library's format, or a classified model with projection and classifier."""
        if self.config.classes is not None:
            super().export(folder)
            return
        self.encoder.save_pretrained(folder)
        self.processor.save_pretrained(folder)
        record_model(folder)
