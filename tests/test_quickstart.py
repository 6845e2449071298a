"""A shortened quickstart through the real command line: every stage, the report, and that nothing is done twice."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import warm

SHORT = [f"stages.{stage}.training.max_steps={steps}" for stage, steps in ((0, 4), (1, 4), (2, 8), (5, 2))]
REMEMBERED = ["stages.5.data.remembered.limit=500"]  # embedding all 46,600 takes half of the time
JUDGED = ["stages.5.evaluation.resamples=100", "stages.5.evaluation.tsne_pairs=50"]  # maps of 500 take a tenth of the time


def quickstart(output: Path) -> list[str]:
    return ["-m", "xcompat", "quickstart", "--output", str(output), *SHORT, *REMEMBERED, *JUDGED]


def test_shortened_quickstart(tmp_path: Path) -> None:
    first = subprocess.run([sys.executable, *quickstart(tmp_path / "run")], capture_output=True, text=True, check=False)
    assert first.returncode == 0, first.stderr
    assert first.stderr.strip() == "Loading PyTorch", "no library's bars or warnings"
    shown = first.stdout
    for stage in ("render the characters", "old", "new", "phi", "ridge", "procrustes", "xbt"):
        assert f"{stage}" in shown
    assert "Backward compatible: " in shown and shown.count("in the old gallery") >= 3, "verdict and three examples"
    assert shown.rstrip().endswith(f"xcompat serve {tmp_path / 'run'}")
    report = json.loads((tmp_path / "run" / "report" / "report.json").read_text())
    queries = {(case["query"], case["gallery"]) for case in report["cases"]}
    assert {
        ("old", "old"),
        ("independent", "old"),
        ("phi", "old"),
        ("new", "old"),
        ("new", "new"),
        ("independent", "independent"),
    } <= queries
    by_direction = {case["direction"]: (case["n_queries"], case["n_gallery"]) for case in report["cases"]}
    assert by_direction["text-to-image"][0] == 1000 and by_direction["image-to-text"][1] == 1000
    chance = 10 / 1000
    raw = [case["metrics"]["recall@10"] for case in report["cases"] if (case["query"], case["gallery"]) == ("independent", "old")]
    assert max(raw) < 4 * chance, "spaces of two models have nothing in common"
    assert (tmp_path / "run" / "report" / "report.html").stat().st_size > 100_000
    files = {
        path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*") if path.is_file() and path.name != "recipe.yaml"
    }
    second = warm.run(*quickstart(tmp_path / "run"), folder=tmp_path)
    assert second.returncode == 0 and "reused" in second.stdout, second.stderr
    assert files == {path: path.stat().st_mtime_ns for path in files}, "a second run trains nothing"
