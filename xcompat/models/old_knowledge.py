"""Knowledge about the old model: training set embeddings, class prototypes and classifier."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from xcompat.core.distributed import compute_in_shares
from xcompat.core.errors import XcompatError

OldWeights: TypeAlias = Literal["prototypes", "classifier", "both"]
"""Frozen rows that classify compatible embeddings."""
ROWS = 65536
ONLY_PROTOTYPES = (
    "{} needs an old embedding of every training image, but there are only class prototypes; "
    "provide the old model or its embeddings, or use a method that trains with prototypes (bct, oca)"
)


class Rows(Protocol):
    """Embeddings readable by row: an array, or a cache on disk."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Return (N, d)."""

    def __len__(self) -> int:
        """Return N."""

    def __getitem__(self, rows: NDArray[np.int64] | slice, /) -> NDArray[np.float32]:
        """Return rows by number, in the given order."""


@dataclass(frozen=True)
class OldKnowledge:
    """Everything known about the old model on the new training set; unknown parts are None.

    Args:
        n_classes: C, number of classes in the new training set.
        labels_N: int64, every training sample's class; empty if unknown.
        embeddings_Nd: float32 old embeddings of the training samples, L2-normalised; NaN rows are unreadable images.
        classifier_Cd: the frozen old classifier's rows in the new class order, NaN for new classes.
        given_prototypes_Cd: prototypes from a file instead of embeddings, NaN for classes without prototype.
    """

    n_classes: int
    labels_N: NDArray[np.int64]
    embeddings_Nd: Rows | None = None
    classifier_Cd: NDArray[np.float32] | None = None
    given_prototypes_Cd: NDArray[np.float32] | None = None

    def prototypes(self) -> NDArray[np.float32]:
        """Return the mean old embedding per class (C, d), not normalised, NaN for classes without a readable sample.

        Raises:
            XcompatError: neither embeddings nor prototypes are known.
        """
        if self.given_prototypes_Cd is not None:
            return self.given_prototypes_Cd
        if self.embeddings_Nd is None:
            raise XcompatError("class prototypes need old embeddings of the training images, or a file of prototypes")
        return class_means(self.embeddings_Nd, self.labels_N, self.n_classes)

    def embeddings(self, method: str) -> Rows:
        """Return the training samples' old embeddings (N, d), or raise with the method's name."""
        if self.embeddings_Nd is None:
            raise XcompatError(ONLY_PROTOTYPES.format(method))
        return self.embeddings_Nd

    def weights(self, kind: OldWeights) -> Tensor:
        """Return the frozen rows to classify compatible embeddings.

        Args:
            kind: ``prototypes``, ``classifier``, or ``both`` (prototypes replace missing classifier rows).

        Returns:
            (C, d) float32, NaN for classes without a row.

        Raises:
            XcompatError: they are not known.
        """
        if kind == "prototypes":
            return torch.from_numpy(np.array(self.prototypes()))
        if self.classifier_Cd is None:
            raise XcompatError(
                f"old_weights is {kind}, but the old model has no classifier (it was not trained on classes); "
                "set options.old_weights to prototypes"
            )
        rows_Cd = torch.from_numpy(np.array(self.classifier_Cd))
        if kind == "classifier":
            return rows_Cd
        lacking_C = rows_Cd.isnan().any(dim=1)
        # means of unit embeddings are shorter than trained rows, and unscaled products depend on lengths
        length = rows_Cd[~lacking_C].norm(dim=1).mean() if not lacking_C.all() else 1.0
        standing_in_Cd = F.normalize(torch.from_numpy(np.array(self.prototypes())), dim=1) * length
        return torch.where(lacking_C[:, None], standing_in_Cd, rows_Cd)


def class_means(embeds_Nd: Rows, labels_N: NDArray[np.int64], n_classes: int) -> NDArray[np.float32]:
    """Return mean embeddings per class (C, d) float32, NaN for empty classes, computed in float64 and in blocks.

    Each process computes a share of the classes, so every process must call this. A class's rows are summed in their order, so
    the number of processes changes no bit.

    Args:
        embeds_Nd: float embeddings; NaN rows are skipped.
        labels_N: classes in [0, C).
        n_classes: C.

    Example:
        >>> class_means(np.array([[1, 0], [0, 1], [1, 1]], np.float32), np.array([0, 0, 2]), 3).tolist()
        [[0.5, 0.5], [nan, nan], [1.0, 1.0]]
    """
    return compute_in_shares(n_classes, lambda classes_c: _means_of(classes_c, embeds_Nd, labels_N))


def _means_of(classes_c: NDArray[np.int64], embeds_Nd: Rows, labels_N: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return the means of some classes (c, d), reading only their rows."""
    sums_cd = torch.zeros(len(classes_c), embeds_Nd.shape[1], dtype=torch.float64)
    counts_c = np.zeros(len(classes_c))
    for rows_B in rows_of_classes(labels_N, classes_c):
        rows_Bd, places_B = np.asarray(embeds_Nd[rows_B], np.float64), np.searchsorted(classes_c, labels_N[rows_B])
        kept_B = np.isfinite(rows_Bd[:, 0])
        # in the rows' order, as np.add.at, but many times faster
        sums_cd.index_add_(0, torch.from_numpy(places_B[kept_B]), torch.from_numpy(rows_Bd[kept_B]))
        counts_c += np.bincount(places_B[kept_B], minlength=len(classes_c))
    with np.errstate(invalid="ignore"):
        return (sums_cd.numpy() / counts_c[:, None]).astype(np.float32)


def rows_of_classes(labels_N: NDArray[np.int64], classes_c: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """Yield the row numbers of some classes in ascending order, in blocks of at most :data:`ROWS`.

    Args:
        labels_N: each row's class.
        classes_c: the classes.

    Example:
        >>> [rows.tolist() for rows in rows_of_classes(np.array([2, 0, 1, 2]), np.array([1, 2]))]
        [[0, 2, 3]]
    """
    rows_n = np.flatnonzero(np.isin(labels_N, classes_c))
    for start in range(0, len(rows_n), ROWS):
        yield rows_n[start : start + ROWS]


def samples_of_classes(labels_N: NDArray[np.int64], n_classes: int) -> list[NDArray[np.int64]]:
    """Return each class's sample numbers, C arrays in ascending order.

    Args:
        labels_N: classes in [0, C).
        n_classes: C.

    Example:
        >>> [samples.tolist() for samples in samples_of_classes(np.array([2, 0, 2]), 3)]
        [[1], [], [0, 2]]
    """
    counts_C = np.bincount(labels_N, minlength=n_classes)
    return np.split(np.argsort(labels_N, kind="stable"), np.cumsum(counts_C)[:-1])


def rows_by_class(weights_Kd: Tensor, old_classes: Sequence[str], new_classes: Sequence[str]) -> NDArray[np.float32]:
    """Return old classifier rows in the new class order, matched by name.

    Args:
        weights_Kd: (K, d) old classifier rows.
        old_classes: K names.
        new_classes: C names.

    Returns:
        (C, d) float32, NaN for classes without an old row.

    Example:
        >>> rows_by_class(torch.eye(2), ["a", "b"], ["b", "c"]).tolist()
        [[0.0, 1.0], [nan, nan]]
    """
    place = {name: row for row, name in enumerate(old_classes)}
    rows_Cd = np.full((len(new_classes), weights_Kd.shape[1]), np.nan, np.float32)
    for row, name in enumerate(new_classes):
        if name in place:
            rows_Cd[row] = weights_Kd[place[name]].detach().float().cpu().numpy()
    return rows_Cd
