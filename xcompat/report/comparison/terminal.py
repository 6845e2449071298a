"""A comparison in the terminal."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from xcompat.progress import literal
from xcompat.report.comparison.study import Comparison
from xcompat.report.comparison.tables import summary, tables


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Print every table, the best method in bold.

    Args:
        comparison: the comparison.
        console: where to.
    """
    seeds = ", ".join(map(str, comparison.seeds))
    console.print(f"[bold]{literal(comparison.name)}[/]: seeds {seeds}")
    for each in tables(comparison):
        table = Table(title=literal(each.title), title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        table.add_column("model", overflow="fold", min_width=11)
        for column in each.columns:
            table.add_column(literal(column), justify="right")
        for row in each.rows:
            cells = [cell.replace(" ± ", "\n± ").replace(" (", "\n(").replace(" per ", "\nper ") for cell in row.cells]
            table.add_row(literal(row.name), *cells, style="bold" if row.is_best else "")
        console.print(table)
        console.print(f"[dim]{literal(each.explanation)}[/]\n")
    for note in comparison.notes:
        console.print(f"[dim]{literal(note)}[/]")
    console.print(literal(summary(comparison)))
