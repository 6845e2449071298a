"""Text quickstart: an index of abstracts by WordLlama, and claims embedded by all-MiniLM-L6-v2."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from xcompat.core.errors import XcompatError
from xcompat.core.files import atomic_path, write_json
from xcompat.core.progress import console, literal, silence_libraries, stage
from xcompat.core.provenance import provenance
from xcompat.data.schema import TEXT
from xcompat.evaluation import EmbeddedTexts, EvaluatedModels, Evaluation
from xcompat.evaluation.cases import RERANKED, TEXT_TO_TEXT
from xcompat.evaluation.query_changes import sort_by_change
from xcompat.mapping import Candidate, FittedMap, PairedEmbeddings, fit_map
from xcompat.mapping.candidates import CandidateParts
from xcompat.mapping.item_memory import with_item_memory
from xcompat.models.embedder import load_embedder
from xcompat.quickstart.scifact import load_scifact
from xcompat.quickstart.table import Comparison, SearchedQueries, render_markdown, render_rich
from xcompat.quickstart.text_models import NEW, OLD, prepare_model
from xcompat.report import Example, write_report
from xcompat.report.terminal import print_examples
from xcompat.score_scale import CANDIDATES
from xcompat.training.evaluation_models import map_contestant
from xcompat.training.judged_texts import JudgedTestSet
from xcompat.training.model_evaluation import make_report, mixed_queries
from xcompat.training.sections import EvaluationSettings

FAILING = "ridge"
"""Map that finds less than old queries on this data, shown for comparison."""
MAP, MEMORY = "map", "map with memory"
"""Names of cases in the report."""
HALF_WAY = "half-way: mapped + old"
"""Row of the queries that `xcompat map --old-model` chooses."""
RERANKED_HITS = f"the same, {CANDIDATES} hits re-ranked"


@dataclass(frozen=True)
class TextRun:
    """Test set and models of a run.

    Args:
        test: claims, abstracts and judgements.
        old_model: folder or name of the old model.
        new_model: folder or name of the new model.
        output: run folder.
    """

    test: JudgedTestSet
    old_model: str
    new_model: str
    output: Path

    def embed(self, name: str) -> EmbeddedTexts:
        """Embed claims and abstracts with a model, or read them from the cache."""
        return self.test.embed(load_embedder(name), self.output / "cache")


def run_text_quickstart(
    output: Path, data: Path | None = None, old_model: str | None = None, new_model: str | None = None
) -> Path:
    """Search a WordLlama index with all-MiniLM-L6-v2, and print the results for each kind of query.

    Args:
        output: folder for models, caches, the map and the tables.
        data: a folder in BEIR's layout instead of SciFact from the Hub.
        old_model: another old model.
        new_model: another new model.

    Returns:
        The report folder.

    Raises:
        XcompatError: data or models cannot be fetched or read.
    """
    silence_libraries()
    seconds: dict[str, float] = {}
    with stage(f"load {'SciFact' if data is None else data}", seconds):
        test = load_scifact(data)
        console.print(f"  {len(test.queries):,} claims search {len(test.passages):,} abstracts")
    with stage("fetch the models", seconds):
        models = output / "models"
        run = TextRun(test, old_model or prepare_model(OLD, models), new_model or prepare_model(NEW, models), output)
    with stage("embed with the old model", seconds):
        old = run.embed(run.old_model)
    with stage("embed with the new model", seconds):
        new = run.embed(run.new_model)
    with stage("fit a map of new queries, without a label", seconds):
        fitted = _fit(run, old, new)
    with stage("search the old index", seconds):
        contestants = map_queries(fitted, old, new)
        settings = EvaluationSettings(ks=[10], rerank=CANDIDATES, examples=0, tsne_pairs=0)
        report = make_report(contestants, test, settings, "map", seed=0, run=provenance(), seconds=seconds)
        report = replace(report, examples=[show_largest_gain(test, report.evaluation, contestants)])
        rows = compare_queries(report.evaluation, fitted)
    console.print(
        render_rich(rows, f"{len(test.queries):,} claims, {len(test.passages):,} abstracts; percent, 95 % intervals", HALF_WAY)
    )
    console.print("The claim that gains most:")
    print_examples(report.examples, console, is_judged=True)
    _print_explanation(rows)
    _write_tables(output, rows, fitted, seconds)
    page = write_report(output, report)
    console.print(f"\nreport: {literal(page)}", soft_wrap=True)
    console.print(f"table: {literal(output / 'table.md')}, {literal(output / 'table.json')}", soft_wrap=True)
    console.print(f"model for queries: {literal(output / 'model')}", soft_wrap=True)
    return page.parent


def _fit(run: TextRun, old: EmbeddedTexts, new: EmbeddedTexts) -> FittedMap:
    texts = run.test.passages[TEXT][:]
    fitted = fit_map(_floats(old.passages()), _floats(new.passages()), None, texts, run.old_model, run.new_model)
    if fitted.choice is None:
        raise XcompatError(f"{len(texts):,} passages are too few to choose a map; use 40 or more")
    with atomic_path(run.output / "model") as temporary:
        fitted.save(temporary)
    return fitted


def _floats(rows_ND: Any) -> np.ndarray:  # noqa: ANN401 - an array or an embedding cache
    return np.asarray(rows_ND[:], np.float32)


def map_queries(fitted: FittedMap, old: EmbeddedTexts, new: EmbeddedTexts) -> EvaluatedModels[EmbeddedTexts]:
    """Map the new queries into the old index in several ways.

    Args:
        fitted: the chosen map.
        old: the old model's embeddings of queries and passages.
        new: the new model's embeddings of the same texts.

    Returns:
        Half-way queries as the new model's view. Extra models are the map, the map with a memory of all items, and a failing map.
    """
    assert fitted.choice is not None
    known = CandidateParts(PairedEmbeddings(_floats(new.passages()), _floats(old.passages())))
    asking = new.without_gallery()

    def embed_with_map(name: str, candidate: Candidate) -> EmbeddedTexts:
        def map_queries(new_QD: Tensor) -> Tensor:
            return known.queries(candidate, lambda: [new_QD.numpy()], "queries")

        return map_contestant(asking, name, new.fingerprint.derive(str(candidate)), map_queries, torch.device("cpu"))

    line = replace(fitted.choice.chosen.candidate, old_share=0.0)
    extra = {MAP: embed_with_map(MAP, line), MEMORY: embed_with_map(MEMORY, with_item_memory(line))}
    if line.line != FAILING:
        extra[FAILING] = embed_with_map(FAILING, Candidate(FAILING))
    half_way = mixed_queries(extra[MAP], old, fitted.choice.chosen.candidate.old_share)
    return EvaluatedModels(old, half_way, new, new, extra)


def compare_queries(evaluation: Evaluation, fitted: FittedMap) -> list[Comparison]:
    """Return the table's rows in printing order.

    Args:
        evaluation: the cases of :func:`map_queries`.
        fitted: the chosen map.
    """
    assert fitted.choice is not None
    line = fitted.choice.chosen.candidate.line
    cases: list[tuple[str, str, str]] = [
        ("new queries as they are", "independent", "old"),
        ("old queries", "old", "old"),
        (f"mapped: {line}", MAP, "old"),
        (HALF_WAY, "new", "old"),
        (RERANKED_HITS, RERANKED, "old"),
        ("mapped, with item memory", MEMORY, "old"),
        (f"mapped: {FAILING}", FAILING, "old"),
        ("all items re-embedded", "new", "new"),
    ]
    measured = {query for query, _, _ in evaluation.ranks}
    rows = [SearchedQueries.of_case(name, evaluation, query, gallery) for name, query, gallery in cases if query in measured]
    old = rows[1]
    return [Comparison(row, old) for row in rows]


def show_largest_gain(test: JudgedTestSet, evaluation: Evaluation, contestants: EvaluatedModels[EmbeddedTexts]) -> Example:
    """Return old and new hits for the claim whose first relevant hit moves up most."""
    old_Q, new_Q = (evaluation.ranks[query, "old", TEXT_TO_TEXT] for query in ("old", "new"))
    row = int(sort_by_change(old_Q, new_Q, "gained").rows_q[0])
    masks = np.arange(len(old_Q)) == row, np.ones(len(test.passages), bool)
    one = JudgedTestSet(test.queries.select([row]), test.passages, test.qrels)
    old = contestants.old.keep(masks)
    asking = replace(contestants.new_view, query_embeds_QD=np.asarray(contestants.new_view.query_embeds_QD)[[row]])
    return one.examples(old, asking, old, count=1, seed=0)[0]


def _print_explanation(rows: list[Comparison]) -> None:
    console.print(
        "[dim]find less: claims with a lower nDCG@10 than the old query. negative flips: claims whose first hit was relevant and "
        "no longer is.[/]",
        soft_wrap=True,
    )
    if worse := [row.queries.name for row in rows if row.gain.high < 0]:
        console.print(f"[red]✗[/] surely below old queries: {literal('; '.join(worse))}", soft_wrap=True)


def _write_tables(output: Path, rows: list[Comparison], fitted: FittedMap, seconds: dict[str, float]) -> None:
    with atomic_path(output / "table.md") as temporary:
        temporary.write_text(render_markdown(rows, HALF_WAY), encoding="utf-8")
    document = {"rows": [row.as_json() for row in rows], "map": fitted.report, "seconds": seconds, "run": provenance()}
    write_json(output / "table.json", document)
