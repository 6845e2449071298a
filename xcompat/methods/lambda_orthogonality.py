"""λ-orthogonality: a line between Procrustes and least squares, by a penalty on what is not a rotation."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from xcompat.encoders.base import Encoder
from xcompat.errors import XcompatError
from xcompat.models.closed_form import LeastSquaresModel, Moments, solve_procrustes
from xcompat.models.mapped import MappedConfig

Floats = NDArray[np.float64]
ITERATIONS = 500


class LambdaOrthogonalityConfig(MappedConfig):
    """Configuration of :class:`LambdaOrthogonalityModel`.

    Args:
        strength: λ, the weight of ‖WᵀW − I‖² beside the mean squared error.
    """

    model_type = "xcompat-lambda_orthogonality"

    strength: float = 1.0


class LambdaOrthogonalityModel(LeastSquaresModel):
    """argmin mean ‖xW + b − y‖² + λ‖WᵀW − I‖² (after Ricci et al. 2025, arXiv 2509.16664).

    Where the target has more dimensions than the source the penalty is on WWᵀ, which alone can be I. With λ = 0 that is least
    squares. Between spaces of equal dimensions it comes to centred Procrustes as λ grows; onto fewer dimensions to the best
    orthonormal columns in squared error, which Procrustes' need not be. Formula from memory of the abstract, to be checked
    against the paper, which learns the line by steps with its penalty relaxed; here it is solved by L-BFGS from both limits,
    of which the better is kept.
    """

    config_class = LambdaOrthogonalityConfig
    citation = "Ricci et al., λ-orthogonality regularization for compatible representation learning, NeurIPS 2025"

    def __init__(self, config: LambdaOrthogonalityConfig, encoder: Encoder | None = None) -> None:
        if not 0 <= config.strength < float("inf"):
            raise XcompatError(f"options.strength is {config.strength}; give 0 (least squares) or more, or leave it out")
        super().__init__(config, encoder)

    @override
    def solve(self, moments: Moments) -> tuple[Tensor, Tensor]:
        covariance, cross = (part.numpy() for part in moments.centred())
        starts = (np.linalg.lstsq(covariance, cross, rcond=None)[0], solve_procrustes(moments, centre=True)[0].numpy())
        found = [_descended(start, covariance, cross, self.config.strength) for start in starts]
        weight_ST = torch.from_numpy(min(found, key=lambda each: each[0])[1])
        source_S, target_T = moments.means()
        return weight_ST, target_T - source_S @ weight_ST


def _descended(start_ST: Floats, covariance_SS: Floats, cross_ST: Floats, strength: float) -> tuple[float, Floats]:
    """Return the least loss that L-BFGS finds from a start, but for a constant, and its weight."""
    from scipy.optimize import minimize

    tall = len(cross_ST) >= len(cross_ST.T)

    def loss(flat: Floats) -> tuple[float, Floats]:
        weight_ST = flat.reshape(start_ST.shape)
        fitted_ST = covariance_SS @ weight_ST
        excess = (weight_ST.T @ weight_ST if tall else weight_ST @ weight_ST.T) - np.eye(min(cross_ST.shape))
        value = (weight_ST * (fitted_ST - 2 * cross_ST)).sum() + strength * (excess**2).sum()
        slope_ST = 2 * (fitted_ST - cross_ST) + 4 * strength * (weight_ST @ excess if tall else excess @ weight_ST)
        return float(value), slope_ST.ravel()

    # the usual tolerances stop early: a squared error of unit vectors is small
    options = {"maxiter": ITERATIONS, "maxfun": 2 * ITERATIONS, "ftol": 1e-12, "gtol": 1e-9}
    found = minimize(loss, start_ST.ravel(), jac=True, method="L-BFGS-B", options=options)
    return float(found.fun), found.x.reshape(start_ST.shape)
