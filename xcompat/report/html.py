"""The report as one HTML file that needs nothing else."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path

from PIL import Image

from xcompat.report.content import Report
from xcompat.report.plots import case_colours
from xcompat.report.storage import encode_png
from xcompat.report.wording import case_meaning, interval, metric_name, percent, verdicts


def render_html(report: Report, plots: Mapping[str, bytes]) -> str:
    """Fill the page's template; styles and pictures are embedded.

    Args:
        report: the report.
        plots: file name -> PNG, as named by :func:`xcompat.report.plots.draw_plots`.

    Returns:
        The HTML.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined)
    environment.filters |= {
        "percent": percent,
        "interval": interval,
        "metric_name": metric_name,
        "case_meaning": case_meaning,
        "picture": _picture_uri,
    }
    environment.trim_blocks = environment.lstrip_blocks = True
    groups = {
        prefix: {name: _png_uri(png) for name, png in plots.items() if name.startswith(prefix)}
        for prefix in ("cases", "recall", "tsne")
    }
    template = environment.get_template("template.html.j2")
    return template.render(report=report, plots=groups, verdicts=verdicts(report), colours=case_colours(report))


def _png_uri(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def _picture_uri(image: Image.Image) -> str:
    return _png_uri(encode_png(image))
