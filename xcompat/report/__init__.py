"""Report of an evaluation, for people and for programs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xcompat.core.lazy import import_on_use

if TYPE_CHECKING:
    from xcompat.report.content import Example, ExampleRow, Hit, ModelInfo, Report, ReportContent
    from xcompat.report.pages import render_html, render_markdown
    from xcompat.report.report import render_report, write_report
    from xcompat.report.storage import load_report, recorded_backfill_losses, report_file, require_report_place
    from xcompat.report.terminal import print_quality, print_report, print_ways

_PLACES = {
    "content": ["Example", "ExampleRow", "Hit", "ModelInfo", "Report", "ReportContent"],
    "pages": ["render_html", "render_markdown"],
    "report": ["render_report", "write_report"],
    "storage": ["load_report", "recorded_backfill_losses", "report_file", "require_report_place"],
    "terminal": ["print_quality", "print_report", "print_ways"],
}

__all__ = [
    "Example",
    "ExampleRow",
    "Hit",
    "ModelInfo",
    "Report",
    "ReportContent",
    "load_report",
    "print_quality",
    "print_report",
    "print_ways",
    "recorded_backfill_losses",
    "render_html",
    "render_markdown",
    "render_report",
    "report_file",
    "require_report_place",
    "write_report",
]

__getattr__ = import_on_use(__name__, _PLACES)
