"""XBT: cross-modal backward-compatible training of image-text encoders."""

from __future__ import annotations

from torch import Tensor
from typing_extensions import override

from xcompat.models.pair_contrast import pair_contrast
from xcompat.models.projected import ProjectedConfig, ProjectedModel, TrainedPart
from xcompat.models.registry import register
from xcompat.outputs import Batch, CompatOutput


class XbtConfig(ProjectedConfig):
    """Configuration of :class:`XbtModel`.

    The paper contradicts itself on trained weights besides LoRA and prompts. §3.3: φ's LayerNorms, the default here. §4.1: also
    the encoders' LayerNorms (``train_encoder: layer_norm``). Count in Table 7: all of φ (``train_projection: all``).
    """

    model_type = "xcompat-xbt"

    train_projection: TrainedPart = "layer_norm"


@register
class XbtModel(ProjectedModel):
    """Pair stage: L = L_c(φ(v_new), φ(w_new)), without the old encoders in memory (XBT Eqn. 5).

    φ comes from text-only pretraining. Without adapters and prompts, the encoder equals the original new model, bit for bit.
    """

    config_class = XbtConfig
    starts_from_projection = True
    citation = "Towards cross-modal backward-compatible representation learning for vision-language models (XBT), Eqn. 5"

    @override
    def loss(self, output: CompatOutput, batch: Batch) -> Tensor:
        return pair_contrast(output, batch, self.config.logit_scale)
