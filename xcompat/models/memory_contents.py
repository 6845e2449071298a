"""Query memory contents, computed from classes or captioned images."""

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
from xcompat.core.threads import one_thread_if_small, unlocked_property
from xcompat.models.indexed_memory import IndexedMemory, Read
from xcompat.models.old_knowledge import ROWS, Rows
from xcompat.models.query_memory import LearnedTransform, QueryMemory
from xcompat.vectors.codecs import AS_THEY_ARE

KEY_POWER, KEY_DAMPING = 0.5, 0.1
"""Power and damping of the key transform."""
MAX_GATE_SAMPLES = 5_000
"""Maximum number of samples for fitting a gate."""
_TINY = 1e-300  # minimum norm to divide by, in float64
MOST, LARGE = 2**24, "SQ8"
"""Maximum numbers in uncompressed keys (32,768 keys of 512 dimensions), and the default codec of larger memories."""
_GATED_AT_ONCE = 256
_OPEN = 30.0  # its logistic function is 1 in float32


def _build_memory(entries: int, keys: Read, values: Read, key_transform: LearnedTransform, codec: str | None) -> QueryMemory:
    """Return a memory with entries, but default learned transform, gate, sharpness and share."""
    codec = codec or (AS_THEY_ARE if entries * len(key_transform.mean_d) <= MOST else LARGE)
    if codec != AS_THEY_ARE:
        return IndexedMemory.from_entries(entries, keys, values, key_transform, codec)
    keys_KD, values_Kd = keys(np.arange(entries)), values(np.arange(entries))
    memory = QueryMemory(keys_KD.shape[1], values_Kd.shape[1], entries)
    memory.key_metric, memory.keys_KD, memory.values_Kd = key_transform, keys_KD, values_Kd
    return memory


@dataclass(frozen=True)
class ClassStatistics:
    """Statistics of labelled embeddings for a learned transform and a memory.

    Args:
        counts_C: float64 number of readable samples per class.
        means_Cd: float64 mean normalised embedding per class; zeros for empty classes.
        mean_d: float64 mean over all samples.
        within_dd: float64 covariance within classes.
    """

    counts_C: Tensor
    means_Cd: Tensor
    mean_d: Tensor
    within_dd: Tensor

    @unlocked_property
    def eigen(self) -> tuple[Tensor, Tensor]:
        """Eigenvalues and eigenvectors of the covariance within classes."""
        with one_thread_if_small(len(self.within_dd)):
            values_d, vectors_dd = torch.linalg.eigh(self.within_dd)
        return values_d, vectors_dd

    @classmethod
    def compute(cls, embeds_Nd: Rows, labels_N: NDArray[np.int64], n_classes: int) -> ClassStatistics:
        """Compute the statistics in one pass; embeddings need not fit into memory.

        Args:
            embeds_Nd: float embeddings, normalised here; NaN rows (unreadable samples) are skipped.
            labels_N: classes in [0, C).
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
            raise XcompatError("a query memory needs embeddings, but none is readable; check the training images")
        means_Cd = sums_Cd / counts_C.clamp(min=1)[:, None]
        between_dd = (means_Cd * counts_C[:, None]).T @ means_Cd
        return cls(counts_C, means_Cd, sums_Cd.sum(0) / total, (outer_dd - between_dd) / total)


@dataclass(frozen=True)
class ClassMemoryContents:
    """Memory contents from classes: keys are mean new embeddings, values mean old embeddings.

    The gate learns to separate known from unknown queries: samples compared with the mean of the rest of their class, and samples
    compared with other classes only.

    Args:
        key_transform: learned transform of new embeddings before they are compared with keys.
        keys_KD: float32 keys for the K classes with samples.
        gate: float32 (2,), slope and offset.
        old_means_Kd: float64 mean old embeddings.
    """

    key_transform: LearnedTransform
    keys_KD: Tensor
    gate: Tensor
    old_means_Kd: Tensor

    @classmethod
    def compute(
        cls, new: ClassStatistics, old: ClassStatistics, new_ND: Rows, labels_N: NDArray[np.int64]
    ) -> ClassMemoryContents:
        """Compute the contents from a training set, in closed form.

        Args:
            new: statistics of the new embeddings.
            old: statistics of the old embeddings for the same samples.
            new_ND: new embeddings; NaN for unreadable samples.
            labels_N: their classes.

        Raises:
            XcompatError: fewer than two classes have samples.
        """
        known_K = torch.nonzero((new.counts_C > 0) & (old.counts_C > 0))[:, 0]
        if len(known_K) < 2:
            raise XcompatError("a memory of classes needs at least two classes with readable samples; add classes")
        transform = LearnedTransform.solve(new.mean_d, new.within_dd, KEY_POWER, KEY_DAMPING, new.eigen)
        keys_KD = transform.transform_centred(new.means_Cd[known_K])
        gate = _fit_gate(transform, keys_KD, known_K, new, new_ND, labels_N)
        return cls(transform, keys_KD, gate, old.means_Cd[known_K])

    def build_memory(self, transform: LearnedTransform, sharpness: float, share: float, codec: str | None = None) -> QueryMemory:
        """Return the memory with a learned transform of queries.

        Args:
            transform: learned transform in the old space.
            sharpness: β.
            share: λ.
            codec: entry codec in :data:`~xcompat.models.codes.CODECS`, or ``float32`` for none; None to use ``float32`` up to
                :data:`MOST` numbers in the keys, and ``SQ8`` beyond.

        Raises:
            XcompatError: the codec does not fit the entries.
        """

        def values(rows_B: NDArray[np.int64]) -> Tensor:
            return transform.transform_centred(self.old_means_Kd[torch.from_numpy(rows_B)])

        entries = len(self.keys_KD)
        memory = _build_memory(entries, lambda rows_B: self.keys_KD[torch.from_numpy(rows_B)], values, self.key_transform, codec)
        memory.metric, memory.gate, memory.sharpness, memory.share = transform, self.gate, sharpness, share
        return memory


@dataclass(frozen=True)
class PairMemoryContents:
    """Memory contents from captioned images.

    A caption's value is its images' mean old embedding; an image's value is its captions'. One memory serves text and image
    queries, because new text and image embeddings are far apart. Values are centred per kind, because a gallery contains a single
    kind. Without examples of unknown queries, the gate is always open. Embeddings need not fit into memory.

    Args:
        new: new caption and image embeddings.
        groups: caption and image groups.
        old: old group means of images (for captions) and of captions (for images).
    """

    new: tuple[Rows, Rows]
    groups: tuple[NDArray[np.int64], NDArray[np.int64]]
    old: tuple[_GroupMeans, _GroupMeans]

    @classmethod
    def compute(cls, new: tuple[Rows, Rows], old: tuple[Rows, Rows], groups: tuple[NDArray[np.int64], NDArray[np.int64]]) -> Self:
        """Compute the contents from captioned images, in closed form.

        Args:
            new: new image (N, D) and caption (M, D) embeddings, all readable.
            old: old image (N, d) and caption (M, d) embeddings.
            groups: (N,) and (M,) group numbers from 0. A caption describes its group's images; each group has both.
        """
        images, captions = (_GroupMeans.compute(old[kind], groups[kind]) for kind in (0, 1))
        return cls((new[1], new[0]), (groups[1], groups[0]), (images, captions))

    @classmethod
    def of_items(cls, new_ND: Rows, old_Nd: Rows) -> Self:
        """Compute the contents from items of one kind; values are their own old embeddings.

        Args:
            new_ND: the items' new embeddings, all readable.
            old_Nd: the same items' old embeddings.
        """
        each, means = np.arange(len(new_ND)), _GroupMeans.compute(old_Nd, np.arange(len(new_ND)))
        return cls((new_ND, new_ND[:0]), (each, each[:0]), (means, means))

    def build_memory(self, transform: LearnedTransform, sharpness: float, share: float, codec: str | None = None) -> QueryMemory:
        """Return the memory with a learned transform of queries; arguments as in :meth:`ClassMemoryContents.build_memory`."""
        captions = len(self.new[0])

        def of_each_kind(rows_B: NDArray[np.int64], read: Sequence[Read]) -> Tensor:
            kinds = zip(read, (rows_B[rows_B < captions], rows_B[rows_B >= captions] - captions), strict=True)
            return torch.cat([one(rows) for one, rows in kinds if len(rows)])  # rows ascend: captions, then images

        def keys(new_ND: Rows) -> Read:
            return lambda rows: _normalise(new_ND[rows]).float()

        def values(old: _GroupMeans, groups_N: NDArray[np.int64]) -> Read:
            return lambda rows: F.normalize(old.centre_groups(groups_N[rows]) @ transform.matrix_dd, dim=1)

        read_keys, read_values = [keys(new) for new in self.new], [values(*of) for of in zip(self.old, self.groups, strict=True)]
        memory = _build_memory(
            captions + len(self.new[1]),
            lambda rows_B: of_each_kind(rows_B, read_keys),
            lambda rows_B: of_each_kind(rows_B, read_values),
            LearnedTransform(self.new[0].shape[1]),
            codec,
        )
        memory.metric, memory.gate, memory.sharpness, memory.share = transform, torch.tensor([0.0, _OPEN]), sharpness, share
        return memory


@dataclass(frozen=True)
class _GroupMeans:
    """Group means of readable embeddings, centred at the mean of all.

    Args:
        embeds_Nd: embeddings.
        mean_d: float64 mean of all normalised embeddings.
        order_N: rows sorted by group.
        starts_C: each group's start in this order, and the last group's end.
    """

    embeds_Nd: Rows
    mean_d: Tensor
    order_N: NDArray[np.int64]
    starts_C: NDArray[np.int64]

    @classmethod
    def compute(cls, embeds_Nd: Rows, groups_N: NDArray[np.int64]) -> Self:
        """Compute the means in one pass. Groups are numbered from 0; none is empty."""
        starts = range(0, len(groups_N), ROWS)
        mean_d = torch.stack([_normalise(embeds_Nd[start : start + ROWS]).sum(0) for start in starts]).sum(0) / len(groups_N)
        starts_C = np.concatenate([[0], np.cumsum(np.bincount(groups_N))])
        return cls(embeds_Nd, mean_d, np.argsort(groups_N, kind="stable"), starts_C)

    def centre_groups(self, groups_B: NDArray[np.int64]) -> Tensor:
        """Return centred, normalised group means: (B, d) float32."""
        wanted_U, which_B = np.unique(groups_B, return_inverse=True)
        sizes_U = self.starts_C[wanted_U + 1] - self.starts_C[wanted_U]
        ends_U = np.cumsum(sizes_U)
        rows = self.order_N[np.arange(ends_U[-1]) + np.repeat(self.starts_C[wanted_U] - ends_U + sizes_U, sizes_U)]
        means_Ud = torch.zeros(len(wanted_U), len(self.mean_d), dtype=torch.float64)
        means_Ud.index_add_(0, torch.from_numpy(np.repeat(np.arange(len(wanted_U)), sizes_U)), _normalise(self.embeds_Nd[rows]))
        means_Ud /= torch.from_numpy(sizes_U)[:, None]
        return F.normalize(means_Ud - self.mean_d, dim=1).float()[torch.from_numpy(which_B)]


def _normalise(embeds_Nd: NDArray[np.floating]) -> Tensor:
    return F.normalize(torch.from_numpy(np.array(embeds_Nd, np.float64)), dim=1, eps=_TINY)


def _fit_gate(
    transform: LearnedTransform,
    keys_KD: Tensor,
    known_K: Tensor,
    new: ClassStatistics,
    new_ND: Rows,
    labels_N: NDArray[np.int64],
) -> Tensor:
    """Return slope and offset of the logistic function from the largest cosine to "known"."""
    from sklearn.linear_model import LogisticRegression

    place_C = torch.full((len(new.counts_C),), -1)
    place_C[known_K] = torch.arange(len(known_K))
    twice_N = np.flatnonzero((new.counts_C[torch.from_numpy(labels_N)] > 1).numpy())  # classes with a mean of the other samples
    if len(twice_N) == 0:
        return torch.zeros(2)  # half open, because there are no examples of known queries
    rows_S = np.sort(np.random.default_rng(0).permutation(twice_N)[:MAX_GATE_SAMPLES])
    samples_SD = torch.from_numpy(np.array(new_ND[rows_S], np.float64))
    labels_S = torch.from_numpy(labels_N[rows_S])
    kept_S = samples_SD.isfinite().all(1) & (place_C[labels_S] >= 0)
    samples_SD, labels_S = F.normalize(samples_SD[kept_S], dim=1, eps=_TINY).float(), labels_S[kept_S]
    queries_SD, own_S1 = transform(samples_SD), place_C[labels_S][:, None]
    unknown_S = torch.cat(
        [
            (queries_BD @ keys_KD.T).scatter(1, own_B1, -torch.inf).amax(1)
            for queries_BD, own_B1 in zip(queries_SD.split(_GATED_AT_ONCE), own_S1.split(_GATED_AT_ONCE), strict=True)
        ]
    )
    counts_S1 = new.counts_C[labels_S][:, None]
    without_SD = (new.means_Cd[labels_S] * counts_S1 - samples_SD) / (counts_S1 - 1)
    known_S = torch.maximum((queries_SD * transform.transform_centred(without_SD)).sum(1), unknown_S)
    seen = LogisticRegression(C=1e4).fit(torch.cat([known_S, unknown_S])[:, None].numpy(), np.repeat([1, 0], len(known_S)))
    return torch.tensor([float(seen.coef_[0, 0]), float(seen.intercept_[0])])
