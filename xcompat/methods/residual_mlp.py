"""Residual MLP: ridge regression, and a small network that learns its residual."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from torch import Tensor
from typing_extensions import override

from xcompat.losses import angular_alignment_loss
from xcompat.models.closed_form import Moments, solve_ridge
from xcompat.models.registry import register
from xcompat.models.residual_map import ResidualMapConfig, ResidualMapModel
from xcompat.outputs import Batch, CompatOutput


class ResidualMlpConfig(ResidualMapConfig):
    """Configuration of :class:`ResidualMlpModel`.

    Args:
        regularisation: the ridge regression's λ, in units of the mean variance of the source's dimensions.
    """

    model_type = "xcompat-residual_mlp"

    regularisation: Annotated[float, Field(ge=0)] = 0.01


@register
class ResidualMlpModel(ResidualMapModel):
    """g(x) = normalise(Ax + c + W2·GELU(W1·x + b1) + b2), L = mean(1 − cos(g(x), y)) (Vejendla 2025, Drift-Adapter).

    A and c are the ridge solution and stay fixed. W2 and b2 start at 0, so training starts at the linear map. The paper has x
    instead of Ax + c, and a mean square error, which equals the cosine loss on unit vectors up to a factor.
    """

    config_class = ResidualMlpConfig
    citation = "Vejendla, Drift-Adapter: near zero-downtime embedding model upgrades in vector databases, EMNLP 2025"

    @override
    def solve(self, moments: Moments) -> tuple[Tensor, Tensor]:
        return solve_ridge(moments, self.config.regularisation)

    @override
    def loss(self, output: CompatOutput, batch: Batch) -> Tensor:
        return angular_alignment_loss(output["image_embeds"], self.target(batch))
