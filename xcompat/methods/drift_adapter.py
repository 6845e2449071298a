"""Drift-Adapter: a rotation, a low-rank affine map or a small network, with a factor on every output dimension."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from xcompat.core.errors import XcompatError
from xcompat.encoders.base import Encoder
from xcompat.losses import angular_alignment_loss
from xcompat.models.closed_form import Moments, readable_pairs, solve_procrustes, solve_ridge
from xcompat.models.mapped import LearnedMapModel, MappedConfig
from xcompat.models.old_knowledge import OldKnowledge, Rows
from xcompat.models.registry import register
from xcompat.outputs import Batch, CompatOutput

DAMPING = 0.01
"""λ of the ridge regression that starts an affine map, in units of the mean variance of the source's dimensions."""


class DriftAdapterConfig(MappedConfig):
    """Configuration of :class:`DriftAdapterModel`.

    Args:
        variant: map under the factors: ``orthogonal``, a rotation; ``low_rank``, an affine map; ``mlp``, a rotation plus a
            network.
        rank: the affine map's largest rank.
        hidden: network width.
    """

    model_type = "xcompat-drift_adapter"

    variant: Literal["orthogonal", "low_rank", "mlp"] = "mlp"
    rank: int = 64
    hidden: int = 256


@register
class DriftAdapterModel(LearnedMapModel):
    """g(x) = normalise(s ⊙ h(x)), L = mean(1 − cos(g(x), y)), s a factor for each dimension (Vejendla 2025, arXiv 2509.23471).

    h(x) is xR, x·U·Vᵀ + t, or xR + W2·GELU(W1·x + b1) + b2. R is the Procrustes solution and stays fixed. Other parts start at
    least squares: U·Vᵀ and t at the ridge regression with this rank, W2 and b2 at 0. With a rotation, s starts at its best
    factors. docs/methods/drift_adapter.md lists the differences from the paper.
    """

    config_class = DriftAdapterConfig
    citation = "Vejendla, Drift-Adapter: near zero-downtime embedding model upgrades in vector databases, EMNLP 2025"

    def __init__(self, config: DriftAdapterConfig, encoder: Encoder | None = None) -> None:
        for name in ("rank", "hidden"):
            if getattr(config, name) < 1:
                raise XcompatError(f"options.{name} is {getattr(config, name)}; give a number from 1, or remove it")
        super().__init__(config, encoder)
        source, target = self.source_dim, self.target_dim
        self.linear = nn.Sequential(nn.Linear(source, target, bias=False))
        self.rank = min(config.rank, source, target)
        if config.variant == "low_rank":
            self.linear = nn.Sequential(nn.Linear(source, self.rank, bias=False), nn.Linear(self.rank, target))
        self.network: nn.Sequential | None = None
        if config.variant == "mlp":
            last = nn.Linear(config.hidden, target)
            nn.init.zeros_(last.weight)
            nn.init.zeros_(last.bias)
            self.network = nn.Sequential(nn.Linear(source, config.hidden), nn.GELU(), last)
        self.scaling = nn.Parameter(torch.ones(target))
        self.set_trainable()
        self.post_init()

    @classmethod
    @override
    def unread_options(cls, options: Mapping[str, object], on_captions: bool) -> Iterator[tuple[str, str]]:
        yield from super().unread_options(options, on_captions)
        variant = options["variant"]
        if variant != "low_rank":
            yield "rank", f"variant {variant} has no rank, only low_rank has one"
        if variant != "mlp":
            yield "hidden", f"variant {variant} has no network, only mlp has one"

    def set_trainable(self) -> None:
        """Train everything but the solved rotation."""
        self.linear.requires_grad_(self.config.variant == "low_rank")

    @override
    @torch.no_grad()
    def prepare(self, old: OldKnowledge, new_ND: Rows | None = None) -> None:
        """Solve the rotation and its factors, or the affine map."""
        assert new_ND is not None
        moments = Moments.compute(readable_pairs(*self.order_sides(new_ND, old.embeddings("drift_adapter"))))
        if self.config.variant == "low_rank":
            down, up = self.linear
            weight_ST, bias_T = solve_ridge(moments, DAMPING, self.rank)
            left, values, right = torch.linalg.svd(weight_ST, full_matrices=False)
            down.load_state_dict({"weight": (left[:, : self.rank] * values[: self.rank]).T})
            up.load_state_dict({"weight": right[: self.rank].T, "bias": bias_T})
        else:
            rotation_ST, _ = solve_procrustes(moments)
            self.linear[0].load_state_dict({"weight": rotation_ST.T})
            common = (moments.new_old_Dd, moments.new_new_DD @ rotation_ST)
            agreed_T, spread_T = ((rotation_ST.T @ each).diagonal() for each in common)
            self.scaling.copy_(agreed_T / spread_T.clamp(min=torch.finfo(spread_T.dtype).tiny))

    @override
    def map(self, embeds: Tensor) -> Tensor:
        mapped = self.linear(embeds)
        if self.network is not None:
            mapped = mapped + self.network(embeds)
        return F.normalize((self.scaling * mapped).float(), dim=-1)

    @property
    @override
    def own_view_layers(self) -> Iterable[nn.Module] | None:
        if self.network is not None:
            return None
        with torch.no_grad():
            eye_SS = torch.eye(self.source_dim, dtype=self.dtype, device=self.device)
            bias_T, weight_ST = (self.scaling * self.linear(rows) for rows in (torch.zeros_like(eye_SS[0]), eye_SS))
            layer = nn.Linear(self.source_dim, self.target_dim)
            layer.load_state_dict({"weight": (weight_ST - bias_T).T, "bias": bias_T})
        return (layer,)

    @override
    def loss(self, output: CompatOutput, batch: Batch) -> Tensor:
        return angular_alignment_loss(output["image_embeds"], self.target(batch))
