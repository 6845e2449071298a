"""Whitened map: both spaces' cross moment, between powers of each space's moments."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor
from typing_extensions import override

from xcompat.core.errors import XcompatError
from xcompat.models.closed_form import LeastSquaresModel, Moments
from xcompat.models.mapped import MappedConfig
from xcompat.models.registry import register

DAMPING, DAMPING_OF_FEW = 0.03, 0.3
"""ε with many pairs, and with fewer than twice as many pairs as the larger space has dimensions."""


class WhitenedConfig(MappedConfig):
    """Configuration of :class:`WhitenedModel`.

    Args:
        source_power: a, power for the source's second moments; 1 as in a regression, 0 as in a rotation.
        target_power: b, power for the target's second moments.
        damping: ε, in units of each space's mean eigenvalue; None for 0.03, or 0.3 with fewer pairs than twice the larger
            space's dimension.
    """

    model_type = "xcompat-whitened"

    source_power: Annotated[float, Field(ge=0, le=1)] = 0.75
    target_power: Annotated[float, Field(ge=0, le=1)] = 0.75
    damping: Annotated[float, Field(gt=0)] | None = None


@register
class WhitenedModel(LeastSquaresModel):
    """W = (C_x + ε)^(-a) · C_xy · (C_y + ε)^(-b), with uncentred second moments C of source x and target y.

    Use a = 1, b = 0 for a regression from x to y without intercept; a = 0, b = 1 for the transpose of a regression from y to x; a
    = b = 1/2 for the canonical correlation score (Hotelling 1936). For jointly Gaussian x and y, a query's optimal score is log
    p(y | x) / p(y) (van den Oord et al. 2018, arXiv 1807.03748). Its cross term is xᵀ C_x^(-1/2) R (I - RᵀR)^(-1) C_y^(-1/2) y
    with the whitened cross moment R. For weak correlations this is a = b = 1. The exponents 3/4 lie between both.
    """

    config_class = WhitenedConfig
    citation = "Hotelling, Relations between two sets of variates, Biometrika 1936"

    @override
    def solve(self, moments: Moments) -> tuple[Tensor, Tensor]:
        few = moments.count < 2 * max(moments.new_old_Dd.shape)
        damping = self.config.damping if self.config.damping is not None else DAMPING_OF_FEW if few else DAMPING
        source_SS = damped_power(moments.new_new_DD / moments.count, -self.config.source_power, damping)
        target_TT = damped_power(moments.old_old_dd / moments.count, -self.config.target_power, damping)
        weight_ST = source_SS @ (moments.new_old_Dd / moments.count) @ target_TT
        return weight_ST, torch.zeros_like(moments.old_d)


def damped_power(moment_DD: Tensor, power: float, damping: float) -> Tensor:
    """Return (C + ε·mean eigenvalue·I)^power for a symmetric positive semidefinite matrix.

    Args:
        moment_DD: C, float64.
        power: any number.
        damping: ε, above 0.

    Raises:
        XcompatError: C is zero.
    """
    values_D, vectors_DD = torch.linalg.eigh(moment_DD)
    mean = values_D.mean()
    if not mean > 0:
        raise XcompatError("a whitened map cannot be solved: all embeddings of one side are zero")
    return vectors_DD * (values_D.clamp(min=0) + damping * mean) ** power @ vectors_DD.T
