"""Every recipe, command and line of Python of the tutorials, in order, on tiny models under the names of real ones."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hub_server import Hub
from test_docs import INDEX, ROOT, take_photos
from typing_in import commands_of, type_in

from xcompat.encoders.standins import save_stand_in
from xcompat.retrieval import Gallery

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
