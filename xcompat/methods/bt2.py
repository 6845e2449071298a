"""BT²: extra dimensions and orthogonal basis transformations keep new information that the old space cannot hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from xcompat.core.errors import XcompatError
from xcompat.encoders.base import Encoder
from xcompat.heads import OrthogonalTransform
from xcompat.losses import angular_alignment_loss
from xcompat.models.backbone import BackboneConfig
from xcompat.models.old_knowledge import OldKnowledge, Rows
from xcompat.models.prototyped import PrototypedConfig, PrototypedModel
from xcompat.models.registry import register
from xcompat.outputs import Batch, CompatOutput


class Bt2Config(PrototypedConfig):
    """Configuration of :class:`Bt2Model`; its ``dim`` is m, the independent new model's embedding dimension.

    Args:
        extra_dim: e, at most the old dimension d.
        dim: m, the independent new model's embedding dimension; None for the old model's dimension.
        independent_weight: λ1, weight of the cosine to the independent new model's embedding.
        compat_weight: λ2, weight of the loss against the old weights.
        old_weight: λ3, weight of the cosine to the image's old embedding.
        norm_ratio: C, length of the transformed new part.
        classified: the new classifier's input: ``new_part``, φ3, or ``whole``, φ_new, which the paper finds better for
            transformers.
        random_start: whether B1 and B2 start at random, or at the identity.
    """

    model_type = "xcompat-bt2"

    extra_dim: int = 32
    dim: int | None = None
    independent_weight: Annotated[float, Field(ge=0)] = 1.0
    compat_weight: Annotated[float, Field(ge=0)] = 10.0
    old_weight: Annotated[float, Field(ge=0)] = 5.0
    norm_ratio: Annotated[float, Field(gt=0)] = 2.0
    classified: Literal["new_part", "whole"] = "new_part"
    random_start: bool = False


@dataclass
class Bt2Output(CompatOutput):
    """A batch's embeddings, and their part for the comparison with the independent model.

    Args:
        new_part: (B, m) φ3, L2-normalised.
    """

    new_part: Tensor | None = None


@register
class Bt2Model(PrototypedModel):
    """φ_new = [B2·[φ2 ; φ4[:d−e]] ; φ4[d−e:]] (m + e dimensions), φ4 = C·B1·φ3 (BT² Algorithm 1).

    The backbone gives φ1 with m + d dimensions. φ3 = normalise(φ1[:m]) is trained like the independent model. φ2 =
    normalise(f(φ1)) with e dimensions holds the rest of the old space. B1 and B2 are orthogonal, and φ5 is the first d
    dimensions. L = CE(W3, φ3) + λ1(1 − cos(φ3, φ'_new)) + λ2·CE(W_old, φ5) + λ3(1 − cos(φ5, φ_old)).
    """

    config_class = Bt2Config
    columns = ("pixel_values", "labels", "old_embeds", "new_embeds")
    only_for_training = ("classifier",)
    ends_linearly = False  # basis changes follow
    citation = "Zhou et al., BT²: backward-compatible training with basis transformation, ICCV 2023"

    @classmethod
    def _check_dims(cls, config: BackboneConfig) -> None:
        super()._check_dims(config)
        assert config.old is not None
        old_dim, extra, new_dim = config.old["dim"], config.extra_dim, config.embedding_dim - config.extra_dim
        if not 0 < extra <= old_dim or new_dim < old_dim - extra:
            raise XcompatError(
                f"bt2 needs extra_dim from 1 to the old dimension {old_dim}, and dim of at least {max(old_dim - extra, 1)}; "
                f"found extra_dim {extra} and dim {new_dim}"
            )

    @classmethod
    @override
    def unread_options(cls, options: Mapping[str, object], on_captions: bool) -> Iterator[tuple[str, str]]:
        yield from super().unread_options(options, on_captions)
        yield "batch_norm", "bt2 normalises the parts of its embedding separately"

    def __init__(self, config: Bt2Config, encoder: Encoder | None = None) -> None:
        super().__init__(config, encoder)
        assert config.old is not None
        old_dim, extra, new_dim = config.old["dim"], config.extra_dim, config.embedding_dim - config.extra_dim
        self.neck = nn.Linear(self.encoder.embedding_dim, new_dim + old_dim)
        self.extra = nn.Linear(new_dim + old_dim, extra)
        self.new_basis = OrthogonalTransform(new_dim, config.random_start)
        self.old_basis = OrthogonalTransform(old_dim, config.random_start)
        self.post_init()

    def build_for_training(self) -> None:
        """Build the classifier for the new part or for the whole embedding."""
        config = self.config
        if config.classes:
            self.classifier = self._head(config.embedding_dim - (config.extra_dim if config.classified == "new_part" else 0))

    @override
    def prepare(self, old: OldKnowledge, new_ND: Rows | None = None) -> None:
        """Load the frozen rows; raise if the independent model's dimension differs from the new part's."""
        new_dim = self.config.embedding_dim - self.config.extra_dim
        if new_ND is not None and new_ND.shape[1] != new_dim:
            raise XcompatError(
                f"bt2 compares its {new_dim} added dimensions with the {new_ND.shape[1]} of the independent model: set dim to "
                f"{new_ND.shape[1]}, or train the independent model with dim {new_dim}"
            )
        super().prepare(old, new_ND)

    @override
    def classifier_of_features(self) -> Tensor | None:
        """Return W3 for input φ_new: φ3 = B1⁻¹·φ4 / C, and B2⁻¹·φ5 contains φ4's first part after φ2."""
        config, rows_Cm = self.config, super().classifier_of_features()
        if rows_Cm is None or config.classified == "whole":
            return rows_Cm
        old_room = config.old["dim"] - config.extra_dim
        turned_Cm = rows_Cm.float() @ self.new_basis.weight.T / config.norm_ratio
        compatible_Cd = turned_Cm[:, :old_room] @ self.old_basis.weight[:, config.extra_dim :].T
        return torch.cat([compatible_Cd, turned_Cm[:, old_room:]], dim=-1)

    def _parts(self, pixel_values: Tensor) -> tuple[Tensor, Tensor]:
        """Return φ_new (B, m + e) and φ3 (B, m)."""
        config = self.config
        new_dim, old_room = config.embedding_dim - config.extra_dim, config.old["dim"] - config.extra_dim
        raw = self.neck(self.encoder.image_features(pixel_values))
        own = F.normalize(raw[:, :new_dim].float(), dim=-1)
        turned = config.norm_ratio * self.new_basis(own)
        extra = F.normalize(self.extra(raw).float(), dim=-1)
        compatible = self.old_basis(torch.cat([extra, turned[:, :old_room]], dim=-1))
        return torch.cat([compatible, turned[:, old_room:]], dim=-1), own

    def features(self, pixel_values: Tensor) -> Tensor:
        """Return φ_new, of length √(1 + C²); its first d dimensions have no fixed length."""
        return self._parts(pixel_values)[0]

    @override
    def embed_batch(self, batch: Batch) -> Bt2Output:
        """Embed images; also return φ3."""
        self.require_columns(batch, ("pixel_values",))
        features, own = self._parts(batch["pixel_values"])
        return Bt2Output(image_embeds=F.normalize(features, dim=-1), features=features, new_part=own)

    @override
    def loss(self, output: CompatOutput, batch: Batch) -> Tensor:
        config, labels_B, features, own = self.config, batch["labels"], output["features"], output["new_part"]
        loss = self.classification_loss(own if config.classified == "new_part" else features, labels_B)
        loss = loss + config.independent_weight * angular_alignment_loss(own, batch["new_embeds"])
        loss = loss + config.compat_weight * self.old_classification_loss(features, labels_B)
        return loss + config.old_weight * angular_alignment_loss(self.old_features(features), batch["old_embeds"])
