"""L2: the loss pulls every new embedding to its image's old embedding."""

from __future__ import annotations

from typing import Annotated, Any

from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from xcompat.losses import l2_alignment_loss
from xcompat.models.classified import ClassifiedConfig, ClassifiedModel
from xcompat.models.credible import credible_mask
from xcompat.models.old_knowledge import OldKnowledge
from xcompat.models.registry import register
from xcompat.outputs import Batch, CompatOutput


class L2Config(ClassifiedConfig):
    """Configuration of :class:`L2Model`.

    Args:
        compat_weight: λ.
        keep: share of each class's old embeddings, nearest to the class's centre, to pull new embeddings with. Use 0.9 for L2* in
            MixBCT Table 6.
    """

    model_type = "xcompat-l2"

    compat_weight: Annotated[float, Field(ge=0)] = 10.0
    keep: Annotated[float, Field(gt=0, le=1)] = 1.0


@register
class L2Model(ClassifiedModel):
    """L = CE(W, f) + λ·mean‖f̂[:d] − f̂_old‖, the norm and not its square (MixBCT §3.2).

    Both sides have length 1, because galleries are compared by cosine.
    """

    config_class = L2Config
    columns = ("pixel_values", "labels", "old_embeds")
    columns_if_known = ("credible",)
    citation = "Liang et al., MixBCT: towards self-adapting backward-compatible training, 2023 (its L2 baseline)"

    @override
    def extra_columns(self, old: OldKnowledge) -> dict[str, NDArray[Any]]:
        """Return ``credible``, (N,) bool: whether a sample's old embedding pulls; empty if all do."""
        if self.config.keep == 1:
            return {}
        return {"credible": credible_mask(old.embeddings("l2"), old.labels_N, self.config.keep)}

    @override
    def loss(self, output: CompatOutput, batch: Batch) -> Tensor:
        features_BD, labels_B = output["features"], batch["labels"]
        near_Bd = F.normalize(self.old_features(features_BD), dim=-1)
        credible_B = None if self.config.keep == 1 else batch["credible"]
        compatible = l2_alignment_loss(near_Bd, batch["old_embeds"], credible_B)
        return self.classification_loss(features_BD, labels_B) + self.config.compat_weight * compatible
