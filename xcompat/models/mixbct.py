"""MixBCT: one classification loss over a mixture of new features and credible old ones."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from xcompat.errors import XcompatError
from xcompat.losses.classification import HeadKind
from xcompat.models.backbone import BackboneConfig
from xcompat.models.classified import ClassifiedConfig, ClassifiedModel
from xcompat.outputs import CompatOutput


class MixBctConfig(ClassifiedConfig):
    """Configuration of :class:`MixBctModel`.

    Args:
        mixed_share: α, the share of a batch whose new features are replaced by old ones.
        keep: the share of each class's old embeddings that is credible: the nearest to the class's centre.
        head: how features are classified; plain softmax would need features of one length. ArcFace, the better one on validation
            glyphs, keeps photos at chance (``docs/results/trained_backbones.md``).
    """

    model_type = "xcompat-mixbct"

    mixed_share: float = 0.3
    keep: float = 0.9
    head: HeadKind = "normalized_softmax"


class MixBctModel(ClassifiedModel):
    """L = CE(W, mix(f, f_old)): one loss and one classifier for both (mixbct.txt Algorithm 1).

    ⌊αB⌋ samples with a credible old embedding are drawn in each batch, all of them where there are fewer. New features are
    brought to length 1 like the old ones.
    """

    config_class = MixBctConfig
    columns: ClassVar[tuple[str, ...]] = ("pixel_values", "labels", "old_embeds", "credible")
    citation = "Liang et al., MixBCT: towards self-adapting backward-compatible training, 2023"

    @classmethod
    def _check_dims(cls, config: BackboneConfig) -> None:
        super()._check_dims(config)
        if config.old is not None and config.old["dim"] != config.embedding_dim:
            raise XcompatError(
                "mixbct classifies old and new embeddings by one classifier: "
                f"the new dimension {config.embedding_dim} must be the old one, {config.old['dim']}; leave out dim and extra_dim"
            )

    def forward(
        self,
        pixel_values: Tensor | None = None,
        labels: Tensor | None = None,
        old_embeds: Tensor | None = None,
        credible: Tensor | None = None,
        return_loss: bool = True,
    ) -> CompatOutput:
        """Compute the classification loss of the mixture.

        Args:
            pixel_values: (B, C, H, W) float32.
            labels: (B,) int64 in [0, C).
            old_embeds: (B, d) old embeddings of the images, L2-normalised.
            credible: (B,) bool, whose old embedding may be mixed in (:func:`xcompat.data.credible_mask`).
            return_loss: whether to compute the loss.

        Returns:
            Loss and L2-normalised embeddings.
        """
        self._require(pixel_values=pixel_values, labels=labels, old_embeds=old_embeds, credible=credible)
        assert pixel_values is not None and labels is not None and old_embeds is not None and credible is not None
        new_embeds = F.normalize(self.features(pixel_values).float(), dim=-1)
        loss = None
        if return_loss:
            # the credible samples with the highest of random numbers: as many as asked for, or all of them
            draw_B = torch.rand(len(labels), device=labels.device).masked_fill(~credible, -1)
            count = math.floor(round(self.config.mixed_share * len(labels), 6))  # 0.29 * 100 is a little below 29
            chosen = draw_B.topk(count).indices
            mixed_B = torch.zeros_like(credible)
            mixed_B[chosen] = credible[chosen]
            loss = self.classification_loss(torch.where(mixed_B[:, None], old_embeds, new_embeds), labels)
        return CompatOutput(loss=loss, image_embeds=new_embeds)
