"""Linear maps in closed form."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from xcompat.core.arrays import forget_pages
from xcompat.core.errors import XcompatError
from xcompat.core.threads import one_thread_if_small, unlocked_property
from xcompat.encoders.base import Encoder
from xcompat.models.mapped import MappedConfig, MappedModel
from xcompat.models.old_knowledge import Rows

BLOCK = 8192  # rows per block of float64 copies


@dataclass(frozen=True)
class Moments:
    """First and second moments of paired embeddings, summed in float64 over batches with any number of rows.

    Args:
        count: number of pairs N.
        new_D: sum of the new embeddings.
        old_d: sum of the old embeddings.
        new_new_DD: sum of outer products of the new embeddings.
        new_old_Dd: sum of outer products of new with old embeddings.
        old_old_dd: sum of outer products of the old embeddings.
    """

    count: int
    new_D: Tensor
    old_d: Tensor
    new_new_DD: Tensor
    new_old_Dd: Tensor
    old_old_dd: Tensor

    @classmethod
    def compute(cls, batches: Iterable[tuple[Tensor, Tensor]]) -> Moments:
        """Compute the moments of paired embeddings in one pass.

        Args:
            batches: pairs of new (B, D) and old (B, d) embeddings for the same samples, L2-normalised.

        Raises:
            XcompatError: there are no pairs.
        """
        count, sums = 0, list[NDArray[np.float64]]()
        for new_BD, old_Bd in batches:
            new, old = (side.cpu().numpy().astype(np.float64) for side in (new_BD, old_Bd))
            # NumPy computes half of a symmetric product, and beside PyTorch's products two thread pools would compete
            parts = [new.sum(0), old.sum(0), new.T @ new, new.T @ old, old.T @ old]
            count, sums = count + len(new), list(map(np.add, sums, parts)) if sums else parts
        if not count:
            raise XcompatError("a closed-form map needs paired embeddings, but there are none; check both models' embeddings")
        return cls(count, *map(torch.from_numpy, sums))

    def plus(self, other: Moments, share: float = 1.0) -> Moments:
        """Return the moments of both sets of pairs; each pair of the other set counts as ``share`` pairs."""
        sums = {name: mine + share * getattr(other, name) for name, mine in vars(self).items() if name != "count"}
        return Moments(self.count + round(share * other.count), **sums)

    def means(self) -> tuple[Tensor, Tensor]:
        """Return the mean new embedding (D,) and the mean old embedding (d,)."""
        return self.new_D / self.count, self.old_d / self.count

    def covariances(self) -> tuple[Tensor, Tensor]:
        """Return the covariance of new embeddings (D, D) and their cross-covariance with old embeddings (D, d)."""
        new_mean_D, old_mean_d = self.means()
        covariance_DD = self.new_new_DD / self.count - torch.outer(new_mean_D, new_mean_D)
        return covariance_DD, self.new_old_Dd / self.count - torch.outer(new_mean_D, old_mean_d)

    @unlocked_property
    def centred_svd(self) -> tuple[Tensor, Tensor, Tensor]:
        """Singular value decomposition of the cross-covariance, computed once for rotations with and without a scale."""
        left_DK, singular_K, right_Kd = torch.linalg.svd(self.covariances()[1], full_matrices=False)
        return left_DK, singular_K, right_Kd


def solve_ridge(moments: Moments, regularisation: float, rank: int | None = None) -> tuple[Tensor, Tensor]:
    """Return argmin ‖XW + b − Y‖² + λ‖W‖² over W with limited rank (Hoerl and Kennard 1970; Izenman 1975).

    With C = Cov(X) + λI and W = C⁻¹Cov(X, Y), any other W' has an additional loss of tr (W − W')ᵀC(W − W'). The best W' with rank
    r is W·V·Vᵀ with V the first r eigenvectors of WᵀCW, not W's truncated singular values.

    Args:
        moments: moments of the pairs (X, Y); X are the new embeddings.
        regularisation: λ in units of the mean variance of the new dimensions.
        rank: r; None to use full rank.

    Returns:
        Weight (D, d) and bias (d,), float64.

    Raises:
        XcompatError: the embeddings are all equal, or λ is not above 0.
    """
    covariance_DD, cross_Dd = moments.covariances()
    strength = regularisation * covariance_DD.diagonal().mean()
    if not strength > 0:
        raise XcompatError("ridge cannot be solved: the new embeddings are all equal, or options.regularisation is not above 0")
    damped_DD = covariance_DD + strength * torch.eye(len(covariance_DD), dtype=torch.float64)
    weight_Dd = torch.linalg.solve(damped_DD, cross_Dd)
    if rank is not None:
        kept_dr = torch.linalg.eigh(cross_Dd.T @ weight_Dd).eigenvectors[:, -rank:]  # WᵀCW = Cov(Y, X)·W
        weight_Dd = weight_Dd @ kept_dr @ kept_dr.T
    new_mean_D, old_mean_d = moments.means()
    return weight_Dd, old_mean_d - new_mean_D @ weight_Dd


def solve_procrustes(moments: Moments, centre: bool = False, scale: bool = False) -> tuple[Tensor, Tensor]:
    """Return argmax tr(WᵀXᵀY) over W with orthonormal columns (rows, if d > D): UVᵀ of XᵀY = USVᵀ (Schönemann 1966).

    Args:
        moments: moments of the pairs (X, Y); X are the new embeddings.
        centre: whether to centre X and Y first; the bias then maps X's mean to Y's mean.
        scale: whether to multiply W by argmin_s ‖s·XW − Y‖² = tr S / tr WᵀXᵀXW (Schönemann and Carroll 1970).

    Returns:
        Weight (D, d) and bias (d,), float64.

    Raises:
        XcompatError: scale is requested, but the embeddings are all equal.
    """
    svd = moments.centred_svd if centre else torch.linalg.svd(moments.new_old_Dd, full_matrices=False)
    left_DK, singular_K, right_Kd = svd
    weight_Dd = left_DK @ right_Kd
    if scale:
        new_new_DD = moments.covariances()[0] if centre else moments.new_new_DD
        spread = (weight_Dd.T @ new_new_DD @ weight_Dd).diagonal().sum()
        if not spread > 0:
            raise XcompatError("a rotation with a scale cannot be solved: the new embeddings are all equal")
        weight_Dd = weight_Dd * (singular_K.sum() / spread)
    new_mean_D, old_mean_d = moments.means()
    return weight_Dd, old_mean_d - new_mean_D @ weight_Dd if centre else torch.zeros_like(old_mean_d)


def readable_pairs(new_ND: Rows, old_Nd: Rows) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield blocks of paired embeddings, (B, D) and (B, d) float32, without unreadable samples.

    Args:
        new_ND: the new model's embeddings; NaN if unreadable.
        old_Nd: the old model's embeddings for the same samples.
    """
    for start in range(0, len(new_ND), BLOCK):
        new_BD, old_Bd = (torch.from_numpy(np.array(side[start : start + BLOCK], np.float32)) for side in (new_ND, old_Nd))
        kept_B = new_BD[:, 0].isfinite() & old_Bd[:, 0].isfinite()
        yield (new_BD, old_Bd) if kept_B.all() else (new_BD[kept_B], old_Bd[kept_B])
        forget_pages(new_ND)
        forget_pages(old_Nd)


class ClosedFormModel(MappedModel):
    """Linear map ``normalise(x @ weight + bias)`` in closed form (see :class:`MappedModel`)."""

    is_solved = True

    def __init__(self, config: MappedConfig, encoder: Encoder | None = None) -> None:
        super().__init__(config, encoder)
        self.weight = torch.nn.Parameter(torch.zeros(self.source_dim, self.target_dim), requires_grad=False)
        self.bias = torch.nn.Parameter(torch.zeros(self.target_dim), requires_grad=False)
        self.post_init()

    @property
    def dtype(self) -> torch.dtype:
        """Return the map's dtype. Transformers would check all parameters for every query."""
        return self.weight.dtype

    def set_trainable(self) -> None:
        """Freeze all parameters."""
        self.requires_grad_(False)

    @override
    def map(self, embeds: Tensor) -> Tensor:
        # equals F.normalize(embeds @ weight + bias), with fewer calls, which take most of the time of a query
        mapped = torch.addmm(self.bias, embeds, self.weight).float()
        return mapped / torch.linalg.vector_norm(mapped, dim=-1, keepdim=True).clamp_min(1e-12)

    @property
    @override
    def own_view_layers(self) -> Iterable[torch.nn.Module] | None:
        layer = torch.nn.Linear(self.source_dim, self.target_dim)
        layer.load_state_dict({"weight": self.weight.T, "bias": self.bias})
        return (layer,)

    def set_map(self, weight_ST: Tensor, bias_T: Tensor) -> Self:
        """Set the weight (S, T) and the bias (T,)."""
        with torch.no_grad():
            self.weight.copy_(weight_ST)
            self.bias.copy_(bias_T)
        return self


class LeastSquaresModel(ClosedFormModel):
    """Linear map computed from pair moments."""

    @override
    def fit(self, batches: Iterable[tuple[Tensor, Tensor]]) -> Self:
        return self.fit_moments(Moments.compute(self.order_sides(new, old) for new, old in batches))

    def fit_moments(self, moments: Moments) -> Self:
        """Solve for the map. The moments' "new" side is the source, "old" the target."""
        with one_thread_if_small(max(moments.new_old_Dd.shape)):
            return self.set_map(*self.solve(moments))

    @abstractmethod
    def solve(self, moments: Moments) -> tuple[Tensor, Tensor]:
        """Return weight (S, T) and bias (T,) from moments as in :meth:`fit_moments`."""
