"""Writes the options of each method into its page in docs/methods, as its configuration's docstrings say them.

python docs/options.py
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch

from xcompat.core.files import atomic_path
from xcompat.methods import METHODS
from xcompat.training.stage_recipe import usual_options

FOLDER = Path(__file__).parent / "methods"
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
    """Return the table of a method's options.

    Args:
        method: its name in a recipe.
    """
    options = options_of(method)
    if not options:
        return "None of its own.\n"
    config = METHODS[method].config_class
    meanings, hints = meanings_of(config), get_type_hints(config, localns={"torch": torch})
    rows = ["| option | default | what it is |", "|---|---|---|"]
    for name, default in options.items():
        meaning = _as_markdown(meanings[name])
        choices = get_args(hints[name]) if get_origin(hints[name]) is Literal else ()
        missing = [f"`{choice}`" for choice in choices if f"`{choice}`" not in meaning]
        rows.append(f"| `{name}` | `{_as_yaml(default)}` | {meaning}{' One of ' + ', '.join(missing) + '.' if missing else ''} |")
    return "\n".join(rows) + "\n"


def _as_markdown(text: str) -> str:
    """Return a docstring's text as a recipe's user reads it: null for None, and a paper by its name."""
    text = re.sub(r"``(.*?)``", r"`\1`", text)
    return re.sub(r"\b(\w+)\.txt\b", lambda paper: paper[1].upper(), re.sub(r"\bNone\b", "null", text))


def _as_yaml(value: Any) -> str:  # noqa: ANN401 - any option
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def with_options(method: str, page: str) -> str:
    """Return a page with its table of options as it is now.

    Args:
        method: its name in a recipe.
        page: its text, with the two markers.
    """
    before, rest = page.split(BEGIN)
    return before + BEGIN + table_of(method) + END + rest.split(END)[1]


if __name__ == "__main__":
    for method in METHODS:
        page = FOLDER / f"{method}.md"
        with atomic_path(page) as temporary:
            temporary.write_text(with_options(method, page.read_text(encoding="utf-8")), encoding="utf-8")
