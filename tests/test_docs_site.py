"""Pages of methods with pictures, options and recipes that run; the site of `make docs`, strict and the same as on GitHub."""

from __future__ import annotations

import importlib
import importlib.util
import os
import pkgutil
import re
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType

import pytest
from latex2mathml.converter import convert
from markdown_it import MarkdownIt
from mkdocstrings import Inventory
from PIL import Image
from schedule import mostly_nightly
from typing_in import commands_of, type_in

import xcompat
from xcompat.methods import METHODS
from xcompat.models.classified import ClassifiedModel
from xcompat.training.stage_recipe import usual_options

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
FOLDER = DOCS / "methods"
sys.path.insert(0, str(DOCS))

import options  # noqa: E402
from pictures import PICTURES, as_svg  # noqa: E402

PAGES = {path.stem: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.md"))}
OVERVIEW = (DOCS / "methods.md").read_text(encoding="utf-8")
OPTIONS_OF_MANY = OVERVIEW[OVERVIEW.index("## Options") :].split("## Shared options")
SECTIONS = ["Loss", "When to use it", "Run it", "Options", "Differences from the paper", "Results", "Paper"]
COLUMNS = {name for method in METHODS.values() for name in (*method.columns, *method.columns_if_known)} | {"labels"}


def section(page: str, name: str) -> str:
    return re.split(r"^## .*\n", page, flags=re.MULTILINE)[1 + SECTIONS.index(name)]


def test_every_method_has_a_page_a_picture_and_current_options() -> None:
    assert set(PAGES) == set(PICTURES) == {path.stem for path in FOLDER.glob("*.svg")} == set(METHODS)
    assert sorted(re.findall(r"^\| \[`(\w+)`\]\(methods/\1\.md\) \|", OVERVIEW, re.MULTILINE)) == sorted(METHODS)
    assert [file.name for file, text in options.files().items() if file.read_text(encoding="utf-8") != text] == []
    assert {model.__module__.rpartition(".")[2]: name for name, model in METHODS.items()} == {name: name for name in METHODS}
    told = options.meanings_of(METHODS["oca"].config_class)
    assert told["compat_weight"] == "the paper's λ1." and told["old_scale"].startswith("factor on cosines")
    assert "| `classified` | `new_part` | the new classifier's input" in options.table_of("bt2")
    assert options.shared_table().count("`triplet`") == 1, "choices that the docstring does not name"


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


PACKAGES = ["xcompat", *(each.name for each in pkgutil.walk_packages(xcompat.__path__, "xcompat.") if each.ispkg)]
SHOWN = ["li", "table", "tr", "pre", "blockquote", "h1", "h2", "h3", "h4", "img"]
"""Elements of which GitHub and the site must show as many."""


def theme(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, DOCS / "theme" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    quiet = {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=os.environ | quiet, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


class Elements(HTMLParser):
    """Start tags of a page, those inside of its article apart; what a page loads."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.article: Counter[str] = Counter()
        self.loaded: list[str] = []
        self._inside = 0
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        told = dict(attrs)
        if tag != "a" and not (tag == "link" and told.get("rel") in ("canonical", "next", "prev")):
            self.loaded += [value for name in ("src", "href", "data", "srcset") if (value := told.get(name))]
        self._inside += tag == "article"
        if self._inside:
            self.article[tag] += 1

    def handle_endtag(self, tag: str) -> None:
        self._inside -= tag == "article"


def test_public_names_and_what_pages_import_have_an_api_page(site: Path) -> None:
    with (site / "objects.inv").open("rb") as file:
        inventory = Inventory.parse_sphinx(file)
    public = [f"{package}.{name}" for package in PACKAGES for name in getattr(importlib.import_module(package), "__all__", ())]
    assert "xcompat.methods.XbtModel" in public
    imports = re.compile(r"^from (xcompat[\w.]*) import ([\w, ]+)", re.MULTILINE)
    pages = [ROOT / "README.md", *DOCS.rglob("*.md"), *DOCS.rglob("*.ipynb")]
    told = [block for page in pages for block in imports.findall(page.read_text(encoding="utf-8"))]
    imported = {(module, name) for module, names in told for name in names.split(", ")}
    assert ("xcompat.retrieval", "Gallery") in imported
    lazy = {name: f"xcompat.methods.{name}" for name in importlib.import_module("xcompat.methods").__all__}
    public += [lazy.get(name, f"xcompat.{name}") if module == "xcompat" else f"{module}.{name}" for module, name in imported]
    assert sorted(name for name in public if name not in inventory and not name.endswith("__")) == []
    assert {item.uri.split("/")[0] for item in inventory.values()} == {"api"}


def test_no_page_loads_anything_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert pages
    for page in pages:
        elsewhere = [address for address in Elements(page).loaded if re.match(r"(?:[a-z]+:)?//", address)]
        assert elsewhere == [], page
    for style in site.rglob("*.css"):
        assert re.findall(r"(?:url\(|@import )['\"]?(?:https?:)?//[^)]*", style.read_text(encoding="utf-8")) == [], style


def as_github_shows(page: Path) -> Counter[str]:
    """Return how many elements of each kind CommonMark with GitHub's tables makes of a page."""
    count: Counter[str] = Counter()
    tokens = MarkdownIt("commonmark").enable("table").parse(page.read_text(encoding="utf-8"))
    for token in [each for block in tokens for each in (block, *(block.children or ()))]:
        equation = token.type == "fence" and token.info == "math"
        count["pre"] += token.type in ("fence", "code_block") and not equation
        count[token.tag] += token.nesting == 1 or token.type == "image"
    return count


def test_github_and_the_site_show_the_same(site: Path) -> None:
    """Lists without a blank line before them, lists in lists and tables are read otherwise by Python-Markdown."""
    pages = [*DOCS.rglob("*.md"), *(ROOT / name for name in theme("hooks").OUTSIDE)]
    for page in pages:
        path = page.relative_to(DOCS) if page.is_relative_to(DOCS) else Path(page.name)
        if path.parts[0] == "api" and path.name != "README.md":
            continue
        shown = site / (path.with_name("index.html") if path.name == "README.md" else path.with_suffix(".html"))
        there, here = Elements(shown).article, as_github_shows(page)
        assert {tag: there[tag] for tag in SHOWN} == {tag: here[tag] for tag in SHOWN}, path
