"""φ alone: text-only pretraining of the map from the new space into the old one (XBT, part 1)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from xcompat.encoders.base import Encoder
from xcompat.fingerprint import Fingerprint
from xcompat.heads import Projection
from xcompat.losses import clip_contrastive_loss
from xcompat.models.base import CompatModel
from xcompat.models.config import CompatConfig
from xcompat.outputs import CompatOutput


class ProjectionConfig(CompatConfig):
    """Configuration of :class:`ProjectionModel`.

    Args:
        noise_std: σ of the Gaussian noise on the new embedding; the paper gives no value.
    """

    model_type = "xcompat-projection"

    noise_std: float = 0.05


class ProjectionModel(CompatModel):
    """φ trained on cached text embeddings: L = L_c(φ(normalise(w_new + ε)), w_old) (xbt.txt Eqn. 3).

    No encoder is in memory. The paper pretrains on texts alone; trained on images it is the paper's ablation (h).

    Args:
        config: the configuration.
        encoder: the frozen new encoder for later inference, not part of the checkpoint.

    Example:
        >>> from xcompat.models.config import describe_old
        >>> from xcompat.fingerprint import Fingerprint
        >>> old = describe_old(Fingerprint.from_string("old"), dim=4)
        >>> model = ProjectionModel(ProjectionConfig(old=old, embedding_dim=8))
        >>> model.view(torch.randn(2, 8)).shape
        torch.Size([2, 4])
    """

    config_class = ProjectionConfig
    columns: ClassVar[tuple[str, ...]] = ("new_embeds", "old_embeds")
    embeds_in_memory = True
    citation = "Towards cross-modal backward-compatible representation learning for vision-language models (XBT), Eqn. 3"

    def __init__(self, config: ProjectionConfig, encoder: Encoder | None = None) -> None:
        super().__init__(config, encoder)
        assert config.old is not None
        self.projection = Projection(config.embedding_dim, config.old["dim"])
        self.post_init()

    def own_view(self, embeds: Tensor, version: Fingerprint | None = None) -> Tensor:
        """Map new embeddings into the old space: φ (see :meth:`CompatModel.own_view`)."""
        return self.projection(embeds)

    @property
    def own_view_layers(self) -> Iterable[nn.Module] | None:
        """See :attr:`CompatModel.own_view_layers`."""
        return self.projection

    def forward(
        self, new_embeds: Tensor | None = None, old_embeds: Tensor | None = None, return_loss: bool = True
    ) -> CompatOutput:
        """Compute the loss between φ of the noisy new embeddings and the old embeddings of the same samples.

        Args:
            new_embeds: (B, D) L2-normalised embeddings of the new model.
            old_embeds: (B, d) L2-normalised embeddings of the old model.
            return_loss: whether to compute the loss.

        Returns:
            Loss and φ's output as ``text_embeds``.
        """
        self._require(new_embeds=new_embeds, old_embeds=old_embeds)
        assert new_embeds is not None
        if self.training and self.config.noise_std > 0:
            new_embeds = F.normalize(new_embeds + self.config.noise_std * torch.randn_like(new_embeds), dim=-1)
        output = CompatOutput(text_embeds=self.projection(new_embeds))
        return CompatOutput(loss=self.embeds_loss(output, {"old_embeds": old_embeds}), **output) if return_loss else output

    def embeds_loss(self, output: CompatOutput, batch: Mapping[str, Tensor | None]) -> Tensor:
        """See :class:`ProjectionModel`."""
        mapped, old_embeds = output.text_embeds, batch["old_embeds"]
        assert mapped is not None and old_embeds is not None
        return clip_contrastive_loss(mapped, old_embeds, self.config.logit_scale)
