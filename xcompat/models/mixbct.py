"""MixBCT: one classification loss over a mixture of new features and credible old ones."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from xcompat.errors import XcompatError
from xcompat.losses.classification import HeadKind
from xcompat.models.backbone import BackboneConfig
from xcompat.models.classified import ClassifiedConfig, ClassifiedModel
from xcompat.outputs import Batch, CompatOutput


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

    def loss(self, output: CompatOutput, batch: Batch) -> Tensor:
        """Return the classification loss of the mixture (see :meth:`CompatModel.loss`)."""
        labels_B, credible_B = batch["labels"], batch["credible"]
        # the credible samples with the highest of random numbers: as many as asked for, or all of them
        draw_B = torch.rand(len(labels_B), device=labels_B.device).masked_fill(~credible_B, -1)
        count = math.floor(round(self.config.mixed_share * len(labels_B), 6))  # 0.29 * 100 is a little below 29
        chosen = draw_B.topk(count).indices
        mixed_B = torch.zeros_like(credible_B)
        mixed_B[chosen] = credible_B[chosen]
        mixed_Bd = torch.where(mixed_B[:, None], batch["old_embeds"], output["image_embeds"])
        return self.classification_loss(mixed_Bd, labels_B)
