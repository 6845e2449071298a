"""Plots of each method's result on the old gallery against its result on its own gallery, and against costs per item."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from xcompat.core.metric_names import metric_name
from xcompat.report.comparison.study import Comparison, ItemCost, Key, MethodRow, Row
from xcompat.report.content import retrieval_metrics
from xcompat.report.plots import new_figure, set_title

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.transforms import Bbox
    from numpy.typing import NDArray

_DRAWN = ("cmc@1", "map", "recall@1", "recall@10")
_COLOURS = {"old": "#7a828e", "independent": "#d9a28b", "method": "#0072b2"}
_RADII = (9, 18, 30, 44)  # points from a marker to its label
_ANGLES = np.deg2rad([0, 180, 90, 270, 45, 135, 315, 225])
_LINEAR = 1e3  # operations up to which an axis is linear, as most methods need none
_ALONG = (0.5, 0.65, 0.8, 0.95)  # from a marker's edge to its label


def draw_comparison(comparison: Comparison) -> dict[str, Figure]:
    """Draw new/old against new/new for the most common metrics: ``DIRECTION METRIC`` -> figure."""
    own = {key for row in comparison.methods for key in row.own_gallery}
    known = [key for key in comparison.old.old_gallery if key in own and retrieval_metrics(key[1:])]
    figures = {}
    for direction in comparison.sizes:
        keys = [key for key in known if key[0] == direction]
        for key in [key for key in keys if key[1] in _DRAWN] or keys[:1]:
            figures[" ".join(key)] = _draw(comparison, key)
    return figures


def draw_item_costs(comparison: Comparison) -> dict[str, Figure]:
    """Draw the first metric against MACs and against bytes per gallery item (FCT Figure 3).

    Returns:
        ``MACs`` and ``bytes`` -> figure; empty if no method maps galleries.
    """
    key, costs = comparison.first_metric, {row.name: row.item_cost for row in comparison.methods if row.item_cost is not None}
    if not any(cost.map_macs for cost in costs.values()):
        return {}
    found = {row.name: (costs[row.name], row.old_gallery[key].mean) for row in comparison.methods if row.name in costs}
    found["old"] = ItemCost(0, min(cost.stored_bytes for cost in costs.values())), comparison.old.old_gallery[key].mean
    for row in comparison.methods:
        cost, own = costs.get(row.name), (comparison.independent or row).own_gallery.get(key)
        if cost is not None and cost.embed_macs is not None and cost.image_bytes is not None and own is not None:
            found.setdefault("re-embed", (ItemCost(cost.embed_macs, cost.image_bytes), own.mean))
    macs = {name: (cost.map_macs, quality) for name, (cost, quality) in found.items()}
    stored = {name: (cost.stored_bytes, quality) for name, (cost, quality) in found.items()}
    return {"MACs": _draw_item_cost(key, "MACs", macs), "bytes": _draw_item_cost(key, "bytes", stored)}


def _draw_item_cost(key: Key, unit: str, points: Mapping[str, tuple[int, float]]) -> Figure:
    from matplotlib.ticker import EngFormatter

    figure, axes = new_figure(4.2)
    shown = {name: (cost, 100 * quality) for name, (cost, quality) in points.items()}
    for name, point in shown.items():
        colour = _COLOURS.get({"re-embed": "independent"}.get(name, name), _COLOURS["method"])
        axes.plot(*point, marker="s" if name in ("old", "re-embed") else "D", color=colour, linestyle="none")
    if all(cost for cost, _ in shown.values()):
        axes.set_xscale("log")
    else:
        axes.set_xscale("symlog", linthresh=_LINEAR)
        axes.set_xticks([0, *np.geomspace(_LINEAR, 1e12, 10)])
        axes.minorticks_off()
    axes.xaxis.set_major_formatter(EngFormatter())
    axes.set_xlabel(f"{unit} per gallery item", fontsize=9, color="#4a5563")
    axes.set_ylabel(f"new queries, {metric_name(key[1])}, %", fontsize=9, color="#4a5563")
    axes.margins(0.2, 0.12)
    axes.set_xlim(axes.get_xlim())
    set_title(axes, f"{key[0].replace('-', ' ')}: {unit} per item")
    _write_names(figure, axes, shown)
    return figure


def _draw(comparison: Comparison, key: Key) -> Figure:
    figure, axes = new_figure(4.8)
    axes.grid(axis="x", color="#eef1f4", linewidth=0.8)
    floor = comparison.old.old_gallery[key].mean * 100
    axes.axhline(floor, color=_COLOURS["old"], linestyle="--", linewidth=1.2, label="old/old, the baseline")
    plain = comparison.independent
    if plain is not None and key in plain.own_gallery:
        ceiling = plain.own_gallery[key].mean * 100
        label = "independent/independent, the ceiling"
        axes.axvline(ceiling, color=_COLOURS["independent"], linestyle="--", linewidth=1.2, label=label)
    shown = [row for row in comparison.rows if key in row.old_gallery and key in row.own_gallery]
    for row in shown:
        _mark(axes, row, key)
    axes.set_xlabel(f"new/new {metric_name(key[1])}, %", fontsize=9, color="#4a5563")
    axes.set_ylabel(f"new/old {metric_name(key[1])}, %", fontsize=9, color="#4a5563")
    axes.margins(0.2, 0.12)
    set_title(axes, f"{key[0].replace('-', ' ')}: {metric_name(key[1])}")
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8.5)
    _write_names(figure, axes, {row.name: (row.own_gallery[key].mean * 100, row.old_gallery[key].mean * 100) for row in shown})
    return figure


def _mark(axes: Axes, row: Row, key: Key) -> None:
    across, up = row.own_gallery[key], row.old_gallery[key]
    if isinstance(row, MethodRow):
        marker, colour = "D" if row.maps_galleries else "o", _COLOURS["method"]
    else:
        marker, colour = "s", _COLOURS["independent"]
    axes.errorbar(
        across.mean * 100,
        up.mean * 100,
        xerr=(across.std or 0) * 100,
        yerr=(up.std or 0) * 100,
        fmt=marker,
        color=colour,
        markersize=6,
        elinewidth=0.9,
        capsize=2,
    )


def _write_names(figure: Figure, axes: Axes, points: Mapping[str, tuple[float, float]]) -> None:
    """Write each name near its point without covering points, lines or other names."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text

    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw_without_rendering()  # lays the axes out
    inside = axes.get_window_extent(renderer)
    taken = [line.get_window_extent(renderer).padded(2) for line in axes.lines]  # markers, caps, baseline and ceiling
    taken += [line.get_window_extent(renderer).padded(1) for line in axes.collections]  # whiskers
    for name, point in points.items():
        arrow = {"arrowstyle": "-", "color": "#9aa5b1", "linewidth": 0.6, "shrinkA": 0, "shrinkB": 5}
        text = axes.annotate(name, point, (0, 0), textcoords="offset points", fontsize=8, color="#374151", arrowprops=arrow)
        text.set_in_layout(False)
        size = Text.get_window_extent(text, renderer)  # without the arrow
        places = _places(axes.transData.transform(point), size.width, size.height, figure.dpi / 72)
        outside = [size.width * size.height - _overlap(box, inside) for _, (box, *_) in places]
        covered = [sum(_overlap(box, other) for box in boxes for other in taken) for _, boxes in places]
        best = int(np.argmin(np.round(np.add(outside, covered))))  # the nearest of the places that cover least
        offset, boxes = places[best]
        text.set_position(offset)
        taken += boxes


def _places(
    point: NDArray[np.float64], width: float, height: float, per_point: float
) -> list[tuple[tuple[float, float], list[Bbox]]]:
    """Return candidate places of a name, nearest first: offset in points, then its box and line in pixels."""
    from matplotlib.transforms import Bbox

    places = []
    for radius in _RADII:
        for angle in _ANGLES:
            direction = np.array([np.cos(angle), np.sin(angle)])
            end = point + radius * per_point * direction
            corner = end + (direction - 1) / 2 * [width, height]
            box = Bbox([corner, np.add(corner, (width, height))])
            on_line = [(1 - share) * point + share * end for share in _ALONG if radius > _RADII[0]]
            across, up = ((corner - point) / per_point).tolist()
            places.append(((across, up), [box, *(Bbox([dot - 1, dot + 1]) for dot in on_line)]))
    return places


def _overlap(one: Bbox, other: Bbox) -> float:
    width = min(one.x1, other.x1) - max(one.x0, other.x0)
    height = min(one.y1, other.y1) - max(one.y0, other.y0)
    return float(max(width, 0.0) * max(height, 0.0))
