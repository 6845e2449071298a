"""The recipes that come with an installation: in the wheel, found by name, copied and never over anything."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from xcompat.cli import app
from xcompat.core.errors import XcompatError
from xcompat.training.recipe import load_recipe
from xcompat.training.shipped import find_recipes, shipped_recipes

ROOT = Path(__file__).parents[1]
NAMES = sorted(file.relative_to(ROOT / "recipes").with_suffix("").as_posix() for file in (ROOT / "recipes").rglob("*.yaml"))


def test_a_wheel_holds_every_recipe_and_every_file_of_the_package(tmp_path: Path) -> None:
    for name in ("recipes", "xcompat"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / name)
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", "dist", "."]
    done = subprocess.run(build, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as held:
        packed = {name.removeprefix("xcompat/recipes/") for name in held.namelist() if name.startswith("xcompat/recipes/")}
        files = {file.relative_to(ROOT).as_posix() for file in (ROOT / "xcompat").rglob("*") if file.is_file()}
        assert {file for file in files if "__pycache__" not in file} <= set(held.namelist())  # templates, styles, py.typed
    assert packed == {f"{name}.yaml" for name in NAMES}


def test_they_are_listed_shown_and_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    listed = CliRunner().invoke(app, ["recipes"]).stdout
    assert all(name in listed for name in NAMES) and "a map that is solved, not trained" in " ".join(listed.split())
    assert "Copy one: xcompat recipes NAME --to recipes. Run it: xcompat train recipes/NAME.yaml" in listed
    source = (ROOT / "recipes" / "clip" / "b32_to_l14.yaml").read_text(encoding="utf-8")
    assert CliRunner().invoke(app, ["recipes", "b32_to_l14"]).stdout == source
    copied = CliRunner().invoke(app, ["recipes", "clip/b32_to_l14", "--to", "mine"])
    assert copied.stdout.split() == ["mine/clip/b32_to_l14.yaml"]
    assert Path("mine/clip/b32_to_l14.yaml").read_text(encoding="utf-8") == source
    assert load_recipe("mine/clip/b32_to_l14.yaml").name == "clip_b32_to_l14"


def test_nothing_is_overwritten_and_then_nothing_copied(tmp_path: Path) -> None:
    theirs = tmp_path / "clip" / "l14_to_h14.yaml"
    theirs.parent.mkdir()
    theirs.write_text("mine: true\n")
    refused = CliRunner().invoke(app, ["recipes", "clip", "--to", str(tmp_path)])
    assert f"{theirs} already exists; choose another folder with --to" in str(refused.exception)
    assert theirs.read_text() == "mine: true\n" and list(theirs.parent.iterdir()) == [theirs]


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("clip/b32_to_l14", ["clip/b32_to_l14"]),
        ("./recipes/clip/b32_to_l14.yaml", ["clip/b32_to_l14"]),
        ("b32_to_l14", ["clip/b32_to_l14"]),
        ("recipes/clip", ["clip/b32_to_h14", "clip/b32_to_l14", "clip/l14_to_h14"]),
    ],
)
def test_names_are_what_people_type(name: str, found: list[str]) -> None:
    assert list(find_recipes(name)) == found


def test_what_is_none_or_several_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(XcompatError, match="xcompat has no recipe 'clip/b32_l14'; did you mean 'clip/b32_to_l14'"):
        find_recipes("clip/b32_l14")
    for folder in ("one", "other"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "same.yaml").write_text("# Twice.\n")
    with monkeypatch.context() as patch:
        patch.setattr("xcompat.training.shipped.PLACES", (tmp_path / "nowhere", tmp_path))
        assert list(shipped_recipes()) == ["one/same", "other/same"]
        with pytest.raises(XcompatError, match="several recipes are named same: one/same, other/same"):
            find_recipes("same")
    monkeypatch.chdir(tmp_path)
    for meant in ("recipes/clip/b32_to_l14.yaml", "b32_to_l14"):
        with pytest.raises(
            XcompatError, match="does not exist; copy xcompat's recipe with `xcompat recipes clip/b32_to_l14 --to recipes`"
        ):
            load_recipe(meant)
