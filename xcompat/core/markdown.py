"""Markdown with untrusted texts, which cannot add markup, links, images or HTML."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xcompat.core.errors import visible

if TYPE_CHECKING:
    from jinja2 import Environment

_MARKS = re.compile(r"[\\`*\[\]|~$]|(?<![^\W_])_|_(?![^\W_])")  # Markdown shows an underscore inside a word as it is
_BLOCK = re.compile(r"^(?:(?=>|[#+\-=]+(?:\s|$)|--|==)|(\d+)(?=[.)](?:\s|$)))")  # begins a heading, a list or a rule
_HTML = re.compile(r"<(?=[A-Za-z/!?])|&(?=#?\w+;)")  # elsewhere these characters are shown as they are


class Markdown(str):
    """Text in Markdown format."""


def one_line(text: str) -> str:
    r"""Return a text as a single line, with control characters escaped.

    Example:
        >>> one_line("a name\n---\x1b[31m")
        'a name ---\\x1b[31m'
    """
    return visible(" ".join(text.split()))


def as_text(text: str) -> str:
    r"""Return a Markdown line that shows a text literally.

    Example:
        >>> as_text("query_map"), as_text("![](http://tracker) | *new*")
        ('query_map', '!\\[\\](http&#58;//tracker) \\| \\*new\\*')
    """
    line = _HTML.sub(lambda found: {"<": "&lt;", "&": "&amp;"}[found[0]], one_line(text))
    line = _MARKS.sub(r"\\\g<0>", line).replace("://", "&#58;//").replace("www.", "www&#46;")
    return _BLOCK.sub(r"\1\\", line)


def as_code(text: str) -> Markdown:
    """Return a code span that shows a text.

    Example:
        >>> print(as_code("clip"), as_code("a`b"))
        `clip` `` a`b ``
    """
    line = one_line(text).replace("|", "\\|")  # needed in tables; elsewhere names have none
    fence = _fence(line, 1)
    return Markdown(f"{fence} {line} {fence}" if "`" in line or not line else f"{fence}{line}{fence}")


def as_block(text: str, language: str) -> Markdown:
    """Return a fenced block in a language. The text cannot close it."""
    fence = _fence(text, 3)
    lines = "\n".join(visible(line) for line in text.rstrip().splitlines())
    return Markdown(f"{fence}{language}\n{lines}\n{fence}")


def _fence(text: str, least: int) -> str:
    return "`" * max(least, 1 + max((len(run) for run in re.findall("`+", text)), default=0))


def templates(folder: Path, **how: Any) -> Environment:  # noqa: ANN401 - jinja2's own
    """Return a folder's jinja2 environment with strict undefined names and without empty lines for tags.

    Args:
        folder: the folder.
        how: other environment options. ``autoescape`` is required.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    usual = {"trim_blocks": True, "lstrip_blocks": True, "keep_trailing_newline": True}
    return Environment(loader=FileSystemLoader(folder), undefined=StrictUndefined, **(usual | how))


@cache  # compiling a template takes longer than filling it in
def markdown_templates(folder: Path) -> Environment:
    """Return a folder's templates, which escape texts with :func:`as_text`.

    In templates, ``| safe`` marks ready Markdown, and ``| code`` and ``| block("yaml")`` show a text as code.
    """
    environment = templates(folder, autoescape=False, finalize=_escape_value)  # autoescape would escape for HTML
    environment.filters |= {"safe": Markdown, "code": as_code, "block": as_block}
    return environment


def _escape_value(value: object) -> object:
    return as_text(value) if type(value) is str else value  # not its subclass Markdown
