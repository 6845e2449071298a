"""BCT: the old classifier also classifies the new model's features; with optional extra dimensions."""

from __future__ import annotations

from torch import Tensor
from typing_extensions import override

from xcompat.models.prototyped import PrototypedConfig, PrototypedModel
from xcompat.models.registry import register
from xcompat.outputs import Batch, CompatOutput


class BctConfig(PrototypedConfig):
    """Configuration of :class:`BctModel`; use ``extra_dim`` for BCT(+e)."""

    model_type = "xcompat-bct"


@register
class BctModel(PrototypedModel):
    """L = CE(W, f) + λ·CE(W_old, f[:d]) (Shen et al. 2020, the influence loss).

    With e extra dimensions the old weights are zero-padded: they classify only the first d dimensions.
    """

    config_class = BctConfig
    compares_by_l2 = True
    citation = "Shen et al., Towards backward-compatible representation learning, CVPR 2020"

    @override
    def loss(self, output: CompatOutput, batch: Batch) -> Tensor:
        features_BD, labels_B = output["features"], batch["labels"]
        compatible = self.old_classification_loss(features_BD, labels_B)
        return self.classification_loss(features_BD, labels_B) + self.config.compat_weight * compatible
