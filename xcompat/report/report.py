"""From an evaluation to a folder: ``report.json``, ``report.html`` and ``plots/``."""

from __future__ import annotations

from pathlib import Path

from xcompat.evaluation import Contestant
from xcompat.files import atomic_path
from xcompat.report.content import ModelInfo, Report, ReportContent
from xcompat.report.html import render_html
from xcompat.report.plots import draw_plots, figure_png
from xcompat.report.projection import project
from xcompat.report.storage import load_report, save_report

HTML_NAME = "report.html"
PLOTS_NAME = "plots"


def write_report(directory: str | Path, content: ReportContent) -> Path:
    """Write ``report.json``, ``report_data.safetensors``, ``report.html`` and ``plots/*.png``.

    Args:
        directory: the folder; made if missing.
        content: what to report.

    Returns:
        The path of ``report.html``.
    """
    save_report(directory, gather(content))
    return render_report(directory)


def gather(content: ReportContent) -> Report:
    """Turn what an evaluation found into a report, with its t-SNE maps.

    Args:
        content: what to report.

    Returns:
        The report as :func:`xcompat.report.load_report` gives it back.
    """
    evaluation = content.evaluation
    return Report(
        old=_model_info(content.old),
        new=_model_info(content.new or content.new_view),
        method=content.method,
        cases=evaluation.cases,
        criterion=evaluation.criterion,
        seconds=content.seconds,
        run={**content.run, "notes": evaluation.notes},
        ranks=evaluation.ranks,
        panels=project(content) if content.tsne_pairs else [],
        examples=content.examples,
        average_precision=evaluation.average_precision,
        clusters=evaluation.clusters,
    )


def render_report(directory: str | Path) -> Path:
    """Draw the pictures and the page again from what :func:`write_report` stored.

    Args:
        directory: a report's folder.

    Returns:
        The path of ``report.html``.

    Raises:
        XcompatError: if there is no report in the folder.
    """
    directory = Path(directory)
    report = load_report(directory)
    plots = {name: figure_png(figure) for name, figure in draw_plots(report).items()}
    page = render_html(report, plots)  # before anything is replaced, so that a failure leaves the report as it was
    with atomic_path(directory / PLOTS_NAME) as folder:
        folder.mkdir()
        for name, png in plots.items():
            (folder / name).write_bytes(png)
    with atomic_path(directory / HTML_NAME) as temporary:
        temporary.write_text(page, encoding="utf-8")
    return directory / HTML_NAME


def _model_info(model: Contestant) -> ModelInfo:
    return ModelInfo(model.name, model.fingerprint.digest, model.dim)
