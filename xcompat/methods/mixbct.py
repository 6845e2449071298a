"""MixBCT: a single classification loss over a mixture of new features and credible old features."""

from __future__ import annotations

import math
from typing import Annotated, Any

import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor
from typing_extensions import override

from xcompat.core.errors import XcompatError
from xcompat.losses.classification import HeadKind
from xcompat.models.backbone import BackboneConfig
from xcompat.models.classified import ClassifiedConfig, ClassifiedModel
from xcompat.models.credible import credible_mask
from xcompat.models.old_knowledge import OldKnowledge
from xcompat.models.registry import register
from xcompat.outputs import Batch, CompatOutput


class MixBctConfig(ClassifiedConfig):
    """Configuration of :class:`MixBctModel`.

    Args:
        mixed_share: α, share of a batch with old features instead of new features.
        keep: credible share of each class's old embeddings: the nearest to the class's centre.
        head: classification head; plain softmax would need features with equal lengths. ArcFace with its usual scale and margin
            leaves photos at chance; use ``head_scale`` 20 and ``head_margin`` 0.2 to avoid it
            (``docs/results/trained_backbones.md``).
    """

    model_type = "xcompat-mixbct"

    mixed_share: Annotated[float, Field(ge=0, le=1)] = 0.3
    keep: Annotated[float, Field(gt=0, le=1)] = 0.9
    head: HeadKind = "normalized_softmax"


@register
class MixBctModel(ClassifiedModel):
    """L = CE(W, mix(f, f_old)): a single loss and classifier for both (MixBCT Algorithm 1).

    Each batch draws ⌊αB⌋ samples with a credible old embedding, or all such samples if there are fewer. New features are
    normalised like old embeddings.
    """

    config_class = MixBctConfig
    columns = ("pixel_values", "labels", "old_embeds", "credible")
    citation = "Liang et al., MixBCT: towards self-adapting backward-compatible training, 2023"

    @classmethod
    def _check_dims(cls, config: BackboneConfig) -> None:
        super()._check_dims(config)
        if config.old is not None and config.old["dim"] != config.embedding_dim:
            raise XcompatError(
                "mixbct has a common classifier for old and new embeddings: "
                f"the new dimension {config.embedding_dim} must equal the old, {config.old['dim']}; remove dim and extra_dim"
            )

    @override
    def extra_columns(self, old: OldKnowledge) -> dict[str, NDArray[Any]]:
        """Return ``credible``, (N,) bool: whether a sample's old embedding can be mixed in."""
        return {"credible": credible_mask(old.embeddings("mixbct"), old.labels_N, self.config.keep)}

    @override
    def loss(self, output: CompatOutput, batch: Batch) -> Tensor:
        labels_B, credible_B = batch["labels"], batch["credible"]
        # draw credible samples by the highest random numbers; -1 never wins
        draw_B = torch.rand(len(labels_B), device=labels_B.device).masked_fill(~credible_B, -1)
        count = math.floor(round(self.config.mixed_share * len(labels_B), 6))  # 0.29 * 100 is a little below 29
        chosen = draw_B.topk(count).indices
        mixed_B = torch.zeros_like(credible_B)
        mixed_B[chosen] = credible_B[chosen]
        mixed_Bd = torch.where(mixed_B[:, None], batch["old_embeds"], output["image_embeds"])
        return self.classification_loss(mixed_Bd, labels_B)
