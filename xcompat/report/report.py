"""From an evaluation to the folder ``report``: ``report.json``, ``report.html`` and ``plots/``, published at once."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from xcompat.errors import XcompatError
from xcompat.evaluation import Contestant
from xcompat.files import atomic_path, listed, read_json
from xcompat.report.content import ModelInfo, Report, ReportContent
from xcompat.report.pages import render_html
from xcompat.report.plots import draw_plots, figure_png
from xcompat.report.storage import DATA_NAME, FOLDER_NAME, JSON_NAME, load_report, report_file, save_report
from xcompat.report.tsne import project

HTML_NAME = "report.html"
PLOTS_NAME = "plots"


def write_report(directory: str | Path, content: ReportContent) -> Path:
    """Write the folder ``report`` at once: ``report.json``, ``report_data.safetensors``, ``report.html`` and ``plots/*.png``.

    Args:
        directory: where the folder goes; made if missing.
        content: what to report.

    Returns:
        The path of ``report.html``.

    Raises:
        XcompatError: see :func:`require_report_place`.
    """
    directory = Path(directory)
    require_report_place(directory)
    return _publish(directory, gather(content))


def require_report_place(directory: str | Path) -> None:
    """Refuse to write a report where a folder of that name holds something else.

    Args:
        directory: where the folder ``report`` goes.

    Raises:
        XcompatError: it is there, and it is not one of ours.
    """
    place = Path(directory) / FOLDER_NAME
    is_other = any(place.iterdir()) and not _is_report(place) if place.is_dir() else os.path.lexists(place)
    if is_other or place.is_symlink():
        raise XcompatError(f"{place} is where the report goes, and is none that could be replaced; move it, or write elsewhere")


def _is_report(folder: Path) -> bool:
    """Return whether the files of a report lie in a folder, perhaps damaged ones."""
    if not (folder / JSON_NAME).is_file():
        return False
    with suppress(XcompatError):
        document = read_json(folder / JSON_NAME)
        if isinstance(document, dict) and {"schema", "criterion"} <= document.keys():
            return True
    return (folder / DATA_NAME).is_file()


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
        confidence=evaluation.confidence,
    )


def render_report(directory: str | Path) -> Path:
    """Draw the pictures and the page again from what :func:`write_report` stored.

    Args:
        directory: as :func:`xcompat.report.load_report` takes it.

    Returns:
        The path of ``report.html``.

    Raises:
        XcompatError: if there is no report in the folder.
    """
    file = report_file(directory)
    report = load_report(file)
    stored = [each for each in (file, file.with_name(DATA_NAME)) if each.exists()]
    return _publish(file.parent.parent if file.parent.name == FOLDER_NAME else file.parent, report, stored)


def _publish(directory: Path, report: Report, stored: Sequence[Path] = ()) -> Path:
    """Put a whole report, with the files in which it is stored already, in the place of the one before.

    What else lies in its folder stays there.
    """
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
            shutil.copy2(file, folder / file.name)
        for other in place.iterdir() if place.is_dir() else ():
            if other.name not in (JSON_NAME, DATA_NAME, HTML_NAME, PLOTS_NAME):
                _copy(other, folder / other.name)
    _retire(directory)
    return place / HTML_NAME


def _copy(source: Path, target: Path) -> None:
    if source.is_dir() and not source.is_symlink():
        shutil.copytree(source, target, symlinks=True)
    else:
        shutil.copy2(source, target, follow_symlinks=False)


def _retire(directory: Path) -> None:
    """Remove the files of a report that an earlier version wrote beside the folder: they would be taken for this one."""
    if not _is_report(directory):
        return
    for plot in listed(directory / PLOTS_NAME, "*.png"):
        if plot.name.startswith(("cases-", "recall-", "cmc-", "tsne-")):
            plot.unlink()
    with suppress(OSError):  # it is missing, or holds something else
        (directory / PLOTS_NAME).rmdir()
    for name in (HTML_NAME, DATA_NAME, JSON_NAME):
        (directory / name).unlink(missing_ok=True)


def _model_info(model: Contestant) -> ModelInfo:
    return ModelInfo(model.name, model.fingerprint.digest, model.dim)
