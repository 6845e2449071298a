"""L2: the loss pulls every new embedding to the same image's old embedding."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from xcompat.losses import l2_alignment_loss
from xcompat.models.classified import ClassifiedConfig, ClassifiedModel
from xcompat.outputs import Batch, CompatOutput


class L2Config(ClassifiedConfig):
    """Configuration of :class:`L2Model`.

    Args:
        compat_weight: λ.
    """

    model_type = "xcompat-l2"

    compat_weight: float = 10.0


class L2Model(ClassifiedModel):
    """L = CE(W, f) + λ·mean‖f̂[:d] − f̂_old‖, the norm and not its square (mixbct.txt §3.2).

    Both sides have length 1, as galleries are compared by cosine.
    """

    config_class = L2Config
    columns = ("pixel_values", "labels", "old_embeds")
    citation = "Liang et al., MixBCT: towards self-adapting backward-compatible training, 2023 (its L2 baseline)"

    @override
    def loss(self, output: CompatOutput, batch: Batch) -> Tensor:
        features_BD, labels_B = output["features"], batch["labels"]
        compatible = l2_alignment_loss(F.normalize(self.old_features(features_BD), dim=-1), batch["old_embeds"])
        return self.classification_loss(features_BD, labels_B) + self.config.compat_weight * compatible
