"""What goes to Embedding Atlas: every drawn item once a side, where the report's own map places it, with what its query gains."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image
from typer.testing import CliRunner

from xcompat.cli import app
from xcompat.core.errors import XcompatError
from xcompat.report import load_report
from xcompat.training.atlas import to_atlas
from xcompat.training.recipe import parse_recipe
from xcompat.training.run import run_recipe


@pytest.fixture(scope="module")
def finished(
    folder_of: dict[str, str], old_folder: str, pairs_folder: str, texts_file: str, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Return the folder of a run that was judged on images with captions."""
    run = tmp_path_factory.mktemp("atlas") / "run"
    raw: dict[str, Any] = {"output_dir": str(run), "cache_dir": str(run / "cache"), "method": "ridge"}
    raw |= {"old": old_folder, "new": folder_of["clip"], "evaluation": {"resamples": 100, "examples": 0}}
    raw["data"] = {"texts": [{"path": texts_file}], "test": {"path": pairs_folder}}
    run_recipe(parse_recipe(raw, "demo", "demo.yaml"))
    return run


def test_items_stand_where_both_models_place_them(finished: Path, pairs_folder: str, tmp_path: Path) -> None:
    out = tmp_path / "atlas.parquet"
    done = CliRunner().invoke(app, ["export", "atlas", str(finished), "--out", str(out), "--items", "500"])
    assert done.exit_code == 0, done.exception
    rows = pq.read_table(out).to_pylist()
    report = load_report(finished)
    panel = next(panel for panel in report.panels if panel.title == "Old space")
    placed = np.array([[row["projection_x"], row["projection_y"]] for row in rows])
    np.testing.assert_allclose(placed, np.concatenate([points for _, points in panel.series]), atol=1e-3)
    assert {(row["side"], row["kind"]) for row in rows} == {(s, k) for s in ("old", "new") for k in ("image", "text")}
    captions = {line for row in rows if row["kind"] == "image" for line in row["text"].split("; ")}
    assert {row["text"] for row in rows if row["kind"] == "text"} <= captions
    for kind, direction in (("image", "image-to-text"), ("text", "text-to-image")):
        ranks = {who: report.ranks[who, "old", direction] for who in ("old", "new")}
        pairs = set(zip(*(ranks[who].tolist() for who in ("old", "new")), strict=True))
        for row in rows:
            if row["kind"] == kind:
                assert (row["rank_old"] - 1, row["rank_new"] - 1) in pairs
                assert row["gain"] == pytest.approx(1 / row["rank_new"] - 1 / row["rank_old"])
    first = next(row for row in rows if row["kind"] == "image")
    with Image.open(io.BytesIO(first["image"]["bytes"])) as thumbnail, Image.open(Path(pairs_folder) / first["id"]) as stored:
        assert np.array_equal(np.asarray(thumbnail), np.asarray(stored.convert("RGB")))
    assert all(row["image"] is None for row in rows if row["kind"] == "text")


def test_nothing_of_the_users_is_replaced(finished: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.parquet").write_text("mine")
    with pytest.raises(XcompatError, match="mine.parquet"):
        to_atlas(finished, tmp_path / "mine.parquet", 10, 0, overwrite=False)
    assert (tmp_path / "mine.parquet").read_text() == "mine"
    with pytest.raises(XcompatError, match="contains no model"):
        to_atlas(finished / "report", tmp_path / "out.parquet", 10, 0, overwrite=False)
