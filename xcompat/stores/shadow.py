"""A shadow: real queries answered as today, and beside it in the new way, to see what would change."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from xcompat.core.errors import XcompatError
from xcompat.evaluation import bootstrap_interval
from xcompat.retrieval import Gallery
from xcompat.retrieval.commands import answers as gallery_answers
from xcompat.retrieval.queries import Typed
from xcompat.stores.commands import answers as store_answers

if TYPE_CHECKING:
    from xcompat.retrieval import Hit
    from xcompat.retrieval.fallback import Fallback
    from xcompat.retrieval.queries import Source
    from xcompat.retrieval.reranking import Reranker
    from xcompat.stores import Store

WARM_UP = 1
"""Queries whose time is not counted: they load models and open files."""
CHANCE_TIMES = 10
"""How many times the overlap of chance two ways have to share, if they are to search the same things."""


@dataclass(frozen=True)
class Way:
    """One way to answer queries.

    Args:
        source: the model that embeds them.
        old: the old model of a map that searches half-way with it; None without one.
        rerank: orders the first hits again; None for plain hits.
    """

    source: Source
    old: Fallback | None = None
    rerank: Reranker | None = None

    def answer(self, searched: Gallery | Store, query: str, top_k: int) -> tuple[list[Hit], float]:
        """Return the hits of a text, or of the picture at a path, and the seconds that they took."""
        started = time.perf_counter()
        if isinstance(searched, Gallery):
            found = gallery_answers(searched, Typed(query), self.source, top_k, [], self.old, rerank=self.rerank)
        else:
            found = store_answers(searched, Typed(query), self.source, top_k, None, self.old, self.rerank)
        return next(iter(found)).hits, time.perf_counter() - started


class Pair(NamedTuple):
    """What both ways found for one query.

    Args:
        query: a text, or the path of a picture.
        old: hits of today's way, the best first.
        new: hits of the new way.
        seconds: what each took.
    """

    query: str
    old: list[Hit]
    new: list[Hit]
    seconds: tuple[float, float]

    @property
    def overlap(self) -> float:
        """Share of today's hits that the new way finds too."""
        return len({hit.id for hit in self.old} & {hit.id for hit in self.new}) / max(1, len(self.old))

    @property
    def keeps_first(self) -> bool:
        """Whether both have the same first hit."""
        return [hit.id for hit in self.old[:1]] == [hit.id for hit in self.new[:1]]


class Answer(NamedTuple):
    """Whether to go on, and why.

    Args:
        go: whether nothing speaks against the new way.
        reason: a sentence.
    """

    go: bool
    reason: str


@dataclass
class Shadow:
    """What two ways made of the same queries.

    Args:
        top_k: hits of each query.
        items: items that are searched.
        pairs: queries that both answered.
        failed: queries that the new way could not answer, and why; today's way could.
        unread: queries that no way could answer, and why.
    """

    top_k: int
    items: int
    pairs: list[Pair] = field(default_factory=list)
    failed: list[tuple[str, str]] = field(default_factory=list)
    unread: list[tuple[str, str]] = field(default_factory=list)

    @property
    def overlap(self) -> tuple[float, float, float]:
        """Mean share of today's hits that the new way finds too, and its 95 % interval over queries."""
        shares_Q = np.array([pair.overlap for pair in self.pairs])
        return float(shares_Q.mean()), *bootstrap_interval(shares_Q)

    @property
    def same_first(self) -> float:
        """Share of the queries with the same first hit."""
        return float(np.mean([pair.keeps_first for pair in self.pairs]))

    def milliseconds(self, side: int) -> tuple[float, float]:
        """Return the median and the 95th percentile of today's way (0) or of the new one (1)."""
        times = sorted(1000 * pair.seconds[side] for pair in self.pairs[WARM_UP:] or self.pairs)
        return statistics.median(times), times[min(len(times) - 1, int(0.95 * len(times)))]

    def disagreements(self) -> list[Pair]:
        """Return the queries whose hits differ, those that differ most first."""
        return sorted((pair for pair in self.pairs if pair.old != pair.new and pair.overlap < 1), key=lambda pair: pair.overlap)

    def answer(self, limit_ms: float | None = None) -> Answer:
        """Say whether to go on.

        Args:
            limit_ms: most milliseconds within which 95 % of the queries have to be answered; None for no limit.
        """
        if self.failed:
            return Answer(False, f"{len(self.failed):,} queries were not answered in the new way, such as {self.failed[0][0]!r}")
        slowest = self.milliseconds(1)[1]
        if limit_ms is not None and slowest > limit_ms:
            return Answer(False, f"5 % of the queries take longer than {slowest:.0f} ms; the limit is {limit_ms:g} ms")
        share, _, high = self.overlap
        chance = self.top_k / max(1, self.items)
        if high < min(0.5, CHANCE_TIMES * chance):
            return Answer(
                False,
                f"only {100 * share:.1f} % of the hits are the same, hardly more than chance: is it a model for this index?",
            )
        return Answer(True, f"all {len(self.pairs):,} queries were answered, 95 % of them within {slowest:.0f} ms")


def compare_ways(searched: Gallery | Store, old: Way, new: Way, queries: Iterable[str], top_k: int = 10) -> Iterator[Shadow]:
    """Answer each query in both ways, one query after the other as a service does.

    Nothing that is searched changes, except that re-ranked searches may keep new embeddings beside a gallery.

    Args:
        searched: a gallery, or a store.
        old: today's way.
        new: the new way.
        queries: texts, or paths of pictures.
        top_k: hits of each.

    Yields:
        The same comparison after each query, so that it can be read while it grows.
    """
    items = len(searched) if isinstance(searched, Gallery) else searched.count()
    shadow = Shadow(top_k, items)
    for query in queries:
        try:
            found, seconds = old.answer(searched, query, top_k)
        except XcompatError as error:
            shadow.unread.append((query, str(error)))
            yield shadow
            continue
        try:
            again, new_seconds = new.answer(searched, query, top_k)
            shadow.pairs.append(Pair(query, found, again, (seconds, new_seconds)))
        except XcompatError as error:
            shadow.failed.append((query, str(error)))
        yield shadow
