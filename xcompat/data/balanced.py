"""Class-balanced batches for triplet losses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler

from xcompat.core.errors import XcompatError


def _require_pairs(labels_N: NDArray[np.int64], classes: Sequence[str] | None) -> None:
    present, counts = np.unique(labels_N, return_counts=True)
    lonely = [classes[index] if classes else str(index) for index in present[counts < 2].tolist()]
    if lonely:
        more = f" and of {len(lonely) - 1} more" if len(lonely) > 1 else ""
        raise XcompatError(f"fewer than two samples of class {lonely[0]!r}{more}; add samples or remove the class")


class ClassBalancedSampler(Sampler[int]):
    """Sampler of batches with P classes and K samples each, for batch-hard triplet loss (Hermans et al. 2017).

    An epoch draws about as many samples as there are. Each pass visits every class at most once, in random order, and drops
    classes that do not fill a batch. Classes repeat samples only after all were drawn. Draws depend only on seed and epoch.

    Use batch size P·K in the data loader. ``accelerate`` distributes whole batches itself, so keep ``num_replicas=1`` there.

    Args:
        labels_N: class of each sample, any integers.
        classes_per_batch: P.
        samples_per_class: K; smaller classes repeat samples.
        classes: class names for messages.
        seed: random seed.
        num_replicas: number of processes sharing the batches.
        rank: this process, which gets every ``num_replicas``-th batch.

    Raises:
        XcompatError: a class has a single sample, K is below 2, or there are too few classes or batches.

    Example:
        >>> sampler = ClassBalancedSampler(np.array([0, 0, 0, 1, 1, 1, 2, 2, 2]), 2, 2)
        >>> len(sampler), len(list(sampler))
        (8, 8)
    """

    def __init__(
        self,
        labels_N: NDArray[np.int64],
        classes_per_batch: int,
        samples_per_class: int,
        *,
        classes: Sequence[str] | None = None,
        seed: int = 0,
        num_replicas: int = 1,
        rank: int = 0,
    ) -> None:
        _require_pairs(labels_N, classes)
        self.labels_N = np.asarray(labels_N)
        _, self._counts_C = np.unique(self.labels_N, return_counts=True)
        per_pass = len(self._counts_C) // classes_per_batch
        if not per_pass:
            raise XcompatError(
                f"classes_per_batch={classes_per_batch} exceeds the {len(self._counts_C)} classes of the data; use fewer"
            )
        if samples_per_class < 2:
            raise XcompatError(f"samples_per_class={samples_per_class} leaves samples without positives; set at least 2")
        self.classes_per_batch, self.samples_per_class = classes_per_batch, samples_per_class
        self._passes = max(1, round(len(self.labels_N) / (len(self._counts_C) * samples_per_class)))
        self._batches = self._passes * per_pass // num_replicas
        if not self._batches:
            raise XcompatError(f"{self._passes * per_pass} batches are too few for {num_replicas} processes; use smaller batches")
        self.seed, self.num_replicas, self.rank, self.epoch = seed, num_replicas, rank, 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next draws."""
        self.epoch = epoch

    def __len__(self) -> int:
        """Return the number of samples per epoch in this process."""
        return self._batches * self.classes_per_batch * self.samples_per_class

    def __iter__(self) -> Iterator[int]:
        """Yield row numbers; each P·K form a batch."""
        draw = np.random.default_rng((self.seed, self.epoch))
        shuffled_N = draw.permutation(len(self.labels_N))
        rows_N = shuffled_N[np.argsort(self.labels_N[shuffled_N], kind="stable")]  # by class, shuffled within
        starts_C = np.cumsum(self._counts_C) - self._counts_C
        whole = len(starts_C) // self.classes_per_batch * self.classes_per_batch
        passes = []
        for number in range(self._passes):
            chosen = draw.permutation(len(starts_C))[:whole, None]
            places = (number * self.samples_per_class + np.arange(self.samples_per_class)) % self._counts_C[chosen]
            passes.append(rows_N[starts_C[chosen] + places].reshape(-1, self.classes_per_batch * self.samples_per_class))
        batches = np.concatenate(passes)[: self._batches * self.num_replicas]
        yield from batches[self.rank :: self.num_replicas].ravel().tolist()
