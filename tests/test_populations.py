"""Populations of queries: known and new classes, alone and in the whole gallery, in evaluations and in choices of maps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from xcompat import Fingerprint
from xcompat.evaluation import EmbeddedImages, EvaluatedModels, bootstrap_interval, cmc, evaluate
from xcompat.evaluation.cases import failed_comparisons
from xcompat.evaluation.embedded_images import LearnedItems
from xcompat.mapping import PairedEmbeddings, choose
from xcompat.mapping.choice_report import as_json

EACH, DIM = 5, 6


def embedded(name: str, seed: int, classes: list[str], noise: float) -> EmbeddedImages:
    """Embed five images of each class; the same class has the same centre for every seed."""
    centres = np.random.default_rng(7).standard_normal((len(classes), DIM)).repeat(EACH, axis=0)
    embeds = (centres + noise * np.random.default_rng(seed).standard_normal(centres.shape)).astype(np.float32)
    ids, labels = [str(row) for row in range(len(embeds))], np.repeat(classes, EACH).tolist()
    return EmbeddedImages(name, Fingerprint.from_string(name), embeds, embeds, ids, ids, labels, labels)


@pytest.fixture
def contestants() -> EvaluatedModels:
    old, new = embedded("old", 0, ["a", "b", "c", "d"], 1.0), embedded("new", 1, ["a", "b", "c", "d"], 0.5)
    return EvaluatedModels(old, replace(new, gallery_embeds_GD=old.gallery_embeds_GD))


def with_learned(contestants: EvaluatedModels, seed: int = 3) -> EvaluatedModels:
    learned_LD = np.random.default_rng(seed).standard_normal((30, DIM)).astype(np.float32)
    learned = LearnedItems(frozenset("ab"), learned_LD, ["a", "b"] * 15)
    return replace(contestants, old=replace(contestants.old, learned=learned))


def test_queries_of_new_classes_search_the_learned_items_too(contestants: EvaluatedModels) -> None:
    old, new = with_learned(contestants).old, contestants.new_view
    evaluation = evaluate(with_learned(contestants))
    found = {case.population: case for case in evaluation.cases if case.label == "new/old"}
    assert {population: (case.n_queries, case.n_gallery) for population, case in found.items()} == {
        "all": (20, 20),
        "known": (10, 20),
        "new": (10, 20),
        "new in the whole gallery": (10, 50),
    }
    assert old.learned is not None and old.learned.embeds_LD is not None
    whole = np.concatenate([np.asarray(old.gallery_embeds_GD), np.asarray(old.learned.embeds_LD)])
    labels, ids = [*old.gallery_labels, *old.learned.labels_L], [*old.gallery_ids, *(f"learned {row}" for row in range(30))]
    naive = cmc(np.asarray(new.query_embeds_QD)[10:], whole, new.query_labels[10:], labels, new.query_ids[10:], ids, ks=(1, 5))
    assert {k: found["new in the whole gallery"].metrics[f"cmc@{k}"] for k in (1, 5)} == pytest.approx(naive)
    for metric in ("cmc@1", "map"):
        both = (found["known"].metrics[metric] + found["new"].metrics[metric]) / 2
        assert found["all"].metrics[metric] == pytest.approx(both), "each half has ten queries"
    assert len(evaluation.ranks["new", "old", "image-to-image"]) == 20, "what is stored for curves is of all queries"


def test_one_population_that_finds_less_fails_the_verdict(contestants: EvaluatedModels) -> None:
    better = replace(contestants, new_view=replace(contestants.new_view, query_embeds_QD=contestants.old.query_embeds_QD * 1.0))
    judged = evaluate(with_learned(better))
    assert {each.population for each in judged.criterion.differences} == {"all", "known", "new", "new in the whole gallery"}
    lost = [
        replace(case, metrics=dict.fromkeys(case.metrics, 1.0 if case.label == "new/old" else 0.5))
        if case.population != "new in the whole gallery"
        else replace(case, metrics=dict.fromkeys(case.metrics, 0.5))
        for case in judged.cases
    ]
    assert {each.population for each in failed_comparisons(lost)} == {"new in the whole gallery"}


def test_intervals_of_a_verdict_draw_classes(contestants: EvaluatedModels) -> None:
    evaluation = evaluate(contestants)
    classes = np.repeat(np.arange(4), EACH)
    np.testing.assert_array_equal(evaluation.clusters["image-to-image"], classes)
    (case,) = [case for case in evaluation.cases if case.label == "old/old"]
    hits_Q = (evaluation.ranks["old", "old", "image-to-image"] == 0).astype(float)
    assert case.ci95["cmc@1"] == pytest.approx(bootstrap_interval(hits_Q, clusters_Q=classes))


def test_queries_of_a_single_class_are_drawn_one_by_one() -> None:
    old = embedded("old", 0, ["a"], 1.0)
    other = replace(old, gallery_labels=["a", "b", "a", "b", "b"])
    assert not evaluate(EvaluatedModels(other, other)).clusters


def test_choices_of_maps_report_every_population() -> None:
    draw = np.random.default_rng(0)
    labels = np.repeat(np.arange(12), 20)
    meant = draw.standard_normal((12, 8))[labels]
    sides = [(meant + noise * draw.standard_normal(meant.shape)).astype(np.float32) for noise in (0.3, 1.0)]
    new, old = (side / np.linalg.norm(side, axis=1, keepdims=True) for side in sides)
    said = as_json(choose(PairedEmbeddings(new, old, labels)))
    assert {(case["query"], case["population"]) for case in said["cases"]} == {
        (query, population) for query in ("old", "new") for population in ("all", "known", "new", "new in the whole gallery")
    }
    floors = {
        (case["population"], name): v for case in said["cases"] if case["query"] == "old" for name, v in case["metrics"].items()
    }
    assert floors["known", "cmc@1"] == said["floor"]["known classes"]["cmc@1"]
