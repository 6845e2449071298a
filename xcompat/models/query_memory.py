"""Learned transform of queries, and query memory.

A memory contains pairs of a new and an old embedding. It compares a query with the new embeddings and moves it towards the old
embeddings in the most similar pairs (kernel regression around a map; for classification Tip-Adapter, Zhang et al., ECCV 2022).
Linear maps cannot express classes, and trained networks overfit to them. Nothing is trained, and the stored gallery does not
change. In a gallery map, stored old embeddings take the place of queries; keys are in the old space and values in the new space.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from xcompat.core.errors import XcompatError, nearest

_LEAST_WEIGHT = 1e-30  # smaller weights have no effect in float32, and denormal numbers slow down CPUs thirtyfold
_HELD = 2**24  # maximum numbers in memory for a block of queries


class LearnedTransform(nn.Module):
    """q ↦ normalise((normalise(q) − μ)·A) with A = (C + ε·tr(C)/d·I)^(−α), symmetric.

    Ranking a gallery by ⟨g, (q − μ)·A⟩ reduces the weight of directions with large differences within classes. Only queries are
    transformed, so it works with any index.

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
    def solve(
        cls, mean_d: Tensor, covariance_dd: Tensor, power: float, damping: float, eigen: tuple[Tensor, Tensor] | None = None
    ) -> Self:
        """Solve the learned transform from a mean and a covariance.

        Args:
            mean_d: μ.
            covariance_dd: C, within classes or over the stored gallery.
            power: α; use 0 only to centre, 0.5 to whiten.
            damping: ε, in units of the mean variance.
            eigen: eigenvalues and eigenvectors of C, if known.

        Returns:
            The learned transform, with A divided by its mean eigenvalue.

        Raises:
            XcompatError: the variance is 0, or the damping is not above 0.
        """
        strength = damping * covariance_dd.diagonal().mean()
        if not strength > 0:
            raise XcompatError("the learned transform needs different embeddings within classes, and a damping above 0")
        values_d, vectors_dd = eigen if eigen is not None else torch.linalg.eigh(covariance_dd.double())
        scaled_d = (values_d.clamp(min=0) + strength) ** -power
        transform = cls(len(mean_d))
        transform.mean_d.copy_(mean_d)
        transform.matrix_dd.copy_((vectors_dd * (scaled_d / scaled_d.mean())) @ vectors_dd.T)
        return transform

    def forward(self, embeds_Bd: Tensor) -> Tensor:
        """Transform queries (B, d) of any length to (B, d) float32, L2-normalised."""
        return self.transform_centred(F.normalize(embeds_Bd.float(), dim=-1))

    def transform_centred(self, embeds_Bd: Tensor) -> Tensor:
        """Transform vectors without normalising them first, e.g. class means; their length depends on the class's spread."""
        return F.normalize((embeds_Bd.float() - self.mean_d.float()) @ self.matrix_dd.float(), dim=-1)


class QueryMemory(nn.Module):
    """q ↦ normalise(m(q) + λ·g(x)·Σ_k softmax_k(β·cos(key(x), key_k))·value_k), m and key learned.

    x is the query's new embedding and q its mapped embedding in the old space. m and key are learned transforms in the old and
    the new space. The gate g, a logistic function of the largest cosine to a key, is high if x resembles an entry. Without
    entries only m remains. Queries are compared with every entry, in an
    :class:`~xcompat.models.indexed_memory.IndexedMemory` only with the nearest.

    Args:
        new_dim: D.
        old_dim: d.
        entries: K.
        sharpness: β.
        share: λ.
        confident: whether the memory is calibrated (:meth:`confidence`).

    Example:
        >>> memory = QueryMemory(4, 3, entries=0)
        >>> torch.allclose(memory(torch.eye(4), torch.eye(4, 3) + 1), F.normalize(torch.eye(4, 3) + 1))
        True
    """

    LEAST: ClassVar[Mapping[str, float | None]] = {"entries": 0, "sharpness": 1, "share": 0, "confident": None}
    """Settings in configurations, with the minimum of each number."""

    keys_KD: Tensor
    values_Kd: Tensor
    gate: Tensor
    calibration: Tensor | None

    def __init__(
        self, new_dim: int, old_dim: int, entries: int, sharpness: float = 30.0, share: float = 0.5, confident: bool = False
    ) -> None:
        super().__init__()
        self.dims, self.entries, self.sharpness, self.share = (new_dim, old_dim), entries, sharpness, share
        # learned transforms of queries and of keys; the attributes are tensor names in saved maps, which must go on to load
        self.metric, self.key_metric = LearnedTransform(old_dim), LearnedTransform(new_dim if entries else 0)
        self.register_buffer("keys_KD", torch.zeros(entries, new_dim))
        self.register_buffer("values_Kd", torch.zeros(entries, old_dim))
        self.register_buffer("gate", torch.zeros(2))  # slope and offset
        self.register_buffer("calibration", torch.zeros(2) if confident else None)  # slope and offset

    @property
    def settings(self) -> dict[str, Any]:
        """Return the settings for a configuration. The contents are weights."""
        said = {"entries": self.entries, "sharpness": self.sharpness, "share": self.share}
        return said | ({"confident": True} if self.calibration is not None else {})

    def calibrate(self, slope: float, offset: float) -> Self:
        """Set the logistic function from the recalled vector's length to the :meth:`confidence`."""
        self.calibration = torch.tensor([slope, offset], device=self.gate.device)
        return self

    def require_fit(self, model: str, dims: tuple[int, int], by_l2: bool) -> None:
        """Raise if a model that maps between these dimensions cannot have this memory."""
        if by_l2:
            raise XcompatError("a memory needs unit vectors, but these embeddings use L2 distance; remove memory")
        if self.dims != dims:
            raise XcompatError(
                f"a memory from {self.dims[0]} to {self.dims[1]} dimensions does not fit {model}, which maps "
                f"{dims[0]} to {dims[1]}"
            )

    def without_entries(self) -> QueryMemory:
        """Return a memory with this learned transform and without entries, i.e. without training data."""
        alone = QueryMemory(*self.dims, entries=0, sharpness=self.sharpness, share=self.share)
        alone.metric = self.metric
        return alone

    def check(self) -> None:
        """Raise if loaded weights contradict each other. Here, matching shapes are sufficient."""

    def key_cosines(self, new_BD: Tensor) -> Tensor:
        """Return new embeddings' cosines to keys: all (B, K), or in an index the nearest (B, k)."""
        return self.key_metric(new_BD) @ self.keys_KD.float().T

    def familiarity(self, cosines_BK: Tensor) -> Tensor:
        """Return the gate g (B,) in (0, 1) for cosines to keys (:meth:`key_cosines`)."""
        slope, offset = self.gate.float()
        return torch.sigmoid(slope * cosines_BK.amax(1) + offset)

    def confidence(self, new_BD: Tensor) -> Tensor | None:
        """Return the probability (B,) that each query finds no less than the old model's query; None without calibration."""
        if self.calibration is None:
            return None
        slope, offset = self.calibration.float()
        return torch.sigmoid(slope * self.recall(new_BD).norm(dim=1) + offset)

    def forward(self, new_BD: Tensor, queries_Bd: Tensor) -> Tensor:
        """Apply the learned transform to queries and move them towards the recalled old embeddings.

        Args:
            new_BD: the queries' new embeddings.
            queries_Bd: the same queries mapped into the old space.

        Returns:
            (B, d) float32, L2-normalised, for the old model's galleries.
        """
        return F.normalize(self.metric(queries_Bd) + self.share * self.recall(new_BD), dim=-1)

    def recall(self, new_BD: Tensor) -> Tensor:
        """Return g(x)·Σ_k softmax_k(…)·value_k (B, d), the recalled old embeddings; zeros without entries."""
        if not self.entries:
            return new_BD.new_zeros(len(new_BD), self.dims[1], dtype=torch.float32)
        rows = max(1, _HELD // self._numbers_per_query)
        if torch.compiler.is_exporting() or len(new_BD) <= rows:  # an exported graph cannot loop over blocks
            return self._recall_block(new_BD)
        return torch.cat([self._recall_block(block) for block in new_BD.split(rows)])

    @property
    def _numbers_per_query(self) -> int:
        """Numbers in memory per query: here its cosines."""
        return self.entries

    def _recall_block(self, new_BD: Tensor) -> Tensor:
        cosines_BK = self.key_cosines(new_BD)
        weights_BK = F.threshold((self.sharpness * cosines_BK).softmax(1), _LEAST_WEIGHT, 0.0)
        return self.familiarity(cosines_BK)[:, None] * (weights_BK @ self.values_Kd.float())


def refuse_settings(settings: Mapping[str, object], least: Mapping[str, float | None]) -> None:
    """Raise if memory settings are unknown, missing or out of range.

    Args:
        settings: settings in a configuration.
        least: known settings, with each number's minimum; None for other types.
    """
    for name in settings.keys() - least.keys():
        raise XcompatError(f"a query memory has no setting {name!r}; {nearest(name, least)}")
    if not isinstance(confident := settings.get("confident", False), bool):
        raise XcompatError(f"memory.confident is {confident!r}; set true or false")
    for name, lowest in least.items():
        value = settings.get(name)
        kind = (int, float) if name in ("sharpness", "share") else int
        if lowest is None:
            continue
        if isinstance(value, bool) or not isinstance(value, kind) or not lowest <= value < float("inf"):
            raise XcompatError(f"memory.{name} is {value!r}; set a number of at least {lowest}")
