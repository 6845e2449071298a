"""Writes recipes/README.md: every recipe, by the paper and table whose rows it repeats, as its header says it.

python docs/recipes_table.py
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from xcompat.core.files import atomic_path
from xcompat.training.headers import Header, read_header
from xcompat.training.shipped import first_sentence

FOLDER = Path(__file__).parents[1] / "recipes"
PAPERS = {
    "xbt": "XBT, cross-modal backward compatible training",
    "bt2": "BT², basis transformation",
    "oca": "OCA, an orthogonal transformation",
    "mixbct": "MixBCT, mixed features",
    "fct": "FCT, forward compatible training",
}
INTRODUCTION = """# Recipes

Written by `python docs/recipes_table.py` from the first lines of each recipe: change those, not this page. Those lines also
say what must lie where (`data`), what the recipe needs, and how it differs from the paper. `xcompat recipes` lists all of
them, `xcompat recipes NAME --to recipes` copies one, and `xcompat train RECIPE --dry-run` tries it on stand-ins.

`../shared` is a folder beside the clone with public data and models, which are not distributed with this project. Put yours
there, or name other paths: `xcompat train RECIPE data.images.path=…`.

Published numbers are copied from the papers, in percent. Protocols differ between papers: compare methods inside one table.
"""


def overview() -> str:
    """Return the page."""
    headers = {file: read_header(file) for file in sorted(FOLDER.rglob("*.yaml"))}
    parts = [INTRODUCTION]
    for paper, title in PAPERS.items():
        of_paper = [(file, header) for file, header in headers.items() if header.first_value("paper") == paper]
        if of_paper:
            head = [f"## {title}", "", "| table | row | recipe | published | ours |", "|---|---|---|---|---|"]
            lines = (line for file, header in sorted(of_paper, key=lambda each: _order(*each)) for line in _lines(file, header))
            parts.append("\n".join([*head, *lines]) + "\n")
    of_none = [file for file, header in headers.items() if not header.first_value("paper")]
    others = [f"| [{_name(file)}]({_path(file)}) | {first_sentence(file)} |" for file in of_none]
    parts.append("\n".join(["## Others", "", "| recipe | what it is |", "|---|---|", *others]) + "\n")
    return "\n".join(parts)


def _lines(file: Path, header: Header) -> Iterator[str]:
    """Yield a line for each row of a recipe."""
    where, ours = f"[{_name(file)}]({_path(file)})", header.first_value("ours")
    for row, published in header.rows():
        yield f"| {header.first_value('table')} | {row} | {where} | {published} | {ours} |"


def _order(file: Path, header: Header) -> tuple[int, str]:
    table = header.first_value("table")
    number = re.match(r"\d+", table)
    return int(number[0]) if number else 1000, _path(file)


def _path(file: Path) -> str:
    return file.relative_to(FOLDER).as_posix()


def _name(file: Path) -> str:
    return _path(file).removesuffix(".yaml")


if __name__ == "__main__":
    with atomic_path(FOLDER / "README.md") as temporary:
        temporary.write_text(overview(), encoding="utf-8")
