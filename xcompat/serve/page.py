"""The page: its tabs, and what is alike in all of them."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import gradio as gr

from xcompat.serve import differing_tab, gallery_tab, numbers_tab, search_tab
from xcompat.serve.rendering import render

if TYPE_CHECKING:
    from xcompat.serve.site import Site

FONTS = ("ui-sans-serif", "system-ui", "Segoe UI", "Roboto", "DejaVu Sans", "sans-serif")
MONO = ("ui-monospace", "DejaVu Sans Mono", "monospace")
STRONG, STRONGER, BRIGHT, DANGER = "#00609a", "#004f80", "#6cc4f5", "#b42318"
COLOURS = {
    "button_primary_background_fill": STRONG,
    "button_primary_background_fill_hover": STRONGER,
    "button_primary_background_fill_dark": STRONG,
    "button_primary_background_fill_hover_dark": STRONGER,
    "button_primary_text_color": "#ffffff",
    "button_primary_text_color_dark": "#ffffff",
    "button_cancel_background_fill": DANGER,
    "button_cancel_background_fill_dark": DANGER,
    "button_cancel_background_fill_hover": DANGER,
    "button_cancel_background_fill_hover_dark": DANGER,
    "checkbox_label_background_fill_selected": STRONG,
    "checkbox_label_background_fill_selected_dark": STRONG,
    "checkbox_label_text_color_selected": "#ffffff",
    "checkbox_label_text_color_selected_dark": "#ffffff",
    "checkbox_background_color_selected": STRONGER,
    "checkbox_background_color_selected_dark": STRONGER,
    "slider_color": STRONG,
    "slider_color_dark": BRIGHT,
    "input_placeholder_color": "#5b6675",
    "input_placeholder_color_dark": "#a9b4c2",
    "body_text_color_subdued": "#55606e",
    "body_text_color_subdued_dark": "#a9b4c2",
    "color_accent": STRONG,
    "link_text_color": STRONG,
    "link_text_color_dark": BRIGHT,
}
"""Colours of the theme that everybody can read: a contrast of at least 4.5 to 1 in light and in dark."""


def theme() -> gr.themes.Base:
    """Return the page's theme: the fonts of the reader's system, as none is fetched from elsewhere."""
    return gr.themes.Default(
        primary_hue=gr.themes.colors.sky, neutral_hue=gr.themes.colors.slate, font=list(FONTS), font_mono=list(MONO)
    ).set(**COLOURS)


def make_page(site: Site) -> gr.Blocks:
    """Return the page with a tab for each thing that the site has."""
    os.environ.setdefault(
        "GRADIO_ANALYTICS_CACHE_FREQUENCY", str(sys.maxsize)
    )  # else it tabulates its last 10,000 events after each
    with gr.Blocks(title=f"{site.title} · xcompat", analytics_enabled=False, fill_width=True) as page:
        gr.HTML(render("title.html.j2", site=site), elem_classes="page-title")
        with gr.Tabs():
            with gr.Tab("Search", id="search"):
                search_tab.build(site, page)
            if site.judged:
                with gr.Tab("Where they differ", id="differing") as tab:
                    differing_tab.build(site, tab)
            if site.report is not None:
                with gr.Tab("The numbers", id="numbers") as tab:
                    numbers_tab.build(site, tab)
            with gr.Tab("The gallery" if len(site.shelves) == 1 else "The galleries", id="gallery") as tab:
                gallery_tab.build(site, tab)
    return page.queue(status_update_rate=1)  # seconds; else all who wait are told their place after each search
