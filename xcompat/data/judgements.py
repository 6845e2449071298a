"""Relevance judgements (qrels)."""

from __future__ import annotations

import json
import math
from pathlib import Path

from xcompat.core.errors import MissingPathError, XcompatError
from xcompat.data.text_files import text_lines

_FIELDS = (
    ("query-id", "query_id", "qid"),
    ("corpus-id", "corpus_id", "doc_id", "docid", "passage_id", "pid"),
    ("score", "relevance", "rel", "label"),
)
"""Names of query, item and gain in JSON lines."""


def read_qrels(file: str | Path) -> dict[str, dict[str, float]]:
    """Read judgements in BEIR (query, item, gain), TREC (query, iteration, item, gain) or MTEB (JSON lines) format.

    Args:
        file: a judgement per line, separated by tabs or spaces, optionally with a header; gzip if it ends in ``.gz``. Higher
            gains are better; 0 and below are not relevant.

    Returns:
        Query id -> item id -> gain.

    Raises:
        XcompatError: the file is missing, or a line is invalid or contradicts another.
    """
    file = require_qrels(file)
    qrels: dict[str, dict[str, float]] = {}
    for place, (number, line) in enumerate(text_lines(file)):
        columns = _fields(line) if line.startswith("{") else line.split("\t") if "\t" in line else line.split()
        gain = _gain(columns)
        if gain is None and place == 0 and len(columns) in (3, 4):
            continue
        if gain is None:
            raise XcompatError(
                f"{file} line {number} is not a judgement ({line[:60]!r}); write query, item and gain, or the format of TREC"
            )
        query, item = columns[0].strip(), columns[-2].strip()
        if qrels.setdefault(query, {}).setdefault(item, gain) != gain:
            raise XcompatError(
                f"{file} line {number} contradicts an earlier gain of {item!r} for {query!r}; keep one of the two lines"
            )
    if not qrels:
        raise XcompatError(f"{file} contains no judgements; write query, item and gain in each line")
    return qrels


def require_qrels(file: str | Path) -> Path:
    """Return the path of a judgements file, or raise if it does not exist."""
    if not Path(file).is_file():
        raise MissingPathError(f"judgements file {file} does not exist; give a file with query, item and gain")
    return Path(file)


def _fields(line: str) -> list[str]:
    """Return query, item and gain of a JSON object, as data sets of MTEB keep them; nothing if a field is missing."""
    try:
        found = json.loads(line)
    except ValueError:
        return []
    fields = [next((found[name] for name in names if name in found), None) for names in _FIELDS]
    return [] if None in fields else [str(field) for field in fields]


def _gain(columns: list[str]) -> float | None:
    """Return the gain of a judgement, or None if the columns are invalid."""
    if len(columns) not in (3, 4):
        return None
    try:
        gain = float(columns[-1])
    except ValueError:
        return None
    return gain if math.isfinite(gain) else None
