"""What makes a site of the Markdown that GitHub shows: links out of docs/, folders in the navigation, equations as MathML."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
OUTSIDE = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
"""Pages of the site that lie beside docs/, where GitHub looks for them."""

PART = re.compile(
    r"(?P<code>^(?P<fence> *`{3,}).*?^(?P=fence) *$)"
    r"|\$`(?P<equation>[^`]+)`\$"
    r"|\[(?P<text>(?:[^\[\]`]|`[^`]*`)*)\]\((?P<target>[^)\s#:]+)(?P<anchor>#[^)\s]*)?\)"
    r"|`[^`\n]+`",
    re.DOTALL | re.MULTILINE,
)
"""Blocks of code, equations in a line, links without a scheme, and code in a line, in the order of the text."""


def equation(source: str, display: str = "inline") -> str:
    """Return MathML of an equation in LaTeX."""
    return convert(source, display=display)


def _fence(source: str, *_: object, **__: object) -> str:
    return f'<div class="equation">{equation(source, "block")}</div>'


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Let ```` ```math ```` be an equation, and put the pages of folders into the navigation."""
    fences = config.mdx_configs.setdefault("pymdownx.superfences", {}).setdefault("custom_fences", [])
    fences.append({"name": "math", "class": "equation", "format": _fence})
    config.nav = _filled(config.nav or [])
    return config


def _filled(entries: list[Any]) -> list[Any]:
    """Replace each folder by its pages, and leave out folders that are not there."""
    filled: list[Any] = []
    for entry in entries:
        if isinstance(entry, str):  # a page under its own title, or those of a folder
            filled += pages_of(DOCS / entry) if entry.endswith("/") else [entry]
            continue
        ((title, value),) = entry.items()
        if isinstance(value, list):
            value = _filled(value)
        elif value.endswith("/"):
            value = pages_of(DOCS / value)
        if value:
            filled.append({title: value})
    return filled


def pages_of(folder: Path) -> list[str]:
    """Return the pages of a folder as paths below docs/, in the order in which its README, or the page above it, names them.

    Args:
        folder: in docs/; without pages if it does not exist.
    """
    above = [folder / "README.md", folder.with_suffix(".md"), DOCS / "README.md"]
    told = "".join(page.read_text(encoding="utf-8") for page in above if page.exists())
    pages = [path for path in sorted(folder.glob("*")) if path.suffix in (".md", ".ipynb")]
    named = {path: re.search(rf"\((?:{folder.name}/)?{re.escape(path.name)}[)#]", told) for path in pages}
    pages.sort(key=lambda path: (path.name != "README.md", found.start() if (found := named[path]) else len(told)))
    return [path.relative_to(DOCS).as_posix() for path in pages]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Take the pages beside docs/ into the site."""
    for name in OUTSIDE:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, **_: object) -> str:
    """Write equations in a line as MathML, and point links that leave docs/ to pages of the site or to the repository."""
    if page.file.abs_src_path is None:
        return markdown
    written, shown = Path(page.file.abs_src_path).parent, (DOCS / page.file.src_uri).parent

    def rewritten(part: re.Match[str]) -> str:
        if part["equation"]:
            return equation(part["equation"])
        if part["target"]:
            target = _address(written / part["target"], shown, config.repo_url)
            return f"[{part['text']}]({target}{part['anchor'] or ''})" if target else part["text"]
        return part[0]

    return PART.sub(rewritten, markdown)


def _address(target: Path, shown: Path, repository: str | None) -> str | None:
    """Return what a page that is shown in a folder of docs/ calls a file or folder; None if it is nowhere to be seen."""
    path = Path(os.path.normpath(target))
    if path == ROOT / "README.md":
        path = DOCS / "README.md"
    elif path.parent == ROOT and path.name in OUTSIDE:
        path = DOCS / path.name
    if path.is_relative_to(DOCS):
        return os.path.relpath(path, shown)
    if not path.exists():
        return os.path.relpath(path, shown)  # mkdocs names it as a broken link
    kind = "tree" if path.is_dir() else "blob"
    return f"{repository.rstrip('/')}/{kind}/main/{path.relative_to(ROOT).as_posix()}" if repository else None
