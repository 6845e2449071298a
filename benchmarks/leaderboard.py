"""The leaderboard: every method on every protocol of recipes/bench, from the comparisons that were run.

    python benchmarks/studies/bench_data.py && xcompat compare recipes/bench && python benchmarks/leaderboard.py [--write]

Prints Markdown, a table for each kind of protocol, and with --write puts the tables into docs/results/leaderboard.md. A protocol
that was not run has no column, and a table without any stays as it is. A method of your own enters by a file with one stage:
`xcompat compare recipes/bench --stage mine.yaml`, then the same command; embeddings alone enter as benchmarks/entry.py says.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from xcompat.files import atomic_path, read_json
from xcompat.report import Report, load_report, report_file
from xcompat.report.comparison import Contender, compare, comparison_file
from xcompat.report.wording import gain_with_interval, metric_name

PAGE = Path(__file__).resolve().parents[1] / "docs" / "results" / "leaderboard.md"
TABLES = {
    "photos": ("tiny_closed", "tiny_half", "tiny_open"),
    "trained": ("trained_closed", "trained_half", "trained_open"),
    "classes": ("glyph_classes",),
    "pairs": ("glyph_captions", "fashion_pairs"),
    "texts": ("captions", "scifact"),
}
"""Which protocols stand in one table: those that the same methods can be run on."""
BEGIN, END = "<!-- leaderboard of {}: python benchmarks/leaderboard.py --write -->\n", "<!-- /leaderboard -->\n"
ENTRIES = "entries"
"""The folder of a protocol in which embeddings that enter alone are judged."""
FIRST = ("cmc@1", "ndcg@10", "recall@10")
"""The metric that a protocol is told by: the first of these that it has."""


def studies(folder: Path) -> dict[str, dict[str, Any]]:
    """Return what was compared, by the name of its protocol, in the order of these names."""
    files = {place.name: comparison_file(place) for place in sorted(folder.iterdir()) if place.is_dir()}
    found = {name: read_json(file) for name, file in files.items() if file.is_file()}
    for name, seen in found.items():
        places = [place for place in sorted((folder / name / ENTRIES).glob("*")) if report_file(place).is_file()]
        seen["rows"] += [entry(place, folder / name) for place in places]
    return found


def entry(place: Path, protocol: Path) -> dict[str, Any]:
    """Return the row of embeddings that somebody judged alone, as those of a comparison are.

    Args:
        place: of its report; its name is the row's.
        protocol: the folder of the runs that it is compared with.
    """
    report, theirs = load_report(place), load_report(min(protocol.glob("seed-*/**/report.json")))
    if not _old_queries(report).items() >= _old_queries(theirs).items():
        raise SystemExit(f"{place} was not judged on the old gallery of this protocol; write that with benchmarks/entry.py")
    row = compare(place.name, [Contender(place.name, "embeddings", {0: report}, 0, False, [0.0])]).methods[0]
    gain: dict[str, dict[str, Any]] = {}
    for (side, metric), each in row.gains.items():
        gain.setdefault(side, {})[metric] = {"mean": each.mean, "low": each.low, "high": each.high}
    return {"name": place.name, "method": "embeddings", "gain": gain, "compatible": row.compatible, "runs": 1}


def _old_queries(report: Report) -> dict[str, tuple[int, float]]:
    """Return what the old model's queries find in its gallery."""
    return {
        f"{case.direction} {metric}": (case.n_queries, round(value, 6))
        for case in report.cases
        if case.label == "old/old"
        for metric, value in case.metrics.items()
    }


def table(found: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of the table: who is compatible in most protocols comes first, then who gains most."""
    heads = [
        f"{name}{', ' + side if len(seen['test']) > 1 else ''}, {about['n_queries']:,} queries"
        for name, seen in found.items()
        for side, about in seen["test"].items()
    ]
    yield "| " + " | ".join(["method", "compatible", *heads, "parameters", "seconds"]) + " |"
    yield "|---|---:|" + "---:|" * (len(heads) + 2)
    names = dict.fromkeys(row["name"] for seen in found.values() for row in seen["rows"] if row["method"])
    yield from (line for _, line in sorted((_line(name, found) for name in names), key=lambda scored: scored[0], reverse=True))


def _line(name: str, found: dict[str, dict[str, Any]]) -> tuple[tuple[float, float], str]:
    """Return a method's line, and what it is placed by."""
    cells, compatible, runs, gains, rows = [], 0, 0, [], []
    for seen in found.values():
        row = next((row for row in seen["rows"] if row["name"] == name), None)
        for side in seen["test"]:
            metrics = row["gain"].get(side, {}) if row else {}
            metric = next((each for each in FIRST if each in metrics), None)
            if metric is None:
                cells.append("")
                continue
            gain = metrics[metric]
            gains.append(gain["mean"])
            cells.append(f"{metric_name(metric)} {gain_with_interval(gain['mean'], gain['low'], gain['high'])}")
        if row:
            rows.append(row)
            compatible, runs = compatible + row["compatible"], runs + row.get("runs", len(seen["seeds"]))
    costs = ["", ""]  # of embeddings alone nobody knows them
    if "seconds" in rows[0]:
        size, seconds = max(row["parameters"] for row in rows), sum(row["seconds"] for row in rows) / len(rows)
        costs = [f"{size:,}", f"{seconds:,.0f}"]
    shown = [f"{name} ({rows[0]['method']})", f"{compatible} of {runs}", *cells, *costs]
    return (compatible / max(runs, 1), sum(gains) / max(len(gains), 1)), f"| {' | '.join(shown)} |"


def main(folder: Path = Path("runs/bench"), write: bool = False) -> None:
    """Print the leaderboard, or write it into its page."""
    if not folder.is_dir() or not (found := studies(folder)):
        raise SystemExit(f"{folder} holds no comparison; run xcompat compare recipes/bench first")
    if unknown := sorted(found.keys() - {name for names in TABLES.values() for name in names}):
        raise SystemExit(f"{folder / unknown[0]} is no protocol of recipes/bench; add it to TABLES, or move it away")
    page = PAGE.read_text(encoding="utf-8") if write else ""
    for title, names in TABLES.items():
        of_kind = {name: found[name] for name in names if name in found}
        if of_kind:
            lines = "".join(f"{line}\n" for line in table(of_kind))
            before, begin, rest = page.partition(BEGIN.format(title))
            page = f"{before}{begin}{lines}{END}{rest.partition(END)[2]}" if write else f"{page}{title}:\n\n{lines}\n"
    if not write:
        Console(soft_wrap=True).print(page, markup=False, highlight=False)
        return
    with atomic_path(PAGE) as temporary:
        temporary.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
