"""Queries that remember: a metric that only queries are brought to, and what the old model said of what they resemble.

A map of queries cannot say what the classes say, and a network learns those it is shown by heart. Both can be looked up: the
training set holds pairs of a new and an old embedding, a query asks which of them it resembles in the new space and leans towards
their old ones (kernel regression around a map; for classification Tip-Adapter, Zhang et al., ECCV 2022). Nothing is trained, and
the stored gallery stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from xcompat.errors import XcompatError, nearest
from xcompat.models.old_knowledge import ROWS, Rows

KEY_POWER, KEY_DAMPING = 0.5, 0.1
"""Of the metric in which queries are compared with what is remembered."""
GATED = 5_000
"""Samples at most that a gate is fitted on."""
_GATED_AT_ONCE = 256
_COSINES = 2**24  # of queries to entries that are in memory at a time
_OPEN = 30.0  # the logistic function of it is 1 in float32
_SETTINGS = {"entries": 0, "sharpness": 1, "share": 0}
"""What a configuration says of a memory, and the least that each may be."""


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

    keys_KD: Tensor
    values_Kd: Tensor
    gate: Tensor
    calibration: Tensor | None

    def __init__(
        self, new_dim: int, old_dim: int, entries: int, sharpness: float = 30.0, share: float = 0.5, confident: bool = False
    ) -> None:
        super().__init__()
        self.sharpness, self.share = sharpness, share
        self.metric, self.key_metric = QueryMetric(old_dim), QueryMetric(new_dim if entries else 0)
        self.register_buffer("keys_KD", torch.zeros(entries, new_dim))
        self.register_buffer("values_Kd", torch.zeros(entries, old_dim))
        self.register_buffer("gate", torch.zeros(2))  # slope and offset
        self.register_buffer("calibration", torch.zeros(2) if confident else None)  # likewise

    @classmethod
    def described(cls, settings: Mapping[str, Any], new_dim: int, old_dim: int) -> Self:
        """Build an empty memory as a configuration describes it.

        Args:
            settings: as :attr:`settings` gives them.
            new_dim: D.
            old_dim: d.

        Raises:
            XcompatError: a setting is unknown, missing, or no number that it may be.
        """
        if not isinstance(settings, Mapping):
            raise XcompatError(f"memory is {settings!r}; it has {', '.join(_SETTINGS)}")
        for name in settings.keys() - _SETTINGS.keys() - {"confident"}:
            raise XcompatError(f"a query memory has no setting {name!r}; {nearest(name, _SETTINGS)}")
        if not isinstance(confident := settings.get("confident", False), bool):
            raise XcompatError(f"memory.confident is {confident!r}; give true or false")
        for name, least in _SETTINGS.items():
            value = settings.get(name)
            kind = int if name == "entries" else (int, float)
            if isinstance(value, bool) or not isinstance(value, kind) or not least <= value < float("inf"):
                raise XcompatError(f"memory.{name} is {value!r}; give a number from {least}")
        return cls(new_dim, old_dim, **settings)

    @property
    def settings(self) -> dict[str, Any]:
        """Return what a configuration says of the memory; what it holds is in the weights."""
        said = {"entries": len(self.keys_KD), "sharpness": self.sharpness, "share": self.share}
        return said | ({"confident": True} if self.calibration is not None else {})

    def calibrated(self, slope: float, offset: float) -> Self:
        """Let it say how sure queries are, by a logistic function of how much they lean on what is remembered."""
        self.calibration = torch.tensor([slope, offset], device=self.gate.device)
        return self

    def metric_alone(self) -> QueryMemory:
        """Return the metric without any entry, of which none can be read back."""
        alone = QueryMemory(self.keys_KD.shape[1], self.values_Kd.shape[1], entries=0, sharpness=self.sharpness, share=self.share)
        alone.metric = self.metric
        return alone

    def resemblance(self, new_BD: Tensor) -> Tensor:
        """Return the cosines (B, K) of what the new model made of queries to all keys."""
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
        if not len(self.keys_KD):
            return new_BD.new_zeros(len(new_BD), self.values_Kd.shape[1], dtype=torch.float32)
        rows = max(1, _COSINES // len(self.keys_KD))
        if torch.compiler.is_exporting() or len(new_BD) <= rows:  # a graph has no loop over as many queries as there come
            return self._recalled_at_once(new_BD)
        return torch.cat([self._recalled_at_once(block) for block in new_BD.split(rows)])

    def _recalled_at_once(self, new_BD: Tensor) -> Tensor:
        cosines_BK = self.resemblance(new_BD)
        return self._opened(cosines_BK)[:, None] * ((self.sharpness * cosines_BK).softmax(1) @ self.values_Kd.float())

    def _opened(self, cosines_BK: Tensor) -> Tensor:
        slope, offset = self.gate.float()
        return torch.sigmoid(slope * cosines_BK.amax(1) + offset)


@dataclass(frozen=True)
class ClassStatistics:
    """What a metric and a memory need of labelled embeddings, summed in one pass over blocks of rows.

    Args:
        counts_C: float64 readable samples of each class.
        means_Cd: float64 mean of the normalised embeddings of each class; zeros where there is none.
        mean_d: float64 mean of all.
        within_dd: float64 covariance of the samples around the means of their classes.
    """

    counts_C: Tensor
    means_Cd: Tensor
    mean_d: Tensor
    within_dd: Tensor

    @classmethod
    def of(cls, embeds_Nd: Rows, labels_N: NDArray[np.int64], n_classes: int) -> ClassStatistics:
        """Sum over embeddings, which need not fit into memory.

        Args:
            embeds_Nd: float embeddings, normalised here; rows of NaN are unreadable samples and left out.
            labels_N: their classes, in [0, C).
            n_classes: C.

        Raises:
            XcompatError: no sample is readable.
        """
        dim = embeds_Nd.shape[1]
        counts_C = torch.zeros(n_classes, dtype=torch.float64)
        sums_Cd = torch.zeros(n_classes, dim, dtype=torch.float64)
        outer_dd = torch.zeros(dim, dim, dtype=torch.float64)
        for start in range(0, len(labels_N), ROWS):
            rows_Bd = torch.from_numpy(np.array(embeds_Nd[start : start + ROWS], np.float64))
            labels_B = torch.from_numpy(np.asarray(labels_N[start : start + ROWS]))
            kept_B = rows_Bd.isfinite().all(1)
            rows_Bd, labels_B = F.normalize(rows_Bd[kept_B], dim=1), labels_B[kept_B]
            counts_C += torch.bincount(labels_B, minlength=n_classes)
            sums_Cd.index_add_(0, labels_B, rows_Bd)
            outer_dd += rows_Bd.T @ rows_Bd
        total = counts_C.sum()
        if not total:
            raise XcompatError("a query memory needs embeddings to remember, and there is no readable one")
        means_Cd = sums_Cd / counts_C.clamp(min=1)[:, None]
        between_dd = (means_Cd * counts_C[:, None]).T @ means_Cd
        return cls(counts_C, means_Cd, sums_Cd.sum(0) / total, (outer_dd - between_dd) / total)


@dataclass(frozen=True)
class RememberedClasses:
    """What a memory holds of classes, whatever metric the queries wear.

    A key is a class's mean new embedding, its value its mean old one. The gate is fitted on what a known query looks like, each
    sample beside its own class without itself, and on what an unknown one does, the same samples with their own class left out.

    Args:
        key_metric: in which queries are compared with keys.
        keys_KD: float32, of the K classes that have samples.
        gate: float32 (2,), slope and offset.
        old_means_Kd: float64.
    """

    key_metric: QueryMetric
    keys_KD: Tensor
    gate: Tensor
    old_means_Kd: Tensor

    @classmethod
    def of(cls, new: ClassStatistics, old: ClassStatistics, new_ND: Rows, labels_N: NDArray[np.int64]) -> RememberedClasses:
        """Look at the classes of a training set, in closed form.

        Args:
            new: of the new embeddings.
            old: of the old embeddings of the same samples.
            new_ND: the new embeddings; NaN where unreadable.
            labels_N: their classes.

        Raises:
            XcompatError: fewer than two classes have samples.
        """
        known_K = torch.nonzero((new.counts_C > 0) & (old.counts_C > 0))[:, 0]
        if len(known_K) < 2:
            raise XcompatError("a memory of classes needs two classes with readable samples at least")
        metric = QueryMetric.solve(new.mean_d, new.within_dd, KEY_POWER, KEY_DAMPING)
        keys_KD = metric.centred(new.means_Cd[known_K])
        gate = _fitted_gate(metric, keys_KD, known_K, new, new_ND, labels_N)
        return cls(metric, keys_KD, gate, old.means_Cd[known_K])

    def memory(self, metric: QueryMetric, sharpness: float, share: float) -> QueryMemory:
        """Return the memory for queries that wear a metric.

        Args:
            metric: of the old space.
            sharpness: β.
            share: λ.
        """
        entries, new_dim = self.keys_KD.shape
        memory = QueryMemory(new_dim, self.old_means_Kd.shape[1], entries, sharpness, share)
        memory.metric, memory.key_metric = metric, self.key_metric
        memory.keys_KD, memory.gate, memory.values_Kd = self.keys_KD, self.gate, metric.centred(self.old_means_Kd)
        return memory


@dataclass(frozen=True)
class RememberedPairs:
    """What a memory holds of captioned images: for a caption where its images lie in the old space, for an image its captions.

    Both are asked at once: the new model tells a query that is a text from one that is an image, and of what it resembles only
    the other kind is recalled, centred, as a gallery of that kind is searched. Nothing says what an unknown query looks like, so
    that the gate is open.

    Args:
        keys_KD: float32 new embeddings of the captions, then of the images.
        values_Kd: float32 mean old embedding of the other kind, minus that of all of them, normalised.
    """

    keys_KD: Tensor
    values_Kd: Tensor

    @classmethod
    def of(cls, new: tuple[Rows, Rows], old: tuple[Rows, Rows], groups: tuple[NDArray[np.int64], NDArray[np.int64]]) -> Self:
        """Look at captioned images, in closed form.

        Args:
            new: new embeddings (N, D) of images and (M, D) of captions, all readable.
            old: old embeddings (N, d) and (M, d) of the same.
            groups: (N,) and (M,) numbers from 0; a caption describes the images of its group, and each group has both.
        """
        keys, values = [], []
        for own, other in ((1, 0), (0, 1)):
            means = ClassStatistics.of(old[other], groups[other], int(groups[other].max()) + 1)
            centred_Cd = F.normalize(means.means_Cd - means.mean_d, dim=1).float()
            keys.append(F.normalize(torch.from_numpy(np.array(new[own], np.float32)), dim=1))
            values.append(centred_Cd[torch.from_numpy(groups[own])])
        return cls(torch.cat(keys), torch.cat(values))

    def memory(self, metric: QueryMetric, sharpness: float, share: float) -> QueryMemory:
        """Return the memory for queries that wear a metric.

        Args:
            metric: of the old space.
            sharpness: β.
            share: λ.
        """
        memory = QueryMemory(self.keys_KD.shape[1], self.values_Kd.shape[1], len(self.keys_KD), sharpness, share)
        memory.metric, memory.keys_KD, memory.gate = metric, self.keys_KD, torch.tensor([0.0, _OPEN])
        memory.values_Kd = F.normalize(self.values_Kd @ metric.matrix_dd, dim=1)
        return memory


def _fitted_gate(
    metric: QueryMetric,
    keys_KD: Tensor,
    known_K: Tensor,
    new: ClassStatistics,
    new_ND: Rows,
    labels_N: NDArray[np.int64],
) -> Tensor:
    """Return slope and offset of the logistic function that tells known queries from unknown ones by their largest cosine."""
    from sklearn.linear_model import LogisticRegression

    place_C = torch.full((len(new.counts_C),), -1)
    place_C[known_K] = torch.arange(len(known_K))
    twice_N = np.flatnonzero((new.counts_C[torch.from_numpy(labels_N)] > 1).numpy())  # left out, one of one leaves nothing
    if len(twice_N) == 0:
        return torch.zeros(2)  # half open: nothing says what a known query looks like
    rows_S = np.sort(np.random.default_rng(0).permutation(twice_N)[:GATED])
    samples_SD = torch.from_numpy(np.array(new_ND[rows_S], np.float32))
    labels_S = torch.from_numpy(labels_N[rows_S])
    kept_S = samples_SD.isfinite().all(1) & (place_C[labels_S] >= 0)
    samples_SD, labels_S = F.normalize(samples_SD[kept_S], dim=1), labels_S[kept_S]
    queries_SD, own_S1 = metric(samples_SD), place_C[labels_S][:, None]
    unknown_S = torch.cat(
        [
            (queries_BD @ keys_KD.T).scatter(1, own_B1, -torch.inf).amax(1)
            for queries_BD, own_B1 in zip(queries_SD.split(_GATED_AT_ONCE), own_S1.split(_GATED_AT_ONCE), strict=True)
        ]
    )
    counts_S1 = new.counts_C[labels_S][:, None]
    without_SD = (new.means_Cd[labels_S] * counts_S1 - samples_SD) / (counts_S1 - 1)
    known_S = torch.maximum((queries_SD * metric.centred(without_SD)).sum(1), unknown_S)
    seen = LogisticRegression(C=1e4).fit(torch.cat([known_S, unknown_S])[:, None].numpy(), np.repeat([1, 0], len(known_S)))
    return torch.tensor([float(seen.coef_[0, 0]), float(seen.intercept_[0])])
