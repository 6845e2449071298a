"""A page for each method: its parts, its picture, its equations, its options and columns, and a recipe that runs."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from latex2mathml.converter import convert
from PIL import Image
from schedule import mostly_nightly
from typing_in import commands_of, type_in

from xcompat.methods import METHODS
from xcompat.models.classified import ClassifiedModel
from xcompat.training.stage_recipe import usual_options

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "methods"
sys.path.insert(0, str(ROOT / "docs"))

import options  # noqa: E402
from pictures import PICTURES, as_svg  # noqa: E402

PAGES = {path.stem: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.md"))}
OVERVIEW = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
OPTIONS_OF_MANY = OVERVIEW[OVERVIEW.index("## Options") :].split("## Shared options")
SECTIONS = ["Loss", "When to use it", "Run it", "Options", "Differences from the paper", "Results", "Paper"]
COLUMNS = {name for method in METHODS.values() for name in (*method.columns, *method.columns_if_known)} | {"labels"}


def section(page: str, name: str) -> str:
    return re.split(r"^## .*\n", page, flags=re.MULTILINE)[1 + SECTIONS.index(name)]


def test_every_method_has_a_page_and_a_picture_and_nothing_else_has() -> None:
    assert set(PAGES) == set(PICTURES) == {path.stem for path in FOLDER.glob("*.svg")} == set(METHODS)
    assert sorted(re.findall(r"^\| \[`(\w+)`\]\(methods/\1\.md\) \|", OVERVIEW, re.MULTILINE)) == sorted(METHODS)


@pytest.mark.parametrize("method", METHODS)
def test_every_page_has_the_same_parts(method: str) -> None:
    page = PAGES[method]
    assert re.findall(r"^## (.*)", page, re.MULTILINE) == SECTIONS
    assert all(section(page, name).strip() for name in SECTIONS)
    ((described, file),) = re.findall(r"!\[(.+)\]\((.+)\)", page)
    assert file == f"{method}.svg" and len(described) > 60, "the picture in words, for whoever does not see it"
    equations = re.findall(r"```math\n(.*?)```", page, re.DOTALL)
    assert equations and not [each for each in equations if "\\" in convert(each)], "a command that latex2mathml does not know"
    assert "$" not in page, "inline equations are words"


@pytest.mark.parametrize("method", METHODS)
def test_pictures_are_up_to_date_and_show_what_the_method_does(method: str) -> None:
    """They are the same bytes whenever they are drawn; `python docs/pictures.py` draws them anew."""
    picture, model = PICTURES[method], METHODS[method]
    assert (FOLDER / f"{method}.svg").read_bytes() == as_svg(picture)
    assert (len(picture.gallery) > 1) == model.maps_galleries_with({}), "mapped once, or left as it is"
    states = {part.state for line in picture.lanes for part in line.parts}
    assert ("solved" in states) == model.is_solved and bool(states & {"trained", "adapted"}) != model.is_solved


@pytest.mark.parametrize("method", METHODS)
def test_options_and_columns_are_those_of_the_method(method: str) -> None:
    assert options.with_table(PAGES[method], options.table_of(method)) == PAGES[method]
    listed = re.findall(r"^\| `(\w+)` \| `(.*?)` \| (.+) \|$", section(PAGES[method], "Options"), re.MULTILINE)
    linked = re.findall(r"^\[Shared options\].*", section(PAGES[method], "Options"), re.MULTILINE)
    shared = re.findall(r"`(\w+)`", "".join(linked))
    of_all, for_some = (re.findall(r"^\| `(\w+)` \| `.*?` \| .+ \|$", part, re.MULTILINE) for part in OPTIONS_OF_MANY)
    assert set(shared) <= set(for_some)
    assert sorted([*(name for name, _, _ in listed), *shared, *of_all]) == sorted(usual_options(method))
    model = METHODS[method]
    (told,) = re.findall(r"^\| Data \|(.*)\|$", section(PAGES[method], "When to use it"), re.MULTILINE)
    needed = {*model.columns, *model.columns_if_known} | ({"labels"} if issubclass(model, ClassifiedModel) else set())
    assert set(re.findall(r"`(\w+)`", told)) & COLUMNS == needed


def test_generated_files_are_up_to_date() -> None:
    """`python docs/options.py` writes them again."""
    assert [file.name for file, text in options.files().items() if file.read_text(encoding="utf-8") != text] == []
    assert {model.__module__.rpartition(".")[2]: name for name, model in METHODS.items()} == {name: name for name in METHODS}


def test_an_option_is_told_by_the_nearest_docstring() -> None:
    told = options.meanings_of(METHODS["oca"].config_class)
    assert told["compat_weight"] == "the paper's λ1." and told["old_scale"].startswith("factor on cosines")
    assert "| `classified` | `new_part` | the new classifier's input" in options.table_of("bt2")
    assert options.shared_table().count("`triplet`") == 1, "choices that the docstring does not name"


@pytest.mark.parametrize("method", mostly_nightly(METHODS, ("bct", "whitened").__contains__))
def test_recipes_run(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undrawn: None, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("photos/captioned", "photos/train/cat", "photos/test/cat"):
        (tmp_path / name).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / name / "a.png")
    (tmp_path / "photos/captioned/metadata.csv").write_text("file_name,caption\na.png,a dog\n", encoding="utf-8")
    (tmp_path / "texts.txt").write_text("a dog\n", encoding="utf-8")
    shown = section(PAGES[method], "Run it")
    ((file, recipe),) = re.findall(r"```yaml\n# (\S+)\n(.*?)```", shown, re.DOTALL)
    (block,) = re.findall(r"```sh\n(.*?)```", shown, re.DOTALL)
    (command,) = commands_of(block)
    (tmp_path / file).write_text(recipe, encoding="utf-8")
    assert f"method: {method}" in recipe
    type_in(command)
    assert f"✓ {method} runs from end to end on stand-ins" in capsys.readouterr().out
