"""Print a report's cases as a Markdown table, as RESULTS.md and the README show them.

python benchmarks/table.py runs/quickstart
"""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console

from xcompat.report import Report, load_report

DIRECTIONS = ("text-to-image", "image-to-text")


def markdown(report: Report) -> str:
    """Make the table: a row per case, recall in percent with its 95 % interval, both directions side by side.

    Args:
        report: a loaded report.

    Returns:
        Lines of Markdown.
    """
    cases = {(case.label, case.direction): case for case in report.cases}
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


if __name__ == "__main__":
    for folder in sys.argv[1:]:
        Console(soft_wrap=True).print(markdown(load_report(Path(folder))), markup=False)
