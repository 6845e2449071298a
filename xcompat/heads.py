"""Small modules that methods put on top of an encoder."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


class Projection(nn.Sequential):
    """φ, the map from the new embedding space into the old one.

    Linear-LN-GELU-Linear-LN-GELU-Linear with four times the output's width inside and no dropout (xbt.txt §4.1).
    D = 768 and d = 512 give 6.83 M parameters.

    Args:
        new_dim: D, dimension of the new embeddings.
        old_dim: d, dimension of the old embeddings.

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
            new_embeds_BD: embeddings of the new model, L2-normalised.

        Returns:
            (B, d) float32, L2-normalised: synthetic old embeddings.
        """
        return F.normalize(super().forward(new_embeds_BD).float(), dim=-1)
