"""Page templates. All values are text and never HTML."""

from __future__ import annotations

import base64
import io
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlencode

from rich.filesize import decimal

from xcompat.core.errors import visible
from xcompat.core.markdown import templates
from xcompat.core.progress import snippet
from xcompat.data.schema import CAPTION, TEXT
from xcompat.report.wording import percent
from xcompat.retrieval.hit_output import short

if TYPE_CHECKING:
    from jinja2 import Environment
    from PIL.Image import Image

FOLDER = Path(__file__).parent
SHOWN = 240
"""Maximum characters of a text."""
EDGE = 192
"""Pixels of the longer side of an image. It is sent as JPEG, as PNG is six times as large and five times as slow."""


@cache
def _environment() -> Environment:
    environment = templates(FOLDER, autoescape=True, finalize=_escape_value)
    environment.filters |= {
        "decimal": decimal,
        "percent": percent,
        "version": short,
        "image_uri": image_uri,
        "link": link,
        "snippet": lambda text: snippet(text, SHOWN),
    }
    return environment


def _escape_value(value: object) -> object:
    return visible(value) if type(value) is str else value  # not its subclass for HTML


def render(template: str, **values: object) -> str:
    """Fill in a template from this package."""
    return _environment().get_template(template).render(**values)


def read(name: str) -> str:
    """Return the content of a file in this package."""
    return (FOLDER / name).read_text(encoding="utf-8")


def image_uri(image: Image) -> str:
    """Return a small image as a ``data:`` URI."""
    small, buffer = image.convert("RGB"), io.BytesIO()
    small.thumbnail((EDGE, EDGE))
    small.save(buffer, "JPEG", quality=90)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def link(values: dict[str, object]) -> str:
    """Return the address to restore the given values. Empty values are dropped.

    Example:
        >>> link({"kind": "text", "text": "a red shoe", "where": ["colour=red"], "item": ""})
        '?kind=text&text=a+red+shoe&where=colour%3Dred'
    """
    return "?" + urlencode({name: value for name, value in values.items() if value not in ("", [], None)}, doseq=True)


def words_of(metadata: dict[str, object] | None) -> str:
    """Return an item's text or caption, or an empty string."""
    about = metadata or {}
    return next((str(about[key]) for key in (TEXT, CAPTION) if about.get(key)), "")


def rest_of(item: str, metadata: dict[str, object] | None) -> dict[str, object]:
    """Return an item's metadata without its text, its caption and parts of its id."""
    told = (TEXT, CAPTION)
    return {key: value for key, value in (metadata or {}).items() if key not in told and not item.startswith(str(value))}
