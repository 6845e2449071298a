"""RBT: a residual bottleneck transformation between two fixed spaces."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from xcompat.core.distributed import from_main_process
from xcompat.core.errors import XcompatError
from xcompat.encoders.base import Encoder
from xcompat.heads import ResidualBottleneck
from xcompat.losses import classifier_kl_loss, cross_entropy_to
from xcompat.models.closed_form import Moments, readable_pairs, solve_procrustes
from xcompat.models.mapped import LearnedMapModel, MappedConfig
from xcompat.models.old_knowledge import OldKnowledge, Rows, class_means
from xcompat.models.registry import register
from xcompat.outputs import Batch, CompatOutput


class RbtConfig(MappedConfig):
    """Configuration of :class:`RbtModel`.

    Args:
        start: fixed map before the blocks: ``procrustes``, the rotation of the source nearest to the target, or ``identity`` as
            in the paper (for different dimensions, it keeps the first dimensions or appends zeros).
        blocks: number of residual blocks.
        bottleneck: block width, chosen on validation faces (``recipes/vision/search_glyphs.yaml``).
        paths: number of parallel paths in each block.
        similarity_weight: λ1, weight for the squared distance.
        kl_weight: λ2, weight for the divergence between both sides' distributions over the target's prototypes.
        class_weight: λ3, weight for the cross-entropy to the target's prototypes.
    """

    model_type = "xcompat-rbt"

    start: Literal["procrustes", "identity"] = "procrustes"
    blocks: Annotated[int, Field(ge=1)] = 4
    bottleneck: Annotated[int, Field(ge=1)] = 64
    paths: Annotated[int, Field(ge=1)] = 4
    similarity_weight: Annotated[float, Field(ge=0)] = 1.0
    kl_weight: Annotated[float, Field(ge=0)] = 1.0
    class_weight: Annotated[float, Field(ge=0)] = 1.0


@register
class RbtModel(LearnedMapModel):
    """L = λ1·mean‖m − t‖² + λ2·KL(p(t) ‖ p(m)) + λ3·CE(P, m), m = blocks(R·x), p = softmax(s·cos(P, ·)) (Wang et al. 2020).

    P are the target's class means instead of its classifier; m and t have unit length; s is ``logit_scale``. Narrow blocks cannot
    rotate a space, so R is the Procrustes rotation by default. From the identity, two independent models stay apart (FCT Appendix
    J finds the method below old/old).
    """

    config_class = RbtConfig
    columns = ("new_embeds", "old_embeds", "labels")
    citation = "Wang et al., Unified representation learning for cross model compatibility, BMVC 2020"

    prototypes_CT: Tensor | None

    def __init__(self, config: RbtConfig, encoder: Encoder | None = None) -> None:
        super().__init__(config, encoder)
        self.entry = nn.Linear(self.source_dim, self.target_dim, bias=False)
        nn.init.eye_(self.entry.weight)
        self.blocks = nn.Sequential(
            *(ResidualBottleneck(self.target_dim, config.bottleneck, config.paths) for _ in range(config.blocks))
        )
        self.register_buffer("prototypes_CT", None, persistent=False)
        self.set_trainable()
        self.post_init()

    @classmethod
    @override
    def reads_logit_scale(cls, options: Mapping[str, object], on_captions: bool) -> bool:
        return True

    def set_trainable(self) -> None:
        """Train only the blocks; the map before them is solved."""
        self.entry.requires_grad_(False)

    @override
    def prepare(self, old: OldKnowledge, new_ND: Rows | None = None) -> None:
        """Solve the rotation and compute the target's class means."""
        assert new_ND is not None
        source_NS, target_NT = self.order_sides(new_ND, old.embeddings("rbt"))
        if self.config.start == "procrustes":
            moments = from_main_process(lambda: Moments.compute(readable_pairs(source_NS, target_NT)))
            weight_ST, _ = solve_procrustes(moments)
            self.entry.load_state_dict({"weight": weight_ST.T})
        self.prototypes_CT = torch.from_numpy(class_means(target_NT, old.labels_N, old.n_classes)).to(self.device)

    @override
    def map(self, embeds: Tensor) -> Tensor:
        return F.normalize(self.blocks(self.entry(embeds)).float(), dim=-1)

    @override
    def loss(self, output: CompatOutput, batch: Batch) -> Tensor:
        if self.prototypes_CT is None:
            raise XcompatError("RbtModel is not prepared; call prepare(OldKnowledge(...), new_embeddings) first")
        mapped_BT, target_BT, labels_B = output["image_embeds"], self.target(batch), batch["labels"]
        config, scale = self.config, self.config.logit_scale
        similarity = (mapped_BT - target_BT).square().sum(dim=-1).mean()
        divergence = classifier_kl_loss(mapped_BT, target_BT, self.prototypes_CT, scale)
        classes = cross_entropy_to(self.prototypes_CT, mapped_BT, labels_B, scale)
        return config.similarity_weight * similarity + config.kl_weight * divergence + config.class_weight * classes
