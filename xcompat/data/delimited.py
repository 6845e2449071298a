"""Delimited text tables: separators, encodings, and the caption formats of Flickr8k and Flickr30k."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

from xcompat.core.errors import XcompatError
from xcompat.core.progress import notice_once
from xcompat.data.schema import CAPTION, CAPTION_COLUMNS, IMAGE, IMAGE_COLUMNS
from xcompat.data.text_files import DECODING, first_line, table_lines, text_encoding

_SEPARATORS = ",;\t|"
_TOKEN_LINE = re.compile(r"([^\t]+\.\w+)#\d+\t")
"""Line of a token file: ``1000268201_693b08cb0e.jpg#0``, a tab, and a caption."""
_NUMBER = re.compile(r"#\d+$")


def csv_options(file: Path) -> dict[str, object]:
    """Return pandas options to read a table as strings, which keeps leading zeros of ids.

    Args:
        file: CSV, TSV, or captions accepted by :func:`is_captions_text`; gzip if it ends in ``.gz``.

    Raises:
        XcompatError: the file is damaged or its encoding is unknown.
    """
    encoding = text_encoding(file)
    line = first_line(file, encoding)
    options: dict[str, Any] = {"keep_default_na": False, "encoding": encoding, "encoding_errors": DECODING}
    if _TOKEN_LINE.match(line):
        columns = {"names": [IMAGE, CAPTION], "converters": {IMAGE: _without_number, CAPTION: str}}
        return options | columns | {"header": None, "sep": "\t", "quoting": csv.QUOTE_NONE}
    separator = _separator(line, "\t" if ".tsv" in file.name.lower() else ",")
    if separator == "\t" and _quotes_are_text(file, encoding):
        options |= {"quoting": csv.QUOTE_NONE}
    return options | {
        "dtype": str,
        "sep": separator,
        "skipinitialspace": separator == "|",
    }  # Flickr30k: `image_name| comment_number| comment`


def _quotes_are_text(file: Path, encoding: str) -> bool:
    """Return whether quotes in a tab-separated table are text: a quote stays open at a line end, and all lines are full rows.

    pandas would read rows up to the next quote as a single field. Varying numbers of tabs per line indicate multi-line fields.
    """
    lines = (line for line in table_lines(file, encoding) if line)
    tabs = next(lines, "").count("\t")
    opened, swallowed, inside, whole = "", "", False, tabs > 0
    for line in lines:
        was_inside, inside = inside, _is_open(line, inside)
        whole = whole and line.count("\t") == tabs
        if inside and not was_inside:
            opened = line
        if was_inside and line.count("\t") == tabs:
            swallowed = swallowed or opened
    unclosed = swallowed or (opened if inside else "")
    if not unclosed or not tabs:
        return False
    told = "quotes are kept as text" if whole else "text between quotes is read as one multi-line field"
    notice_once(f"{file}: a quote is not closed on its line ({unclosed[:100]!r}); {told}")
    return whole


def _is_open(line: str, inside: bool) -> bool:
    """Return whether a quoted field continues after this line. Doubled quotes are escapes."""
    if not inside and '"' not in line:
        return False
    for field in line.split("\t"):
        starts = not inside and field.startswith('"')
        if inside or starts:
            inside = '"' not in field[starts:].replace('""', "")
    return inside


def is_captions_text(file: Path) -> bool:
    r"""Return whether a text file contains captions: ``image,caption``, or a token file of Flickr8k or Flickr30k.

    Args:
        file: e.g. ``captions.txt``. Unreadable files give False.

    Example:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp()) / "captions.txt"
        >>> _ = file.write_text("1.jpg#0\ta dog in the snow")
        >>> is_captions_text(file)
        True
    """
    try:
        line = first_line(file, "utf-8-sig", errors="replace")
    except XcompatError:
        return False
    fields = {field.strip() for field in next(csv.reader([line], delimiter=_separator(line, ",")), [])}
    return _TOKEN_LINE.match(line) is not None or bool(fields & {*IMAGE_COLUMNS} and fields & {*CAPTION_COLUMNS})


def _without_number(name: str) -> str:
    return _NUMBER.sub("", name)


def _separator(header: str, usual: str) -> str:
    """Return the separator of a header, by default ``usual``."""
    if usual in header:
        return usual
    try:
        return csv.Sniffer().sniff(header, _SEPARATORS).delimiter
    except csv.Error:  # a single column
        return usual
