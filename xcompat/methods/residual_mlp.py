"""Residual MLP: ridge regression, and a small network that learns its residual."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from xcompat.encoders.base import Encoder
from xcompat.losses import angular_alignment_loss
from xcompat.models.closed_form import Moments, readable_pairs, solve_ridge
from xcompat.models.mapped import LearnedMapModel, MappedConfig
from xcompat.models.old_knowledge import OldKnowledge, Rows
from xcompat.outputs import Batch, CompatOutput


class ResidualMlpConfig(MappedConfig):
    """Configuration of :class:`ResidualMlpModel`.

    Args:
        hidden: width of the network.
        regularisation: λ of the ridge regression, in units of the mean variance of the source's dimensions.
    """

    model_type = "xcompat-residual_mlp"

    hidden: int = 256
    regularisation: float = 0.01


class ResidualMlpModel(LearnedMapModel):
    """g(x) = normalise(Ax + c + W2·GELU(W1·x + b1) + b2), L = mean(1 − cos(g(x), y)) (Vejendla 2025, Drift-Adapter).

    A and c are the ridge solution and stay fixed; W2 and b2 start at 0, so that training begins at the linear map. The paper has
    x in place of Ax + c, which needs similar spaces, and a mean square error, which on unit vectors is the cosine loss up to a
    factor.
    """

    config_class = ResidualMlpConfig
    citation = "Vejendla, Drift-Adapter: near zero-downtime embedding model upgrades in vector databases, EMNLP 2025"

    def __init__(self, config: ResidualMlpConfig, encoder: Encoder | None = None) -> None:
        super().__init__(config, encoder)
        self.skip = nn.Linear(self.source_dim, self.target_dim)
        last = nn.Linear(config.hidden, self.target_dim)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        self.residual = nn.Sequential(nn.Linear(self.source_dim, config.hidden), nn.GELU(), last)
        self.set_trainable()
        self.post_init()

    def set_trainable(self) -> None:
        """Train the network alone; the linear part is solved."""
        self.skip.requires_grad_(False)

    @override
    def prepare(self, old: OldKnowledge, new_ND: Rows | None = None) -> None:
        """Solve the linear part."""
        assert new_ND is not None
        pairs = readable_pairs(*self.ordered(new_ND, old.embeddings("residual_mlp")))
        weight_ST, bias_T = solve_ridge(Moments.of(pairs), self.config.regularisation)
        self.skip.load_state_dict({"weight": weight_ST.T, "bias": bias_T})

    @override
    def map(self, embeds: Tensor) -> Tensor:
        return F.normalize((self.skip(embeds) + self.residual(embeds)).float(), dim=-1)

    @override
    def loss(self, output: CompatOutput, batch: Batch) -> Tensor:
        return angular_alignment_loss(output["image_embeds"], self.target(batch))
