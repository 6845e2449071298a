"""The pictures of a report, one per direction or space, so that they stack on a small screen."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from xcompat.evaluation import Case
from xcompat.report.content import Panel, Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours can be told apart by nearly everyone; new/old, the point of the project, gets the strongest.
_COLOURS = {
    "old/old": "#7a828e",
    "independent/old": "#d9a28b",
    "new/old": "#0072b2",
    "new/new": "#009e73",
    "independent/independent": "#b8c4cf",
}
_EXTRA_COLOURS = ("#e69f00", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442")
_CLOUD_COLOURS = ("#7a828e", "#b8a07a", "#0072b2", "#e69f00")
_MARKED_PAIRS = 5


def draw_plots(report: Report) -> dict[str, Figure]:
    """Draw every picture that the report has data for.

    Args:
        report: the report.

    Returns:
        file name -> figure: ``cases-DIRECTION.png``, ``recall-DIRECTION.png``, ``tsne-N.png``.
    """
    figures = {}
    colours = case_colours(report)
    retrieval = [table for table in report.tables() if any(name.startswith("recall") for name in table[1])]
    for direction, metrics, _ in retrieval:
        recalls = [name for name in metrics if name.startswith("recall")]
        figures[f"cases-{direction}.png"] = _draw_cases(report, direction, recalls, colours)
    for direction in dict.fromkeys(key[2] for key in report.ranks):
        figures[f"recall-{direction}.png"] = _draw_recall(report, direction, colours)
    for number, panel in enumerate(report.panels):
        figures[f"tsne-{number}.png"] = _draw_map(panel)
    return figures


def case_colours(report: Report) -> dict[str, str]:
    """Give each case its colour, the same in every picture.

    Args:
        report: the report.

    Returns:
        case label -> CSS colour.
    """
    extras = [label for label in dict.fromkeys(case.label for case in report.cases) if label not in _COLOURS]
    return _COLOURS | {label: _EXTRA_COLOURS[i % len(_EXTRA_COLOURS)] for i, label in enumerate(extras)}


def _figure(height: float) -> tuple[Figure, Axes]:
    """Return an empty figure in the report's style; no global matplotlib state is touched."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, height), dpi=150, layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#c9d1da")
    axes.tick_params(colors="#4a5563", labelsize=9)
    axes.grid(axis="y", color="#eef1f4", linewidth=0.8)
    axes.set_axisbelow(True)
    return figure, axes


def _title(axes: Axes, text: str) -> None:
    axes.set_title(text, loc="left", fontsize=11, fontweight="bold", color="#1f2937")


def _draw_cases(report: Report, direction: str, metrics: list[str], colours: dict[str, str]) -> Figure:
    """Draw grouped bars with 95 % intervals."""
    figure, axes = _figure(4.0)
    cases = _recall_cases(report, direction)
    width = 0.84 / len(cases)
    for place, case in enumerate(cases):
        heights = np.array([case.metrics[name] for name in metrics]) * 100
        # A percentile interval of a skewed bootstrap may leave the mean out; an error bar cannot be negative.
        spans = np.array([case.ci95[name] for name in metrics]).T * 100
        errors = np.abs(np.clip([heights - spans[0], spans[1] - heights], 0, None))
        at = np.arange(len(metrics)) + (place - (len(cases) - 1) / 2) * width
        style = {"ecolor": "#374151", "elinewidth": 0.9, "capsize": 2}
        axes.bar(at, heights, width * 0.92, yerr=errors, color=colours[case.label], label=case.label, error_kw=style)
    axes.set_xticks(range(len(metrics)), metrics)
    axes.set_ylabel("queries that find a match, %", fontsize=9, color="#4a5563")
    axes.set_ylim(bottom=0)
    _title(axes, direction.replace("-", " "))
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8.5)
    return figure


def _recall_cases(report: Report, direction: str) -> list[Case]:
    cases = [case for case in report.cases if case.direction == direction]
    return [case for case in cases if any(name.startswith("recall") for name in case.metrics)]


def _draw_recall(report: Report, direction: str, colours: dict[str, str]) -> Figure:
    """Draw recall@k against k for every case."""
    from matplotlib.ticker import StrMethodFormatter

    figure, axes = _figure(4.0)
    sizes = {case.label: case.n_gallery for case in _recall_cases(report, direction)}
    for (query, gallery, found_direction), ranks_Q in report.ranks.items():
        if found_direction != direction:
            continue
        label = f"{query}/{gallery}"
        found_Q = np.sort(ranks_Q[ranks_Q >= 0])
        ks = np.unique(np.geomspace(1, sizes[label], 120).round().astype(np.int64))
        recall = np.searchsorted(found_Q, ks, side="left") / len(found_Q) * 100
        strong = label == "new/old"
        (line,) = axes.plot(ks, recall, color=colours[label], label=label, linewidth=2.6 if strong else 1.6)
        line.set_zorder(3 if strong else 2)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.set_xlabel("k, items looked at", fontsize=9, color="#4a5563")
    axes.set_ylabel("recall@k, %", fontsize=9, color="#4a5563")
    axes.set_ylim(0, 101)
    _title(axes, direction.replace("-", " "))
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8.5)
    return figure


def _draw_map(panel: Panel) -> Figure:
    """Draw one t-SNE map; some pairs are joined by a line."""
    figure, axes = _figure(4.8)
    for number, (label, points_N2) in enumerate(panel.series):
        colour = _CLOUD_COLOURS[number % len(_CLOUD_COLOURS)]
        marker = "o" if label.startswith("images") else "^"
        axes.scatter(points_N2[:, 0], points_N2[:, 1], s=9, marker=marker, color=colour, alpha=0.65, linewidths=0, label=label)
    for images, texts in zip(panel.series[::2], panel.series[1::2], strict=True):
        for start, end in zip(images.points_N2[:_MARKED_PAIRS], texts.points_N2[:_MARKED_PAIRS], strict=True):
            axes.plot([start[0], end[0]], [start[1], end[1]], color="#111827", linewidth=0.7, marker=".", markersize=4)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.grid(visible=False)
    axes.spines[["left", "bottom"]].set_visible(False)
    _title(axes, panel.title)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8.5, markerscale=2)
    return figure
