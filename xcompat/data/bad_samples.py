"""Counts of unusable shards and samples, with limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from xcompat.core.distributed import gather_objects
from xcompat.core.errors import XcompatError
from xcompat.core.progress import notice

MAX_NAMED = 3  # problems named in full; the rest is counted
MIN_SAMPLES = 100  # before the end, shares of fewer samples are unreliable


@dataclass
class Problems:
    """Unusable shards and samples in a pass over the data.

    Args:
        max_bad_share: largest tolerated share of unusable shards or samples.
        total_shards: number of shards.
        shards: ``name: reason`` of damaged shards.
        samples: ``id: reason`` of the first unusable samples.
        n_bad: number of unusable samples.
        n_good: number of usable samples.
        members: unusable samples' members.
        notes: further lines to print.
    """

    max_bad_share: float = 0.01
    total_shards: int = 0
    shards: list[str] = field(default_factory=list)
    samples: list[str] = field(default_factory=list)
    n_bad: int = 0
    n_good: int = 0
    members: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)

    def add_bad_shard(self, reason: str) -> None:
        """Record a damaged shard.

        Raises:
            XcompatError: too many shards are damaged.
        """
        self.shards.append(reason)
        if len(self.shards) > self.max_bad_share * self.total_shards:
            raise XcompatError(
                f"{len(self.shards)} of {self.total_shards} shards cannot be read, more than "
                f"max_bad_share={self.max_bad_share:g}: {_summarise(self.shards)}; fetch them again, remove them, "
                "or raise max_bad_share"
            )

    def add_bad_sample(self, sample: dict[str, object], reason: str) -> None:
        """Record an unusable sample."""
        self.n_bad += 1
        self.members.update(key for key in sample if not key.startswith("__"))
        if len(self.samples) < MAX_NAMED:
            self.samples.append(f"{sample['__key__']}: {reason}")

    def check_samples(self, *, final: bool) -> None:
        """Raise if too many samples are unusable.

        Args:
            final: whether all samples were read; small counts are ignored before.

        Raises:
            XcompatError: names the first unusable samples.
        """
        total = self.n_good + self.n_bad
        if self.n_bad > self.max_bad_share * total and (final or total >= MIN_SAMPLES):
            named = self.samples if self.n_good else self.samples[:1]  # if none is good, all fail for the same reason
            raise XcompatError(
                f"{self.n_bad} of {total} samples cannot be used, more than max_bad_share={self.max_bad_share:g}: "
                f"{_summarise(named, self.n_bad)}; their members are {', '.join(sorted(self.members))}; set image_column, "
                "caption_column or label_column, or raise max_bad_share"
            )

    def lines(self) -> list[str]:
        """Return lines about skipped shards and samples, and the notes."""
        lines = []
        if self.shards:
            lines.append(f"skipped {len(self.shards)} of {self.total_shards} shards: {_summarise(self.shards)}")
        if self.n_bad:
            lines.append(f"skipped {self.n_bad} of {self.n_bad + self.n_good} samples: {_summarise(self.samples, self.n_bad)}")
        return [*lines, *self.notes]


def _summarise(reasons: Sequence[str], total: int | None = None) -> str:
    more = (len(reasons) if total is None else total) - len(reasons[:MAX_NAMED])
    return "; ".join(reasons[:MAX_NAMED]) + (f"; and {more} more" if more else "")


@dataclass
class BadSamples:
    """Samples without readable image or caption, each counted once. Each data loader worker counts the samples that it reads.

    Args:
        max_share: largest tolerated share.
        total: number of samples; None for a stream, whose share is of the samples seen.
        reasons: id -> reason.
        seen: samples of a stream so far.
        quiet: print no notices.
        what: noun to use in messages.
        raised_by: setting or option of the limit, for messages; can be empty.
    """

    max_share: float = 0.01
    total: int | None = None
    reasons: dict[str, str] = field(default_factory=dict)
    seen: int = 0
    quiet: bool = False
    what: str = "samples"
    raised_by: str = "max_bad_share"

    def add(self, sample_id: str, reason: str) -> None:
        """Record a sample and print a notice.

        Raises:
            XcompatError: too many samples are unusable.
        """
        if sample_id in self.reasons:
            return
        self.reasons[sample_id] = reason
        total = self.total if self.total is not None else self.seen
        if len(self.reasons) > self.max_share * total and (self.total is not None or total >= MIN_SAMPLES):
            named = "; ".join(f"{name}: {why}" for name, why in list(self.reasons.items())[:MAX_NAMED])
            raise XcompatError(
                f"{len(self.reasons)} of {total} {self.what} cannot be used, more than the share {self.max_share:g}: {named}; "
                f"fix or remove them{f', or raise {self.raised_by}' if self.raised_by else ''}"
            )
        if not self.quiet:
            notice(f"skipped {sample_id}: {reason}")

    def merge_processes(self) -> None:
        """Merge the samples of all processes; every process must call it.

        Raises:
            XcompatError: together too many samples are unusable.
        """
        for reasons in gather_objects(self.reasons, shared=True):
            for sample_id, reason in reasons.items():
                self.add(sample_id, reason)
