"""Texts with judgements: queries of a new latent semantic analysis on the stored vectors of an old one.

    python benchmarks/studies/texts.py

Needs ../shared/data/text. The old model is a latent semantic analysis of words (128 dimensions), the new one of parts of words
(512), both of the passages alone. Maps learn from what both make of the passages, of which the old vectors are stored anyway;
`chosen` is what `xcompat map` takes where questions are known as well: claims of SciFact's training split with the abstracts that
they cite. Cranfield has no training questions. Gains are in points over old queries, with 95 % intervals over queries.
Prints Markdown.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from sklearn.decomposition import TruncatedSVD
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import Normalizer

from xcompat import Fingerprint
from xcompat.data import read_qrels
from xcompat.data.text_files import json_lines
from xcompat.evaluation import GradedQueries, graded_per_query, paired_bootstrap
from xcompat.evaluation.graded import Qrels
from xcompat.mapping import CaptionedEmbeddings, PairedEmbeddings, choose, fit
from xcompat.mapping.candidates import Known
from xcompat.methods import METHODS
from xcompat.models import CompatModel, describe_old
from xcompat.report.wording import gain_with_interval, metric_name

DATA = Path("../shared/data/text")
OLD_DIM, NEW_DIM, KS, METRICS = 128, 512, (10,), ("ndcg@10", "recall@10", "map")
Rows = NDArray[np.float32]
console = Console(soft_wrap=True, markup=False, highlight=False)


class Judged(NamedTuple):
    """Passages, questions that are asked, and questions with the passages that answer them to learn from."""

    texts: dict[str, str]
    queries: dict[str, str]
    qrels: Qrels
    train: list[tuple[str, str]]


class Embedded(NamedTuple):
    """What one model makes of passages and questions."""

    texts_GD: Rows
    queries_QD: Rows
    train_TD: Rows


def scifact() -> Judged:
    """Claims, and the abstracts that they cite."""
    texts = {row["id"]: f"{row['title']} {row['text']}" for _, row in json_lines(DATA / "scifact/docs.jsonl.gz")}
    claims, qrels = [row for _, row in json_lines(DATA / "scifact/queries.jsonl")], read_qrels(DATA / "scifact/qrels.tsv")
    asked = {row["id"]: row["text"] for row in claims if row["split"] == "test"}
    train = [(row["text"], item) for row in claims if row["split"] == "train" for item in qrels.get(row["id"], {})]
    return Judged(texts, asked, qrels, train)


def cranfield() -> Judged:
    """Questions on aerodynamics; the smallest code is the best, and -1 counts as not relevant, as usual."""
    texts = {row["id"]: row["text"] for _, row in json_lines(DATA / "cranfield/docs.jsonl.gz")}
    asked = {row["id"]: row["text"] for _, row in json_lines(DATA / "cranfield/queries.jsonl")}
    codes = read_qrels(DATA / "cranfield/qrels.tsv")
    qrels = {query: {item: 5 - code if code > 0 else 0 for item, code in items.items()} for query, items in codes.items()}
    return Judged(texts, asked, qrels, [])


def analysed(judged: Judged, dim: int, **words: Any) -> Embedded:  # noqa: ANN401 - of the vectoriser
    """Fit a latent semantic analysis to the passages, and embed everything."""
    vectoriser = TfidfVectorizer(sublinear_tf=True, min_df=2, **words)
    model = make_pipeline(vectoriser, TruncatedSVD(dim, random_state=0), Normalizer()).fit(judged.texts.values())

    def embed(texts: list[str]) -> Rows:
        return model.transform(texts).astype(np.float32) if texts else np.zeros((0, dim), np.float32)

    return Embedded(embed([*judged.texts.values()]), embed([*judged.queries.values()]), embed([text for text, _ in judged.train]))


def maps(judged: Judged, old: Embedded, new: Embedded) -> Iterator[tuple[str, CompatModel]]:
    """Yield maps of new queries into the old space."""
    described = describe_old(Fingerprint.from_string("old"), OLD_DIM)
    kept_G = (old.texts_GD != 0).any(1) & (new.texts_GD != 0).any(1)  # Cranfield has empty passages
    pairs = torch.from_numpy(new.texts_GD[kept_G]), torch.from_numpy(old.texts_GD[kept_G])
    for name, options in (("procrustes", {"centre": True, "scale": True}), ("ridge", {})):
        config = METHODS[name].config_class(old=described, embedding_dim=NEW_DIM, **options)
        yield name, METHODS[name](config).fit([pairs])
    if judged.train:
        place = {name: row for row, name in enumerate(judged.texts)}
        groups_T = np.array([place[item] for _, item in judged.train])
        passages = PairedEmbeddings(new.texts_GD, old.texts_GD, np.arange(len(place)))
        known = CaptionedEmbeddings.whole(passages, PairedEmbeddings(new.train_TD, old.train_TD, groups_T))
        choice = choose(known)
        yield f"chosen: {choice.chosen.candidate}", fit(choice.chosen.candidate, Known(known))


def table(name: str, judged: Judged) -> None:
    """Print a row for each kind of query."""
    old = analysed(judged, OLD_DIM, stop_words="english")
    new = analysed(judged, NEW_DIM, analyzer="char_wb", ngram_range=(3, 5), max_features=200_000)
    ids = list(judged.queries), list(judged.texts)

    def found(queries_QD: Rows, texts_GD: Rows) -> GradedQueries:
        return graded_per_query(queries_QD, texts_GD, *ids, judged.qrels, KS)

    floor = found(old.queries_QD, old.texts_GD)
    about = f"{len(floor.rows_J)} questions, {len(judged.texts):,} passages"
    heads = " | ".join(f"{metric_name(metric)} | gain" for metric in METRICS)
    console.print(f"\n| {name}: {about} | {heads} |\n|---|{'---:|---:|' * len(METRICS)}")
    rows = [("old/old", floor)]
    for label, model in maps(judged, old, new):
        with torch.inference_mode():
            rows.append((f"new/old, {label}", found(model.view(torch.from_numpy(new.queries_QD)).numpy(), old.texts_GD)))
    rows.append(("new/new", found(new.queries_QD, new.texts_GD)))
    for label, one in rows:
        gains = [paired_bootstrap(one.values[metric], floor.values[metric]) for metric in METRICS]
        said = [gain_with_interval(gain.mean, gain.low, gain.high) if one is not floor else "" for gain in gains]
        cells = [f"{100 * one.values[metric].mean():.1f} | {gain}" for metric, gain in zip(METRICS, said, strict=True)]
        console.print(f"| {label} | {' | '.join(cells)} |")


if __name__ == "__main__":
    started = time.monotonic()
    table("SciFact", scifact())
    table("Cranfield", cranfield())
    console.print(f"\n{time.monotonic() - started:.0f} s")
