"""The leaderboard: every method on every protocol of recipes/bench, from the comparisons that were run.

    python benchmarks/studies/bench_data.py && xcompat compare recipes/bench && python benchmarks/leaderboard.py [--write]

Prints Markdown, a table for each kind of protocol: of what was run here, and of what docs/results/leaderboard keeps of the other
protocols. With --write it keeps what was run here too and puts the tables into docs/results/leaderboard.md; a table with a
protocol that is neither run nor kept stays as it is. --write --add keeps the rows of methods that were not run this time. You can
enter your own method by a file with one stage: `xcompat compare recipes/bench --stage mine.yaml`, then the same command.
Embeddings alone enter as benchmarks/entry.py says.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from xcompat.core.files import atomic_path, read_json, write_json
from xcompat.core.metric_names import metric_name
from xcompat.evaluation import PairedDifference
from xcompat.evaluation.cases import ALL, RERANKED
from xcompat.report import Report, load_report, report_file
from xcompat.report.comparison import EvaluatedMethod, compare, comparison_file
from xcompat.report.planning import RERANKED_HITS
from xcompat.report.wording import gain_with_interval

PAGE = Path(__file__).resolve().parents[1] / "docs" / "results" / "leaderboard.md"
KEPT = PAGE.with_suffix("")
"""The folder of what was measured: a file a protocol, for programs and for the next table."""
TABLES = {
    "photos": ("tiny_closed", "tiny_half", "tiny_open"),
    "trained": ("trained_closed", "trained_half", "trained_open"),
    "classes": ("glyph_classes",),
    "pairs": ("glyph_captions", "fashion_pairs"),
    "towers": ("fashion_towers",),
    "texts": ("captions", "scifact"),
}
"""Which protocols stand in one table: those that the same methods can be run on."""
BEGIN, END = "<!-- leaderboard of {}: python benchmarks/leaderboard.py --write -->\n", "<!-- /leaderboard -->\n"
ROW = ("name", "method", "gain", "compatible", "runs", "parameters", "seconds")
"""What is kept of a method."""
RAN = ("git_revision", "machine", "versions")
"""What is kept of the first run of a protocol."""
ALSO = {"slerp": "{}, half-way", RERANKED: "{} + {}"}
"""Other queries in cases of reports -> name of their row, from the name of the method and the number of re-ranked hits."""
ENTRIES = "entries"
"""The folder of a protocol in which embeddings that enter alone are judged."""
FIRST = ("cmc@1", "ndcg@10", "recall@10")
"""The metric that a protocol is told by: the first of these that it has."""


def studies(folder: Path) -> dict[str, dict[str, Any]]:
    """Return what was compared in a folder, by the name of its protocol; nothing if there is no such folder."""
    places = sorted(place for place in folder.glob("*") if comparison_file(place).is_file())
    return {place.name: study(place) for place in places}


def study(protocol: Path) -> dict[str, Any]:
    """Return what was compared on one protocol: its seeds, its sizes, where it ran, and the row of each method."""
    seen = read_json(comparison_file(protocol))
    entries = [place for place in sorted((protocol / ENTRIES).glob("*")) if report_file(place).is_file()]
    rows = [row | {"runs": len(seen["seeds"])} for row in seen["rows"] if row["method"]]
    rows = [{key: row[key] for key in ROW} for row in rows]
    rows += [other for row in rows for query in ALSO for other in other_rows(protocol, row, seen["seeds"], query)]
    rows += [entry(place, protocol) for place in entries]
    ran = {key: value for key, value in _a_report(protocol).run.items() if key in RAN}
    return {"seeds": seen["seeds"], "test": seen["test"], "run": ran, "rows": rows}


def other_rows(protocol: Path, row: dict[str, Any], seeds: list[int], query: str) -> Iterator[dict[str, Any]]:
    """Yield the row of a method's other queries, if the recipe has ``evaluation: {slerp: 0.5}`` or ``{rerank: 20}``.

    Args:
        protocol: folder of the runs.
        row: the method's row.
        seeds: seeds of the runs.
        query: a key of :data:`ALSO`.
    """
    folders = {seed: protocol / f"seed-{seed}" / row["name"] for seed in seeds}
    reports = {seed: load_report(folder) for seed, folder in folders.items() if report_file(folder).is_file()}
    if len(reports) < len(seeds) or not all(any(case.query == query for case in each.cases) for each in reports.values()):
        return
    name = ALSO[query].format(row["name"], reports[seeds[0]].run.get(RERANKED_HITS, ""))
    renamed = {seed: _as_new(report, query) for seed, report in reports.items()}

    def gains_of(seeds: list[int]) -> dict[tuple[str, str], PairedDifference]:
        ran = {seed: renamed[seed] for seed in seeds}
        return compare(name, [EvaluatedMethod(name, row["method"], ran, 0, False, [0.0])]).methods[0].gains

    gain: dict[str, dict[str, Any]] = {}
    for (side, metric), each in gains_of(seeds).items():
        gain.setdefault(side, {})[metric] = {"mean": each.mean, "low": each.low, "high": each.high}
    compatible = sum(all(each.mean > 0 for each in gains_of([seed]).values()) for seed in seeds)
    yield row | {"name": name, "gain": gain, "compatible": compatible}


def _as_new(report: Report, query: str) -> Report:
    """Return a report in which other queries are the new queries on the old gallery."""

    def rename(found: Mapping[Any, Any]) -> dict[Any, Any]:
        kept = {key: value for key, value in found.items() if key[:2] != ("new", "old")}
        return {("new", *key[1:]) if key[0] == query else key: value for key, value in kept.items()}

    kept = [case for case in report.cases if (case.query, case.gallery) != ("new", "old")]
    cases = [replace(case, query="new") if case.query == query else case for case in kept]
    return replace(report, cases=cases, ranks=rename(report.ranks), average_precision=rename(report.average_precision))


def kept() -> dict[str, dict[str, Any]]:
    """Return what earlier runs left, by the name of its protocol."""
    return {file.stem: read_json(file) for file in sorted(KEPT.glob("*.json"))}


def require_no_loss(name: str, now: dict[str, Any], before: dict[str, Any]) -> None:
    """Refuse to replace what is kept of a protocol by a run with fewer seeds or methods."""
    lost = [f"seed {seed}" for seed in before["seeds"] if seed not in now["seeds"]]
    lost += sorted({row["name"] for row in before["rows"]} - {row["name"] for row in now["rows"]})
    if lost:
        ways = f"run them too, use --add for methods, or delete {KEPT / name}.json"
        raise SystemExit(f"{name}: {', '.join(lost)} would be lost; {ways}")


def add_rows(name: str, now: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """Return a protocol's kept results with the rows of a run of some methods; kept rows of the same names are replaced.

    Raises:
        SystemExit: the run has other seeds or another test set.
    """
    if differs := [key for key in ("seeds", "test") if now[key] != before[key]]:
        raise SystemExit(f"{name}: cannot add rows with other {' and '.join(differs)} than in {KEPT / name}.json")
    names = {row["name"] for row in now["rows"]}
    return before | {"rows": [*(row for row in before["rows"] if row["name"] not in names), *now["rows"]]}


def entry(place: Path, protocol: Path) -> dict[str, Any]:
    """Return the row of embeddings that somebody judged alone, as those of a comparison are.

    Args:
        place: of its report; its name is the row's.
        protocol: the folder of the runs that it is compared with.
    """
    report, theirs = load_report(place), _a_report(protocol)
    if not _old_queries(report).items() >= _old_queries(theirs).items():
        raise SystemExit(f"{place} was not judged on the old gallery of this protocol; write that with benchmarks/entry.py")
    row = compare(place.name, [EvaluatedMethod(place.name, "embeddings", {0: report}, 0, False, [0.0])]).methods[0]
    gain: dict[str, dict[str, Any]] = {}
    for (side, metric), each in row.gains.items():
        gain.setdefault(side, {})[metric] = {"mean": each.mean, "low": each.low, "high": each.high}
    return {"name": place.name, "method": "embeddings", "gain": gain, "compatible": row.compatible, "runs": 1}


def _a_report(protocol: Path) -> Report:
    """Return one of the reports that a comparison was made of."""
    return load_report(min(protocol.glob("seed-*/**/report.json")))


def _old_queries(report: Report) -> dict[str, tuple[int, float]]:
    """Return what the old model's queries find in its gallery."""
    return {
        f"{case.direction} {metric}": (case.n_queries, round(value, 6))
        for case in report.cases
        if case.population == ALL and case.label == "old/old"
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
    names = dict.fromkeys(row["name"] for seen in found.values() for row in seen["rows"])
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
            compatible, runs = compatible + row["compatible"], runs + row["runs"]
    costs = ["", ""]  # of embeddings alone nobody knows them
    if "seconds" in rows[0]:
        size, seconds = max(row["parameters"] for row in rows), sum(row["seconds"] for row in rows) / len(rows)
        costs = [f"{size:,}", f"{seconds:,.0f}"]
    shown = [f"{name} ({rows[0]['method']})", f"{compatible} of {runs}", *cells, *costs]
    return (compatible / max(runs, 1), sum(gains) / max(len(gains), 1)), f"| {' | '.join(shown)} |"


def main(folder: Path = Path("runs/bench"), write: bool = False, add: bool = False) -> None:
    """Print the leaderboard, or write it into its page."""
    before, now = kept(), studies(folder)
    if add:
        now |= {name: add_rows(name, now[name], before[name]) for name in now.keys() & before.keys()}
    if not now and (write or not before):
        raise SystemExit(f"{folder} holds no comparison; run xcompat compare recipes/bench first")
    if unknown := sorted(now.keys() - {name for names in TABLES.values() for name in names}):
        raise SystemExit(f"{folder / unknown[0]} is no protocol of recipes/bench; add it to TABLES, or move it away")
    found = before | now
    tables = {title: {name: found[name] for name in names if name in found} for title, names in TABLES.items()}
    if not write:
        shown = [f"{title}:\n\n" + "\n".join(table(seen)) for title, seen in tables.items() if seen]
        Console(soft_wrap=True).print("\n\n".join(shown), markup=False, highlight=False)
        return
    for name in now.keys() & before.keys():
        require_no_loss(name, now[name], before[name])
    for name, seen in now.items():
        write_json(KEPT / f"{name}.json", seen)
    page = PAGE.read_text(encoding="utf-8")
    for title, seen in tables.items():
        if missing := [name for name in TABLES[title] if name not in seen]:
            said = f"The table of {title} stays: {', '.join(missing)} is neither run nor kept."
            Console(stderr=True, soft_wrap=True).print(said, highlight=False)
            continue
        above, begin, rest = page.partition(BEGIN.format(title))
        lines = "".join(f"{line}\n" for line in table(seen))
        page = f"{above}{begin}{lines}{END}{rest.partition(END)[2]}"
    with atomic_path(PAGE) as temporary:
        temporary.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
