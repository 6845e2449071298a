"""Ways to a new model for an index and its traffic, with their quality and cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from xcompat.core.errors import XcompatError
from xcompat.core.metric_names import metric_name
from xcompat.evaluation.cases import ALL, BACKFILLED, RERANKED, UNMIXED
from xcompat.report.content import Report, retrieval_metrics
from xcompat.report.wording import percent, search_name

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RERANKED_HITS = "reranked_hits"
"""Key of a report's ``run`` with the number of re-ranked hits per query."""
CANDIDATES = 20
"""Re-ranked hits per query if the report measured no re-ranking."""
BYTES = 4
"""Bytes per number of a stored embedding (float32)."""
CACHE_OVERHEAD_BYTES = 48
"""Extra bytes per cached embedding of re-ranked searches: hash, checksum, time, demand, index entries."""


@dataclass(frozen=True)
class Traffic:
    """An index and its traffic.

    Args:
        items: stored items.
        queries_per_day: queries per day.
        embeds_per_second: items or queries that the new model embeds per second; None if unknown.
        price_per_1000: price of 1,000 embeddings; None if unknown.
        days: period of the cost estimate.
    """

    items: int
    queries_per_day: int
    embeds_per_second: float | None = None
    price_per_1000: float | None = None
    days: int = 30


class Way(NamedTuple):
    """Way to a new model.

    Args:
        name: display name.
        case: the report's case that measured it.
        quality: its metric; None if not measured.
        ci95: 95 % interval over queries.
        per_query: embeddings per query; an upper bound for re-ranking, which embeds each item once.
        at_once: embeddings before the start.
        in_all: most embeddings in the period.
        milliseconds: most embedding time per query; None if the rate is unknown.
        hours: time until it is complete; None if the rate is unknown.
        stored_bytes: bytes of embeddings at the end.
        price: highest price in the period; None if unknown.
    """

    name: str
    case: str
    quality: float | None
    ci95: tuple[float, float] | None
    per_query: int
    at_once: int
    in_all: int
    milliseconds: float | None
    hours: float | None
    stored_bytes: int
    price: float | None


class Plan(NamedTuple):
    """All ways, with the metric that compares them.

    Args:
        direction: search direction.
        metric: e.g. ``cmc@1``.
        ways: ordered by the amount of change.
        traffic: index and traffic of the plan.
        rerank: re-ranked hits per query.
    """

    direction: str
    metric: str
    ways: list[Way]
    traffic: Traffic
    rerank: int


def plan_ways(report: Report, traffic: Traffic, metric: str | None = None) -> Plan:
    """Compare the ways to a new model.

    Args:
        report: report with their quality.
        traffic: index and traffic.
        metric: e.g. ``map``; None to use the report's first metric.

    Raises:
        XcompatError: the report does not measure old and new queries on the old gallery by this metric.
    """
    table = {(case.label, case.direction): case for case in report.cases if case.population == ALL}
    direction = report.directions[0]
    known = retrieval_metrics(table["old/old", direction].metrics) if ("old/old", direction) in table else []
    metric = metric or (known[0] if known else "")
    if metric not in known:
        raise XcompatError(f"the report does not measure {metric or 'old queries'}; it has {', '.join(known) or 'no metric'}")
    is_half_way = (f"{UNMIXED}/old", direction) in table
    items, k, old_dim = traffic.items, int(report.run.get(RERANKED_HITS, CANDIDATES)), report.old.dim
    cached = min(items, k * traffic.queries_per_day * traffic.days)
    re_embedded = "new/new" if (f"new/{BACKFILLED}", direction) not in table else f"new/{BACKFILLED}"
    index = items * old_dim * BYTES
    rows = [
        ("stay", "old/old", 1, 0, 0, index),
        ("new queries", f"{UNMIXED}/old" if is_half_way else "new/old", 1, 0, 0, index),
        ("half-way queries", "new/old" if is_half_way else "slerp/old", 2, 0, 0, index),
        (f"re-rank {k}", f"{RERANKED}/old", 1 + k, 0, cached, index + cached * (report.new.dim * BYTES + CACHE_OVERHEAD_BYTES)),
        ("backfill", re_embedded, 1, items, 0, items * (old_dim if BACKFILLED in re_embedded else report.new.dim) * BYTES),
    ]
    ways = []
    for name, label, per_query, at_once, grown, stored in rows:
        case = table.get((label, direction))
        asked = traffic.queries_per_day * traffic.days * (per_query if not grown else 1)
        in_all, rate, price = at_once + asked + grown, traffic.embeds_per_second, traffic.price_per_1000
        ways.append(
            Way(
                name,
                label,
                case.metrics.get(metric) if case is not None else None,
                case.ci95.get(metric) if case is not None else None,
                per_query,
                at_once,
                in_all,
                None if rate is None else 1000 * per_query / rate,
                None if rate is None else at_once / rate / 3600,
                stored,
                None if price is None else in_all / 1000 * price,
            )
        )
    return Plan(direction, metric, ways, traffic, k)


def describe_plan(plan: Plan) -> list[str]:
    """Return sentences on each way's share of a backfill's gain, and on the cost of re-ranking."""
    ways = {way.name.partition(" ")[0]: way for way in plan.ways}
    stay, backfill = ways["stay"], ways["backfill"]
    said = [f"Quality is {metric_name(plan.metric)}, {search_name(plan.direction)}, from the report."]
    if stay.quality is not None and backfill.quality is not None:
        whole = backfill.quality - stay.quality
        others = [way for way in plan.ways[1:-1] if way.quality is not None]
        if whole > 0 and others:
            shares = ", ".join(f"{way.name}: {100 * (way.quality - stay.quality) / whole:.0f} %" for way in others)  # type: ignore[operator]
            said.append(f"Share of the gain of a complete backfill ({percent(whole)[:-2]} points): {shares}.")
        elif whole <= 0:
            said.append("A complete backfill gains nothing over old queries: keep the old model, or try another new one.")
    hints = {
        "re-rank": "add --rerank 20 to `xcompat evaluate`",
        "half-way": "set evaluation.slerp: 0.5 in the recipe",
        "backfill": "add --new-own FOLDER to `xcompat evaluate`",
    }
    missing = {name: way for name, way in ways.items() if way.quality is None and name in hints}
    if missing:
        said.append(f"Not measured: {', '.join(f'{way.name} ({hints[name]})' for name, way in missing.items())}.")
    if daily := plan.rerank * plan.traffic.queries_per_day:
        said.append(
            f"Re-ranking embeds each item once, at most {daily:,} items a day. It embeds as many items as a backfill after "
            f"{plan.traffic.items / daily:,.1f} days or more, and you can reuse its embeddings for the backfill."
        )
    return said


def draw_plan(plan: Plan) -> Figure:
    """Draw quality against embeddings in the period of the plan."""
    from matplotlib.ticker import EngFormatter, LogLocator, NullLocator

    from xcompat.report.plots import new_figure, set_title

    figure, axes = new_figure(4.2)
    shown: Sequence[Way] = [way for way in plan.ways if way.quality is not None and way.ci95 is not None]
    for way in shown:
        assert way.quality is not None and way.ci95 is not None
        low, high = ([100 * (way.quality - way.ci95[0])], [100 * (way.ci95[1] - way.quality)])
        axes.errorbar([max(1, way.in_all)], [100 * way.quality], yerr=[low, high], fmt="o", capsize=3, color="#0072b2")
        axes.annotate(way.name, (max(1, way.in_all), 100 * way.quality), xytext=(8, 5), textcoords="offset points", fontsize=9)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(EngFormatter())
    axes.xaxis.set_minor_locator(NullLocator())
    axes.margins(0.25, 0.2)
    axes.set_xlabel(f"embeddings in {plan.traffic.days} days, at most", fontsize=9, color="#4a5563")
    axes.set_ylabel(f"{metric_name(plan.metric)}, %", fontsize=9, color="#4a5563")
    set_title(axes, f"{search_name(plan.direction)}: {metric_name(plan.metric)}")
    return figure
