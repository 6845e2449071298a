"""Ridge regression between two spaces, with intercept."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from torch import Tensor
from typing_extensions import override

from xcompat.core.errors import XcompatError
from xcompat.encoders.base import Encoder
from xcompat.models.closed_form import LeastSquaresModel, Moments, solve_ridge
from xcompat.models.mapped import MappedConfig
from xcompat.models.registry import register


class RidgeConfig(MappedConfig):
    """Configuration of :class:`RidgeModel`.

    Args:
        regularisation: λ in units of the mean variance of the source's dimensions.
        rank: the map's largest rank; None for no limit. A quarter of the dimensions is a usual choice.
    """

    model_type = "xcompat-ridge"

    regularisation: Annotated[float, Field(ge=0)] = 0.01
    rank: int | None = None


@register
class RidgeModel(LeastSquaresModel):
    """argmin ‖XW + b − Y‖² + λ‖W‖², with full or reduced rank (Hoerl and Kennard 1970; Izenman 1975).

    Drift-Adapter (Vejendla 2025) trains such a low-rank affine map. This closed form has the smallest loss among all maps with
    its rank.
    """

    config_class = RidgeConfig
    citation = "Hoerl and Kennard, Ridge regression, Technometrics 1970; Izenman, Reduced-rank regression, 1975"

    def __init__(self, config: RidgeConfig, encoder: Encoder | None = None) -> None:
        if config.rank is not None and config.rank < 1:
            raise XcompatError(f"options.rank is {config.rank}; give a rank of at least 1, or remove it")
        super().__init__(config, encoder)

    @override
    def solve(self, moments: Moments) -> tuple[Tensor, Tensor]:
        return solve_ridge(moments, self.config.regularisation, self.config.rank)
