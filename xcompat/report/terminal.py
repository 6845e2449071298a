"""Terminal output of reports and plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.filesize import decimal

from xcompat.core.files import read_json
from xcompat.core.metric_names import metric_name
from xcompat.core.progress import Table, literal
from xcompat.evaluation import Case
from xcompat.report.content import Example, Hit, Report
from xcompat.report.planning import Plan, describe_plan
from xcompat.report.storage import is_report_of_map, load_report, report_file
from xcompat.report.wording import failed_lines, gain, interval, search_name, verdicts

_STYLES = {
    **dict.fromkeys(("yes", "better"), "bold green"),
    **dict.fromkeys(("no", "worse"), "bold red"),
    **dict.fromkeys(("not measured", "undecided"), "yellow"),
}
BESIDE = 5
"""Most metrics in a table, so that it fits into 80 columns."""
WAYS = {"old/old": "old queries, unchanged vectors", "new/new": "new queries, re-embedded vectors"}


def print_report(report: Report, console: Console) -> None:
    """Print a table per direction, the example searches and the verdict."""
    for direction, metrics, cases in report.tables():
        _print_cases(console, direction, metrics, cases)
    print_examples(report.examples, console, report.is_judged)
    for note in report.notes:
        console.print(literal(note), style="yellow" if note.startswith("!") else "dim")
    for verdict in verdicts(report):
        console.print(f"{verdict.question}: [{_STYLES[verdict.answer]}]{verdict.answer}[/]. {literal(verdict.detail)}")
    for line in failed_lines(report):
        console.print(f"  [red]✗[/] {literal(line)}")
    for each in report.criterion.differences:
        which = literal(f"{search_name(each.direction, each.population)} {metric_name(each.metric)}")
        found = f"{gain(each.mean)} points ({interval(each.ci95)})"
        console.print(f"  [dim]{which}: new/old - old/old = {found}[/]")


def print_quality(model: str, console: Console, mapped: bool) -> None:
    """Print the result of each way to the new model on a run's test set, or a map's result on its validation split.

    Args:
        model: the run or the map.
        console: output console.
        mapped: whether the model maps galleries.
    """
    file = report_file(model)
    if not file.is_file():
        console.print(f"quality is unknown: {literal(model)} has no report; create one with `xcompat evaluate`", soft_wrap=True)
    elif is_report_of_map(document := read_json(file)):
        for line in document.get("said", []):
            console.print(literal(line))
    else:
        print_ways(load_report(file), console, mapped)


def print_ways(report: Report, console: Console, mapped: bool) -> None:
    """Print the result of each way to the new model on a run's test set.

    Args:
        report: the run's report.
        console: output console.
        mapped: whether the run's model maps galleries.
    """
    names = WAYS | {"new/old": "new queries, mapped vectors" if mapped else "new queries, unchanged vectors"}
    for direction, metrics, cases in report.tables():
        _print_cases(console, direction, metrics, [case for case in cases if case.label in names], names)


def _print_cases(
    console: Console, direction: str, metrics: list[str], cases: list[Case], names: Mapping[str, str] = MappingProxyType({})
) -> None:
    size = "/".join(dict.fromkeys(f"{case.n_queries:,} queries, {case.n_gallery:,} items" for case in cases))
    console.print(f"[italic]{literal(search_name(direction, cases[0].population))}: {size}; percent, 95 % intervals[/]\n")
    for first in range(0, len(metrics), BESIDE):
        console.print(_table(metrics[first : first + BESIDE], cases, names))
        console.print()


def _share_and_interval(share: float, ci95: tuple[float, float]) -> str:
    """Return a share above its interval, which is short enough for five metrics in 80 columns."""
    low, high = (100 * bound for bound in ci95)
    return f"{100 * share:.1f}\n[dim]{low:.1f}–{high:.1f}[/]"


def _table(metrics: list[str], cases: list[Case], names: Mapping[str, str]) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=0, show_edge=False)
    table.add_column("way" if names else "query/gallery", no_wrap=True)
    for metric in metrics:
        table.add_column(literal(metric_name(metric)), justify="right")
    for case in cases:
        cells = [
            _share_and_interval(case.metrics[metric], case.ci95[metric]) if metric in case.metrics else "" for metric in metrics
        ]
        label = literal(names.get(case.label, case.label))
        table.add_row(label, *cells, style="bold" if case.label == "new/old" else "")
    return table


def print_examples(examples: Sequence[Example], console: Console, is_judged: bool) -> None:
    """Print the hits for each kind of query side by side.

    Args:
        examples: example searches.
        console: output console.
        is_judged: whether the items are judged texts, which are cut to the column width.
    """
    for example in examples:
        table = Table(title=f"“{literal(example.query_text)}” in the old gallery", title_justify="left", box=SIMPLE_HEAD)
        for label, _ in example.rows:
            table.add_column(literal(label), no_wrap=is_judged, overflow="ellipsis" if is_judged else "fold")
        depth = max((len(hits) for _, hits in example.rows), default=0)
        for place in range(depth):
            cells = []
            for _, hits in example.rows:
                hit = hits[place] if place < len(hits) else Hit(None, "", False)
                cells.append(f"[bold green]{hit.mark} {literal(hit.caption)}[/]" if hit.is_hit else f"  {literal(hit.caption)}")
            table.add_row(*cells)
        console.print(table)


def print_plan(plan: Plan, console: Console) -> None:
    """Print the ways to a new model as a table, with sentences about them.

    Args:
        plan: the ways.
        console: output console.
    """
    traffic = plan.traffic
    title = f"{traffic.items:,} items, {traffic.queries_per_day:,} queries a day, {traffic.days} days"
    console.print(f"[italic]{title}[/]\n")
    timed = traffic.embeds_per_second is not None
    per_query = [metric_name(plan.metric), "embeddings\nper query", *(["ms per\nquery"] if timed else [])]
    in_all = [f"embeddings\nin {traffic.days} days", "storage", *(["hours until\ncomplete"] if timed else [])]
    in_all += ["price"] if traffic.price_per_1000 is not None else []
    tables = [Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False) for _ in range(2)]
    for table, columns in zip(tables, (per_query, in_all), strict=True):
        table.add_column("way")
        for column in columns:
            table.add_column(column, justify="right", no_wrap=True)
    for way in plan.ways:
        quality = "not measured"
        if way.quality is not None and way.ci95 is not None:
            quality = _share_and_interval(way.quality, way.ci95)
        most = "≤ " if way.per_query > 2 else ""
        asked = [quality, f"{most}{way.per_query:,}"]
        asked += [f"{most}{way.milliseconds:,.1f}"] if way.milliseconds is not None else []
        total = [f"{most}{way.in_all:,}", f"{most}{decimal(way.stored_bytes)}"]
        total += [f"{way.hours:,.1f}"] if way.hours is not None else []
        total += [f"{most}{way.price:,.2f}"] if way.price is not None else []
        for table, cells in zip(tables, (asked, total), strict=True):
            table.add_row(way.name, *cells)
    for table in tables:
        console.print(table)
        console.print()
    for line in describe_plan(plan):
        console.print(literal(line))
