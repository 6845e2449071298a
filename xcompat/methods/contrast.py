"""Contrast (RACT): pulls a new embedding to its image's old embedding, and away from other classes' embeddings."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from torch import Tensor
from typing_extensions import override

from xcompat.losses import ract_loss
from xcompat.models.classified import ClassifiedConfig, ClassifiedModel
from xcompat.models.registry import register
from xcompat.outputs import Batch, CompatOutput


class ContrastConfig(ClassifiedConfig):
    """Configuration of :class:`ContrastModel`.

    Args:
        compat_weight: λ.
        temperature: τ. The public code has .05, .01 and 1; at 1 the softmax over cosines is nearly flat. 0.1 was chosen on
            validation faces (``recipes/vision/search_glyphs.yaml``).
        topk_negatives: number of hardest negatives per kind; None for all.
    """

    model_type = "xcompat-contrast"

    compat_weight: Annotated[float, Field(ge=0)] = 1.0
    temperature: Annotated[float, Field(gt=0)] = 0.1
    topk_negatives: Annotated[int, Field(ge=1)] | None = None


@register
class ContrastModel(ClassifiedModel):
    """L = CE(W, f) + λ·RACT(f[:d], f_old, y) (Zhang et al. 2022; "Contrast" in BT² §4)."""

    config_class = ContrastConfig
    columns = ("pixel_values", "labels", "old_embeds")
    citation = "Zhang et al., Hot-refresh model upgrades with regression-alleviating compatible training, ICLR 2022"

    @override
    def loss(self, output: CompatOutput, batch: Batch) -> Tensor:
        config, features_BD, labels_B = self.config, output["features"], batch["labels"]
        near_Bd = self.old_features(features_BD)
        compatible = ract_loss(near_Bd, batch["old_embeds"], labels_B, config.temperature, config.topk_negatives)
        return self.classification_loss(features_BD, labels_B) + config.compat_weight * compatible
