"""``xcompat gallery`` as a user types it, on pictures and stand-in models."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from xcompat import XbtModel, cli
from xcompat.models.embedder import load_embedder
from xcompat.retrieval import Gallery

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a function that runs a command line and returns exit code, output and errors."""
    monkeypatch.setenv("COLUMNS", "400")

    def called(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["xcompat", "gallery", *map(str, arguments)])
        try:
            cli.main()
            code = 0
        except SystemExit as stop:
            code = int(stop.code or 0)
        out, err = capsys.readouterr()
        return code, out, err

    return called


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Write a dozen coloured squares, one of them damaged."""
    folder = tmp_path / "photos"
    (folder / "inner").mkdir(parents=True)
    for number in range(120):
        pixels = np.random.default_rng(number).integers(0, 255, (20, 20, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / ("inner" if number % 2 else ".") / f"{number}.png")
    (folder / "inner" / "bad.png").write_bytes(b"no picture")
    return folder


def test_build_search_add_and_the_rest(run: Run, photos: Path, tmp_path: Path, folder_of: dict[str, str]) -> None:
    gallery, model = tmp_path / "gallery", folder_of["clip"]
    code, out, err = run("build", photos, "--model", model, "--out", gallery)
    assert (code, err) == (0, "") and "120 pictures added" in out and "1 cannot be read" in out
    code, out, _ = run("build", photos, "--model", model, "--out", gallery)
    assert code == 0 and "0 pictures added" in out and "120 were there already" in out
    code, out, _ = run("search", gallery, photos / "inner" / "7.png", "--model", model, "--top-k", 3)
    rows = [line for line in out.splitlines() if ".png" in line]
    assert code == 0 and len(rows) == 3 and "inner/7.png" in rows[0] and "1.000" in rows[0]
    code, out, _ = run("search", gallery, "a red running shoe", "--model", model)
    assert code == 0 and sum(".png" in line for line in out.splitlines()) == 10
    code, out, _ = run("verify", gallery)
    assert code == 0 and "is whole: 120 items" in out
    code, out, _ = run("info", gallery, "--model", model)
    assert code == 0 and "120 items" in out and "yes" in out and "create" in out
    code, out, _ = run("compact", gallery)
    assert code == 0 and "1 segments" in out
    code, out, err = run("rollback", gallery, 0)
    assert code == 2 and "has no generation 0" in err
    index = gallery / "segments" / Gallery.open(gallery).segments[0].record.name / "index.faiss"
    index.write_bytes(index.read_bytes()[:-1])
    code, out, _ = run("verify", gallery)
    assert code == 1 and "index.faiss has" in out


@pytest.fixture
def compatible(tmp_path: Path, folder_of: dict[str, str], old_folder: str) -> str:
    """Return a checkpoint whose queries search galleries of the old model."""
    model = XbtModel.from_encoder(folder_of["clip"], old=load_embedder(old_folder).describe_old())
    model.export(tmp_path / "xbt")
    return str(tmp_path / "xbt")


def test_a_model_that_would_split_the_gallery_is_refused(
    run: Run, photos: Path, tmp_path: Path, folder_of: dict[str, str], old_folder: str
) -> None:
    gallery = tmp_path / "gallery"
    run("build", photos, "--model", old_folder, "--out", gallery)
    foreign = ("--model", folder_of["clip"])
    for verb in (("search", gallery, "a dog"), ("add", gallery, photos), ("upgrade", gallery, "--backfill", photos)):
        code, _, err = run(*verb, *foreign)
        assert code == 2 and err.count("\n") == 1 and "cannot be compared with" in err
    assert Gallery.open(gallery).damage() == [] and len(Gallery.open(gallery).versions) == 1
    code, _, err = run("upgrade", gallery, *foreign)
    assert code == 2 and "is a plain encoder and maps nothing" in err


def test_a_compatible_model_adds_beside_and_replaces_when_asked(
    run: Run, photos: Path, tmp_path: Path, compatible: str, old_folder: str
) -> None:
    gallery = tmp_path / "gallery"
    run("build", photos, "--model", old_folder, "--out", gallery)
    code, _, err = run("add", gallery, photos, "--model", compatible)
    assert code == 2 and "embedded by another model" in err
    code, out, _ = run("add", gallery, photos, "--model", compatible, "--replace")
    assert code == 0 and "120 pictures added" in out
    assert Gallery.open(gallery).versions == [load_embedder(compatible).fingerprint]


def test_backfill_stays_within_its_budget_and_goes_on(
    run: Run, photos: Path, tmp_path: Path, compatible: str, old_folder: str
) -> None:
    gallery = tmp_path / "gallery"
    run("build", photos, "--model", old_folder, "--out", gallery)
    code, out, _ = run("upgrade", gallery, "--model", compatible, "--backfill", photos, "--budget", 50, "--dry-run")
    assert code == 0 and "50 of 120 pictures to embed" in out and len(Gallery.open(gallery).versions) == 1
    for done, left in ((50, 70), (50, 20), (20, 0)):
        code, out, _ = run("upgrade", gallery, "--model", compatible, "--backfill", photos, "--budget", 50)
        assert code == 0 and f"{done} embedded anew, {left} to go" in out
        assert run("search", gallery, photos / "0.png", "--model", compatible)[0] == 0
    assert Gallery.open(gallery).versions == [load_embedder(compatible).fingerprint] and len(Gallery.open(gallery)) == 120
    (tmp_path / "elsewhere").mkdir()
    Image.new("RGB", (9, 9)).save(tmp_path / "elsewhere" / "x.png")
    code, _, err = run("upgrade", gallery, "--model", compatible, "--backfill", tmp_path / "elsewhere")
    assert code == 2 and "none of the 1 pictures is in" in err


def test_a_faiss_index_is_adopted_by_name(run: Run, tmp_path: Path) -> None:
    import faiss

    index = faiss.IndexFlatIP(4)
    index.add(np.eye(4, dtype=np.float32))
    faiss.write_index(index, str(tmp_path / "own.faiss"))
    (tmp_path / "ids.txt").write_text("a\nb\nc\nd\n")
    adopt = ("build", "--from-faiss", tmp_path / "own.faiss", "--model", "/our/clip", "--out", tmp_path / "g")
    code, _, err = run(*adopt)
    assert code == 2 and "with --ids" in err
    code, out, _ = run(*adopt, "--ids", tmp_path / "ids.txt")
    assert code == 0 and "4 vectors of /our/clip@" in out and "cannot be loaded" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("build", "nowhere", "--model", "x"), "x"),
        (("build",), "name the model with --model"),
        (("search", "nowhere", "text", "--model", "x"), "nowhere is no gallery"),
        (("verify", "nowhere"), "nowhere is no gallery"),
    ],
)
def test_mistakes_are_one_line(arguments: tuple[str, ...], message: str, run: Run) -> None:
    code, _, err = run(*arguments)
    assert code == 2 and message in err and len(err.strip().splitlines()) == 1
