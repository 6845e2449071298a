"""Shadow test: answer real queries with the current and a new configuration, and compare."""

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
from xcompat.retrieval.commands import search_in_blocks as gallery_answers
from xcompat.retrieval.queries import TypedQuery
from xcompat.stores.commands import answers as store_answers

if TYPE_CHECKING:
    from xcompat.retrieval import Hit
    from xcompat.retrieval.fallback import Fallback
    from xcompat.retrieval.queries import Source
    from xcompat.retrieval.reranking import Reranker
    from xcompat.stores import Store

WARM_UP = 1
"""Queries without time measurement, which load models and files."""
CHANCE_TIMES = 10
"""Minimum overlap as a multiple of chance."""


@dataclass(frozen=True)
class SearchSetup:
    """Configuration to answer queries.

    Args:
        source: embedding model.
        old: old model for hybrid searches, or None.
        rerank: reranker, or None.
    """

    source: Source
    old: Fallback | None = None
    rerank: Reranker | None = None

    def answer(self, searched: Gallery | Store, query: str, top_k: int) -> tuple[list[Hit], float]:
        """Return the hits for a text or an image path, and the seconds."""
        started = time.perf_counter()
        if isinstance(searched, Gallery):
            found = gallery_answers(searched, TypedQuery(query), self.source, top_k, [], self.old, rerank=self.rerank)
        else:
            found = store_answers(searched, TypedQuery(query), self.source, top_k, None, self.old, self.rerank)
        return next(iter(found)).hits, time.perf_counter() - started


class Pair(NamedTuple):
    """Both configurations' results for a query.

    Args:
        query: text or image path.
        old: current hits, best first.
        new: new hits.
        seconds: each configuration's time.
    """

    query: str
    old: list[Hit]
    new: list[Hit]
    seconds: tuple[float, float]

    @property
    def overlap(self) -> float:
        """Share of the current hits among the new hits."""
        return len({hit.id for hit in self.old} & {hit.id for hit in self.new}) / max(1, len(self.old))

    @property
    def keeps_first(self) -> bool:
        """Whether both have the same first hit."""
        return [hit.id for hit in self.old[:1]] == [hit.id for hit in self.new[:1]]


class Decision(NamedTuple):
    """Decision with its reason.

    Args:
        go: whether the new configuration passes.
        reason: a sentence.
    """

    go: bool
    reason: str


@dataclass
class Shadow:
    """Comparison between two configurations.

    Args:
        top_k: hits per query.
        items: number of searched items.
        pairs: queries with both results.
        failed: queries that only the new configuration failed, with reasons.
        unread: queries that the current configuration failed, with reasons.
    """

    top_k: int
    items: int
    pairs: list[Pair] = field(default_factory=list)
    failed: list[tuple[str, str]] = field(default_factory=list)
    unread: list[tuple[str, str]] = field(default_factory=list)

    @property
    def overlap(self) -> tuple[float, float, float]:
        """Mean share of the current hits among the new hits, and its 95 % interval over queries."""
        shares_Q = np.array([pair.overlap for pair in self.pairs])
        return float(shares_Q.mean()), *bootstrap_interval(shares_Q)

    @property
    def same_first(self) -> float:
        """Share of queries with the same first hit."""
        return float(np.mean([pair.keeps_first for pair in self.pairs]))

    def milliseconds(self, side: int) -> tuple[float, float]:
        """Return the current (0) or new (1) configuration's median and 95th percentile."""
        times = sorted(1000 * pair.seconds[side] for pair in self.pairs[WARM_UP:] or self.pairs)
        return statistics.median(times), times[min(len(times) - 1, int(0.95 * len(times)))]

    def disagreements(self) -> list[Pair]:
        """Return the queries with different hits, largest difference first."""
        return sorted((pair for pair in self.pairs if pair.old != pair.new and pair.overlap < 1), key=lambda pair: pair.overlap)

    def answer(self, limit_ms: float | None = None) -> Decision:
        """Return the decision.

        Args:
            limit_ms: limit for the 95th percentile in milliseconds, or None.
        """
        if self.failed:
            return Decision(False, f"the new configuration failed {len(self.failed):,} queries, e.g. {self.failed[0][0]!r}")
        slowest = self.milliseconds(1)[1]
        if limit_ms is not None and slowest > limit_ms:
            return Decision(False, f"5 % of the queries take longer than {slowest:.0f} ms; the limit is {limit_ms:g} ms")
        share, _, high = self.overlap
        chance = self.top_k / max(1, self.items)
        if high < min(0.5, CHANCE_TIMES * chance):
            return Decision(
                False,
                f"only {100 * share:.1f} % of the hits are the same, close to chance; check that the model fits the index",
            )
        return Decision(True, f"all {len(self.pairs):,} queries were answered, 95 % of them within {slowest:.0f} ms")


def compare_ways(
    searched: Gallery | Store, old: SearchSetup, new: SearchSetup, queries: Iterable[str], top_k: int = 10
) -> Iterator[Shadow]:
    """Answer each query with both configurations, one after the other as in a service.

    The data stays unchanged, but rerankers can cache embeddings beside a gallery.

    Args:
        searched: gallery or store.
        old: current configuration.
        new: new configuration.
        queries: texts or image paths.
        top_k: hits per query.

    Yields:
        The same growing comparison after each query.
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
