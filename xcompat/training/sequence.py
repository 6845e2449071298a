"""Table for a chain of updates: queries on all earlier galleries."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from rich.console import Console

from xcompat.core.files import atomic_path, list_entries
from xcompat.core.metric_names import metric_name
from xcompat.core.progress import Table, literal
from xcompat.evaluation.cases import ALL
from xcompat.report import Report, load_report, report_file

CSV_NAME = "sequence.csv"
AGAINST = "against-"


def sequence_table(folders: dict[str, Path]) -> pd.DataFrame:
    """Read the cases q_i/g_j for a chain of updates from reports (BT² §4.8).

    Args:
        folders: stage name -> report folder, in order.

    Returns:
        Rows of ``query``, ``gallery``, ``direction``, ``metric``, ``value``.
    """
    rows = []
    for stage, folder in folders.items():
        nearest = load_report(folder)
        rows += _rows(
            nearest, {"old/old": (nearest.old.name,) * 2, "new/old": (stage, nearest.old.name), "new/new": (stage,) * 2}
        )
        for against in _earlier(folder):
            earlier = load_report(against)
            rows += _rows(earlier, {"new/old": (stage, earlier.old.name)})
    return pd.DataFrame(rows).drop_duplicates(["query", "gallery", "direction", "metric"])


def _earlier(folder: Path) -> list[Path]:
    return [against for against in list_entries(folder, f"{AGAINST}*") if report_file(against).exists()]


def _rows(report: Report, names: dict[str, tuple[str, str]]) -> list[dict[str, object]]:
    return [
        {"query": query, "gallery": gallery, "direction": case.direction, "metric": metric, "value": value}
        for case in report.cases
        if case.population == ALL and case.label in names
        for (query, gallery) in [names[case.label]]
        for metric, value in case.metrics.items()
    ]


def write_sequence(output_dir: Path, folders: dict[str, Path], console: Console) -> None:
    """Write ``sequence.csv`` and print it, if there are several old galleries.

    Args:
        output_dir: run folder.
        folders: stage name -> report folder, in order.
        console: where to print.
    """
    if not any(map(_earlier, folders.values())):
        return
    table = sequence_table(folders)
    with atomic_path(output_dir / CSV_NAME) as temporary:
        table.to_csv(temporary, index=False)
    galleries = list(dict.fromkeys(table["gallery"]))
    for (direction, metric), part in table.groupby(["direction", "metric"], sort=False):
        if not str(metric).endswith(("@1", "@1.0")) or str(metric).startswith("negative"):
            continue
        square = part.pivot_table(index="query", columns="gallery", values="value", sort=False).reindex(columns=galleries)
        shown = Table("query \\ gallery", *map(literal, galleries), title=literal(f"{direction} {metric_name(metric)}, percent"))
        for query, values in square.iterrows():
            shown.add_row(literal(query), *("" if pd.isna(value) else f"{100 * value:.1f}" for value in values))
        console.print(shown)
