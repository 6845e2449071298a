"""HTML documents with inline scripts and styles, and their content security policies."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from typing import TYPE_CHECKING

from starlette.responses import HTMLResponse

from xcompat.report import load_report
from xcompat.report.pages import render_html
from xcompat.report.plots import draw_plots, figure_png
from xcompat.serve.queries import LONGEST, LONGEST_FILTER, MOST
from xcompat.serve.rendering import read, render
from xcompat.serve.search import list_kinds
from xcompat.serve.uploads import UPLOAD_BYTES

if TYPE_CHECKING:
    from pathlib import Path

    from xcompat.serve.queries import SearchQuery
    from xcompat.serve.site import Site

REPORT_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; frame-ancestors 'self'; sandbox"
"""Policy for reports: inline styles and images, no scripts."""


def main_page(site: Site, query: SearchQuery) -> HTMLResponse:
    """Return the page.

    Args:
        site: the page's content.
        query: the search form's initial values.
    """
    values = {"site": site, "query": query, "kinds": list_kinds(site), "upload_bytes": UPLOAD_BYTES}
    return _document("page.html.j2", "page.js", **values, longest=LONGEST, longest_filter=LONGEST_FILTER, most=MOST)


def login_page() -> HTMLResponse:
    """Return the login page."""
    response = _document("login.html.j2", "login.js")
    response.status_code = 401
    return response


def report_page(folder: Path) -> HTMLResponse:
    """Return a run's report, for a frame.

    Args:
        folder: the report's folder.
    """
    report = load_report(folder)
    page = render_html(report, {name: figure_png(figure) for name, figure in draw_plots(report).items()})
    return HTMLResponse(page, headers={"content-security-policy": REPORT_POLICY})


def _document(template: str, script: str, **values: object) -> HTMLResponse:
    style, script = read("style.css"), read(script)
    page = render(template, style=style, script=script, **values)
    return HTMLResponse(page, headers={"content-security-policy": _policy(style, script)})


@cache
def _policy(style: str, script: str) -> str:
    return (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; img-src data:; connect-src 'self'; "
        "frame-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
