"""Small modules that methods add to an encoder, and the interpolation of two queries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from xcompat.core.errors import XcompatError

LayerNorms = Literal["batch", "layer"]
"""Normalisation between two layers."""
OPPOSITE = 1e-6
"""Minimum angle from opposite, in radians. Below it, float32 rounding would choose the direction of an arc."""


class Projection(nn.Sequential):
    """φ, the map from the new to the old embedding space.

    Linear-LN-GELU-Linear-LN-GELU-Linear with four times the output's width inside and no dropout (XBT §4.1).
    D = 768 and d = 512 give 6.83 M parameters.

    Args:
        new_dim: D, the new embeddings' dimension.
        old_dim: d, the old embeddings' dimension.

    Example:
        >>> sum(p.numel() for p in Projection(768, 512).parameters())
        6828544
    """

    def __init__(self, new_dim: int, old_dim: int) -> None:
        hidden = 4 * old_dim
        super().__init__(
            nn.Linear(new_dim, hidden),
            nn.LayerNorm(hidden),
            nn.GELU(),
            nn.Linear(hidden, hidden),
            nn.LayerNorm(hidden),
            nn.GELU(),
            nn.Linear(hidden, old_dim),
        )

    def forward(self, new_embeds_BD: Tensor) -> Tensor:
        """Map and normalise.

        Args:
            new_embeds_BD: the new model's embeddings, L2-normalised.

        Returns:
            (B, d) float32, L2-normalised: synthetic old embeddings.
        """
        return F.normalize(super().forward(new_embeds_BD.to(next(self.parameters()).dtype)).float(), dim=-1)


def first_dims(dim: int, kept: int) -> nn.Linear:
    """Return the linear layer that keeps its input's first dimensions.

    Args:
        dim: D, input dimension.
        kept: d, number of kept dimensions.

    Example:
        >>> first_dims(3, 2)(torch.tensor([1.0, 2.0, 3.0])).tolist()
        [1.0, 2.0]
    """
    layer = nn.Linear(dim, kept, bias=False)
    nn.init.eye_(layer.weight)
    return layer


class ForwardTransform(nn.Module):
    """h, the map from an old embedding and its side-information into the new space (FCT §3.2, Appendix D.1).

    Each input passes Linear-BN-ReLU twice, 256 wide. Their concatenation passes Linear-BN-ReLU twice, 2048 wide, and a Linear.
    Without side-information there is a single branch (the paper feeds zeros to a second branch, so its output is constant). The
    output is normalised in training and inference, as in Appendix D.7. Use ``unit=False`` to compare embeddings by L2 distance,
    as in the other experiments. d = S = D = 128 give 5.72 M parameters.

    Args:
        old_dim: d, the old embeddings' dimension.
        side_dim: S, the side-information's dimension. None for no side-information.
        new_dim: D, output dimension.
        mixer: layer width behind the branches. Table 11 has 512 to 4096.
        unit: whether the output has length 1.
        unit_side: whether to normalise side-information first.
        norm: ``batch``, or ``layer``, which has no batch statistics (Appendix D.5).

    Example:
        >>> sum(p.numel() for p in ForwardTransform(128, 128, 128).parameters())
        5717120
    """

    def __init__(
        self,
        old_dim: int,
        side_dim: int | None,
        new_dim: int,
        mixer: int = 2048,
        *,
        unit: bool = True,
        unit_side: bool = True,
        norm: LayerNorms = "batch",
    ) -> None:
        super().__init__()
        self.unit, self.unit_side = unit, unit_side
        self.old_branch = _normed_layers(old_dim, 256, norm)
        self.side_branch = _normed_layers(side_dim, 256, norm) if side_dim is not None else None
        self.mixer = nn.Sequential(_normed_layers(256 if side_dim is None else 512, mixer, norm), nn.Linear(mixer, new_dim))

    def forward(self, old_Bd: Tensor, side_BS: Tensor | None = None) -> Tensor:
        """Map and, with ``unit``, normalise.

        Args:
            old_Bd: old embeddings, L2-normalised unless compared by L2 distance.
            side_BS: the same items' side-information, of any length. Bits are fine.

        Returns:
            (B, D) float32.
        """
        return self.apply_last_layer(self.to_last_layer(old_Bd, side_BS))

    def to_last_layer(self, old_Bd: Tensor, side_BS: Tensor | None = None) -> Tensor:
        """Return the last layer's input (B, M), for the inputs of :meth:`forward`."""
        dtype = next(self.parameters()).dtype
        inside = self.old_branch(old_Bd.to(dtype))
        if self.side_branch is not None:
            assert side_BS is not None
            side_BS = F.normalize(side_BS.float(), dim=-1) if self.unit_side else side_BS
            inside = torch.cat([inside, self.side_branch(side_BS.to(dtype))], dim=-1)
        return self.mixer[0](inside)

    def apply_last_layer(self, inside_BM: Tensor) -> Tensor:
        """Return the output (B, D) float32 for the last layer's input."""
        mapped_BD = self.mixer[1](inside_BM).float()
        return F.normalize(mapped_BD, dim=-1) if self.unit else mapped_BD


def _normed_layers(width: int, hidden: int, norm: LayerNorms) -> nn.Sequential:
    first, second = nn.Linear(width, hidden), nn.Linear(hidden, hidden)
    made = nn.BatchNorm1d if norm == "batch" else nn.LayerNorm
    return nn.Sequential(first, made(hidden), nn.ReLU(), second, made(hidden), nn.ReLU())


class ResidualBottleneck(nn.Module):
    """x ↦ x + Σ_k b_k(x), each path Linear(D, 16)-BN-PReLU-Linear(16, 16)-BN-PReLU-Linear(16, D)-BN-PReLU (Wang et al. 2020).

    Each path's last normalisation scale starts at 0, so the block starts as the identity.

    Args:
        dim: D.
        width: bottleneck width.
        paths: number of parallel paths.
    """

    def __init__(self, dim: int, width: int = 16, paths: int = 4) -> None:
        super().__init__()

        def path() -> nn.Sequential:
            last = nn.BatchNorm1d(dim)
            nn.init.zeros_(last.weight)
            down, inner, up = nn.Linear(dim, width, bias=False), nn.Linear(width, width), nn.Linear(width, dim)
            norms = nn.BatchNorm1d(width), nn.BatchNorm1d(width)
            return nn.Sequential(down, norms[0], nn.PReLU(), inner, norms[1], nn.PReLU(), up, last, nn.PReLU())

        self.paths = nn.ModuleList(path() for _ in range(paths))

    def forward(self, x_BD: Tensor) -> Tensor:
        """Add all paths' outputs to each row."""
        return x_BD + sum(path(x_BD) for path in self.paths)


class OrthogonalTransform(nn.Module):
    """x ↦ Q·x with a learnable orthogonal Q, which preserves lengths and angles (BT² Lemmas 2 and 3; T_⊥ of OCA §3.2).

    Q = exp(A) with a skew-symmetric A. Its lower triangle is learnt (PyTorch's parametrisation), so Q stays orthogonal through
    any optimiser step, with determinant 1. A bias would change angles, so there is none. Q starts at the identity unless A starts
    at random, as in the papers. ``weight`` is Q, computed at every call. Checkpoints store ``parametrizations.weight.original``.

    Args:
        dim: D.
        random_start: whether A starts like a linear layer's weights instead of 0.

    Example:
        >>> OrthogonalTransform(3)(torch.eye(3)).tolist()
        [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    """

    weight: Tensor

    def __init__(self, dim: int, random_start: bool = False) -> None:
        super().__init__()
        self.register_parameter("weight", nn.Parameter(torch.zeros(dim, dim, dtype=torch.float32)))
        parametrizations.orthogonal(self, "weight", orthogonal_map="matrix_exp", use_trivialization=False)
        if random_start:
            with torch.no_grad():
                self.get_parameter("parametrizations.weight.original").copy_(nn.Linear(dim, dim).weight)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Stay in float32 in half precision, which has no matrix exponential."""

        def compute_unrounded(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if torch.finfo(moved.dtype).bits >= 32 else tensor.to(moved.device)

        return super()._apply(compute_unrounded, recurse)

    def forward(self, x_BD: Tensor) -> Tensor:
        """Transform every row.

        Args:
            x_BD: of any length.

        Returns:
            (B, D) with the same lengths, in at least float32.
        """
        with torch.autocast(x_BD.device.type, enabled=False):  # bf16 rounding would change angles
            weight_DD = self.weight
            return F.linear(x_BD.to(torch.promote_types(x_BD.dtype, weight_DD.dtype)), weight_DD)


def slerp(new_Bd: Tensor, old_Bd: Tensor, share: float) -> Tensor:
    """Mix new and old queries along the shortest arc between their directions, to search the old gallery with both models.

    slerp(n, o; t) = (sin((1 - t)·Ω)·n + sin(t·Ω)·o) / sin Ω with cos Ω = n·o (Shoemake 1985, Animating Rotation with Quaternion
    Curves). The weight of n is computed as (1 - t)·sinc((1 - t)·Ω) / sinc(Ω), and similarly for o, with Ω from both n - o and
    n + o. Close or equal directions and their gradients are therefore no special case. A NaN in either row makes the mix NaN.

    Args:
        new_Bd: the new model's queries in the old space, from its ``view``, of any length but 0.
        old_Bd: the old model's queries for the same items, of any length but 0.
        share: t, the old query's weight, from 0 (only the new query) to 1 (only the old query).

    Returns:
        (B, d) float32, L2-normalised.

    Raises:
        XcompatError: the share is outside 0 to 1, the shapes differ, or two rows are opposite and have no shortest arc.

    Example:
        >>> mixed = slerp(torch.tensor([[2.0, 0.0]]), torch.tensor([[0.0, 1.0]]), share=1 / 3)  # a third of the way, 30°
        >>> [round(x, 3) for x in mixed[0].tolist()]
        [0.866, 0.5]
    """
    if not 0 <= share <= 1:
        raise XcompatError(f"share is {share}; choose a weight of the old query from 0 to 1")
    if new_Bd.shape != old_Bd.shape:
        raise XcompatError(
            f"new queries of shape {tuple(new_Bd.shape)} and old queries of {tuple(old_Bd.shape)} cannot be mixed; pass the new "
            "model's view of the old space and old queries for the same items, in the same order"
        )
    new_Bd, old_Bd = F.normalize(new_Bd.float(), dim=-1), F.normalize(old_Bd.float(), dim=-1)
    apart_B1, together_B1 = ((new_Bd + sign * old_Bd).norm(dim=-1, keepdim=True) for sign in (-1, 1))
    opposite = (together_B1.detach() < OPPOSITE).flatten().nonzero()
    if len(opposite):
        raise XcompatError(
            f"the new and the old query in row {int(opposite[0])} are opposite, so there is no shortest arc between them; "
            "remove this row, or search with only the new or the old query"
        )
    turns_B1 = 2 / torch.pi * torch.atan2(apart_B1, together_B1)  # Ω/π, exact for small angles where the arc cosine is not

    def weight(part: float) -> Tensor:
        return part * torch.sinc(part * turns_B1) / torch.sinc(turns_B1)

    return F.normalize(weight(1 - share) * new_Bd + weight(share) * old_Bd, dim=-1)
