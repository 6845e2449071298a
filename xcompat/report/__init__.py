"""The report of an evaluation, for people and for programs."""

from __future__ import annotations

from xcompat.report.content import Example, ExampleRow, Hit, ModelInfo, Report, ReportContent
from xcompat.report.pages import render_html, render_markdown
from xcompat.report.report import render_report, require_report_place, write_report
from xcompat.report.storage import load_report, report_file
from xcompat.report.terminal import print_report, print_ways

__all__ = [
    "Example",
    "ExampleRow",
    "Hit",
    "ModelInfo",
    "Report",
    "ReportContent",
    "load_report",
    "print_report",
    "print_ways",
    "render_html",
    "render_markdown",
    "render_report",
    "report_file",
    "require_report_place",
    "write_report",
]
