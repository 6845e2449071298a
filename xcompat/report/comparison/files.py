"""The files of a comparison: CSV and JSON for programs, Markdown and a self-contained page for people."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from xcompat.evaluation import PairedDifference
from xcompat.files import atomic_path, write_json
from xcompat.report.comparison.plots import draw_comparison
from xcompat.report.comparison.study import Comparison, Key, MethodRow, Row, Spread
from xcompat.report.comparison.tables import summary, tables
from xcompat.report.html import page_template, png_uri
from xcompat.report.plots import figure_png
from xcompat.report.wording import metric_meanings

SCHEMA = 1
JSON_NAME, CSV_NAME, MARKDOWN_NAME, HTML_NAME = (f"compare.{kind}" for kind in ("json", "csv", "md", "html"))


def write_comparison(directory: str | Path, comparison: Comparison) -> Path:
    """Write ``compare.json``, ``compare.csv`` (one row per model), ``compare.md`` and ``compare.html``, each atomically.

    Args:
        directory: the folder; made if missing.
        comparison: what to write.

    Returns:
        The path of ``compare.html``.
    """
    import pandas as pd

    directory = Path(directory)
    document = _document(comparison)
    # from below, as methods have columns that the floor lacks, and their order is the one to keep
    table = pd.json_normalize(document["rows"][::-1], sep="/")[::-1].convert_dtypes()
    shown = {"comparison": comparison, "tables": tables(comparison), "summary": summary(comparison)}
    plots = {name: png_uri(figure_png(figure)) for name, figure in draw_comparison(comparison).items()}
    meanings = metric_meanings(metric for _, metric in {**comparison.methods[0].old_gallery, **comparison.old.old_gallery})
    pages = {
        CSV_NAME: table.to_csv(index=False),
        MARKDOWN_NAME: page_template("comparison/table.md.j2").render(shown),
        HTML_NAME: page_template("comparison/page.html.j2").render(shown, plots=plots, meanings=meanings),
    }
    write_json(directory / JSON_NAME, document)
    for name, text in pages.items():
        with atomic_path(directory / name) as temporary:
            temporary.write_text(text, encoding="utf-8")
    return directory / HTML_NAME


def _document(comparison: Comparison) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "name": comparison.name,
        "seeds": comparison.seeds,
        "best": comparison.best,
        "test": {name: {"n_queries": size[0], "n_gallery": size[1]} for name, size in comparison.sizes.items()},
        "rows": [_row(row) for row in comparison.rows],
        "notes": comparison.notes,
    }


def _row(row: Row) -> dict[str, Any]:
    """Describe a model; in the CSV, nested keys become one column each, joined by slashes."""
    galleries = {"old_gallery": _by_direction(row.old_gallery), "own_gallery": _by_direction(row.own_gallery)}
    if not isinstance(row, MethodRow):
        return {"name": row.name, "method": None, **galleries}
    return {
        "name": row.name,
        "method": row.method,
        **galleries,
        **({"from_old": _by_direction(row.from_old)} if row.from_old else {}),
        "compatible": row.compatible,
        "not_hurt": row.not_hurt,
        "gain": _by_direction(row.gains),
        "behind_best": _by_direction(row.behind_best),
        "extra_dims": row.extra_dims,
        "parameters": row.parameters,
        "parameters_per": "gallery item" if row.maps_galleries else "query",
        "seconds": row.seconds,
    }


def _by_direction(values: Mapping[Key, Spread] | Mapping[Key, PairedDifference]) -> dict[str, dict[str, dict[str, float | None]]]:
    found: dict[str, dict[str, dict[str, float | None]]] = {}
    for (direction, metric), value in values.items():
        numbers = value._asdict() if isinstance(value, Spread) else asdict(value)
        found.setdefault(direction, {})[metric] = numbers
    return found
