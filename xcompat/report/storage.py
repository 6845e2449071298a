"""The files of a report: ``report.json`` for programs, ``report_data.safetensors`` for drawing it again."""

from __future__ import annotations

import io
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from xcompat.errors import XcompatError
from xcompat.evaluation import Case, Criterion, Difference
from xcompat.files import atomic_path, read_json, write_json
from xcompat.report.content import Example, ExampleRow, Hit, ModelInfo, Panel, Report, Series

SCHEMA = 1
JSON_NAME = "report.json"
DATA_NAME = "report_data.safetensors"
_THUMBNAIL_PIXELS = 160


def save_report(directory: str | Path, report: Report) -> None:
    """Write ``report.json`` and ``report_data.safetensors``, each atomically.

    Args:
        directory: the folder; made if missing.
        report: what to write.
    """
    directory = Path(directory)
    _save_data(directory / DATA_NAME, report)
    write_json(
        directory / JSON_NAME,
        {
            "schema": SCHEMA,
            "old": asdict(report.old),
            "new": asdict(report.new),
            "method": report.method,
            "cases": [asdict(case) for case in report.cases],
            "criterion": asdict(report.criterion),
            "seconds": report.seconds,
            "run": report.run,
        },
    )


def load_report(path: str | Path) -> Report:
    """Read a report back.

    Args:
        path: its folder, or its ``report.json``. Without the data file beside it, curves, maps and examples are empty.

    Returns:
        The report.

    Raises:
        XcompatError: if the file is missing, of another schema, or lacks a key.
    """
    path = Path(path)
    file = path / JSON_NAME if path.is_dir() else path
    document = read_json(file)
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        found = document.get("schema") if isinstance(document, dict) else type(document).__name__
        raise XcompatError(f"{file} has schema {found!r} but this version reads schema {SCHEMA}; evaluate again")
    try:
        return Report(
            old=ModelInfo(**document["old"]),
            new=ModelInfo(**document["new"]),
            method=document["method"],
            cases=[_case(case) for case in document["cases"]],
            criterion=_criterion(document["criterion"]),
            seconds=document["seconds"],
            run=document.get("run", {}),
            **_load_data(file.with_name(DATA_NAME)),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise XcompatError(f"{file} is not a complete report ({type(error).__name__}: {error}); evaluate again") from None


def _case(document: dict[str, Any]) -> Case:
    return Case(**{**document, "ci95": {name: (low, high) for name, (low, high) in document["ci95"].items()}})


def _criterion(document: dict[str, Any]) -> Criterion:
    differences = [
        Difference(each["direction"], each["metric"], each["mean"], (each["ci95"][0], each["ci95"][1]))
        for each in document.get("differences", [])
    ]
    return Criterion(document["backward_compatible"], document["new_model_not_hurt"], document["failed"], differences)


def _save_data(path: Path, report: Report) -> None:
    """Put what is known of each query, maps and thumbnails into one safetensors file whose metadata says what is what."""
    from safetensors.numpy import save

    tensors = {f"ranks.{i}": ranks_Q.astype(np.int32) for i, ranks_Q in enumerate(report.ranks.values())}
    tensors |= {f"precision.{i}": values_Q.astype(np.float32) for i, values_Q in enumerate(report.average_precision.values())}
    tensors |= {f"clusters.{i}": clusters_Q.astype(np.int32) for i, clusters_Q in enumerate(report.clusters.values())}
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
            for image, caption, is_hit in hits:
                name = None
                if image is not None:
                    name = f"image.{len(tensors)}"
                    tensors[name] = np.frombuffer(encode_png(image), dtype=np.uint8)
                described.append({"image": name, "caption": caption, "is_hit": bool(is_hit)})
            rows.append({"label": label, "hits": described})
        examples.append({"query_text": example.query_text, "rows": rows})
    layout = {
        "ranks": [list(key) for key in report.ranks],
        "precision": [list(key) for key in report.average_precision],
        "clusters": list(report.clusters),
        "panels": panels,
        "examples": examples,
    }
    with atomic_path(path) as temporary:
        temporary.write_bytes(save(tensors, metadata={"layout": json.dumps(layout)}))


def _load_data(path: Path) -> dict[str, Any]:
    """Return the fields of a report that a data file holds; nothing if there is none."""
    from safetensors import SafetensorError, safe_open

    if not path.exists():
        return {}
    try:
        with safe_open(path, framework="numpy") as file:
            layout = json.loads(file.metadata()["layout"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (SafetensorError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise XcompatError(f"{path} cannot be read ({error}); delete it to go without curves, or evaluate again") from None
    clouds = iter([tensors[f"points.{i}"] for i in range(sum(len(panel["series"]) for panel in layout["panels"]))])
    return {
        "ranks": {tuple(key): tensors[f"ranks.{i}"] for i, key in enumerate(layout["ranks"])},
        "average_precision": {tuple(key): tensors[f"precision.{i}"] for i, key in enumerate(layout.get("precision", []))},
        "clusters": {direction: tensors[f"clusters.{i}"] for i, direction in enumerate(layout.get("clusters", []))},
        "panels": [
            Panel(panel["title"], [Series(label, next(clouds)) for label in panel["series"]]) for panel in layout["panels"]
        ],
        "examples": [_example(example, tensors) for example in layout["examples"]],
    }


def _example(document: dict[str, Any], tensors: dict[str, np.ndarray]) -> Example:
    def picture(name: str | None) -> Image.Image | None:
        return None if name is None else Image.open(io.BytesIO(tensors[name].tobytes()))

    rows = [
        ExampleRow(row["label"], [Hit(picture(hit["image"]), hit["caption"], hit["is_hit"]) for hit in row["hits"]])
        for row in document["rows"]
    ]
    return Example(document["query_text"], rows)


def encode_png(image: Image.Image) -> bytes:
    """Return a PNG of at most 160 pixels a side.

    Args:
        image: any picture.

    Returns:
        The bytes of the file.
    """
    small = image.convert("L" if image.mode in ("1", "L") else "RGB")
    small.thumbnail((_THUMBNAIL_PIXELS, _THUMBNAIL_PIXELS))
    buffer = io.BytesIO()
    small.save(buffer, format="PNG")
    return buffer.getvalue()
