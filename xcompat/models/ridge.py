"""Ridge regression from the new space into the old one, with intercept."""

from __future__ import annotations

import torch
from torch import Tensor

from xcompat.errors import XcompatError
from xcompat.models.base import CompatConfig
from xcompat.models.closed_form import ClosedFormModel, Moments


class RidgeConfig(CompatConfig):
    """Configuration of :class:`RidgeModel`.

    Args:
        regularisation: λ in units of the mean variance of the new dimensions.
    """

    model_type = "xcompat-ridge"

    regularisation: float = 0.01


class RidgeModel(ClosedFormModel):
    """argmin ‖XW + b − Y‖² + λ‖W‖² (Hoerl and Kennard 1970)."""

    config_class = RidgeConfig
    citation = "Hoerl and Kennard, Ridge regression, Technometrics 1970"

    def solve(self, moments: Moments) -> tuple[Tensor, Tensor]:
        """See :meth:`ClosedFormModel.solve`."""
        new_mean_D, old_mean_d = moments.new_D / moments.count, moments.old_d / moments.count
        covariance_DD = moments.new_new_DD / moments.count - torch.outer(new_mean_D, new_mean_D)
        cross_Dd = moments.new_old_Dd / moments.count - torch.outer(new_mean_D, old_mean_d)
        strength = self.config.regularisation * covariance_DD.diagonal().mean()
        if not strength > 0:
            raise XcompatError(
                "ridge cannot be solved: the new embeddings are all equal, or options.regularisation is not above 0"
            )
        weight_Dd = torch.linalg.solve(covariance_DD + strength * torch.eye(len(covariance_DD), dtype=torch.float64), cross_Dd)
        return weight_Dd, old_mean_d - new_mean_D @ weight_Dd
