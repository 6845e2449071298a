"""LCE: a map that aligns two spaces' class centres and keeps samples inside their class boundaries."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from xcompat.core.distributed import compute_in_shares
from xcompat.core.errors import XcompatError
from xcompat.encoders.base import Encoder
from xcompat.heads import Projection
from xcompat.losses.classification import in_blocks, mean_of_known
from xcompat.models.mapped import LearnedMapModel, MappedConfig
from xcompat.models.old_knowledge import OldKnowledge, Rows, class_means, rows_of_classes
from xcompat.models.registry import register
from xcompat.outputs import Batch, CompatOutput

CENTRES_AT_ONCE = 8192
"""Most centres with activations in memory for the backward pass."""


class LceConfig(MappedConfig):
    """Configuration of :class:`LceModel`.

    Args:
        alignment_weight: λ_a, weight for 1 minus the cosine between mapped and target centres. The public code's 100 applies to a
            mean square over the d dimensions, which equals 200/d here.
        boundary_weight: λ_b. Both weights were chosen on validation faces (``recipes/vision/search_glyphs.yaml``).
    """

    model_type = "xcompat-lce"

    alignment_weight: Annotated[float, Field(ge=0)] = 10.0
    boundary_weight: Annotated[float, Field(ge=0)] = 10.0


@register
class LceModel(LearnedMapModel):
    """L = λ_a·mean_j(1 − cos(T(s_j), c_j)) + λ_b·mean_i max(b_y − T(x_i)·c_y, 0) (Meng et al. 2021, Eqns. 3 to 5).

    s_j and c_j are class j's centres in source and target; b_j is the smallest cosine between c_j and a target embedding in the
    class. Only T is trained. Use ``new_to_old`` for the paper's backward transformation, and ``old_to_new`` for its forward
    transformation. Every step maps all centres, in blocks, and the backward pass recomputes them, so 100,000 classes fit.
    docs/methods/lce.md lists the differences from the paper.
    """

    config_class = LceConfig
    columns = ("new_embeds", "old_embeds", "labels")
    citation = "Meng et al., Learning compatible embeddings, ICCV 2021"

    source_centres_KS: Tensor
    target_centres_KT: Tensor
    target_centres_CT: Tensor | None
    boundary_C: Tensor

    def __init__(self, config: LceConfig, encoder: Encoder | None = None) -> None:
        super().__init__(config, encoder)
        self.transform = Projection(self.source_dim, self.target_dim)
        for name in ("source_centres_KS", "target_centres_KT", "target_centres_CT", "boundary_C"):
            self.register_buffer(name, None, persistent=False)
        self.post_init()

    @override
    def prepare(self, old: OldKnowledge, new_ND: Rows | None = None) -> None:
        """Compute centres and boundaries."""
        assert new_ND is not None
        source_NS, target_NT = self.order_sides(new_ND, old.embeddings("lce"))
        source_CS, target_CT = (
            F.normalize(torch.from_numpy(class_means(side, old.labels_N, old.n_classes)), dim=-1)
            for side in (source_NS, target_NT)
        )
        known_C = source_CS[:, 0].isfinite() & target_CT[:, 0].isfinite()
        # selected here, because a GPU would wait for a selection in every step
        self.source_centres_KS, self.target_centres_KT = (side[known_C].to(self.device) for side in (source_CS, target_CT))
        self.target_centres_CT = target_CT.masked_fill(~known_C[:, None], torch.nan).to(self.device)
        self.boundary_C = torch.from_numpy(_boundaries(target_NT, old.labels_N, target_CT.numpy())).to(self.device)

    @override
    def map(self, embeds: Tensor) -> Tensor:
        return self.transform(embeds)

    @property
    @override
    def own_view_layers(self) -> Iterable[nn.Module] | None:
        return self.transform

    @override
    def loss(self, output: CompatOutput, batch: Batch) -> Tensor:
        if self.target_centres_CT is None:
            raise XcompatError("LceModel is not prepared; call prepare(OldKnowledge(...), new_embeddings) first")
        mapped_BT, labels_B = output["image_embeds"], batch["labels"]
        known_C = self.target_centres_CT[:, 0].isfinite()
        aligned = self._alignment_loss()
        cosine_B = (mapped_BT * self.target_centres_CT[labels_B].nan_to_num()).sum(dim=-1)
        outside = mean_of_known(F.relu(self.boundary_C[labels_B] - cosine_B), known_C[labels_B])
        return self.config.alignment_weight * aligned + self.config.boundary_weight * outside

    def _alignment_loss(self) -> Tensor:
        """Return mean_j(1 − cos(T(s_j), c_j)), computed in blocks of centres."""

        def block(sources_BS: Tensor, targets_BT: Tensor) -> Tensor:
            return (1 - F.cosine_similarity(self.map(sources_BS), targets_BT, dim=-1)).sum()

        parts = in_blocks(block, CENTRES_AT_ONCE, self.source_centres_KS, self.target_centres_KT)
        return torch.stack(parts).sum() / len(self.target_centres_KT)


def _boundaries(embeds_Nd: Rows, labels_N: NDArray[np.int64], centres_Cd: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return each class's smallest cosine to its centre (C,); 1 for classes without samples."""

    def compute(classes_c: NDArray[np.int64]) -> NDArray[np.float32]:
        smallest_c = np.ones(len(classes_c), np.float32)
        for rows_B in rows_of_classes(labels_N, classes_c):
            labels_B = labels_N[rows_B]
            cosines_B = (embeds_Nd[rows_B] * centres_Cd[labels_B]).sum(axis=1)
            kept_B = np.isfinite(cosines_B)
            np.minimum.at(smallest_c, np.searchsorted(classes_c, labels_B[kept_B]), cosines_B[kept_B])
        return smallest_c

    return compute_in_shares(len(centres_Cd), compute)
