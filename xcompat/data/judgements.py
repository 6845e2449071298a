"""Relevance judgements (qrels): which items answer which query, and how well."""

from __future__ import annotations

import math
from pathlib import Path

from xcompat.core.errors import MissingPathError, XcompatError
from xcompat.data.text_files import text_lines


def read_qrels(file: str | Path) -> dict[str, dict[str, float]]:
    """Read judgements as BEIR (query, item, gain) or TREC (query, iteration, item, gain) writes them.

    Args:
        file: a judgement a line, its columns separated by tabs or blanks; gzip if it is called ``.gz``. A first line without a
            number at its end is a header. The higher the gain the better; 0 and below are not relevant.

    Returns:
        Query id -> item id -> gain.

    Raises:
        XcompatError: the file is missing, or a line is no judgement or contradicts another one.
    """
    file = require_qrels(file)
    qrels: dict[str, dict[str, float]] = {}
    for place, (number, line) in enumerate(text_lines(file)):
        columns = line.split("\t") if "\t" in line else line.split()
        gain = _gain(columns)
        if gain is None and place == 0 and len(columns) in (3, 4):
            continue
        if gain is None:
            raise XcompatError(
                f"{file} line {number} is no judgement ({line[:60]!r}); write query, item and gain, or TREC's four columns"
            )
        query, item = columns[0].strip(), columns[-2].strip()
        if qrels.setdefault(query, {}).setdefault(item, gain) != gain:
            raise XcompatError(f"{file} line {number} judges {item!r} for {query!r} once more, and otherwise; keep one of both")
    if not qrels:
        raise XcompatError(f"{file} holds no judgement; write query, item and gain in each line")
    return qrels


def require_qrels(file: str | Path) -> Path:
    """Return the path of a file of judgements, or refuse one that is not there."""
    if not Path(file).is_file():
        raise MissingPathError(f"the judgements {file} do not exist; name a file of query, item and gain")
    return Path(file)


def _gain(columns: list[str]) -> float | None:
    """Return the gain of a judgement; None where these columns are none."""
    if len(columns) not in (3, 4):
        return None
    try:
        gain = float(columns[-1])
    except ValueError:
        return None
    return gain if math.isfinite(gain) else None
