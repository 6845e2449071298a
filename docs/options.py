"""Writes each method's options into its page and into ``methods.json``, which checks read without torch, and a stub for types.

python docs/options.py
"""

from __future__ import annotations

import inspect
import json
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch

from xcompat.core.files import atomic_path
from xcompat.methods import METHODS
from xcompat.models import CompatConfig
from xcompat.training.stage_recipe import usual_options
from xcompat.training.static_options import METHODS_FILE

FOLDER = Path(__file__).parent / "methods"
OVERVIEW = FOLDER.with_suffix(".md")
HEADER = ("| option | default | meaning |", "|---|---|---|")
SHARED_BY = 3
"""Options that are equal for this many methods are in docs/methods.md."""
OF_ALL = ("adapters", "logit_scale")
"""Options that every method has; docs/methods.md says once what they are."""
BEGIN, END = "<!-- options: python docs/options.py -->\n", "<!-- /options -->\n"


def options_of(method: str) -> dict[str, Any]:
    """Return the options of a method that not every method has, with their defaults, its own ones first.

    Args:
        method: its name in a recipe.
    """
    usual = usual_options(method)
    own = [name for cls in METHODS[method].config_class.__mro__ for name in vars(cls).get("__annotations__", {})]
    return {name: usual[name] for name in dict.fromkeys(own) if name in usual and name not in OF_ALL}


def meanings_of(config: type) -> dict[str, str]:
    """Return what the docstrings of a configuration and of its bases say of their arguments; the nearest one says it.

    Args:
        config: its class.

    Example:
        >>> meanings_of(AdapterConfig)["prompts"] != ""
        True
    """
    meanings: dict[str, str] = {}
    for cls in reversed(config.__mro__):
        arguments = re.search(r"^Args:\n((?:    .*\n?|\n)+)", inspect.cleandoc(vars(cls).get("__doc__") or ""), re.MULTILINE)
        for name, meaning in re.findall(r"^    (\w+): ((?:.|\n(?!    \w))*)", arguments[1] if arguments else "", re.MULTILINE):
            meanings[name] = " ".join(meaning.split())
    return meanings


def table_of(method: str) -> str:
    """Return the table of a method's options, and a link to those that it shares with other methods.

    Args:
        method: its name in a recipe.
    """
    rows, shared = rows_of(method), shared_rows()
    linked = [name for name, row in rows.items() if shared.get(name) == row]
    link = f"[Shared options](../methods.md#shared-options): {', '.join(f'`{name}`' for name in linked)}.\n" if linked else ""
    own = [row for name, row in rows.items() if name not in linked]
    table = "\n".join([*HEADER, *own]) + "\n" if own else ""
    return "\n".join(filter(None, (table, link))) or "None of its own.\n"


def shared_table() -> str:
    """Return the table of the options that several methods share."""
    return "\n".join([*HEADER, *shared_rows().values()]) + "\n"


@cache
def shared_rows() -> dict[str, str]:
    """Return the rows that are equal for at least ``SHARED_BY`` methods, by option."""
    counts = Counter(row for method in METHODS for row in rows_of(method).items())
    return {name: row for (name, row), count in counts.items() if count >= SHARED_BY}


@cache
def rows_of(method: str) -> dict[str, str]:
    """Return the row of each option of a method.

    Args:
        method: its name in a recipe.
    """
    config = METHODS[method].config_class
    meanings, hints = meanings_of(config), get_type_hints(config, localns={"torch": torch})
    rows = {}
    for name, default in options_of(method).items():
        meaning = _as_markdown(meanings[name])
        choices = get_args(hints[name]) if get_origin(hints[name]) is Literal else ()
        missing = [f"`{choice}`" for choice in choices if f"`{choice}`" not in meaning]
        rows[name] = f"| `{name}` | `{_as_yaml(default)}` | {meaning}{' One of ' + ', '.join(missing) + '.' if missing else ''} |"
    return rows


def _as_markdown(text: str) -> str:
    """Return a docstring's text as a recipe's user reads it: null for None, and a paper by its name."""
    text = re.sub(r"``(.*?)``", r"`\1`", text)
    return re.sub(r"\b(\w+)\.txt\b", lambda paper: paper[1].upper(), re.sub(r"\bNone\b", "null", text))


def _as_yaml(value: Any) -> str:  # noqa: ANN401 - any option
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def with_table(page: str, table: str) -> str:
    """Return a page with another table between its two markers.

    Args:
        page: its text.
        table: the new table.
    """
    before, rest = page.split(BEGIN)
    return before + BEGIN + table + END + rest.split(END)[1]


def methods_json() -> str:
    """Return ``methods.json``: each method's own options with their types as in the source, and whether it is solved."""
    described = {}
    for name, model in sorted(METHODS.items()):
        bases = reversed(
            [base for base in model.config_class.__mro__ if issubclass(base, CompatConfig) and base is not CompatConfig]
        )
        hints = [hint for base in bases for hint in vars(base).get("__annotations__", {}).items() if "ClassVar" not in hint[1]]
        described[name] = {"is_solved": model.is_solved, "options": dict(hints)}
    return json.dumps(described, indent=1) + "\n"


def methods_stub() -> str:
    """Return ``__init__.pyi`` of the methods, for type checkers, editors and the pages of the API."""
    lines: list[str] = ["# Written by `python docs/options.py`."]
    names: list[str] = []
    for model in sorted(METHODS.values(), key=lambda model: model.__module__):
        for cls in (model.config_class, model):
            names.append(cls.__name__)
            lines.append(f"from {model.__module__} import {cls.__name__} as {cls.__name__}")
    lines.append("from xcompat.models.registry import METHODS as METHODS")
    return "\n".join([*lines, "", "__all__ = [", *(f'    "{name}",' for name in ["METHODS", *sorted(names)]), "]", ""])


def files() -> dict[Path, str]:
    """Return every file that this script writes, with its text."""
    pages = {page: with_table(page.read_text(encoding="utf-8"), table_of(page.stem)) for page in FOLDER.glob("*.md")}
    pages[OVERVIEW] = with_table(OVERVIEW.read_text(encoding="utf-8"), shared_table())
    return pages | {METHODS_FILE: methods_json(), METHODS_FILE.with_name("__init__.pyi"): methods_stub()}


if __name__ == "__main__":
    for file, text in files().items():
        with atomic_path(file) as temporary:
            temporary.write_text(text, encoding="utf-8")
