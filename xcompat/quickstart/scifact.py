"""SciFact test set: scientific claims that search abstracts (Wadden et al. 2020)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from xcompat.core.errors import XcompatError
from xcompat.data import load_text_items, read_qrels
from xcompat.data.loading import load_raw
from xcompat.data.schema import ID, METADATA
from xcompat.data.sources import DataSource
from xcompat.data.texts import TextSource
from xcompat.evaluation.graded import Qrels
from xcompat.training.judged_texts import JudgedTestSet

if TYPE_CHECKING:
    import datasets

HUB_NAME = "mteb/scifact"
PASSAGES = ("corpus.jsonl", "corpus.jsonl.gz", "docs.jsonl", "docs.jsonl.gz")
QUERIES = ("queries.jsonl", "queries.jsonl.gz")
JUDGEMENTS = ("qrels/test.tsv", "qrels.tsv")
TEXT_COLUMNS = ["title", "text"]
SHARD_ROWS = 512
"""Texts per shard: half a minute of work that a killed run can lose."""


def load_scifact(folder: Path | None) -> JudgedTestSet:
    """Load the test claims, the abstracts and the judgements.

    Args:
        folder: a folder in BEIR's layout. None to use the cached copy from the Hub.

    Returns:
        The judged claims, all abstracts, and the judgements.

    Raises:
        XcompatError: the Hub cannot be reached, a file is missing, or no query is judged.
    """
    passages, queries, qrels = _load_from_hub() if folder is None else _load_from_folder(folder)
    rows = zip(queries[ID][:], queries[METADATA][:], strict=True)
    judged = [row for row, (name, metadata) in enumerate(rows) if name in qrels and _is_test(metadata)]
    test = JudgedTestSet(queries.select(judged) if judged else queries, passages, qrels, SHARD_ROWS)
    test.require_judgements()
    return test


def _is_test(metadata: str | None) -> bool:
    return json.loads(metadata or "{}").get("split", "test") == "test"


def _load_from_folder(folder: Path) -> tuple[datasets.Dataset, datasets.Dataset, Qrels]:
    passages = TextSource(path=str(_find_file(folder, PASSAGES)), text_column=TEXT_COLUMNS)
    queries = TextSource(path=str(_find_file(folder, QUERIES)))
    return load_text_items(passages), load_text_items(queries), read_qrels(_find_file(folder, JUDGEMENTS))


def _find_file(folder: Path, names: Sequence[str]) -> Path:
    found = next((folder / name for name in names if (folder / name).is_file()), None)
    if found is None:
        raise XcompatError(
            f"--data {folder} contains no {names[0]}; choose a folder with {PASSAGES[0]}, {QUERIES[0]}, {JUDGEMENTS[0]}"
        )
    return found


def _load_from_hub() -> tuple[datasets.Dataset, datasets.Dataset, Qrels]:
    passages = TextSource(path=HUB_NAME, name="corpus", split="corpus", text_column=TEXT_COLUMNS)
    queries = TextSource(path=HUB_NAME, name="queries", split="queries")
    qrels: dict[str, dict[str, float]] = {}
    try:
        for row in load_raw(DataSource(path=HUB_NAME, name="default", split="test"), []):
            qrels.setdefault(str(row["query-id"]), {})[str(row["corpus-id"])] = float(row["score"])
        return load_text_items(passages), load_text_items(queries), qrels
    except XcompatError as error:
        raise XcompatError(
            f"{error}. Without the Hub, use --data FOLDER with {PASSAGES[0]}, {QUERIES[0]} and {JUDGEMENTS[0]} of SciFact"
        ) from error
