"""Geometry-aware residual: a frozen closed form, and a network that moves only embeddings with wrong neighbours."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from xcompat.core.errors import XcompatError
from xcompat.encoders.base import Encoder
from xcompat.losses.classification import mean_of_known
from xcompat.models.closed_form import Moments, solve_procrustes, solve_ridge
from xcompat.models.registry import register
from xcompat.models.residual_map import ResidualMapConfig, ResidualMapModel
from xcompat.outputs import Batch, CompatOutput

DAMPING = 0.01
"""λ of the ridge regression, in units of the mean variance of the source's dimensions."""


class GeometryResidualConfig(ResidualMapConfig):
    """Configuration of :class:`GeometryResidualModel`.

    Args:
        start: fixed closed form: centred ``procrustes``, or ``ridge``.
        margin: least difference in cosine between an item's own target embedding and its neighbours.
        neighbours: number of other items' target embeddings to compare, the nearest in the batch to the item's own.
    """

    model_type = "xcompat-geometry_residual"

    start: Literal["procrustes", "ridge"] = "procrustes"
    margin: Annotated[float, Field(ge=0)] = 0.05
    neighbours: int = 5


@register
class GeometryResidualModel(ResidualMapModel):
    """g(x) = normalise(Ax + c + W2·GELU(W1·x + b1) + b2), L = mean max(0, m + cos(g(x_i), y_n) − cos(g(x_i), y_i)).

    After Zhao 2026 (arXiv 2605.05674): a residual that starts at 0, triplets with a small margin, and unit vectors. A and c are
    solved and stay fixed. y_n are the target embeddings nearest to y_i in the batch, from another class if classes are known.
    Triplets within the margin have no gradient, so training stops where the geometry is right. docs/methods/geometry_residual.md
    lists the differences from the paper.
    """

    config_class = GeometryResidualConfig
    columns_if_known = ("labels",)
    citation = (
        "Zhao, EGA: adapting frozen encoders for vector search with bounded out-of-distribution degradation, arXiv 2605.05674"
    )

    def __init__(self, config: GeometryResidualConfig, encoder: Encoder | None = None) -> None:
        if config.neighbours < 1:
            raise XcompatError(f"options.neighbours is {config.neighbours}; give a number from 1, or remove it")
        super().__init__(config, encoder)

    @override
    def solve(self, moments: Moments) -> tuple[Tensor, Tensor]:
        ridge = self.config.start == "ridge"
        return solve_ridge(moments, DAMPING) if ridge else solve_procrustes(moments, centre=True)

    @override
    def loss(self, output: CompatOutput, batch: Batch) -> Tensor:
        mapped_BT, target_BT = output["image_embeds"], F.normalize(self.target(batch).float(), dim=-1)
        others_BB = ~torch.eye(len(target_BT), dtype=torch.bool, device=target_BT.device)
        if (labels_B := batch.get("labels")) is not None:
            others_BB = labels_B[:, None] != labels_B
        count = min(self.config.neighbours, len(target_BT))
        near_BK = (target_BT @ target_BT.T).masked_fill(~others_BB, -torch.inf).topk(count).indices
        cosines_BB = mapped_BT @ target_BT.T
        missed_BK = F.relu(self.config.margin + cosines_BB.gather(1, near_BK) - cosines_BB.diagonal()[:, None])
        counted_BK = others_BB.gather(1, near_BK)
        return mean_of_known(missed_BK, counted_BK)
