"""The contents of a query memory, computed from a training set: its classes, or its captioned images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from xcompat.core.errors import XcompatError
from xcompat.models.indexed_memory import IndexedMemory, Read
from xcompat.models.old_knowledge import ROWS, Rows
from xcompat.models.query_memory import QueryMemory, QueryMetric
from xcompat.vectors import AS_THEY_ARE

KEY_POWER, KEY_DAMPING = 0.5, 0.1
"""Power and damping of the key metric, in which queries are compared with keys."""
GATED = 5_000
_TINY = 1e-300  # least length to divide by, in float64
"""Most samples that a gate is fitted on."""
MOST, LARGE = 2**24, "SQ8"
"""Unless a codec is named: most numbers in uncompressed keys (32,768 keys of 512 dimensions), and the codec beyond."""
_GATED_AT_ONCE = 256
_OPEN = 30.0  # its logistic function is 1 in float32


def _holding(entries: int, keys: Read, values: Read, key_metric: QueryMetric, codec: str | None) -> QueryMemory:
    """Return a memory of entries; its metric, gate, sharpness and share are still the defaults."""
    codec = codec or (AS_THEY_ARE if entries * len(key_metric.mean_d) <= MOST else LARGE)
    if codec != AS_THEY_ARE:
        return IndexedMemory.of(entries, keys, values, key_metric, codec)
    keys_KD, values_Kd = keys(np.arange(entries)), values(np.arange(entries))
    memory = QueryMemory(keys_KD.shape[1], values_Kd.shape[1], entries)
    memory.key_metric, memory.keys_KD, memory.values_Kd = key_metric, keys_KD, values_Kd
    return memory


@dataclass(frozen=True)
class ClassStatistics:
    """Statistics of labelled embeddings for a metric and a memory, summed in one pass over blocks of rows.

    Args:
        counts_C: float64 number of readable samples of each class.
        means_Cd: float64 mean of the normalised embeddings of each class; zeros for a class without samples.
        mean_d: float64 mean of all samples.
        within_dd: float64 covariance of the samples around the means of their classes.
    """

    counts_C: Tensor
    means_Cd: Tensor
    mean_d: Tensor
    within_dd: Tensor

    @classmethod
    def of(cls, embeds_Nd: Rows, labels_N: NDArray[np.int64], n_classes: int) -> ClassStatistics:
        """Compute the statistics of embeddings, which need not fit into memory.

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
            rows_Bd, labels_B = F.normalize(rows_Bd[kept_B], dim=1, eps=_TINY), labels_B[kept_B]
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
    """A memory's contents from classes, before the queries' metric is chosen.

    A class's key is its mean new embedding, its value its mean old embedding. The gate learns to tell known queries from unknown
    ones: a sample stands for a known query when its class's mean is taken without it, and for an unknown one when its class is
    left out.

    Args:
        key_metric: compares queries with keys.
        keys_KD: float32 keys of the K classes with samples.
        gate: float32 (2,), slope and offset.
        old_means_Kd: float64 mean old embeddings.
    """

    key_metric: QueryMetric
    keys_KD: Tensor
    gate: Tensor
    old_means_Kd: Tensor

    @classmethod
    def of(cls, new: ClassStatistics, old: ClassStatistics, new_ND: Rows, labels_N: NDArray[np.int64]) -> RememberedClasses:
        """Compute the contents from a training set, in closed form.

        Args:
            new: statistics of the new embeddings.
            old: statistics of the old embeddings of the same samples.
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

    def memory(self, metric: QueryMetric, sharpness: float, share: float, codec: str | None = None) -> QueryMemory:
        """Return the memory for a metric of queries.

        Args:
            metric: of the old space.
            sharpness: β.
            share: λ.
            codec: the codec of entries, one of :data:`~xcompat.models.codes.CODECS`, or ``float32`` for none; None chooses
                ``float32`` up to :data:`MOST` numbers in the keys, and ``SQ8`` beyond.

        Raises:
            XcompatError: the codec does not fit the entries.
        """

        def values(rows_B: NDArray[np.int64]) -> Tensor:
            return metric.centred(self.old_means_Kd[torch.from_numpy(rows_B)])

        entries = len(self.keys_KD)
        memory = _holding(entries, lambda rows_B: self.keys_KD[torch.from_numpy(rows_B)], values, self.key_metric, codec)
        memory.metric, memory.gate, memory.sharpness, memory.share = metric, self.gate, sharpness, share
        return memory


@dataclass(frozen=True)
class RememberedPairs:
    """A memory's contents from captioned images: a caption's value is its images' old mean, an image's its captions' old mean.

    One memory serves both directions: new embeddings of texts and of images lie apart, so a text query resembles captions and
    recalls their images, and an image query the reverse. Values are centred for each kind, because a gallery holds one kind.
    Nothing shows what an unknown query looks like, so the gate is open.

    Embeddings are read when they are needed, and need not fit into memory.

    Args:
        new: new embeddings of the captions, and of the images.
        groups: the groups of the captions, and of the images.
        old: old means by group of the images (for captions), and of the captions (for images).
    """

    new: tuple[Rows, Rows]
    groups: tuple[NDArray[np.int64], NDArray[np.int64]]
    old: tuple[_GroupMeans, _GroupMeans]

    @classmethod
    def of(cls, new: tuple[Rows, Rows], old: tuple[Rows, Rows], groups: tuple[NDArray[np.int64], NDArray[np.int64]]) -> Self:
        """Compute the contents from captioned images, in closed form.

        Args:
            new: new embeddings (N, D) of images and (M, D) of captions, all readable.
            old: old embeddings (N, d) of the images and (M, d) of the captions.
            groups: (N,) and (M,) group numbers from 0; a caption describes the images of its group, and each group has both.
        """
        images, captions = (_GroupMeans.of(old[kind], groups[kind]) for kind in (0, 1))
        return cls((new[1], new[0]), (groups[1], groups[0]), (images, captions))

    @classmethod
    def of_items(cls, new_ND: Rows, old_Nd: Rows) -> Self:
        """Compute the contents from stored items of one kind: the value of each is its own old embedding.

        Args:
            new_ND: new embeddings of the items, all readable.
            old_Nd: old embeddings of the same items, which are searched.
        """
        each, means = np.arange(len(new_ND)), _GroupMeans.of(old_Nd, np.arange(len(new_ND)))
        return cls((new_ND, new_ND[:0]), (each, each[:0]), (means, means))

    def memory(self, metric: QueryMetric, sharpness: float, share: float, codec: str | None = None) -> QueryMemory:
        """Return the memory for a metric of queries.

        Args:
            metric: of the old space.
            sharpness: β.
            share: λ.
            codec: as in :meth:`RememberedClasses.memory`.

        Raises:
            XcompatError: the codec does not fit the entries.
        """
        captions = len(self.new[0])

        def of_each_kind(rows_B: NDArray[np.int64], read: Sequence[Read]) -> Tensor:
            kinds = zip(read, (rows_B[rows_B < captions], rows_B[rows_B >= captions] - captions), strict=True)
            return torch.cat([one(rows) for one, rows in kinds if len(rows)])  # rows ascend: captions, then images

        def keys(new_ND: Rows) -> Read:
            return lambda rows: _normalised(new_ND[rows]).float()

        def values(old: _GroupMeans, groups_N: NDArray[np.int64]) -> Read:
            return lambda rows: F.normalize(old.centred(groups_N[rows]) @ metric.matrix_dd, dim=1)

        read_keys, read_values = [keys(new) for new in self.new], [values(*of) for of in zip(self.old, self.groups, strict=True)]
        memory = _holding(
            captions + len(self.new[1]),
            lambda rows_B: of_each_kind(rows_B, read_keys),
            lambda rows_B: of_each_kind(rows_B, read_values),
            QueryMetric(self.new[0].shape[1]),
            codec,
        )
        memory.metric, memory.gate, memory.sharpness, memory.share = metric, torch.tensor([0.0, _OPEN]), sharpness, share
        return memory


@dataclass(frozen=True)
class _GroupMeans:
    """Group means of embeddings, centred at the mean of all.

    Args:
        embeds_Nd: the embeddings, all readable.
        mean_d: float64 mean of all normalised embeddings.
        order_N: rows, sorted by group.
        starts_C: the start of each group in that order, and the end of the last one.
    """

    embeds_Nd: Rows
    mean_d: Tensor
    order_N: NDArray[np.int64]
    starts_C: NDArray[np.int64]

    @classmethod
    def of(cls, embeds_Nd: Rows, groups_N: NDArray[np.int64]) -> Self:
        """Compute the mean of embeddings (N, d) in one pass; groups are numbered from 0, and none is empty."""
        starts = range(0, len(groups_N), ROWS)
        mean_d = torch.stack([_normalised(embeds_Nd[start : start + ROWS]).sum(0) for start in starts]).sum(0) / len(groups_N)
        starts_C = np.concatenate([[0], np.cumsum(np.bincount(groups_N))])
        return cls(embeds_Nd, mean_d, np.argsort(groups_N, kind="stable"), starts_C)

    def centred(self, groups_B: NDArray[np.int64]) -> Tensor:
        """Return the means of some groups minus the mean of all, normalised: (B, d) float32."""
        wanted_U, which_B = np.unique(groups_B, return_inverse=True)
        sizes_U = self.starts_C[wanted_U + 1] - self.starts_C[wanted_U]
        ends_U = np.cumsum(sizes_U)
        rows = self.order_N[np.arange(ends_U[-1]) + np.repeat(self.starts_C[wanted_U] - ends_U + sizes_U, sizes_U)]
        means_Ud = torch.zeros(len(wanted_U), len(self.mean_d), dtype=torch.float64)
        means_Ud.index_add_(0, torch.from_numpy(np.repeat(np.arange(len(wanted_U)), sizes_U)), _normalised(self.embeds_Nd[rows]))
        means_Ud /= torch.from_numpy(sizes_U)[:, None]
        return F.normalize(means_Ud - self.mean_d, dim=1).float()[torch.from_numpy(which_B)]


def _normalised(embeds_Nd: NDArray[np.floating]) -> Tensor:
    return F.normalize(torch.from_numpy(np.array(embeds_Nd, np.float64)), dim=1, eps=_TINY)


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
    twice_N = np.flatnonzero((new.counts_C[torch.from_numpy(labels_N)] > 1).numpy())  # the class keeps a mean without the sample
    if len(twice_N) == 0:
        return torch.zeros(2)  # half open: nothing shows what a known query looks like
    rows_S = np.sort(np.random.default_rng(0).permutation(twice_N)[:GATED])
    samples_SD = torch.from_numpy(np.array(new_ND[rows_S], np.float64))
    labels_S = torch.from_numpy(labels_N[rows_S])
    kept_S = samples_SD.isfinite().all(1) & (place_C[labels_S] >= 0)
    samples_SD, labels_S = F.normalize(samples_SD[kept_S], dim=1, eps=_TINY).float(), labels_S[kept_S]
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
