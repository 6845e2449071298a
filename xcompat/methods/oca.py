"""OCA: an orthogonal transformation mixes in extra dimensions during training, and is then discarded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

from pydantic import Field
from torch import Tensor, nn
from typing_extensions import override

from xcompat.heads import OrthogonalTransform
from xcompat.losses import ace_loss
from xcompat.models.prototyped import PrototypedConfig, PrototypedModel
from xcompat.models.registry import register
from xcompat.outputs import Batch, CompatOutput


class OcaConfig(PrototypedConfig):
    """Configuration of :class:`OcaModel`.

    Args:
        compat_weight: the paper's λ1.
        angle_weight: the paper's λ2.
        extra_dim: e, h_e's dimension.
        transform: transformation to mix in h_e during training: ``orthogonal`` (Q), ``linear`` (any matrix, without bias) or
            ``none`` (ablation in Table 4).
        random_start: whether the matrix starts at random, as in the paper, or at the identity.
    """

    model_type = "xcompat-oca"

    compat_weight: Annotated[float, Field(ge=0)] = 10.0
    angle_weight: Annotated[float, Field(ge=0)] = 5.0
    extra_dim: int = 32
    transform: Literal["orthogonal", "linear", "none"] = "orthogonal"
    random_start: bool = False


@register
class OcaModel(PrototypedModel):
    """L = CE(W, Q·h_new) + λ1·CE(W_old, h_bct) + λ2·L_∠(h_bct), h_new = [h_bct | h_e] (OCA Eqn. 6).

    Q is orthogonal, without bias. Inference drops Q and W and uses plain h_new. L_∠ is mean(1 - cos): the paper's minus sign
    would open the angle.
    """

    config_class = OcaConfig
    only_for_training = ("transform", "classifier")
    citation = "Ricci et al., Backward-compatible aligned representations via an orthogonal transformation layer (OCA), 2024"

    @classmethod
    @override
    def unread_options(cls, options: Mapping[str, object], on_captions: bool) -> Iterator[tuple[str, str]]:
        yield from super().unread_options(options, on_captions)
        if options["transform"] == "none":
            yield "random_start", "there is no matrix, because options.transform is none"

    def build_for_training(self) -> None:
        """Build Q and the classifier on its output."""
        if self.config.classes:
            self.transform = self._transform(self.config.embedding_dim)
            self.classifier = self._head(self.config.embedding_dim)

    def _transform(self, dim: int) -> nn.Module:
        if self.config.transform == "none":
            return nn.Identity()
        if self.config.transform == "orthogonal":
            return OrthogonalTransform(dim, self.config.random_start)
        linear = nn.Linear(dim, dim, bias=False)
        if not self.config.random_start:
            nn.init.eye_(linear.weight)
        return linear

    @override
    def classifier_of_features(self) -> Tensor | None:
        """Return W·Q. It gives h_new the same logits as W gives Q·h_new."""
        rows_CD = super().classifier_of_features()
        if rows_CD is None or not isinstance(self.transform, OrthogonalTransform | nn.Linear):
            return rows_CD
        return rows_CD.to(self.transform.weight.dtype) @ self.transform.weight

    @override
    def loss(self, output: CompatOutput, batch: Batch) -> Tensor:
        config, features_BD, labels_B = self.config, output["features"], batch["labels"]
        old_features_Bd = self.old_features(features_BD)
        compatible = ace_loss(
            old_features_Bd, self._old_weights(), labels_B, config.compat_weight, config.angle_weight, self.old_scale
        )
        return self.classification_loss(self.transform(features_BD), labels_B) + compatible
