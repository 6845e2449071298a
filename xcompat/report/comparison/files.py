"""Files of a comparison: CSV and JSON for programs, Markdown and a self-contained page for people."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from xcompat.core.files import write_json
from xcompat.core.ownership import owned_path, require_replaceable
from xcompat.evaluation import PairedDifference
from xcompat.evaluation.cases import overall_outcome
from xcompat.report.comparison.plots import draw_comparison, draw_item_costs
from xcompat.report.comparison.study import Comparison, Key, MethodRow, Row, Spread
from xcompat.report.comparison.tables import summary, tables
from xcompat.report.pages import page_template, png_uri
from xcompat.report.plots import figure_png
from xcompat.report.wording import metric_meanings

SCHEMA = 1
FOLDER_NAME = "comparison"
MADE_BY = "compare"
JSON_NAME, CSV_NAME, MARKDOWN_NAME, HTML_NAME = (f"compare.{kind}" for kind in ("json", "csv", "md", "html"))


def write_comparison(directory: str | Path, comparison: Comparison) -> Path:
    """Write the folder ``comparison`` atomically: ``compare.json``, ``.csv`` (a row per model), ``.md`` and ``.html``.

    Args:
        directory: parent of the folder; created if missing.
        comparison: the comparison.

    Returns:
        The path of ``compare.html``.

    Raises:
        XcompatError: see :func:`require_comparison_place`.
    """
    import pandas as pd

    directory = Path(directory)
    require_comparison_place(directory)
    document = _document(comparison)
    # reversed twice, so that the methods, which have the most columns, set their order
    table = pd.json_normalize(document["rows"][::-1], sep="/")[::-1].convert_dtypes()
    shown = {"comparison": comparison, "tables": tables(comparison), "summary": summary(comparison)}
    drawn = {"plots": draw_comparison(comparison), "item_costs": draw_item_costs(comparison)}
    plots = {kind: {name: png_uri(figure_png(figure)) for name, figure in figures.items()} for kind, figures in drawn.items()}
    meanings = metric_meanings(metric for _, metric in {**comparison.methods[0].old_gallery, **comparison.old.old_gallery})
    pages = {
        CSV_NAME: table.to_csv(index=False),
        MARKDOWN_NAME: page_template("comparison/table.md.j2").render(shown),
        HTML_NAME: page_template("comparison/page.html.j2").render(shown, **plots, meanings=meanings),
    }
    with owned_path(directory / FOLDER_NAME, MADE_BY, overwrite=None) as folder:
        folder.mkdir()
        write_json(folder / JSON_NAME, document)
        for name, text in pages.items():
            (folder / name).write_text(text, encoding="utf-8")
    return directory / FOLDER_NAME / HTML_NAME


def require_comparison_place(directory: str | Path) -> None:
    """Raise :class:`XcompatError` if a directory's folder ``comparison`` contains files of another origin."""
    require_replaceable(Path(directory) / FOLDER_NAME, MADE_BY, overwrite=None)


def comparison_file(directory: str | Path) -> Path:
    """Return the path of ``compare.json`` in a study's folder or its ``comparison``, whether it exists or not."""
    places = (Path(directory) / FOLDER_NAME / JSON_NAME, Path(directory) / JSON_NAME)
    return next((file for file in places if file.is_file()), places[0])


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


def _row(row: Row) -> dict[str, object]:
    """Return a model's row; CSV columns join nested keys with slashes."""
    galleries = {"old_gallery": _by_direction(row.old_gallery), "own_gallery": _by_direction(row.own_gallery)}
    if not isinstance(row, MethodRow):
        return {"name": row.name, "method": None, **galleries}
    seldom = ("from_old", "reranked", "without_memory", "old_with_memory", "beside_old_with_memory")
    return {
        "name": row.name,
        "method": row.method,
        **galleries,
        **{name: _by_direction(values) for name in seldom if (values := getattr(row, name))},
        "compatible": row.compatible,
        "outcome": overall_outcome(row.differences) if row.gains else None,
        "not_hurt": row.not_hurt,
        "gain": _by_direction(row.gains),
        "behind_best": _by_direction(row.behind_best),
        "extra_dims": row.extra_dims,
        "parameters": row.parameters,
        "parameters_per": "gallery item" if row.maps_galleries else "query",
        "seconds": row.seconds,
        "peak_memory": row.peak_memory,
        **({"item_cost": row.item_cost._asdict()} if row.item_cost is not None else {}),
    }


def _by_direction(values: Mapping[Key, Spread] | Mapping[Key, PairedDifference]) -> dict[str, dict[str, dict[str, float | None]]]:
    found: dict[str, dict[str, dict[str, float | None]]] = {}
    for (direction, metric), value in values.items():
        numbers = value._asdict() if isinstance(value, Spread) else asdict(value)
        found.setdefault(direction, {})[metric] = numbers
    return found
