"""Recipes that are judged on texts: queries search passages, by judgements, from data to page."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import recipe_of

from xcompat.core.distributed import device
from xcompat.core.errors import XcompatError
from xcompat.core.fingerprint import Fingerprint
from xcompat.data import load_texts, read_qrels
from xcompat.encoders.processor import Processor
from xcompat.evaluation import graded_metrics
from xcompat.mapping.candidates import LINES
from xcompat.models.closed_form import readable_pairs
from xcompat.models.embedder import load_checkpoint, load_embedder
from xcompat.report import Report, load_report
from xcompat.training.evaluation_sets import load_test_set
from xcompat.training.judged_texts import SHOWN, JudgedTestSet, load_judged_texts
from xcompat.training.push import run_facts
from xcompat.training.recipe import Recipe
from xcompat.training.record import CHOICE
from xcompat.training.run import embed_recipe, run_recipe

ANIMALS = ("dog", "cat", "bird", "fish")
PASSAGES = [f"{row} {animal} <b>sleeps</b>\n all day" for row, animal in enumerate(ANIMALS * 5)]
QUERIES = [f"{row} who is a {animal}" for row, animal in enumerate(ANIMALS * 3)]
LEARNED = [f"{row} old {animal}" for row, animal in enumerate(ANIMALS * 10)]
PROMPT = "?"  # short, as a stand-in reads 16 tokens
GAINS = (2, 1, 0)


def write_rows(file: Path, rows: Sequence[tuple[str, str]]) -> dict[str, str]:
    file.write_text("".join(json.dumps({"id": name, "text": text}) + "\n" for name, text in rows), encoding="utf-8")
    return {"path": str(file)}


@pytest.fixture
def judged(tmp_path: Path) -> dict[str, Any]:
    """Write passages and queries; q0 has no judgement, q1 nothing relevant, q2 no text; what q3 asks for is gone."""
    queries = [(f"q{row}", " " if row == 2 else text) for row, text in enumerate(QUERIES)]
    lines = [f"q{row}\tp{(row + 4 * each) % 20}\t{gain}" for row in range(2, 12) for each, gain in enumerate(GAINS)]
    (tmp_path / "qrels.tsv").write_text("\n".join(["query\tpassage\tgain", "q1\tp1\t0", "q3\tgone\t1", *lines]) + "\n")
    passages = write_rows(tmp_path / "passages.jsonl", [(f"p{row}", text) for row, text in enumerate(PASSAGES)])
    written = write_rows(tmp_path / "queries.jsonl", queries)
    return {"queries": written, "passages": passages, "qrels": str(tmp_path / "qrels.tsv")}


@pytest.fixture
def raw(folder_of: dict[str, str], old_folder: str, judged: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "learned.txt").write_text("\n".join(LEARNED) + "\n")
    raw: dict[str, Any] = {"output_dir": str(tmp_path / "run"), "cache_dir": str(tmp_path / "cache"), "method": "ridge"}
    raw["data"] = {"texts": [{"path": str(tmp_path / "learned.txt")}], "judged_texts": judged}
    raw["training"] = {"max_steps": 4, "per_device_train_batch_size": 8, "learning_rate": 1e-3}
    raw["evaluation"] = {"resamples": 100, "examples": 2, "tsne_pairs": 0}
    return raw | {"old": old_folder, "new": folder_of["clip"]}


def judged_on(recipe: Recipe) -> JudgedTestSet:
    test = load_test_set(recipe.stages[-1].data)
    assert isinstance(test, JudgedTestSet)
    return test


def cases_of(report: Report) -> dict[str, dict[str, float]]:
    return {case.label: case.metrics for case in report.cases}


def ask_for_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give every model a prompt that it puts before queries."""

    def for_queries(self: Processor) -> Processor:
        asking = copy.copy(self)
        asking.tokenize = lambda texts: self.tokenize([PROMPT + text for text in texts])  # type: ignore[method-assign]
        return asking

    monkeypatch.setattr(Processor, "for_queries", for_queries)


def np_tensor(embeds: Any) -> torch.Tensor:
    return torch.from_numpy(np.asarray(embeds, dtype=np.float32))


def embedded(folder: str, texts: list[str]) -> np.ndarray:
    embedder = load_embedder(folder)
    return embedder.embed(embedder.processor.texts(texts)).numpy()


def test_the_whole_course(raw: dict[str, Any], tmp_path: Path) -> None:
    judged = {"compare_with": ["lines"], "old_on_new": True, "slerp": 0.5}
    raw["stages"] = [{"name": "lines"}, {"name": "trained", "method": "residual_mlp", "evaluation": judged}]
    recipe = recipe_of(raw)
    run_recipe(recipe)
    report = load_report(tmp_path / "run")
    assert list(cases_of(report)) == [
        "old/old", "independent/old", "lines/old", "slerp/old", "new/old", "new/backfilled", "old/new", "new/new",
        "independent/independent",
    ]  # fmt: skip
    test, model = judged_on(recipe), load_checkpoint(str(tmp_path / "run" / "trained" / "model"))
    old, new = (test.embed(load_embedder(raw[role], device()), recipe.cache_dir) for role in ("old", "new"))
    mapped_Qd, backfilled_Gd = (model.to_space(np_tensor(rows)).numpy() for rows in (new.query_embeds_QD, new.passages()))
    for label, queries, gallery in (
        ("old/old", old.query_embeds_QD, old.passages()),
        ("new/old", mapped_Qd, old.passages()),
        ("old/new", old.query_embeds_QD, backfilled_Gd),
        ("new/new", new.query_embeds_QD, new.passages()),
    ):
        wanted = graded_metrics(queries, gallery, old.query_ids, old.text_ids, test.qrels)
        assert {name: cases_of(report)[label][name] for name in wanted} == pytest.approx(wanted), label
    assert {case.n_queries for case in report.cases} == {10} and {case.n_gallery for case in report.cases} == {20}
    assert report.notes[:4] == [
        "Judged queries without relevant passages, counted as 0: 1, e.g. 'q1'.",
        "Judged queries missing from the queries, excluded: 1, e.g. 'q2'.",
        "Relevant passages missing from the gallery, counted as not found: 1, e.g. 'gone'.",
        "1 queries have no judgement and are excluded.",
    ]
    facts = run_facts(tmp_path / "run" / "trained" / "model", Fingerprint.from_string("any"))
    assert facts.data == {"texts": ["learned.txt"], "judged_texts": ["queries.jsonl", "passages.jsonl"]}


def test_prompts_are_for_queries(raw: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undrawn: None) -> None:
    ask_for_queries(monkeypatch)
    recipe = recipe_of(raw)
    run_recipe(recipe)
    test = judged_on(recipe)
    new = test.embed(load_embedder(raw["new"], device()), recipe.cache_dir)
    prompted, plain = ([f"{prompt}{text}" for text in test.queries["text"]] for prompt in (PROMPT, ""))
    np.testing.assert_allclose(new.query_embeds_QD, embedded(raw["new"], prompted), atol=1e-3)
    assert not np.allclose(new.query_embeds_QD, embedded(raw["new"], plain), atol=1e-2)
    np.testing.assert_allclose(new.passages(), embedded(raw["new"], list(test.passages["text"])), atol=1e-3)

    model = load_checkpoint(str(tmp_path / "run" / "model"))
    pairs = readable_pairs(embedded(raw["new"], [PROMPT + text for text in LEARNED]), embedded(raw["old"], LEARNED))
    wanted = type(model)(model.config).fit(pairs)
    probes = np_tensor(new.query_embeds_QD)
    np.testing.assert_allclose(model.to_space(probes), wanted.to_space(probes), atol=2e-2)


def test_gallery_maps_use_no_prompt(raw: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undrawn: None) -> None:
    """A mapped gallery holds passages, so no text that it learns from gets the prompt of queries."""
    ask_for_queries(monkeypatch)
    asked = []
    recipe = recipe_of(raw, options={"direction": "old_to_new"})
    monkeypatch.setattr(Processor, "for_queries", lambda self: asked.append(self) or self)
    embed_recipe(recipe_of(raw, options={"direction": "old_to_new"}, evaluation=None))
    assert not asked
    run_recipe(recipe)
    report = load_report(tmp_path / "run")
    assert "new/old" in cases_of(report) and "mapped towards the new model" in " ".join(report.notes)


def test_queries_that_are_judged_on_are_not_learned_from(
    raw: dict[str, Any], judged: dict[str, Any], capsys: pytest.CaptureFixture[str], tmp_path: Path, undrawn: None
) -> None:
    corpus = tmp_path / "corpus.txt"
    learned = [f"sentence {row}" for row in range(30)]
    corpus.write_text("\n".join([QUERIES[5].upper(), " ".join(PASSAGES[3].split()), *learned]) + "\n")
    raw["data"]["texts"] = [{"path": str(corpus)}]
    run_recipe(recipe_of(raw))
    assert "31 distinct texts of 32 (0 duplicates and 1 held-out captions left out)" in " ".join(capsys.readouterr().out.split())
    kept = load_texts(str(corpus), exclude=load_judged_texts(recipe_of(raw).stages[0].data.judged_texts).texts())
    assert kept["text"][:] == [" ".join(PASSAGES[3].split()), *learned]


def test_a_changed_gain_is_judged_anew_and_nothing_is_trained(raw: dict[str, Any], tmp_path: Path, undrawn: None) -> None:
    run_recipe(recipe_of(raw))
    model, qrels = tmp_path / "run" / "done.json", Path(raw["data"]["judged_texts"]["qrels"])
    before = cases_of(load_report(tmp_path / "run")), model.stat().st_mtime_ns
    qrels.write_text(qrels.read_text().replace("q4\tp4\t2", "q4\tp4\t0"))
    run_recipe(recipe_of(raw))
    after = cases_of(load_report(tmp_path / "run")), model.stat().st_mtime_ns
    assert after[0] != before[0] and after[1] == before[1]


def test_example_searches_show_texts_and_gains(raw: dict[str, Any], tmp_path: Path) -> None:
    write_rows(tmp_path / "passages.jsonl", [(f"p{row}", f"{text}\n" + "and so on " * 99) for row, text in enumerate(PASSAGES)])
    run_recipe(recipe_of(raw, evaluation={**raw["evaluation"], "examples": 12}))
    report = load_report(tmp_path / "run")
    qrels, snippets = read_qrels(raw["data"]["judged_texts"]["qrels"]), [" ".join(text.split()) for text in PASSAGES]
    assert {example.query_text for example in report.examples} == set(QUERIES[3:]), "those that something answers"
    for example in report.examples:
        assert [label for label, _ in example.rows] == ["old query", "new query"]
        gains = qrels[f"q{QUERIES.index(example.query_text)}"]
        for hit in (hit for _, hits in example.rows for hit in hits):
            (row,) = (row for row, snippet in enumerate(snippets) if hit.caption.startswith(snippet))
            gain = gains.get(f"p{row}", 0)
            assert len(hit.caption) <= SHOWN and hit.caption.endswith("…") and "\n" not in hit.caption, "cut to one line"
            assert hit.image is None and hit.is_hit == (gain > 0) and hit.gain == (gain or None)
    marks = {hit.mark for example in report.examples for _, hits in example.rows for hit in hits}
    assert marks == {"", "✓ gain 1", "✓ gain 2"}
    page = (tmp_path / "run" / "report" / "report.html").read_text()
    assert '<ol class="hits texts">' in page and "<b>✓ gain 2</b>" in page
    assert "&lt;b&gt;sleeps&lt;/b&gt; all day" in page and "<b>sleeps</b>" not in page


def test_what_does_not_fit_is_refused(raw: dict[str, Any]) -> None:
    penultimate = {"options": {"input": "penultimate"}, "method": "query_map"}
    for data, changes, message in (
        ({"test": {"path": "some/pairs"}}, {}, "a single test set; remove judged_texts or test"),
        ({"queries": {"path": "some/images"}}, {}, "a single test set; remove judged_texts or queries"),
        ({"judged_texts": {"passagen": {"path": "x"}}}, {}, "passagen.*passages"),
        ({}, penultimate, "data.judged_texts has texts"),
    ):
        with pytest.raises(XcompatError, match=message):
            run_recipe(recipe_of(raw, **changes, data=raw["data"] | data))


def test_a_map_of_texts_is_chosen_by_their_sentences(raw: dict[str, Any], tmp_path: Path) -> None:
    texts = [f"{row} {animal} sleeps here. nobody wakes {animal} {row}." for row, animal in enumerate(ANIMALS * 50)]
    (tmp_path / "learned.txt").write_text("\n".join(texts) + "\n")
    del raw["method"]
    run_recipe(recipe_of(raw, evaluation=None))
    said = json.loads((tmp_path / "run" / CHOICE).read_text())
    assert said["sentences"].keys() == LINES.keys() and said["of_agreement"] and not said["is_other_kind"]
    best = max(said["sentences"], key=said["sentences"].get)
    assert said["chosen"] == f"{best} + old query, weight 0.5", "the old model can embed queries too"
