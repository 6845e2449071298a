"""Table of several kinds of queries, compared with old queries on the old index."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from rich.box import SIMPLE_HEAD

from xcompat.core.progress import Table, literal
from xcompat.evaluation import Evaluation, PairedDifference, bootstrap_interval, paired_bootstrap
from xcompat.evaluation.cases import TEXT_TO_TEXT
from xcompat.report.wording import gain, interval

METRIC = "ndcg@10"
COLUMNS = ("queries", "nDCG@10", "over old queries", "find less", "negative flips")


@dataclass(frozen=True)
class SearchedQueries:
    """Results of a query kind.

    Args:
        name: the first column of the table.
        ndcg_Q: each query's nDCG@10.
        first_ranks_Q: first relevant item's rank, from 0.
    """

    name: str
    ndcg_Q: NDArray[np.float64]
    first_ranks_Q: NDArray[np.int64]

    @classmethod
    def of_case(cls, name: str, evaluation: Evaluation, query: str, gallery: str = "old") -> SearchedQueries:
        """Read the results of a case from an evaluation."""
        key = query, gallery, TEXT_TO_TEXT
        values_Q = evaluation.average_precision[*key, METRIC].astype(np.float64)
        return cls(name, values_Q, evaluation.ranks[key])


@dataclass(frozen=True)
class Comparison:
    """Row of the table.

    Args:
        queries: the results.
        old: the results of old queries.
    """

    queries: SearchedQueries
    old: SearchedQueries

    @cached_property
    def gain(self) -> PairedDifference:
        """Gain over old queries with its 95 % interval."""
        return paired_bootstrap(self.queries.ndcg_Q, self.old.ndcg_Q)

    @cached_property
    def ci95(self) -> tuple[float, float]:
        """95 % interval of nDCG@10."""
        return bootstrap_interval(self.queries.ndcg_Q)

    @property
    def found_less(self) -> int:
        """Number of queries with a lower nDCG@10 than the old query."""
        return int((self.queries.ndcg_Q < self.old.ndcg_Q - 1e-9).sum())

    @property
    def negative_flips(self) -> int:
        """Number of queries that lost a correct first hit."""
        return int(((self.old.first_ranks_Q == 0) & (self.queries.first_ranks_Q > 0)).sum())

    def cells(self) -> list[tuple[str, str]]:
        """Return the row as text: each column's value with its interval or share."""
        value = f"{100 * self.queries.ndcg_Q.mean():.1f}", interval(self.ci95)
        if self.queries is self.old:
            return [(self.queries.name, ""), value, ("", ""), ("", ""), ("", "")]
        counts = [(str(count), f"{100 * count / len(self.old.ndcg_Q):.0f} %") for count in (self.found_less, self.negative_flips)]
        return [(self.queries.name, ""), value, (gain(self.gain.mean), interval((self.gain.low, self.gain.high))), *counts]

    def as_json(self) -> dict[str, object]:
        """Return the row as JSON: fractions, differences and counts."""
        return {
            "queries": self.queries.name,
            METRIC: {"value": float(self.queries.ndcg_Q.mean()), "ci95": list(self.ci95)},
            "gain": asdict(self.gain),
            "found_less": self.found_less,
            "negative_flips": self.negative_flips,
        }


def render_rich(rows: Sequence[Comparison], title: str, best: str) -> Table:
    """Return the table for the terminal.

    Args:
        rows: the rows, in order.
        title: the title.
        best: name of the bold row.
    """
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in COLUMNS:
        table.add_column(name, justify="left" if name == COLUMNS[0] else "right", no_wrap=name == COLUMNS[0])
    for row in rows:
        cells = (f"{literal(value)}\n[dim]{literal(beside)}[/]" if beside else literal(value) for value, beside in row.cells())
        table.add_row(*cells, style="bold" if row.queries.name == best else "")
    return table


def render_markdown(rows: Sequence[Comparison], best: str) -> str:
    """Return the table as Markdown, with the arguments of :func:`render_rich`."""
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{' --- |' * len(COLUMNS)}"]
    for row in rows:
        cells = [f"{value} ({beside})" if beside else value for value, beside in row.cells()]
        name = f"**{cells[0]}**" if cells[0] == best else cells[0]
        lines.append(f"| {' | '.join([name, *cells[1:]])} |")
    return "\n".join(lines) + "\n"
