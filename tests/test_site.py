"""The site of `make docs`: built strictly, every public name in it, the same as on GitHub, nothing loaded from elsewhere."""

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
from markdown_it import MarkdownIt
from mkdocstrings import Inventory

import xcompat

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
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
