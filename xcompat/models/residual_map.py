"""Base class for maps that train a network around a closed-form linear map."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from xcompat.core.errors import XcompatError
from xcompat.encoders.base import Encoder
from xcompat.models.closed_form import Moments, readable_pairs
from xcompat.models.mapped import LearnedMapModel, MappedConfig
from xcompat.models.old_knowledge import OldKnowledge, Rows


class ResidualMapConfig(MappedConfig):
    """Configuration of :class:`ResidualMapModel`.

    Args:
        hidden: network width.
    """

    hidden: int = 256


class ResidualMapModel(LearnedMapModel):
    """g(x) = normalise(Ax + c + W2·GELU(W1·x + b1) + b2): A and c are fixed closed-form solutions, W2 and b2 start at 0."""

    config_class = ResidualMapConfig

    def __init__(self, config: ResidualMapConfig, encoder: Encoder | None = None) -> None:
        if config.hidden < 1:
            raise XcompatError(f"options.hidden is {config.hidden}; set 1 or more")
        super().__init__(config, encoder)
        self.skip = nn.Linear(self.source_dim, self.target_dim)
        last = nn.Linear(config.hidden, self.target_dim)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        self.residual = nn.Sequential(nn.Linear(self.source_dim, config.hidden), nn.GELU(), last)
        self.set_trainable()
        self.post_init()

    @abstractmethod
    def solve(self, moments: Moments) -> tuple[Tensor, Tensor]:
        """Return A (S, T) and c (T,) from the moments of all readable pairs."""

    def set_trainable(self) -> None:
        """Train only the network."""
        self.skip.requires_grad_(False)

    @override
    def prepare(self, old: OldKnowledge, new_ND: Rows | None = None) -> None:
        assert new_ND is not None
        method = self.config.model_type.removeprefix("xcompat-")
        weight_ST, bias_T = self.solve(Moments.compute(readable_pairs(*self.order_sides(new_ND, old.embeddings(method)))))
        self.skip.load_state_dict({"weight": weight_ST.T, "bias": bias_T})

    @override
    def map(self, embeds: Tensor) -> Tensor:
        return F.normalize((self.skip(embeds) + self.residual(embeds)).float(), dim=-1)
