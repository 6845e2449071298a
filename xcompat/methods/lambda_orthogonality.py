"""λ-orthogonality: a linear map between Procrustes and least squares, with a penalty on the distance from rotations."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from xcompat.core.errors import XcompatError
from xcompat.encoders.base import Encoder
from xcompat.models.closed_form import LeastSquaresModel, Moments, solve_procrustes
from xcompat.models.mapped import MappedConfig
from xcompat.models.registry import register

Floats = NDArray[np.float64]
ITERATIONS = 500
STEEPNESS = 10.0
"""Default α: the penalty is 10 % on at 0.2 below the threshold, and 90 % at 0.2 above."""


class LambdaOrthogonalityConfig(MappedConfig):
    """Configuration of :class:`LambdaOrthogonalityModel`.

    Args:
        strength: the penalty's weight beside the mean squared error.
        threshold: the paper's λ, the largest ‖WᵀW − I‖ without a penalty; None for a squared penalty on any distance.
        steepness: the paper's α, the penalty's steepness at the threshold; None for 10.
    """

    model_type = "xcompat-lambda_orthogonality"

    strength: float = 1.0
    threshold: float | None = None
    steepness: float | None = None


@register
class LambdaOrthogonalityModel(LeastSquaresModel):
    """argmin mean ‖xW + b − y‖² + w·P(‖WᵀW − I‖), P(f) = σ(α(f − λ))·f or f² (Ricci et al. 2025, arXiv 2509.16664, §3.3).

    The first P is the paper's λ-orthogonality (its equation 6), used with a threshold λ. The second is squared soft
    orthogonality. With weight 0 it gives least squares; with a growing weight it approaches centred Procrustes for equal
    dimensions, and least-squares orthonormal columns for fewer target dimensions. For more target dimensions, the penalty is on
    WWᵀ. L-BFGS solves W from both limits, and the better solution wins. docs/methods/lambda_orthogonality.md lists the
    differences from the paper.
    """

    config_class = LambdaOrthogonalityConfig
    citation = "Ricci et al., λ-orthogonality regularization for compatible representation learning, NeurIPS 2025"

    def __init__(self, config: LambdaOrthogonalityConfig, encoder: Encoder | None = None) -> None:
        if not 0 <= config.strength < float("inf"):
            raise XcompatError(f"options.strength is {config.strength}; give 0 (least squares) or more, or remove it")
        if config.threshold is not None and not 0 <= config.threshold < float("inf"):
            raise XcompatError(f"options.threshold is {config.threshold}; give 0 or more, or remove it")
        if config.steepness is not None and not 0 < config.steepness < float("inf"):
            raise XcompatError(f"options.steepness is {config.steepness}; give more than 0, or remove it")
        super().__init__(config, encoder)

    @classmethod
    @override
    def unread_options(cls, options: Mapping[str, object], on_captions: bool) -> Iterator[tuple[str, str]]:
        yield from super().unread_options(options, on_captions)
        if options["threshold"] is None:
            yield "steepness", "it applies only with options.threshold"

    @override
    def solve(self, moments: Moments) -> tuple[Tensor, Tensor]:
        covariance, cross = (part.numpy() for part in moments.covariances())
        starts = (np.linalg.lstsq(covariance, cross, rcond=None)[0], solve_procrustes(moments, centre=True)[0].numpy())
        found = [_minimise_loss(start, covariance, cross, self._penalty) for start in starts]
        weight_ST = torch.from_numpy(min(found, key=lambda each: each[0])[1])
        source_S, target_T = moments.means()
        return weight_ST, target_T - source_S @ weight_ST

    def _penalty(self, distance: float) -> tuple[float, float]:
        """Return w·P of ‖WᵀW − I‖, and its derivative by ‖WᵀW − I‖², which f² also has at 0."""
        weight, threshold = self.config.strength, self.config.threshold
        if threshold is None:
            return weight * distance**2, weight
        steepness, distance = self.config.steepness or STEEPNESS, max(distance, 1e-12)
        on = (1 + math.tanh(steepness * (distance - threshold) / 2)) / 2  # a sigmoid that cannot overflow
        slope = on + steepness * distance * on * (1 - on)
        return weight * on * distance, weight * slope / (2 * distance)


def _minimise_loss(
    start_ST: Floats, covariance_SS: Floats, cross_ST: Floats, penalty: Callable[[float], tuple[float, float]]
) -> tuple[float, Floats]:
    """Return the lowest loss that L-BFGS finds from a start, up to a constant, and its weight."""
    from scipy.optimize import minimize

    tall = len(cross_ST) >= len(cross_ST.T)

    def loss(flat: Floats) -> tuple[float, Floats]:
        weight_ST = flat.reshape(start_ST.shape)
        fitted_ST = covariance_SS @ weight_ST
        excess = (weight_ST.T @ weight_ST if tall else weight_ST @ weight_ST.T) - np.eye(min(cross_ST.shape))
        cost, steep = penalty(float(np.linalg.norm(excess)))
        value = (weight_ST * (fitted_ST - 2 * cross_ST)).sum() + cost
        slope_ST = 2 * (fitted_ST - cross_ST) + 4 * steep * (weight_ST @ excess if tall else excess @ weight_ST)
        return float(value), slope_ST.ravel()

    # default tolerances stop early, because squared errors of unit vectors are small
    options = {"maxiter": ITERATIONS, "maxfun": 2 * ITERATIONS, "ftol": 1e-12, "gtol": 1e-9}
    found = minimize(loss, start_ST.ravel(), jac=True, method="L-BFGS-B", options=options)
    return float(found.fun), found.x.reshape(start_ST.shape)
