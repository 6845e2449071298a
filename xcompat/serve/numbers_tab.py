"""The numbers: the report of a run, as its page shows it."""

from __future__ import annotations

from functools import cache
from html import escape

import gradio as gr

from xcompat.report import load_report
from xcompat.report.pages import render_html
from xcompat.report.plots import draw_plots, figure_png
from xcompat.serve.failing import told
from xcompat.serve.site import Site


def build(site: Site, tab: gr.Tab) -> None:
    """Lay out the tab, which draws the report when it is first chosen."""
    shown = gr.HTML('<p class="soft">The report is drawn …</p>', js_on_load=None)

    @told
    @cache
    def drawn() -> str:
        return frame(site)

    tab.select(drawn, None, shown, api_visibility="private", show_progress="minimal")


def frame(site: Site) -> str:
    """Return the report, drawn anew, in a frame of its own in which no script runs."""
    assert site.report is not None
    report = load_report(site.report)
    page = render_html(report, {name: figure_png(figure) for name, figure in draw_plots(report).items()})
    return f'<iframe class="report-frame" title="report" sandbox srcdoc="{escape(page)}"></iframe>'
