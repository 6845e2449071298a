"""Reports as a self-contained HTML file, and as Markdown for a model card."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from xcompat.core.markdown import markdown_templates, templates
from xcompat.core.metric_names import metric_name
from xcompat.hub.endpoint import public_name
from xcompat.report.content import Report
from xcompat.report.plots import case_colours
from xcompat.report.storage import encode_png
from xcompat.report.wording import (
    case_meaning,
    failed_lines,
    gain,
    interval,
    metric_meanings,
    percent,
    round_count,
    search_name,
    spread,
    verdicts,
)

if TYPE_CHECKING:
    from jinja2 import Template


def render_html(report: Report, plots: Mapping[str, bytes]) -> str:
    """Render the HTML page, with embedded styles and images.

    Args:
        report: the report.
        plots: file name -> PNG, named as in :func:`xcompat.report.plots.draw_plots`.
    """
    groups = {
        prefix: {name: png_uri(png) for name, png in plots.items() if name.startswith(prefix)}
        for prefix in ("cases", "recall", "cmc", "success", "classes", "confidence", "tsne", "loss")
    }
    return page_template("template.html.j2").render(
        report=report, plots=groups, colours=case_colours(report), **_sentences(report)
    )


def render_markdown(report: Report) -> str:
    """Render verdict, cases with intervals, and their meanings as Markdown without a heading."""
    labels = dict.fromkeys(case.label for case in report.cases)
    return page_template("results.md.j2").render(report=report, labels=labels, **_sentences(report))


def _sentences(report: Report) -> dict[str, object]:
    meanings = metric_meanings(dict.fromkeys(name for case in report.cases for name in case.metrics))
    return {"verdicts": verdicts(report), "failed": failed_lines(report), "meanings": meanings}


@cache  # compiling a template takes longer than rendering it
def page_template(name: str) -> Template:
    """Return a template by its path in this package. Inserted texts are escaped."""
    folder = Path(__file__).parent
    environment = markdown_templates(folder) if name.endswith(".md.j2") else templates(folder, autoescape=True)
    environment.filters |= {
        "percent": percent,
        "interval": interval,
        "spread": spread,
        "approximately": round_count,
        "gain": gain,
        "metric_name": metric_name,
        "public_name": public_name,
        "case_meaning": case_meaning,
        "search_name": search_name,
        "image_uri": lambda image: png_uri(encode_png(image)),
    }
    return environment.get_template(name)


def png_uri(png: bytes) -> str:
    """Return the bytes of a PNG file as a ``data:`` URI."""
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"
