"""Print a report's cases, or a comparison's methods, as a Markdown table, as docs/results and the README show them.

python benchmarks/studies/table.py runs/quickstart runs/study_query_map
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from xcompat.core.files import read_json
from xcompat.core.metric_names import metric_name
from xcompat.evaluation.cases import ALL
from xcompat.report import Report, load_report
from xcompat.report.comparison import comparison_file
from xcompat.report.wording import gain_with_interval, spread

DIRECTIONS = ("text-to-image", "image-to-text")
COMPARED = ("cmc@1", "map", "recall@1", "recall@10")


def markdown(report: Report) -> str:
    """Make the table: a row per case, recall in percent with its 95 % interval, both directions side by side.

    Args:
        report: a loaded report.

    Returns:
        Lines of Markdown.
    """
    cases = {(case.label, case.direction): case for case in report.cases if case.population == ALL}
    labels = list(dict.fromkeys(case.label for case in report.cases))
    metrics = [name for name in report.cases[0].metrics if name.startswith("recall@")]
    heads = [f"{direction.replace('-to-', '→')} {name.replace('recall', 'R')}" for direction in DIRECTIONS for name in metrics]
    lines = ["| query/gallery | " + " | ".join(heads) + " |", "|---|" + "---|" * len(heads)]
    for label in labels:
        cells = []
        for direction in DIRECTIONS:
            case = cases[label, direction]
            for name in metrics:
                low, high = case.ci95[name]
                cells.append(f"{100 * case.metrics[name]:.1f} ({100 * low:.1f}-{100 * high:.1f})")
        strong = "**" if label == "new/old" else ""
        lines.append(f"| {strong}{label}{strong} | " + " | ".join(cells) + " |")
    for difference in report.criterion.differences:
        low, high = difference.ci95
        name = difference.metric.replace("recall", "R")
        gain = f"{100 * difference.mean:+.1f} points ({100 * low:.1f} to {100 * high:.1f})"
        lines.append(f"\n{difference.direction} {name}: new/old - old/old = {gain}")
    return "\n".join(lines)


def comparison_markdown(study: dict[str, Any]) -> str:
    """Make the tables of a comparison: a row per model, mean ± standard deviation over seeds in percent, a table per direction.

    Args:
        study: what a `compare.json` holds.

    Returns:
        Lines of Markdown.
    """
    tables = []
    for direction in study["test"]:
        known = list(study["rows"][0]["old_gallery"][direction])
        metrics = [name for name in known if name in COMPARED] or known[:1]
        names = [metric_name(metric) for metric in metrics]
        wearing = any("old_with_memory" in row for row in study["rows"])
        heads = [f"{side} {name}" for side in ("new/old", "gain at", "new/new") for name in names]
        heads += [f"{side} {names[0]}" for side in ("without memory", "old+memory") if wearing]
        lines = [direction, "", "| " + " | ".join(["method", *heads, "compatible"]) + " |", "|---|" + "---:|" * (len(heads) + 1)]
        for row in study["rows"]:
            old, own = (row[side].get(direction, {}) for side in ("old_gallery", "own_gallery"))
            found, owned = ([spread(**side[name]) if name in side else "" for name in metrics] for side in (old, own))
            gained = [_gain(row.get("gain", {}).get(direction, {}).get(metric)) for metric in metrics]
            sides = [row.get(side, {}).get(direction, {}) for side in ("without_memory", "old_with_memory") if wearing]
            memories = [spread(**side[metrics[0]]) if side else "" for side in sides]
            verdict = f"{row['compatible']} of {len(study['seeds'])}" if row["method"] else ""
            name = f"**{row['name']}**" if row["name"] == study["best"] else row["name"]
            lines.append("| " + " | ".join([name, *found, *gained, *owned, *memories, verdict]) + " |")
        tables.append("\n".join(lines))
    return "\n\n".join(tables)


def _gain(difference: dict[str, float] | None) -> str:
    return gain_with_interval(difference["mean"], difference["low"], difference["high"]) if difference else ""


if __name__ == "__main__":
    for folder in map(Path, sys.argv[1:]):
        compared = comparison_file(folder)
        table = comparison_markdown(read_json(compared)) if compared.is_file() else markdown(load_report(folder))
        Console(soft_wrap=True).print(table, markup=False)
