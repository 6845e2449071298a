"""Files of a report: ``report.json`` for programs, ``report_data.safetensors`` to redraw its plots."""

from __future__ import annotations

import io
import json
import os
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from xcompat.core.errors import XcompatError
from xcompat.core.files import read_json, write_json
from xcompat.evaluation import Case, Criterion, Difference
from xcompat.evaluation.cases import (
    ALL,
    IDENTIFICATION,
    POPULATIONS,
    VERIFICATION,
    BackfillLoss,
    RankKey,
    Threshold,
    ValueKey,
    backfill_losses,
    find_deciding_difference,
    overall_outcome,
)
from xcompat.report.content import Cost, Example, ExampleRow, Hit, LossPoint, ModelInfo, Panel, Report, Series

if TYPE_CHECKING:
    from PIL import Image

T = TypeVar("T")
SCHEMA = 1
FOLDER_NAME = "report"
MODEL_NAME = "model"
JSON_NAME = "report.json"
DATA_NAME = "report_data.safetensors"
_THUMBNAIL_PIXELS = 160
DIRECTIONS = ("image-to-image", "text-to-image", "image-to-text", "text-to-text", VERIFICATION, IDENTIFICATION)


class _Run(BaseModel):
    """Run of a report; unknown fields are shown as they are."""

    model_config = ConfigDict(extra="allow")

    notes: list[str] = []


class _Document(BaseModel):
    """Schema of ``report.json``, which catches mistakes in manual edits."""

    model_config = ConfigDict(extra="ignore")

    schema_: Literal[1]
    old: ModelInfo
    new: ModelInfo
    method: str
    cases: list[Case]
    criterion: Criterion
    seconds: dict[str, float]
    training: dict[str, list[LossPoint]] = {}
    costs: dict[str, Cost] = {}
    verdict: bool | None = None
    thresholds: list[Threshold] = []
    run: _Run = _Run()

    @model_validator(mode="after")
    def _every_metric_has_its_interval(self) -> _Document:
        for case in self.cases:
            if case.direction not in DIRECTIONS:
                raise ValueError(f"a case has the direction {case.direction!r}; known: {', '.join(DIRECTIONS)}")
            if case.population not in POPULATIONS:
                raise ValueError(f"a case has the population {case.population!r}; known: {', '.join(POPULATIONS)}")
            if missing := case.metrics.keys() - case.ci95.keys():
                raise ValueError(f"{case.label} has no interval for {min(missing)}")
        return self


class _HitLayout(BaseModel):
    image: str | None
    caption: str
    is_hit: bool
    gain: float | None = None


class _RowLayout(BaseModel):
    label: str
    hits: list[_HitLayout]


class _ExampleLayout(BaseModel):
    query_text: str
    rows: list[_RowLayout]


class _PanelLayout(BaseModel):
    title: str
    series: list[str]


class _Layout(BaseModel):
    """Meaning of the numbered tensors in ``report_data.safetensors``."""

    ranks: list[RankKey]
    precision: list[ValueKey] = []
    clusters: list[str] = []
    confidence: list[str] = []
    panels: list[_PanelLayout]
    examples: list[_ExampleLayout]


def save_report(folder: Path, report: Report) -> None:
    """Write ``report.json`` and ``report_data.safetensors`` into a new folder without readers."""
    folder.mkdir(parents=True, exist_ok=True)
    _save_data(folder / DATA_NAME, report)
    write_json(
        folder / JSON_NAME,
        {
            "schema": SCHEMA,
            "old": asdict(report.old),
            "new": asdict(report.new),
            "method": report.method,
            "cases": [asdict(case) for case in report.cases],
            "criterion": _criterion_json(report.criterion),
            "seconds": report.seconds,
            "training": {stage: [point._asdict() for point in points] for stage, points in report.training.items()},
            "costs": {stage: cost._asdict() for stage, cost in report.costs.items()},
            "run": report.run,
            **({"verdict": report.verdict} if report.verdict is not None else {}),
            **({"thresholds": [each._asdict() for each in report.thresholds]} if report.thresholds else {}),
            "backfill_losses": [loss._asdict() for loss in backfill_losses(report.cases)],
        },
    )


def _criterion_json(criterion: Criterion) -> dict[str, object]:
    last = find_deciding_difference(criterion.differences)
    return asdict(criterion) | {
        "differences": [_described_difference(each) for each in criterion.differences],
        "outcome": overall_outcome(criterion.differences),
        "queries_needed": last.queries_needed if last is not None else None,
    }


def _described_difference(difference: Difference) -> dict[str, object]:
    described = asdict(difference) | {"outcome": difference.outcome}
    return {key: value for key, value in described.items() if key != "population" or value != ALL}


def recorded_backfill_losses(model: str) -> list[BackfillLoss]:
    """Return the losses of a complete backfill from the report next to a model.

    Args:
        model: model name, model folder or run folder.

    Returns:
        The losses; empty without a report, e.g. for a model of the Hub.

    Raises:
        XcompatError: the report is damaged.
    """
    folder = Path(model)
    if folder.name == MODEL_NAME and not (folder / MODEL_NAME).exists():
        folder = folder.parent
    file = report_file(folder)
    if not folder.is_dir() or not file.is_file():
        return []
    try:
        return [BackfillLoss(**loss) for loss in read_json(file).get("backfill_losses", [])]
    except (AttributeError, TypeError) as error:
        raise XcompatError(f"{file} is damaged ({error}); evaluate the model again") from None


def report_file(path: str | Path) -> Path:
    """Return the path of ``report.json``, whether it exists or not.

    Args:
        path: the file, its folder ``report``, or its parent.
    """
    path = Path(path)
    if not path.is_dir():
        return path
    places = (path / FOLDER_NAME / JSON_NAME, path / JSON_NAME)
    return next((file for file in places if file.is_file()), places[0])


def is_report_of_map(document: object) -> bool:
    """Return whether ``report.json`` is a map's report (which has no schema), not an evaluation's."""
    return isinstance(document, dict) and "searched_classes" in document and "schema" not in document


def load_report(path: str | Path) -> Report:
    """Load a report.

    Args:
        path: as in :func:`report_file`. Without the data file next to it, curves, maps and examples are empty.

    Returns:
        The report.

    Raises:
        XcompatError: the file is missing, damaged or has another schema.
    """
    file = report_file(path)
    document = read_json(file)
    if is_report_of_map(document):
        raise XcompatError(
            f"{file} is the report of a map on its validation split; evaluate the map on a test set: "
            f"`xcompat evaluate --old FOLDER --new FOLDER --map {file.parent}`"
        )
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        found = document.get("schema") if isinstance(document, dict) else type(document).__name__
        raise XcompatError(f"{file} has schema {found!r} but this version reads schema {SCHEMA}; evaluate again")
    try:
        read = _Document(**{**document, "schema_": SCHEMA})
    except (ValidationError, TypeError) as error:
        reason = error.errors()[0] if isinstance(error, ValidationError) else {"loc": (), "msg": str(error)}
        place = ".".join(map(str, reason["loc"]))
        raise XcompatError(f"{file} is not a complete report ({place}: {reason['msg']}); evaluate again") from None
    return Report(
        old=read.old,
        new=read.new,
        method=read.method,
        cases=read.cases,
        criterion=read.criterion,
        seconds=read.seconds,
        training=read.training,
        costs=read.costs,
        verdict=read.verdict,
        thresholds=read.thresholds,
        run=read.run.model_dump(exclude_unset=True),
        **_load_data(file.with_name(DATA_NAME)),
    )


def _save_data(path: Path, report: Report) -> None:
    """Write values per query, maps and thumbnails, with a :class:`_Layout` as metadata."""
    tensors = {f"ranks.{i}": ranks_Q.astype(np.int32) for i, ranks_Q in enumerate(report.ranks.values())}
    tensors |= {f"precision.{i}": values_Q.astype(np.float32) for i, values_Q in enumerate(report.average_precision.values())}
    tensors |= {f"clusters.{i}": clusters_Q.astype(np.int32) for i, clusters_Q in enumerate(report.clusters.values())}
    tensors |= {f"confidence.{i}": values_Q.astype(np.float32) for i, values_Q in enumerate(report.confidence.values())}
    panels: list[dict[str, Any]] = []
    for panel in report.panels:
        first = sum(len(each["series"]) for each in panels)
        panels.append({"title": panel.title, "series": [label for label, _ in panel.series]})
        tensors |= {f"points.{first + i}": np.ascontiguousarray(points_N2) for i, (_, points_N2) in enumerate(panel.series)}
    examples = []
    for example in report.examples:
        rows = []
        for label, hits in example.rows:
            described = []
            for image, caption, is_hit, gain in hits:
                name = None
                if image is not None:
                    name = f"image.{len(tensors)}"
                    tensors[name] = np.frombuffer(encode_png(image), dtype=np.uint8)
                described.append({"image": name, "caption": caption, "is_hit": bool(is_hit), "gain": gain})
            rows.append({"label": label, "hits": described})
        examples.append({"query_text": example.query_text, "rows": rows})
    layout = {
        "ranks": [list(key) for key in report.ranks],
        "precision": [list(key) for key in report.average_precision],
        "clusters": list(report.clusters),
        "confidence": list(report.confidence),
        "panels": panels,
        "examples": examples,
    }
    path.write_bytes(save(tensors, metadata={"layout": json.dumps(layout)}))


def _load_data(path: Path) -> dict[str, Any]:
    """Return the report fields of the data file; empty without a file."""
    if not path.exists():
        return {}
    try:
        with safe_open(path, framework="numpy") as file:
            layout = _Layout(**json.loads(file.metadata()["layout"]))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        return _parse_layout(layout, tensors)
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise XcompatError(
            f"{path} cannot be read ({reason}); delete it to load the report without curves, or evaluate again"
        ) from None


def _parse_layout(layout: _Layout, tensors: dict[str, np.ndarray]) -> dict[str, object]:
    def rows(kind: str, number: int, ndim: int = 1) -> np.ndarray:
        if tensors[f"{kind}.{number}"].ndim != ndim:
            raise ValueError(f"{kind}.{number} has the shape {tensors[f'{kind}.{number}'].shape}")
        return tensors[f"{kind}.{number}"]

    clouds = iter([rows("points", number, 2) for number in range(sum(len(panel.series) for panel in layout.panels))])
    return {
        "ranks": {key: rows("ranks", number) for number, key in enumerate(layout.ranks)},
        "average_precision": {key: rows("precision", number) for number, key in enumerate(layout.precision)},
        "clusters": {direction: rows("clusters", number) for number, direction in enumerate(layout.clusters)},
        "confidence": {direction: rows("confidence", number) for number, direction in enumerate(layout.confidence)},
        "panels": [Panel(panel.title, [Series(label, next(clouds)) for label in panel.series]) for panel in layout.panels],
        "examples": [_example(example, tensors) for example in layout.examples],
    }


def _example(described: _ExampleLayout, tensors: dict[str, np.ndarray]) -> Example:
    from xcompat.data.images import open_image

    def image(name: str | None) -> Image.Image | None:
        return None if name is None else open_image(tensors[name].tobytes())

    return Example(
        described.query_text,
        [
            ExampleRow(row.label, [Hit(image(hit.image), hit.caption, hit.is_hit, hit.gain) for hit in row.hits])
            for row in described.rows
        ],
    )


def encode_png(image: Image.Image) -> bytes:
    """Return an image's thumbnail as PNG bytes."""
    small = image.convert("RGB")
    small.thumbnail((_THUMBNAIL_PIXELS, _THUMBNAIL_PIXELS))
    buffer = io.BytesIO()
    small.save(buffer, format="PNG")
    return buffer.getvalue()


def require_report_place(directory: str | Path) -> None:
    """Raise :class:`XcompatError` if a directory's entry ``report`` is not a report."""
    place = Path(directory) / FOLDER_NAME
    is_other = any(place.iterdir()) and not is_report(place) if place.is_dir() else os.path.lexists(place)
    if is_other or place.is_symlink():
        raise XcompatError(f"{place} exists but is not a report; move it, or choose another output folder")


def is_report(folder: Path) -> bool:
    """Return whether a folder contains a report, intact or damaged."""
    if not (folder / JSON_NAME).is_file():
        return False
    with suppress(XcompatError):
        document = read_json(folder / JSON_NAME)
        if isinstance(document, dict) and {"schema", "criterion"} <= document.keys():
            return True
    return (folder / DATA_NAME).is_file()
