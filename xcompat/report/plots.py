"""Plots of a report, each for a direction or space, to stack on a small screen."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import numpy as np

from xcompat.core.metric_names import metric_name
from xcompat.evaluation import Case
from xcompat.evaluation.cases import ALL, IMAGE_TO_IMAGE
from xcompat.evaluation.selective import query_quality, risk_coverage
from xcompat.report.content import LossPoint, Panel, Report, retrieval_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Nearly everyone can tell Okabe and Ito's colours apart; new/old, the main result, gets the strongest.
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
_FEW_POINTS = 20
"""Most points that get markers; a line of one or two points is invisible without."""
_CLASS_RANGES = 10
"""Ranges of classes in a plot, of at least two classes each."""
_LEAST_COVERAGE = 5
"""Smallest percentage of queries for which risk is shown; fewer queries are too noisy."""


def draw_plots(report: Report) -> dict[str, Figure]:
    """Draw every plot for which the report has data.

    Returns:
        file name -> figure: ``cases-DIRECTION.png``, ``recall-``, ``cmc-`` or ``success-DIRECTION.png``,
        ``classes-DIRECTION.png``, ``confidence-DIRECTION.png``, ``tsne-N.png``, ``loss-N.png``.
    """
    figures = {}
    colours = case_colours(report)
    for direction, metrics, cases in report.tables():
        if cases[0].population != ALL:
            continue
        drawn = retrieval_metrics(metrics)
        if drawn:
            figures[f"cases-{direction}.png"] = _draw_cases(direction, drawn, cases, colours)
            if any(key[2] == direction for key in report.ranks):
                kind = "cmc" if report.is_labelled else "success" if report.is_judged else "recall"
                figures[f"{kind}-{direction}.png"] = _draw_depths(report, kind, direction, cases, colours)
            if direction == IMAGE_TO_IMAGE and (ranges := _class_ranges(report.clusters.get(direction))):
                figures[f"classes-{direction}.png"] = _draw_classes(report, direction, ranges, colours)
    for direction in report.confidence:
        figures[f"confidence-{direction}.png"] = _draw_risk(report, direction)
    for number, panel in enumerate(report.panels):
        figures[f"tsne-{number}.png"] = _draw_map(panel)
    for number, (stage, points) in enumerate(report.training.items()):
        figures[f"loss-{number}.png"] = _draw_losses(stage, points)
    return figures


def case_colours(report: Report) -> dict[str, str]:
    """Return case label -> CSS colour, equal in all plots."""
    extras = [label for label in dict.fromkeys(case.label for case in report.cases) if label not in _COLOURS]
    return _COLOURS | {label: _EXTRA_COLOURS[i % len(_EXTRA_COLOURS)] for i, label in enumerate(extras)}


def figure_png(figure: Figure) -> bytes:
    """Return a figure as PNG bytes, equal in every run."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def new_figure(height: float) -> tuple[Figure, Axes]:
    """Return an empty figure in the report's style, ``height`` inches high, and its axes.

    Global matplotlib state stays unchanged.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, height), dpi=150, layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#c9d1da")
    axes.tick_params(colors="#4a5563", labelsize=9)
    axes.grid(axis="y", color="#eef1f4", linewidth=0.8)
    axes.set_axisbelow(True)
    return figure, axes


def set_title(axes: Axes, text: str) -> None:
    """Set a title in the report's style."""
    axes.set_title(text, loc="left", fontsize=11, fontweight="bold", color="#1f2937", parse_math=False)


def _draw_cases(direction: str, metrics: list[str], cases: list[Case], colours: dict[str, str]) -> Figure:
    figure, axes = new_figure(4.0)
    width = 0.84 / len(cases)
    for place, case in enumerate(cases):
        heights = np.array([case.metrics[name] for name in metrics]) * 100
        # A percentile interval of a skewed bootstrap may not contain the mean; an error bar cannot be negative.
        spans = np.array([case.ci95[name] for name in metrics]).T * 100
        errors = np.abs(np.clip([heights - spans[0], spans[1] - heights], 0, None))
        at = np.arange(len(metrics)) + (place - (len(cases) - 1) / 2) * width
        style = {"ecolor": "#374151", "elinewidth": 0.9, "capsize": 2}
        axes.bar(at, heights, width * 0.92, yerr=errors, color=colours[case.label], label=case.label, error_kw=style)
    axes.set_xticks(range(len(metrics)), [metric_name(name) for name in metrics])
    axes.set_ylabel("%", fontsize=9, color="#4a5563")
    axes.set_ylim(bottom=0)
    set_title(axes, direction.replace("-", " "))
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8.5)
    return figure


def _draw_depths(report: Report, kind: str, direction: str, cases: list[Case], colours: dict[str, str]) -> Figure:
    from matplotlib.ticker import StrMethodFormatter

    figure, axes = new_figure(4.0)
    sizes = {case.label: case.n_gallery for case in cases}
    for (query, gallery, found_direction), ranks_Q in report.ranks.items():
        if found_direction != direction:
            continue
        label = f"{query}/{gallery}"
        found_Q = np.sort(ranks_Q[ranks_Q >= 0])
        ks = np.unique(np.geomspace(1, sizes[label], 120).round().astype(np.int64))
        share = np.searchsorted(found_Q, ks, side="left") / len(found_Q) * 100
        strong = label == "new/old"
        (line,) = axes.plot(ks, share, color=colours[label], label=label, linewidth=2.6 if strong else 1.6)
        line.set_zorder(3 if strong else 2)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.set_xlabel("number of items k", fontsize=9, color="#4a5563")
    axes.set_ylabel(f"{metric_name(f'{kind}@k')}, %", fontsize=9, color="#4a5563")
    axes.set_ylim(0, 101)
    set_title(axes, direction.replace("-", " "))
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8.5)
    return figure


def _class_ranges(classes_Q: np.ndarray | None) -> list[np.ndarray]:
    """Return the class numbers of each range, in label order; nothing for few classes."""
    present_C = np.unique(classes_Q) if classes_Q is not None else np.empty(0)
    return np.array_split(present_C, _CLASS_RANGES) if len(present_C) >= 2 * _CLASS_RANGES else []


def _draw_classes(report: Report, direction: str, ranges: list[np.ndarray], colours: dict[str, str]) -> Figure:
    """Draw CMC@1 by ranges of classes (FCT Figure 7)."""
    figure, axes = new_figure(4.0)
    ends = np.cumsum([len(classes_C) for classes_C in ranges])
    for (query, gallery, found_direction), ranks_Q in report.ranks.items():
        if found_direction != direction:
            continue
        inside = [np.isin(report.clusters[direction], classes_C) & (ranks_Q >= 0) for classes_C in ranges]
        share = [100 * np.mean(ranks_Q[in_Q] == 0) if in_Q.any() else np.nan for in_Q in inside]
        label = f"{query}/{gallery}"
        axes.plot(
            share, color=colours[label], label=label, marker="o", markersize=4, linewidth=2.6 if label == "new/old" else 1.6
        )
    axes.set_xticks(range(len(ranges)), [f"{end - len(each) + 1}–{end}" for end, each in zip(ends, ranges, strict=True)])
    axes.tick_params(axis="x", labelsize=7)
    axes.set_xlabel("classes, in label order", fontsize=9, color="#4a5563")
    axes.set_ylabel(f"{metric_name('cmc@1')}, %", fontsize=9, color="#4a5563")
    axes.set_ylim(bottom=0)
    set_title(axes, direction.replace("-", " "))
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8.5)
    return figure


def _draw_risk(report: Report, direction: str) -> Figure:
    """Draw how many of the most confident new queries are worse than old ones."""
    figure, axes = new_figure(3.4)
    confidence_Q = report.confidence[direction]
    known_Q = np.isfinite(confidence_Q)
    new_Q, old_Q = (query_quality(report.ranks, report.average_precision, who, direction)[known_Q] for who in ("new", "old"))
    risk_Q = 100 * risk_coverage(confidence_Q[known_Q], new_Q < old_Q)
    coverage_Q = 100 * np.arange(1, len(risk_Q) + 1) / len(risk_Q)
    shown_Q = coverage_Q >= _LEAST_COVERAGE
    axes.plot(coverage_Q[shown_Q], risk_Q[shown_Q], color=_COLOURS["new/old"], linewidth=2.2, label="most confident new queries")
    axes.axhline(risk_Q[-1], color=_COLOURS["old/old"], linestyle="--", linewidth=1.2, label="random new queries")
    axes.set_xlabel("queries answered by the new model, %", fontsize=9, color="#4a5563")
    axes.set_ylabel("find less than old queries, %", fontsize=9, color="#4a5563")
    axes.set_ylim(bottom=0)
    set_title(axes, direction.replace("-", " "))
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8.5)
    return figure


def _draw_losses(stage: str, points: list[LossPoint]) -> Figure:
    from matplotlib.ticker import MaxNLocator

    figure, axes = new_figure(3.4)
    marker = "o" if len(points) <= _FEW_POINTS else None
    axes.plot(
        [each.step for each in points], [each.loss for each in points], color=_COLOURS["new/old"], linewidth=1.6, marker=marker
    )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel(f"step ({points[-1].epoch:.3g} epochs in total)", fontsize=9, color="#4a5563")
    axes.set_ylabel("loss", fontsize=9, color="#4a5563")
    set_title(axes, stage)
    return figure


def _draw_map(panel: Panel) -> Figure:
    """Draw a t-SNE map; lines join pairs of image and text, or two models' embeddings of an image."""
    figure, axes = new_figure(4.8)
    with_texts = any(label.startswith("texts") for label, _ in panel.series)
    colours = _CLOUD_COLOURS if with_texts else _CLOUD_COLOURS[::2]  # one colour per model, or per model and kind
    for colour, (label, points_N2) in zip(colours, panel.series, strict=False):
        marker = "o" if label.startswith("images") else "^"
        axes.scatter(points_N2[:, 0], points_N2[:, 1], s=9, marker=marker, color=colour, alpha=0.65, linewidths=0, label=label)
    for one, other in zip(panel.series[::2], panel.series[1::2], strict=False):  # the images of a single model have no partner
        for start, end in zip(one.points_N2[:_MARKED_PAIRS], other.points_N2[:_MARKED_PAIRS], strict=True):
            axes.plot([start[0], end[0]], [start[1], end[1]], color="#111827", linewidth=0.7, marker=".", markersize=4)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.grid(visible=False)
    axes.spines[["left", "bottom"]].set_visible(False)
    set_title(axes, panel.title)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8.5, markerscale=2)
    return figure
