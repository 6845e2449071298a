"""Embeddings alone on the leaderboard: the old gallery that they start from, their row, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from xcompat.core.errors import XcompatError
from xcompat.training.compare import compare_recipe
from xcompat.training.evaluate_command import evaluate_embeddings
from xcompat.training.recipe import Recipe, parse_recipe

pytestmark = pytest.mark.usefixtures("undrawn")
ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def _in_benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def protocol(tmp_path: Path, data: dict[str, Any], old: str, new: str) -> dict[str, Any]:
    raw: dict[str, Any] = {"output_dir": str(tmp_path / "bench" / "pairs"), "cache_dir": str(tmp_path / "cache"), "seeds": [3]}
    raw |= {"old": old, "new": new, "data": data, "stages": [{"name": "line", "method": "procrustes"}]}
    return raw | {"evaluation": {"resamples": 100, "ks": [1, 10], "examples": 0, "tsne_pairs": 0}}


@pytest.fixture
def pairs(tmp_path: Path, folder_of: dict[str, str], old_folder: str, pairs_folder: str, texts_file: str) -> dict[str, Any]:
    data = {"texts": [{"path": texts_file}], "test": {"path": pairs_folder}}
    return protocol(tmp_path, data, old_folder, folder_of["clip"])


def recipe_of(raw: dict[str, Any]) -> Recipe:
    return parse_recipe(raw, "pairs", "pairs.yaml")


def test_embeddings_alone_are_a_row(
    pairs: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import entry
    import leaderboard

    compare_recipe(recipe_of(pairs))
    (tmp_path / "pairs.yaml").write_text(yaml.safe_dump(pairs))
    monkeypatch.setattr(entry, "RECIPES", tmp_path)
    monkeypatch.setattr(entry, "FOLDER", tmp_path / "bench")
    monkeypatch.setattr(leaderboard, "TABLES", {"one": ("pairs",)})
    entry.main("pairs")
    entries = tmp_path / "bench" / "pairs" / "entries"
    assert f"xcompat evaluate --old {entries}/old --new MINE --out {entries}/MINE" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="pairs: .*old is there; delete it to write it again"):
        entry.main("pairs")
    texts = [json.loads(line) for line in (entries / "old" / "texts.jsonl").read_text().splitlines()]
    assert len(texts) == len(np.load(entries / "old" / "text_embeds.npy")) and all(isinstance(text, str) for text in texts)

    evaluate_embeddings(entries / "old", entries / "old", None, None, entries / "mine")  # old embeddings gain nothing
    found = leaderboard.studies(tmp_path / "bench")
    rows = {line.split(" (")[0][2:]: line for line in leaderboard.table(found)}
    assert rows["mine"].startswith("| mine (embeddings) | 0 of 1 | R@10 +0.0 (0.0 to 0.0) | R@10 +0.0 (0.0 to 0.0) |")
    assert rows["mine"].endswith(" |  |  |"), "nobody knows what they cost"
    assert "0 of 1 |" in rows["line"] or "1 of 1 |" in rows["line"]

    embeds = np.load(entries / "old" / "image_embeds.npy")
    np.save(entries / "old" / "image_embeds.npy", embeds[::-1])
    evaluate_embeddings(entries / "old", entries / "old", None, None, entries / "turned")
    with pytest.raises(SystemExit, match="turned was not judged on the old gallery of this protocol"):
        leaderboard.studies(tmp_path / "bench")


def test_the_old_gallery_of_images_and_of_texts(
    tmp_path: Path, image_folder_of: dict[str, str], folder_of: dict[str, str], pairs_folder: str
) -> None:
    import entry

    photos = {"path": pairs_folder, "label_column": "caption"}
    old, new = image_folder_of["resnet"], image_folder_of["vit"]
    raw = protocol(tmp_path, {"images": photos, "queries": photos}, old, new)
    entry.old_gallery(recipe_of(raw), tmp_path / "images")
    held = {file.name for file in (tmp_path / "images").iterdir()}
    assert held == {"image_embeds.npy", "image_ids.txt", "labels.txt"}
    count = len((tmp_path / "images" / "labels.txt").read_text().splitlines())
    assert np.load(tmp_path / "images" / "image_embeds.npy").shape == (count, 16)
    raw["data"]["gallery"] = {**photos, "limit": 3}
    with pytest.raises(XcompatError, match="its queries are other images than its gallery"):
        entry.old_gallery(recipe_of(raw), tmp_path / "others")
    assert not (tmp_path / "others").exists()

    for name in ("queries", "passages"):
        lines = [json.dumps({"id": f"{name[0]}{number}", "text": f"text {number}"}) for number in range(4)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    (tmp_path / "qrels.tsv").write_text("query-id\tcorpus-id\tscore\nq0\tp0\t1\nq1\tp1\t1\n")
    judged = {name: {"path": str(tmp_path / f"{name}.jsonl")} for name in ("queries", "passages")}
    data = {
        "texts": [{"path": str(tmp_path / "passages.jsonl")}],
        "judged_texts": {**judged, "qrels": str(tmp_path / "qrels.tsv")},
    }
    raw = protocol(tmp_path, data, folder_of["clip"], folder_of["clip"])
    entry.old_gallery(recipe_of(raw), tmp_path / "texts")
    assert np.load(tmp_path / "texts" / "query_embeds.npy").shape == (4, 16)
    assert (tmp_path / "texts" / "text_ids.txt").read_text() == "p0\np1\np2\np3\n"
