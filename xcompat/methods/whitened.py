"""Whitened map: both spaces' cross moment, between powers of each space's moments."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from itertools import chain
from typing import Annotated, Self

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from xcompat.core.errors import XcompatError
from xcompat.encoders.base import Encoder
from xcompat.models.closed_form import LeastSquaresModel, Moments
from xcompat.models.kmeans import find_centroids
from xcompat.models.mapped import MappedConfig
from xcompat.models.registry import register

DAMPING, DAMPING_OF_FEW = 0.03, 0.3
"""ε with many pairs, and with fewer than twice as many pairs as the larger space has dimensions."""
PRIOR = 1000
"""Number of pairs that all pairs count for in each cluster: clusters have few pairs for their dimensions."""
SAMPLE = 25_000
"""Fewest pairs to find clusters in, if there are as many."""


class WhitenedConfig(MappedConfig):
    """Configuration of :class:`WhitenedModel`.

    Args:
        source_power: a, power for the source's second moments; 1 as in a regression, 0 as in a rotation.
        target_power: b, power for the target's second moments.
        damping: ε, in units of each space's mean eigenvalue; None for 0.03, or 0.3 with fewer pairs than twice the larger
            space's dimension.
        clusters: number of clusters of the source embeddings, each with a map of its own.
    """

    model_type = "xcompat-whitened"

    source_power: Annotated[float, Field(ge=0, le=1)] = 0.75
    target_power: Annotated[float, Field(ge=0, le=1)] = 0.75
    damping: Annotated[float, Field(gt=0)] | None = None
    clusters: Annotated[int, Field(ge=1)] = 1


@register
class WhitenedModel(LeastSquaresModel):
    """W = (C_x + ε)^(-a) · C_xy · (C_y + ε)^(-b), with uncentred second moments C of source x and target y.

    Use a = 1, b = 0 for a regression from x to y without intercept; a = 0, b = 1 for the transpose of a regression from y to x; a
    = b = 1/2 for the canonical correlation score (Hotelling 1936). For jointly Gaussian x and y, a query's optimal score is log
    p(y | x) / p(y) (van den Oord et al. 2018, arXiv 1807.03748). Its cross term is xᵀ C_x^(-1/2) R (I - RᵀR)^(-1) C_y^(-1/2) y
    with the whitened cross moment R. For weak correlations this is a = b = 1. The exponents 3/4 lie between both.

    With several k-means clusters, a source embedding is mapped by the W of its nearest centroid. A cluster's moments are those
    of its pairs, and those of all pairs, which count as :data:`PRIOR` pairs.
    """

    config_class = WhitenedConfig
    citation = "Hotelling, Relations between two sets of variates, Biometrika 1936"

    def __init__(self, config: WhitenedConfig, encoder: Encoder | None = None) -> None:
        super().__init__(config, encoder)
        if config.clusters > 1:
            shape_CST = config.clusters, self.source_dim, self.target_dim
            self.centroids = nn.Parameter(torch.zeros(shape_CST[:2]), requires_grad=False)
            self.local_weights = nn.Parameter(torch.zeros(shape_CST), requires_grad=False)

    @property
    @override
    def own_view_layers(self) -> Iterable[nn.Module] | None:
        return super().own_view_layers if self.config.clusters == 1 else None

    @override
    def map(self, embeds: Tensor) -> Tensor:
        if self.config.clusters == 1:
            return super().map(embeds)
        mapped_BT, nearest_B = embeds.new_empty(len(embeds), self.target_dim), self._nearest(embeds)
        for cluster in nearest_B.unique().tolist():  # all maps of a gallery's block would take gigabytes
            mapped_BT[nearest_B == cluster] = embeds[nearest_B == cluster] @ self.local_weights[cluster]
        return F.normalize(mapped_BT.float(), dim=-1)

    def _nearest(self, embeds_BS: Tensor) -> Tensor:
        """Return each embedding's nearest centroid (B,)."""
        return (self.centroids.square().sum(1) - 2 * embeds_BS.to(self.dtype) @ self.centroids.T).argmin(1)

    @override
    def fit(self, batches: Iterable[tuple[Tensor, Tensor]]) -> Self:
        if self.config.clusters == 1:
            return super().fit(batches)
        sides, first, rows = (self.order_sides(new, old) for new, old in batches), [], 0
        for pair in sides:
            first.append(pair)
            if (rows := rows + len(pair[0])) >= SAMPLE:
                break
        if rows < self.config.clusters:
            raise XcompatError(f"options.clusters is {self.config.clusters}, but there are {rows} pairs; choose fewer clusters")
        found_CS = find_centroids(torch.cat([source for source, _ in first]).double().numpy(), self.config.clusters, seed=0)
        self.centroids.copy_(torch.from_numpy(found_CS))
        parts: dict[int, Moments] = {}
        for source_BS, target_BT in chain(first, sides):
            nearest_B = self._nearest(source_BS)
            for cluster in nearest_B.unique().tolist():
                own = Moments.compute([(source_BS[nearest_B == cluster], target_BT[nearest_B == cluster])])
                parts[cluster] = parts[cluster].plus(own) if cluster in parts else own
        whole = reduce(Moments.plus, parts.values())
        for cluster, own in parts.items():
            self.local_weights[cluster] = self.solve(own.plus(whole, min(1, PRIOR / whole.count)))[0]
        return self.fit_moments(whole)

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
