"""OCA: an orthogonal transformation mixes extra dimensions in during training, and is then discarded."""

from __future__ import annotations

from torch import Tensor
from typing_extensions import override

from xcompat.heads import OrthogonalTransform
from xcompat.losses import ace_loss
from xcompat.models.prototyped import PrototypedConfig, PrototypedModel
from xcompat.outputs import Batch, CompatOutput


class OcaConfig(PrototypedConfig):
    """Configuration of :class:`OcaModel`.

    Args:
        compat_weight: λ1 of the paper.
        angle_weight: λ2 of the paper.
        extra_dim: e, the dimensions of h_e.
    """

    model_type = "xcompat-oca"

    compat_weight: float = 10.0
    angle_weight: float = 5.0
    extra_dim: int = 32


class OcaModel(PrototypedModel):
    """L = CE(W, Q·h_new) + λ1·CE(W_old, h_bct) + λ2·L_∠(h_bct), h_new = [h_bct | h_e] (oca.txt Eqn. 6).

    Q is orthogonal, without bias; inference drops Q and W and uses plain h_new. The paper's L_∠ has a minus sign that would open
    the angle; here it is mean(1 - cos), which closes it.
    """

    config_class = OcaConfig
    only_for_training = ("transform", "classifier")
    citation = "Ricci et al., Backward-compatible aligned representations via an orthogonal transformation layer (OCA), 2024"

    def build_for_training(self) -> None:
        """Build Q and the classifier of its output."""
        if self.config.classes:
            self.transform = OrthogonalTransform(self.config.embedding_dim)
            self.classifier = self._head(self.config.embedding_dim)

    @override
    def loss(self, output: CompatOutput, batch: Batch) -> Tensor:
        config, features_BD, labels_B = self.config, output["features"], batch["labels"]
        old_features_Bd = self.old_features(features_BD)
        compatible = ace_loss(
            old_features_Bd, self._old_weights(), labels_B, config.compat_weight, config.angle_weight, config.old_scale
        )
        return self.classification_loss(self.transform(features_BD), labels_B) + compatible
