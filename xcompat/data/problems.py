"""What could not be used of shards and samples, and when that is too much."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from xcompat.distributed import gather_objects
from xcompat.errors import XcompatError
from xcompat.progress import notice

SHOWN = 3  # problems named in full, the rest counted
MIN_SAMPLES = 100  # a share of fewer samples says little while more are to come


@dataclass
class Problems:
    """What could not be used while loading, and when that is too much.

    Args:
        max_bad_share: the share of shards, or of samples, that may be unusable.
        total_shards: how many shards there are.
        shards: ``name: reason`` of each shard that could not be read to its end.
        samples: ``id: reason`` of the first samples that could not be used.
        n_bad: how many samples could not be used.
        n_good: how many could.
        members: members seen in unusable samples.
    """

    max_bad_share: float = 0.01
    total_shards: int = 0
    shards: list[str] = field(default_factory=list)
    samples: list[str] = field(default_factory=list)
    n_bad: int = 0
    n_good: int = 0
    members: set[str] = field(default_factory=set)

    def bad_shard(self, reason: str) -> None:
        """Record a shard that could not be read to its end.

        Raises:
            XcompatError: there are more such shards than allowed.
        """
        self.shards.append(reason)
        if len(self.shards) > self.max_bad_share * self.total_shards:
            raise XcompatError(
                f"{len(self.shards)} of {self.total_shards} shards cannot be read, more than "
                f"max_bad_share={self.max_bad_share:g}: {_some(self.shards)}; fetch them again, leave them out, "
                "or raise max_bad_share"
            )

    def bad_sample(self, sample: dict[str, Any], reason: str) -> None:
        """Record a sample that could not be used."""
        self.n_bad += 1
        self.members.update(key for key in sample if not key.startswith("__"))
        if len(self.samples) < SHOWN:
            self.samples.append(f"{sample['__key__']}: {reason}")

    def check_samples(self, *, final: bool) -> None:
        """Stop when more samples than allowed could not be used.

        Args:
            final: whether everything has been read, so that few samples are no excuse.

        Raises:
            XcompatError: naming the first of them.
        """
        total = self.n_good + self.n_bad
        if self.n_bad > self.max_bad_share * total and (final or total >= MIN_SAMPLES):
            named = self.samples if self.n_good else self.samples[:1]  # all fail for one reason when none is good
            raise XcompatError(
                f"{self.n_bad} of {total} samples cannot be used, more than max_bad_share={self.max_bad_share:g}: "
                f"{_some(named, self.n_bad)}; their members are {', '.join(sorted(self.members))}; set image_column, "
                "caption_column or label_column, or raise max_bad_share"
            )

    def lines(self) -> list[str]:
        """Say what was skipped, one line for shards and one for samples."""
        lines = []
        if self.shards:
            lines.append(f"skipped {len(self.shards)} of {self.total_shards} shards: {_some(self.shards)}")
        if self.n_bad:
            lines.append(f"skipped {self.n_bad} of {self.n_bad + self.n_good} samples: {_some(self.samples, self.n_bad)}")
        return lines


def _some(reasons: Sequence[str], total: int | None = None) -> str:
    more = (len(reasons) if total is None else total) - len(reasons[:SHOWN])
    return "; ".join(reasons[:SHOWN]) + (f"; and {more} more" if more else "")


@dataclass
class BadSamples:
    """Samples whose image cannot be read or that have no caption, each counted once.

    Every worker of a data loader counts what it met itself.

    Args:
        max_share: more than this share stops the run.
        total: how many samples there are; None for a stream, whose share is of what was seen.
        reasons: why, by id.
        seen: samples of a stream so far.
    """

    max_share: float = 0.01
    total: int | None = None
    reasons: dict[str, str] = field(default_factory=dict)
    seen: int = 0

    def add(self, sample_id: str, reason: str) -> None:
        """Record a sample and name it in one line.

        Raises:
            XcompatError: there are more than allowed.
        """
        if sample_id in self.reasons:
            return
        self.reasons[sample_id] = reason
        total = self.total if self.total is not None else self.seen
        if len(self.reasons) > self.max_share * total and (self.total is not None or total >= MIN_SAMPLES):
            named = "; ".join(f"{name}: {why}" for name, why in list(self.reasons.items())[:SHOWN])
            raise XcompatError(
                f"{len(self.reasons)} of {total} samples cannot be used, more than the share {self.max_share:g}: {named}; "
                "mend or remove them, or raise max_bad_share"
            )
        notice(f"skipped {sample_id}: {reason}")

    def share(self) -> None:
        """Count what any process has met; every process calls it.

        Raises:
            XcompatError: together there are more than allowed.
        """
        for reasons in gather_objects(self.reasons, shared=True):
            for sample_id, reason in reasons.items():
                self.add(sample_id, reason)
