"""The tasks of the study of texts: what is asked, what is searched, what answers, and what there is to learn from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from xcompat.data import read_qrels
from xcompat.data.text_files import json_lines
from xcompat.evaluation.graded import Qrels

DATA = Path("../shared/data/text")
Groups = list[list[str]]
"""Texts that belong together: what would ask, then what it should find."""


class Task(NamedTuple):
    """A gallery of texts, queries and judgements.

    Args:
        name: its name.
        texts: id -> text that is searched.
        queries: id -> query.
        qrels: query id -> text id -> gain.
        learn: groups of texts to learn from, in random order.
        apart: whether those are other texts than what is searched.
    """

    name: str
    texts: dict[str, str]
    queries: dict[str, str]
    qrels: Qrels
    learn: Groups
    apart: bool


def captions(split: str = "test") -> Task:
    """Return captions as queries, and the four other captions of their photo as relevant texts."""
    draw = np.random.default_rng(0)
    groups = {"train": list[list[str]](), "validation": [], "test": []}
    ids = []
    for _, row in json_lines(DATA / "flickr30k_groups.jsonl.gz"):
        groups[row["split"]].append([row["captions"][place] for place in draw.permutation(5)])
        ids += [row["id"]] * (row["split"] == split)
    asked = dict(zip(ids, groups[split], strict=True))
    texts = {f"{photo}/{place}": text for photo, group in asked.items() for place, text in enumerate(group[1:])}
    qrels = {photo: {f"{photo}/{place}": 1.0 for place in range(4)} for photo in asked}
    return Task(
        "Captions", texts, {photo: group[0] for photo, group in asked.items()}, qrels, _shuffled(groups["train"]), apart=True
    )


def glosses() -> Task:
    """Return glosses as queries, and their lemmas as relevant texts, of topics outside the training set."""
    rows = [row for _, row in json_lines(DATA / "wordnet.jsonl.gz")]
    test = [row for row in rows if row["split"] == "test"]
    qrels = {row["id"]: {lemma.casefold(): 1.0 for lemma in row["lemmas"]} for row in test}
    texts = {lemma: lemma for lemma in sorted({lemma for lemmas in qrels.values() for lemma in lemmas})}
    learn = [[row["gloss"], row["lemmas"][0]] for row in rows if row["split"] == "train"]
    return Task("Glosses", texts, {row["id"]: row["gloss"] for row in test}, qrels, _shuffled(learn), apart=True)


def scifact() -> Task:
    """Return claims as queries, and their cited abstracts as relevant texts."""
    texts = {row["id"]: f"{row['title']} {row['text']}" for _, row in json_lines(DATA / "scifact/docs.jsonl.gz")}
    claims, qrels = [row for _, row in json_lines(DATA / "scifact/queries.jsonl")], read_qrels(DATA / "scifact/qrels.tsv")
    asked = {row["id"]: row["text"] for row in claims if row["split"] == "test"}
    train, cited = Groups(), set[str]()
    for row in claims:
        if row["split"] == "train" and cited.isdisjoint(found := qrels[row["id"]]):  # no two groups share an abstract
            train.append([row["text"], *(texts[item] for item in found)])
            cited.update(found)
    return Task("SciFact", texts, asked, {query: qrels[query] for query in asked}, train, apart=False)


def cranfield() -> Task:
    """Return questions on aerodynamics. Code 1 is the best judgement, and -1 counts as not relevant, as usual."""
    texts = {row["id"]: row["text"] for _, row in json_lines(DATA / "cranfield/docs.jsonl.gz")}
    asked = {row["id"]: row["text"] for _, row in json_lines(DATA / "cranfield/queries.jsonl")}
    codes = read_qrels(DATA / "cranfield/qrels.tsv")
    qrels = {query: {item: 5 - code if code > 0 else 0 for item, code in items.items()} for query, items in codes.items()}
    return Task("Cranfield", texts, asked, qrels, [], apart=False)


def _shuffled(groups: Sequence[list[str]]) -> Groups:
    return [groups[row] for row in np.random.default_rng(0).permutation(len(groups))]


def first_groups(groups: Groups, count: int) -> Groups:
    """Return the first groups that hold so many texts."""
    ends = np.cumsum([len(group) for group in groups])
    return groups[: int(np.searchsorted(ends, count)) + 1]
