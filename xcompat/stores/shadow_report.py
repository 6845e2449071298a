"""Shadow test reports, as text and JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD

from xcompat.core.errors import XcompatError
from xcompat.core.files import write_json
from xcompat.core.progress import Table, advance_bar, console, literal, progress_bar, snippet
from xcompat.stores.shadow import Decision, Pair, SearchSetup, Shadow, compare_ways

if TYPE_CHECKING:
    from xcompat.retrieval import Gallery, Hit
    from xcompat.stores import Store

SHOWN = 5
"""Number of printed differences."""
_LABELS = (
    "Different hits are not always better hits: measure them with labels (`xcompat evaluate`), or review the "
    "queries that differ most."
)


def show_shadow(
    searched: Gallery | Store,
    ways: tuple[SearchSetup, SearchSetup],
    queries: Iterable[str],
    top_k: int,
    limit_ms: float | None,
    out: Path | None,
) -> bool:
    """Run a shadow test, print the differences, and return whether the new configuration passes.

    Args:
        searched: gallery or store.
        ways: current and new configuration.
        queries: texts or image paths.
        top_k: hits per query.
        limit_ms: limit for the 95th percentile in milliseconds, or None.
        out: JSON file for all results, or None.

    Raises:
        XcompatError: the current configuration answered no query.
    """
    seen: Shadow | None = None
    with progress_bar() as bar:
        task = bar.add_task("comparing queries", total=len(queries) if isinstance(queries, Sequence) else None, unit="queries")
        for grown in compare_ways(searched, *ways, queries, top_k):
            seen = grown
            advance_bar(bar, task, 1)
    if seen is None or not (seen.pairs or seen.failed):
        why = (
            f"; {seen.unread[0][0]!r}: {seen.unread[0][1]}" if seen is not None and seen.unread else "; the input has no queries"
        )
        raise XcompatError(f"the current configuration answered no query{why}")
    answer = seen.answer(limit_ms)
    if seen.pairs:
        console.print(_table(seen, ways[1]))
    for pair in seen.disagreements()[:SHOWN]:
        console.print(f"  {literal(_difference(pair))}", soft_wrap=True)
    if out is not None:
        write_json(out, as_json(seen, answer))
        console.print(f"all queries: {literal(out)}", soft_wrap=True)
    console.print(f"{'[green]Go[/]' if answer.go else '[red]No-go[/]'}: {literal(answer.reason)}.", soft_wrap=True)
    if answer.go:
        console.print(_LABELS)
    return answer.go


def _table(shadow: Shadow, new: SearchSetup) -> Table:
    table = Table(title=f"{len(shadow.pairs):,} queries, {shadow.items:,} items", title_justify="left", box=SIMPLE_HEAD)
    for column in ("", "today", "new way"):
        table.add_column(column)
    (old_median, old_most), (new_median, new_most) = shadow.milliseconds(0), shadow.milliseconds(1)
    table.add_row("milliseconds, median", f"{old_median:.1f}", f"{new_median:.1f}")
    table.add_row("milliseconds, 95 % of the queries within", f"{old_most:.1f}", f"{new_most:.1f}")
    share, low, high = shadow.overlap
    table.add_row(f"same hits among {shadow.top_k}", "", f"{100 * share:.1f} % ({100 * low:.1f} to {100 * high:.1f})")
    table.add_row("same first hit", "", f"{100 * shadow.same_first:.1f} %")
    table.add_row("not answered", f"{len(shadow.unread):,}", f"{len(shadow.failed):,}")
    if new.rerank is not None:
        table.add_row("candidates", "", str(new.rerank.counts))
    return table


def _difference(pair: Pair) -> str:
    today, new = (", ".join(hit.id for hit in hits[:3]) or "nothing" for hits in (pair.old, pair.new))
    return f"{snippet(pair.query, 60)}: {100 * pair.overlap:.0f} % the same; today {today}; new {new}"


def as_json(shadow: Shadow, answer: Decision) -> dict[str, object]:
    """Return a comparison as JSON, with the largest differences first."""

    def hits_of(hits: list[Hit]) -> list[dict[str, object]]:
        return [{"id": hit.id, "score": hit.score} for hit in hits]

    pairs = [
        {
            "query": each.query,
            "overlap": each.overlap,
            "seconds": {"old": each.seconds[0], "new": each.seconds[1]},
            "old": hits_of(each.old),
            "new": hits_of(each.new),
        }
        for each in sorted(shadow.pairs, key=lambda each: each.overlap)
    ]
    measured: dict[str, object] = {}
    if shadow.pairs:
        times = {name: shadow.milliseconds(side) for side, name in enumerate(("old", "new"))}
        measured = {
            "overlap": dict(zip(("mean", "low", "high"), shadow.overlap, strict=True)),
            "same_first": shadow.same_first,
            "milliseconds": {name: {"median": median, "p95": most} for name, (median, most) in times.items()},
        }
    return {
        "go": answer.go,
        "reason": answer.reason,
        "top_k": shadow.top_k,
        "items": shadow.items,
        **measured,
        "queries": pairs,
        "failed": [{"query": query, "reason": why} for query, why in shadow.failed],
        "not_answered_today": [{"query": query, "reason": why} for query, why in shadow.unread],
    }
