"""Comparisons as text tables for page, Markdown and terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import accumulate
from typing import NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.filesize import decimal

from xcompat.core.metric_names import metric_name
from xcompat.core.progress import Table as TerminalTable
from xcompat.core.progress import literal
from xcompat.evaluation import PairedDifference
from xcompat.evaluation.cases import find_deciding_difference, overall_outcome
from xcompat.report.comparison.study import Comparison, Key, MethodRow, Row, Spread
from xcompat.report.wording import gain_with_interval, round_count, spread

NOTHING = "–"
OLD_QUERIES, RERANKED_HITS = "old queries", "re-ranked"


class TableRow(NamedTuple):
    """Row of a model.

    Args:
        name: model name.
        cells: a text per column.
        is_best: whether it is the best method.
    """

    name: str
    cells: list[str]
    is_best: bool


class Table(NamedTuple):
    """Text table.

    Args:
        title: table title.
        explanation: how to read it.
        columns: headings of all columns after the first, which names the models.
        rows: a row per model.
        groups: numbers of columns that the terminal shows together.
    """

    title: str
    explanation: str
    columns: list[str]
    rows: list[TableRow]
    groups: list[int]


def tables(comparison: Comparison) -> list[Table]:
    """Return results, gains over old/old and distances to the best method per direction, then verdicts and costs."""
    found = []
    for direction, (n_queries, n_gallery) in comparison.sizes.items():
        size = f"{direction}: {n_queries:,} queries, {n_gallery:,} items"
        found.append(_values(comparison, direction, f"{size}; percent"))
        gains = {row.name: row.gains for row in comparison.methods}
        floor = "new/old minus old/old on the same queries, mean over seeds, in points, with 95 % intervals over queries."
        found.append(_differences(comparison, direction, f"{direction}: gain over old/old", floor, gains))
        if len(comparison.methods) > 1:
            behind = {row.name: row.behind_best for row in comparison.methods if row.name != comparison.best}
            best = (
                f"new/old minus new/old of {comparison.best}, the best by {headline(comparison.first_metric)}, in the same form."
            )
            found.append(_differences(comparison, direction, f"{direction}: distance to {comparison.best}", best, behind))
        found.append(_memories(comparison, direction))
    return [table for table in found if table.rows] + [_costs(comparison)]


def headline(key: Key) -> str:
    """Return the name of a metric with its direction.

    Example:
        >>> headline(("image-to-image", "cmc@1"))
        'CMC@1 (image to image)'
    """
    return f"{metric_name(key[1])} ({key[0].replace('-', ' ')})"


def summary(comparison: Comparison) -> str:
    """Summarise a comparison in two sentences."""
    every = len(comparison.seeds)
    good = sum(row.compatible == every for row in comparison.methods)
    with_seeds = f"with all {every} seeds" if every > 1 else f"with seed {comparison.seeds[0]}"
    count = len(comparison.methods)
    methods = f"{count} method{'s' if count > 1 else ''} {'is' if 1 in (good, count) else 'are'}"
    return (
        f"{good} of {methods} backward compatible {with_seeds}. "
        f"Best on the old gallery by {headline(comparison.first_metric)}: {comparison.best}."
    )


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Print every table, with the best method in bold."""
    seeds = ", ".join(map(str, comparison.seeds))
    console.print(f"[bold]{literal(comparison.name)}[/]: seeds {seeds}")
    for each in tables(comparison):
        console.print(f"[italic]{literal(each.title)}[/]\n")
        for last, size in zip(accumulate(each.groups), each.groups, strict=True):
            console.print(_group(each, slice(last - size, last)))
            console.print()
        console.print(f"[dim]{literal(each.explanation)}[/]\n")
    for note in comparison.notes:
        console.print(f"[dim]{literal(note)}[/]")
    console.print(literal(summary(comparison)))


def _group(shown: Table, columns: slice) -> TerminalTable:
    """Return some columns of a table for the terminal."""
    table = TerminalTable(box=SIMPLE_HEAD, padding=0, show_edge=False)  # four intervals fit into 80 columns
    table.add_column("model", min_width=11)
    for column in shown.columns[columns]:
        table.add_column(literal(column), justify="right", no_wrap=True)
    for row in shown.rows:
        cells = [cell.replace(" ± ", "\n± ").replace(" (", "\n(").replace(" per ", "\nper ") for cell in row.cells[columns]]
        table.add_row(literal(row.name), *cells, style="bold" if row.is_best else "")
    return table


def _groups(columns: int, most: int) -> list[int]:
    """Divide columns into groups.

    Example:
        >>> _groups(5, most=4)
        [4, 1]
    """
    return [min(most, columns - first) for first in range(0, columns, most)]


def _values(comparison: Comparison, direction: str, title: str) -> Table:
    columns = {
        (side, key): f"{metric_name(key[1])}\n{side if side in (RERANKED_HITS, OLD_QUERIES) else f'on {side}'}"
        for side in ("old", RERANKED_HITS, "own", OLD_QUERIES)
        for row in comparison.rows
        for key in _cases(row, side)
        if key[0] == direction
    }
    rows = []
    for row in comparison.rows:
        values = [_cases(row, side).get(key) for side, key in columns]
        rows.append(TableRow(row.name, [spread(*value) if value else NOTHING for value in values], row.name == comparison.best))
    explanation = (
        "On old: results on the old gallery (new/old for a method; old/old is the baseline). On own: results on the model's own "
        "gallery (new/new for a method; independent/independent is the ceiling). Mean ± standard deviation over seeds."
    )
    if any(side == RERANKED_HITS for side, _ in columns):
        explanation += " Re-ranked: results on the old gallery after the new model re-ranks the first hits."
    if any(side == OLD_QUERIES for side, _ in columns):
        explanation += " Old queries: their results on the method's own gallery, in the shared space."
    groups = [size for count in Counter(side for side, _ in columns).values() for size in _groups(count, 8)]
    return Table(title, explanation, list(columns.values()), rows, groups)


def _cases(row: Row, side: str) -> dict[Key, Spread]:
    if side in (RERANKED_HITS, OLD_QUERIES):
        if not isinstance(row, MethodRow):
            return {}
        return row.from_old if side == OLD_QUERIES else row.reranked
    return row.old_gallery if side == "old" else row.own_gallery


def _differences(
    comparison: Comparison, direction: str, title: str, explanation: str, found: Mapping[str, Mapping[Key, PairedDifference]]
) -> Table:
    metrics = {key[1]: metric_name(key[1]) for each in found.values() for key in each if key[0] == direction}
    rows = []
    for name, differences in found.items():
        if differences:
            each = [differences[direction, metric] for metric in metrics]
            texts = [gain_with_interval(one.mean, one.low, one.high) for one in each]
            rows.append(TableRow(name, texts, name == comparison.best))
    return Table(title, explanation, list(metrics.values()), rows if metrics else [], _groups(len(metrics), 4))


def _memories(comparison: Comparison, direction: str) -> Table:
    """Separate the effect of learned transform and memory."""
    wearing = [row for row in comparison.methods if row.without_memory]
    metrics = [metric for each, metric in (wearing[0].gains if wearing else ()) if each == direction]
    rows = []
    for row in wearing:
        keys = [(direction, metric) for metric in metrics]
        found = [side.get(key) for side in (row.without_memory, row.old_with_memory) for key in keys]
        cells = [spread(*value) if value else NOTHING for value in found]
        beside = [row.beside_old_with_memory.get(key) for key in keys]
        cells += [gain_with_interval(one.mean, one.low, one.high) if one else NOTHING for one in beside]
        rows.append(TableRow(row.name, cells, row.name == comparison.best))
    explanation = (
        "No memory: new queries without learned transform and memory, on the old gallery. Old + memory: old queries with the "
        "same learned transform and memory, which need no new model. Gain: new/old minus old + memory, with 95 % intervals over "
        "queries."
    )
    columns = [f"{metric_name(metric)}\n{side}" for side in ("no memory", "old + memory", "gain") for metric in metrics]
    groups = 2 * _groups(len(metrics), 8) + _groups(len(metrics), 4)
    return Table(f"{direction}: effect of learned transform and memory", explanation, columns, rows, groups)


def _costs(comparison: Comparison) -> Table:
    every = len(comparison.seeds)
    remembered = any(row.peak_memory is not None for row in comparison.methods)
    counted = any(row.item_cost is not None for row in comparison.methods)

    def cells(row: MethodRow) -> list[str]:
        return [
            f"{row.compatible} of {every}",
            _describe_outcome(row),
            f"{row.not_hurt} of {every}" if row.not_hurt is not None else "not measured",
            f"{row.extra_dims:+,}",
            f"{row.parameters:,} per {'gallery item' if row.maps_galleries else 'query'}" if row.parameters else "0",
            f"{row.seconds:,.0f}",
            *([decimal(row.peak_memory) if row.peak_memory is not None else NOTHING] if remembered else []),
            *(([f"{row.item_cost.map_macs:,}", f"{row.item_cost.stored_bytes:,}"] if row.item_cost else [NOTHING] * 2) * counted),
        ]

    explanation = (
        "Compatible: number of seeds with new/old above old/old on every metric. Outcome: better if the intervals of all gains "
        "lie above zero, worse if one lies below, otherwise undecided. Brackets estimate the number of queries needed (80 % "
        "power, with gains and spreads as measured). New model unharmed: number of seeds with new/new not below "
        "independent/independent. Extra parameters: heads and maps outside the encoder. Every query passes through them, or "
        "every gallery item once if the method maps galleries. Training seconds: time of the method's stage."
    )
    columns = ["compatible", "outcome", "new model\nunharmed", "extra\ndimensions", "extra\nparameters", "training\nseconds"]
    if remembered:
        columns.append("peak\nmemory")
        explanation += (
            " Peak memory: maximum over seeds during training or solving, on the accelerator or, without one, of the whole "
            "process."
        )
    if counted:
        columns += ["MACs\nper item", "bytes\nper item"]
        explanation += (
            " MACs per item: multiply-accumulate operations to map a stored vector. Bytes per item: stored vector and "
            "side-information, in float32."
        )
    rows = [TableRow(row.name, cells(row), row.name == comparison.best) for row in comparison.methods]
    return Table("Verdicts and costs", explanation, columns, rows, [3, len(columns) - 3])


def _describe_outcome(row: MethodRow) -> str:
    if not row.gains:
        return NOTHING
    outcome, last = overall_outcome(row.differences), find_deciding_difference(row.differences)
    needed = f" ({round_count(last.queries_needed)} queries)" if last is not None and last.queries_needed is not None else ""
    return f"{outcome}{needed}"
