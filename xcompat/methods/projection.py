"""φ alone: text-only pretraining of the map from the new space to the old space (XBT, part 1)."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from xcompat.losses import clip_contrastive_loss
from xcompat.models.config import CompatConfig
from xcompat.models.projected import PhiModel
from xcompat.models.registry import register
from xcompat.outputs import Batch, CompatOutput


class ProjectionConfig(CompatConfig):
    """Configuration of :class:`ProjectionModel`.

    Args:
        noise_std: σ of the Gaussian noise on the new embedding; the paper gives no value.
    """

    model_type = "xcompat-projection"

    noise_std: Annotated[float, Field(ge=0)] = 0.05


@register
class ProjectionModel(PhiModel):
    """φ trained on cached text embeddings: L = L_c(φ(normalise(w_new + ε)), w_old) (XBT Eqn. 3).

    No encoder is in memory. The paper pretrains on texts alone; training on images is its ablation (h).

    Args:
        config: the configuration.
        encoder: frozen new encoder for inference, not part of the checkpoint.

    Example:
        >>> from xcompat.models.config import describe_old
        >>> from xcompat.core.fingerprint import Fingerprint
        >>> old = describe_old(Fingerprint.from_string("old"), dim=4)
        >>> model = ProjectionModel(ProjectionConfig(old=old, embedding_dim=8))
        >>> model.to_space(torch.randn(2, 8)).shape
        torch.Size([2, 4])
    """

    config_class = ProjectionConfig
    columns = ("new_embeds", "old_embeds")
    embedded = ("new_embeds",)
    loss_of_embeddings = True
    embeds_in_memory = True
    citation = "Towards cross-modal backward-compatible representation learning for vision-language models (XBT), Eqn. 3"

    @override
    def embed_batch(self, batch: Batch) -> CompatOutput:
        """Map new embeddings by φ, with noise during training; return them as ``text_embeds``."""
        self.require_columns(batch, self.embedded)
        new_BD = batch["new_embeds"]
        if self.training and self.config.noise_std > 0:
            new_BD = F.normalize(new_BD + self.config.noise_std * torch.randn_like(new_BD), dim=-1)
        return CompatOutput(text_embeds=self.projection(new_BD))

    @override
    def loss(self, output: CompatOutput, batch: Batch) -> Tensor:
        return clip_contrastive_loss(output["text_embeds"], batch["old_embeds"], self.config.logit_scale)
