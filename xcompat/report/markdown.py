"""The report as Markdown: verdict and every case, for where no page of its own can stand."""

from __future__ import annotations

from xcompat.report.content import Report
from xcompat.report.html import page_template
from xcompat.report.wording import metric_meanings, verdicts


def render_markdown(report: Report) -> str:
    """Write verdict, cases with intervals, and what they mean.

    Args:
        report: the report.

    Returns:
        Markdown without a heading.
    """
    meanings = metric_meanings(dict.fromkeys(name for case in report.cases for name in case.metrics))
    labels = dict.fromkeys(case.label for case in report.cases)
    return page_template("results.md.j2").render(report=report, verdicts=verdicts(report), meanings=meanings, labels=labels)
