"""A map for a name and a gallery of the model itself: refused with the command that helps, which then works."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from store_places import unit_vectors as draw
from typer.testing import CliRunner

from xcompat import Fingerprint, XcompatError
from xcompat.cli import app
from xcompat.models.embedder import load_checkpoint, load_embedder
from xcompat.retrieval import Gallery

ITEMS, NEW_DIM = 90, 12


NEW = draw(ITEMS, NEW_DIM, 0)


def run(*arguments: str) -> str:
    done = CliRunner().invoke(app, list(arguments))
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.stdout


def make_old_rows(dim: int) -> np.ndarray:
    rows = NEW @ draw(NEW_DIM, dim, 1)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def make_gallery(here: Path, model: object, dim: int) -> str:
    with Gallery.create(here / "my gallery", model, dim=dim) as gallery:  # type: ignore[arg-type]
        gallery.add(make_old_rows(dim), [str(row) for row in range(ITEMS)])
        gallery.commit()
    return str(here / "my gallery")


def make_map(here: Path, old_model: str, dim: int) -> str:
    np.save(here / "old.npy", make_old_rows(dim))
    np.save(here / "new.npy", NEW)
    np.save(here / "q.npy", NEW[:4])
    files = ("--old", str(here / "old.npy"), "--new", str(here / "new.npy"), "--out", str(here / "map"))
    run("map", *files, "--old-model", old_model, "--allow-worse")
    return str(here / "map")


def search(gallery: str, here: Path, model: str) -> list[str]:
    lines = run("gallery", "search", gallery, "--queries", str(here / "q.npy"), "--model", model, "--top-k", "1", "--json")
    return [json.loads(line)["hits"][0]["id"] for line in lines.splitlines()]


def follow_advice(error: XcompatError) -> None:
    """Run the command between backticks, as a user who pastes it."""
    program, *arguments = shlex.split(str(error).split("`")[1])
    assert program == "xcompat"
    run(*arguments)


@pytest.mark.parametrize("gallery_knows", ["model", "name"])
def test_the_advised_command_makes_a_map_fit(gallery_knows: str, tmp_path: Path, old_folder: str) -> None:
    old = load_embedder(old_folder)
    names = (old_folder, "clip b32")
    known, mapped = names if gallery_knows == "model" else names[::-1]
    gallery = make_gallery(tmp_path, old if gallery_knows == "model" else Fingerprint.from_string(known), old.dim)
    model = make_map(tmp_path, mapped, old.dim)
    with pytest.raises(XcompatError, match="gallery alias") as refused:
        search(gallery, tmp_path, model)
    follow_advice(refused.value)
    view = load_checkpoint(f"{model}/model").to_space(torch.from_numpy(NEW[:4].astype(np.float32)))
    expected = [str(row) for row in (view.numpy() @ make_old_rows(old.dim).T).argmax(1)]
    assert search(gallery, tmp_path, model) == expected
    assert search(f"file://{gallery.replace(' ', '%20')}", tmp_path, model) == expected
    assert "alias" in run("gallery", "info", gallery)


def test_a_name_says_what_it_fits_and_a_model_its_fingerprint(
    tmp_path: Path, old_folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    old = load_embedder(old_folder)
    for name, digest in (("b32", Fingerprint.from_string("b32").digest), (old_folder, old.fingerprint.digest)):
        caplog.clear()
        (tmp_path / name[-3:]).mkdir()
        folder = make_map(tmp_path / name[-3:], name, old.dim)
        assert json.loads((Path(folder) / "report.json").read_text())["old"]["fingerprint"] == digest
        assert ("xcompat gallery alias GALLERY b32" in caplog.text) == (name == "b32")


def test_an_alias_never_joins_two_models(tmp_path: Path, old_folder: str, image_folder_of: dict[str, str]) -> None:
    gallery = make_gallery(tmp_path, load_embedder(old_folder), load_embedder(old_folder).dim)
    with pytest.raises(XcompatError, match="another model than"):
        run("gallery", "alias", gallery, image_folder_of["resnet"])


def test_another_dimension_gets_no_alias_advice(tmp_path: Path, old_folder: str) -> None:
    gallery = make_gallery(tmp_path, load_embedder(old_folder), load_embedder(old_folder).dim)
    model = make_map(tmp_path, "b32", 5)
    with pytest.raises(XcompatError, match="cannot be compared") as refused:
        search(gallery, tmp_path, model)
    assert "alias" not in str(refused.value)
