"""The folder ``report`` of an evaluation: ``report.json``, ``report.html`` and ``plots/``, written atomically."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from xcompat.core.files import atomic_path
from xcompat.evaluation import EvaluatedModel
from xcompat.report.content import ModelInfo, Report, ReportContent
from xcompat.report.pages import render_html
from xcompat.report.plots import draw_plots, figure_png
from xcompat.report.storage import (
    DATA_NAME,
    DIRECTIONS,
    FOLDER_NAME,
    JSON_NAME,
    load_report,
    report_file,
    require_report_place,
    save_report,
)
from xcompat.report.tsne import project
from xcompat.report.wording import NOT_SHOWN

HTML_NAME = "report.html"
PLOTS_NAME = "plots"
_DRAWN = re.compile(rf"(cases|recall|cmc|success|classes|confidence)-({'|'.join(DIRECTIONS)})\.png|(tsne|loss)-\d+\.png")
"""Names of plots; those of an earlier report are replaced."""


def write_report(directory: str | Path, content: ReportContent) -> Path:
    """Write the folder ``report`` atomically: ``report.json``, ``report_data.safetensors``, ``report.html``, ``plots/*.png``.

    Args:
        directory: parent of the folder; created if missing.
        content: the evaluation, its models and examples.

    Returns:
        The path of ``report.html``.

    Raises:
        XcompatError: see :func:`require_report_place`.
    """
    directory = Path(directory)
    require_report_place(directory)
    return _publish(directory, build_report(content))


def build_report(content: ReportContent) -> Report:
    """Turn an evaluation into a report with t-SNE maps, equal to the result of :func:`xcompat.report.load_report`."""
    evaluation, models = content.evaluation, content.contestants
    return Report(
        old=_model_info(models.old),
        new=_model_info(models.new or models.new_view),
        method=content.method,
        cases=evaluation.cases,
        criterion=evaluation.criterion,
        seconds=content.seconds,
        run={**content.run, "notes": [*evaluation.notes, *([NOT_SHOWN] if content.verdict is False else [])]},
        ranks=evaluation.ranks,
        panels=project(content) if content.tsne_pairs else [],
        examples=content.examples,
        average_precision=evaluation.average_precision,
        clusters=evaluation.clusters,
        confidence=evaluation.confidence,
        training=content.training,
        costs=content.costs,
        verdict=content.verdict,
        thresholds=evaluation.thresholds,
    )


def render_report(directory: str | Path) -> Path:
    """Redraw plots and page of a stored report.

    Args:
        directory: as in :func:`xcompat.report.load_report`.

    Returns:
        The path of ``report.html``.

    Raises:
        XcompatError: the folder has no report; see also :func:`require_report_place`.
    """
    file = report_file(directory)
    report = load_report(file)
    stored = [each for each in (file, file.with_name(DATA_NAME)) if each.exists()]
    parent = file.parent.parent if file.parent.name == FOLDER_NAME else file.parent
    require_report_place(parent)
    return _publish(parent, report, stored)


def _publish(directory: Path, report: Report, stored: Sequence[Path] = ()) -> Path:
    """Replace a report's folder; keep files of the user. Copy ``stored`` data files, or write new ones."""
    place = directory / FOLDER_NAME
    plots = {name: figure_png(figure) for name, figure in draw_plots(report).items()}
    with atomic_path(place) as folder:
        folder.mkdir()
        (folder / PLOTS_NAME).mkdir()
        for name, png in plots.items():
            (folder / PLOTS_NAME / name).write_bytes(png)
        (folder / HTML_NAME).write_text(render_html(report, plots), encoding="utf-8")
        if not stored:
            save_report(folder, report)
        for file in stored:
            shutil.copy2(file, folder / (DATA_NAME if file.name == DATA_NAME else JSON_NAME))
        for other in _user_files(place):
            _copy(other, folder / other.relative_to(place))
    return place / HTML_NAME


def _user_files(place: Path) -> Iterator[Path]:
    if place.is_dir():
        yield from (each for each in place.iterdir() if each.name not in (JSON_NAME, DATA_NAME, HTML_NAME, PLOTS_NAME))
    if (place / PLOTS_NAME).is_dir():
        yield from (each for each in (place / PLOTS_NAME).iterdir() if not _DRAWN.fullmatch(each.name))


def _copy(source: Path, target: Path) -> None:
    if source.is_dir() and not source.is_symlink():
        shutil.copytree(source, target, symlinks=True)
    else:
        shutil.copy2(source, target, follow_symlinks=False)


def _model_info(model: EvaluatedModel) -> ModelInfo:
    return ModelInfo(model.name, model.fingerprint.digest, model.dim)
