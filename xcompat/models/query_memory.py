"""Queries that remember: a metric that only queries are brought to, and what the old model said of what they resemble.

A map of queries cannot say what the classes say, and a network learns those it is shown by heart. Both can be looked up: the
training set holds pairs of a new and an old embedding, a query asks which of them it resembles in the new space and leans towards
their old ones (kernel regression around a map; for classification Tip-Adapter, Zhang et al., ECCV 2022). Nothing is trained, and
the stored gallery stays as it is. Turned round, where stored old embeddings are mapped and queries stay as they are, it is these
that ask: keys lie in the old space and values in the new one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from xcompat.errors import XcompatError, nearest

_LEAST_WEIGHT = 1e-30  # less weighs nothing in float32, and as denormal numbers takes a CPU thirty times as long
_HELD = 2**24  # numbers that are in memory at a time for the queries of a block


class QueryMetric(nn.Module):
    """q ↦ normalise((normalise(q) − μ)·A) with A = (C + ε·tr(C)/d·I)^(−α), symmetric.

    A gallery ranked by ⟨g, (q − μ)·A⟩ counts those directions less in which what belongs together differs. Only the query is
    multiplied, so that any index takes it.

    Args:
        dim: d.
    """

    mean_d: Tensor
    matrix_dd: Tensor

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.register_buffer("mean_d", torch.zeros(dim))
        self.register_buffer("matrix_dd", torch.eye(dim))

    @classmethod
    def solve(cls, mean_d: Tensor, covariance_dd: Tensor, power: float, damping: float) -> Self:
        """Return the metric of a mean and a covariance.

        Args:
            mean_d: μ.
            covariance_dd: C, within classes, or of the stored gallery.
            power: α; 0 only centres, 0.5 whitens.
            damping: ε, in units of the mean variance.

        Returns:
            The metric, A divided by its mean eigenvalue.

        Raises:
            XcompatError: there is no variance, or the damping is not above 0.
        """
        strength = damping * covariance_dd.diagonal().mean()
        if not strength > 0:
            raise XcompatError("a query metric needs embeddings that differ within their classes, and a damping above 0")
        values_d, vectors_dd = torch.linalg.eigh(covariance_dd.double())
        scaled_d = (values_d.clamp(min=0) + strength) ** -power
        metric = cls(len(mean_d))
        metric.mean_d.copy_(mean_d)
        metric.matrix_dd.copy_((vectors_dd * (scaled_d / scaled_d.mean())) @ vectors_dd.T)
        return metric

    def forward(self, embeds_Bd: Tensor) -> Tensor:
        """Bring queries (B, d) of any length to the metric: (B, d) float32 of length 1."""
        return self.centred(F.normalize(embeds_Bd.float(), dim=-1))

    def centred(self, embeds_Bd: Tensor) -> Tensor:
        """Bring what is not to be normalised first to the metric, such as means of classes: a wide class has a short one."""
        return F.normalize((embeds_Bd.float() - self.mean_d.float()) @ self.matrix_dd.float(), dim=-1)


class QueryMemory(nn.Module):
    """q ↦ normalise(m(q) + λ·g(x)·Σ_k softmax_k(β·cos(key(x), key_k))·value_k), m and key metrics of the old and the new space.

    x is what the new model made of the query and q its place in the old space, as the map gives it. g, the gate, says how much x
    looks like anything remembered: a logistic function of its largest cosine to a key. Without entries only the metric is left.
    Here a query looks at every entry; of very many (:class:`~xcompat.models.indexed_memory.IndexedMemory`), at the nearest alone.

    Args:
        new_dim: D.
        old_dim: d.
        entries: K.
        sharpness: β.
        share: λ.
        confident: whether it says how sure queries are (:meth:`confidence`).

    Example:
        >>> memory = QueryMemory(4, 3, entries=0)
        >>> torch.allclose(memory(torch.eye(4), torch.eye(4, 3) + 1), F.normalize(torch.eye(4, 3) + 1))
        True
    """

    LEAST: ClassVar[Mapping[str, float | None]] = {"entries": 0, "sharpness": 1, "share": 0, "confident": None}
    """What a configuration says of a memory, and the least that each number may be."""

    keys_KD: Tensor
    values_Kd: Tensor
    gate: Tensor
    calibration: Tensor | None

    def __init__(
        self, new_dim: int, old_dim: int, entries: int, sharpness: float = 30.0, share: float = 0.5, confident: bool = False
    ) -> None:
        super().__init__()
        self.dims, self.entries, self.sharpness, self.share = (new_dim, old_dim), entries, sharpness, share
        self.metric, self.key_metric = QueryMetric(old_dim), QueryMetric(new_dim if entries else 0)
        self.register_buffer("keys_KD", torch.zeros(entries, new_dim))
        self.register_buffer("values_Kd", torch.zeros(entries, old_dim))
        self.register_buffer("gate", torch.zeros(2))  # slope and offset
        self.register_buffer("calibration", torch.zeros(2) if confident else None)  # likewise

    @property
    def settings(self) -> dict[str, Any]:
        """Return what a configuration says of the memory; what it holds is in the weights."""
        said = {"entries": self.entries, "sharpness": self.sharpness, "share": self.share}
        return said | ({"confident": True} if self.calibration is not None else {})

    def calibrated(self, slope: float, offset: float) -> Self:
        """Let it say how sure queries are, by a logistic function of how much they lean on what is remembered."""
        self.calibration = torch.tensor([slope, offset], device=self.gate.device)
        return self

    def metric_alone(self) -> QueryMemory:
        """Return the metric without any entry, of which none can be read back."""
        alone = QueryMemory(*self.dims, entries=0, sharpness=self.sharpness, share=self.share)
        alone.metric = self.metric
        return alone

    def check(self) -> None:
        """Refuse what was loaded where its parts do not fit each other; here shapes say all."""

    def resemblance(self, new_BD: Tensor) -> Tensor:
        """Return the cosines of what the new model made of queries to all keys (B, K), or to those that are looked at."""
        return self.key_metric(new_BD) @ self.keys_KD.float().T

    def familiarity(self, new_BD: Tensor) -> Tensor:
        """Return g (B,) in (0, 1): how much each query looks like anything remembered."""
        return self._opened(self.resemblance(new_BD))

    def confidence(self, new_BD: Tensor) -> Tensor | None:
        """Return how probable it is that each query finds no less than the old model's (B,), in (0, 1); None if it cannot say."""
        if self.calibration is None:
            return None
        slope, offset = self.calibration.float()
        return torch.sigmoid(slope * self.recalled(new_BD).norm(dim=1) + offset)

    def forward(self, new_BD: Tensor, queries_Bd: Tensor) -> Tensor:
        """Lean queries towards what is remembered.

        Args:
            new_BD: what the new model made of them.
            queries_Bd: the same, mapped into the old space.

        Returns:
            (B, d) float32, L2-normalised, for galleries of the old model.
        """
        return F.normalize(self.metric(queries_Bd) + self.share * self.recalled(new_BD), dim=-1)

    def recalled(self, new_BD: Tensor) -> Tensor:
        """Return g(x)·Σ_k softmax_k(…)·value_k (B, d): what queries lean towards, and how much; zeros without entries."""
        if not self.entries:
            return new_BD.new_zeros(len(new_BD), self.dims[1], dtype=torch.float32)
        rows = max(1, _HELD // self._held)
        if torch.compiler.is_exporting() or len(new_BD) <= rows:  # a graph has no loop over as many queries as there come
            return self._recalled_at_once(new_BD)
        return torch.cat([self._recalled_at_once(block) for block in new_BD.split(rows)])

    @property
    def _held(self) -> int:
        """Numbers that are in memory at a time for a query: its cosines."""
        return self.entries

    def _recalled_at_once(self, new_BD: Tensor) -> Tensor:
        cosines_BK = self.resemblance(new_BD)
        weights_BK = F.threshold((self.sharpness * cosines_BK).softmax(1), _LEAST_WEIGHT, 0.0)
        return self._opened(cosines_BK)[:, None] * (weights_BK @ self.values_Kd.float())

    def _opened(self, cosines_BK: Tensor) -> Tensor:
        slope, offset = self.gate.float()
        return torch.sigmoid(slope * cosines_BK.amax(1) + offset)


def refuse_settings(settings: Mapping[str, Any], least: Mapping[str, float | None]) -> None:
    """Refuse what is no description of a memory.

    Args:
        settings: as a configuration has them.
        least: those there are, and the least that each number may be; None for what is no number.

    Raises:
        XcompatError: a setting is unknown, missing, or no number that it may be.
    """
    for name in settings.keys() - least.keys():
        raise XcompatError(f"a query memory has no setting {name!r}; {nearest(name, least)}")
    if not isinstance(confident := settings.get("confident", False), bool):
        raise XcompatError(f"memory.confident is {confident!r}; give true or false")
    for name, lowest in least.items():
        value = settings.get(name)
        kind = (int, float) if name in ("sharpness", "share") else int
        if lowest is None:
            continue
        if isinstance(value, bool) or not isinstance(value, kind) or not lowest <= value < float("inf"):
            raise XcompatError(f"memory.{name} is {value!r}; give a number from {lowest}")
