"""Cases, verdicts, re-ranked searches and thresholds against what the public metrics and naive counts say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import refuses
from numpy.typing import NDArray

from xcompat import Fingerprint, XcompatError
from xcompat.evaluation import EmbeddedPairs, EmbeddedTexts, EvaluatedModels, EvaluationOptions, ZeroShot, evaluate
from xcompat.evaluation.cases import FLIP_METRIC, Threshold, failed_comparisons
from xcompat.evaluation.embedded_images import EmbeddedImages, LearnedItems
from xcompat.evaluation.intervals import bootstrap_interval, paired_bootstrap
from xcompat.evaluation.labelled import Items, LabelledPairs
from xcompat.evaluation.metrics import class_embeddings, first_hit_ranks, negative_flip_rate, recall_at_k, zero_shot_accuracy
from xcompat.evaluation.ranking import cmc, rank
from xcompat.evaluation.reranked import find_first_hits, rerank
from xcompat.mapping import PairedEmbeddings, choose
from xcompat.mapping.choice_report import as_json
from xcompat.report import ReportContent, load_report
from xcompat.report.report import build_report
from xcompat.report.storage import save_report
from xcompat.training.model_evaluation import evaluate_cases
from xcompat.training.sections import EvaluationSettings

N_ITEMS, VIEWS = 60, 3
EACH, DIM = 5, 6


def embedded(name: str, dim: int, noise: float, basis_seed: int, *, zero_shot: bool = False) -> EmbeddedPairs:
    """Make a model that sees the same 60 items through its own basis, with noise."""
    truth = np.random.default_rng(0).normal(size=(N_ITEMS, 32))
    basis = np.random.default_rng(basis_seed).normal(size=(32, dim))
    generator = np.random.default_rng(len(name) + int(noise * 100))
    items = np.arange(N_ITEMS)
    image_ids, text_ids = np.repeat(items, VIEWS), np.append(items, 999)
    images = truth[image_ids] @ basis + noise * generator.normal(size=(len(image_ids), dim))
    texts = np.concatenate([truth, truth[:1]]) @ basis + noise * generator.normal(size=(len(text_ids), dim))
    shot = None
    if zero_shot:
        prompts = texts[:5, None] + 0.1 * generator.normal(size=(5, 4, dim))
        shot = ZeroShot(images[: 5 * VIEWS], class_embeddings(prompts), image_ids[: 5 * VIEWS])
    return EmbeddedPairs(name, Fingerprint.from_string(name), images, texts, image_ids, text_ids, shot)


@pytest.fixture
def models() -> EvaluatedModels[EmbeddedPairs]:
    return EvaluatedModels(
        old=embedded("old", 16, 6.0, 1, zero_shot=True),
        new_view=embedded("new", 16, 2.0, 1, zero_shot=True),
        new=embedded("new", 24, 1.5, 2),
        independent=embedded("independent", 24, 1.5, 3),
    )


def test_every_number_is_the_public_metric(models: EvaluatedModels[EmbeddedPairs]) -> None:
    result = evaluate(replace(models, extra={"phi": embedded("phi", 16, 4.0, 1)}), EvaluationOptions(n_resamples=50))
    old = models.old
    cut = models.independent
    cut = replace(cut, image_embeds_ND=cut.image_embeds_ND[:, :16], text_embeds_MD=cut.text_embeds_MD[:, :16])
    sides = {
        "old/old": (old, old),
        "independent/old": (cut, old),
        "phi/old": (embedded("phi", 16, 4.0, 1), old),
        "new/old": (models.new_view, old),
        "new/new": (models.new, models.new),
        "independent/independent": (models.independent, models.independent),
    }
    retrieval = [case for case in result.cases if "recall@1" in case.metrics]
    assert [case.label for case in retrieval[::2]] == list(sides)
    for case in retrieval:
        query, gallery = sides[case.label]
        if case.direction == "image-to-text":
            arguments = (query.image_embeds_ND, gallery.text_embeds_MD, query.image_ids, gallery.text_ids)
            assert (case.n_queries, case.n_gallery) == (180, 61)
        else:
            arguments = (query.text_embeds_MD, gallery.image_embeds_ND, query.text_ids, gallery.image_ids)
            assert (case.n_queries, case.n_gallery) == (60, 180)
        recall = recall_at_k(*arguments, ks=(1, 5, 10, 50))
        assert recall == {int(name[7:]): value for name, value in case.metrics.items() if name.startswith("recall@")}
        ranks = first_hit_ranks(*arguments)
        assert result.ranks[case.query, case.gallery, case.direction].tolist() == ranks.tolist()
        clusters = np.asarray(arguments[2])[ranks >= 0]
        assert case.ci95["recall@5"] == pytest.approx(bootstrap_interval((ranks < 5)[ranks >= 0], 50, clusters_Q=clusters))
    assert result.dropped == {"image-to-text": 0, "text-to-image": 1}
    assert "1 text-to-image queries have no match" in result.notes[0]


def test_old_queries_and_smaller_models_search_other_galleries(models: EvaluatedModels[EmbeddedPairs]) -> None:
    old, view = models.old, models.new_view
    result = evaluate(models, EvaluationOptions(old_on_new=True, n_resamples=50))
    found = [case for case in result.cases if case.label == "old/new" and case.direction == "image-to-text"]
    case = next(case for case in found if "recall@5" in case.metrics)
    expected = recall_at_k(old.image_embeds_ND, view.text_embeds_MD, old.image_ids, view.text_ids, ks=(5,))
    assert case.metrics["recall@5"] == pytest.approx(expected[5])
    assert "old/new" not in {case.label for case in evaluate(models, EvaluationOptions(n_resamples=50)).cases}
    with pytest.raises(XcompatError, match="old_on_new does not apply: .*; set it to false"):
        evaluate(replace(models, upgraded=view), EvaluationOptions(old_on_new=True, n_resamples=50))
    small = embedded("small", 8, 1.5, 5)
    result = evaluate(replace(models, independent=small), EvaluationOptions(n_resamples=20))
    padded = np.pad(np.asarray(small.text_embeds_MD), ((0, 0), (0, 8)))
    expected = first_hit_ranks(padded, models.old.image_embeds_ND, small.text_ids, small.image_ids)
    assert result.ranks["independent", "old", "text-to-image"].tolist() == expected.tolist()


def test_mixed_queries_search_the_old_gallery_for_both_models(models: EvaluatedModels[EmbeddedPairs]) -> None:
    images = models.new_view.image_embeds_ND.copy()
    images[7] = np.nan  # an image that one of the models could not read
    models = replace(models, new_view=replace(models.new_view, image_embeds_ND=images))
    found = {}
    for share in (0.0, 0.4, 1.0):
        settings = EvaluationSettings(slerp=share, resamples=100, ks=[1, 5])
        found[share], kept = evaluate_cases(models, settings, seed=0)
    labels = list(dict.fromkeys(case.label for case in found[0.4].cases))
    assert labels[:4] == ["old/old", "independent/old", "slerp/old", "new/old"]
    for direction in ("image-to-text", "text-to-image"):
        ranks = {
            (share, query): each.ranks[query, "old", direction].tolist()
            for share, each in found.items()
            for query in ("old", "slerp", "new")
        }
        assert ranks[0.0, "slerp"] == ranks[0.0, "new"] and ranks[1.0, "slerp"] == ranks[1.0, "old"]
        assert len(ranks[0.4, "slerp"]) == {"image-to-text": 179, "text-to-image": 60}[direction]
    new, old = (np.asarray(each.text_embeds_MD) for each in (kept.new_view, kept.old))
    new, old = (each / np.linalg.norm(each, axis=1, keepdims=True) for each in (new, old))
    angle = np.arccos((new * old).sum(axis=1, keepdims=True))
    mixed = (np.sin(0.6 * angle) * new + np.sin(0.4 * angle) * old) / np.sin(angle)
    expected = first_hit_ranks(mixed, kept.old.image_embeds_ND, kept.old.text_ids, kept.old.image_ids)
    assert found[0.4].ranks["slerp", "old", "text-to-image"].tolist() == expected.tolist()
    assert {"zero_shot@1", "negative_flip_rate@1"} <= {
        name for case in found[0.4].cases if case.query == "slerp" for name in case.metrics
    }
    assert found[0.4].notes[-1].startswith("slerp/old searches with new queries mixed with old ones of weight 0.4, so")
    assert found[0.4].criterion == evaluate_cases(models, EvaluationSettings(resamples=100, ks=[1, 5]), 0)[0].criterion


def test_flips_and_differences_compare_with_the_old_model(models: EvaluatedModels[EmbeddedPairs]) -> None:
    result = evaluate(replace(models, extra={"phi": embedded("phi", 16, 4.0, 1)}), EvaluationOptions(n_resamples=20))
    for case in result.cases:
        if case.label in ("new/old", "phi/old") and "recall@1" in case.metrics:
            ranks = (result.ranks[query, "old", case.direction] for query in ("old", case.query))
            assert case.metrics["negative_flip_rate@1"] == negative_flip_rate(*ranks)
            low, high = case.ci95["negative_flip_rate@1"]
            assert low <= case.metrics["negative_flip_rate@1"] <= high
        else:
            assert "negative_flip_rate@1" not in case.metrics
    result = evaluate(models, EvaluationOptions(n_resamples=60, seed=4))
    found = next(d for d in result.criterion.differences if (d.direction, d.metric) == ("image-to-text", "recall@5"))
    new, old = (result.ranks[query, "old", "image-to-text"] < 5 for query in ("new", "old"))
    expected = paired_bootstrap(new, old, 60, seed=4, clusters_Q=models.old.image_ids)
    assert (found.mean, found.ci95) == (expected.mean, pytest.approx((expected.low, expected.high)))


def test_a_verdict_needs_gains_over_old_and_no_loss_of_the_new(models: EvaluatedModels[EmbeddedPairs]) -> None:
    good = evaluate(models, EvaluationOptions(ks=(1, 5, 10), n_resamples=200)).criterion
    assert good.backward_compatible
    assert not any("<=" in line for line in good.failed)
    improvement = next(d for d in good.differences if (d.direction, d.metric) == ("text-to-image", "recall@10"))
    assert improvement.ci95[0] > 0
    bad = evaluate(replace(models, new_view=embedded("new", 16, 2.0, 77)), EvaluationOptions(n_resamples=20)).criterion
    assert not bad.backward_compatible
    assert any(line.startswith("text-to-image recall@10: new/old 0.") and "<= old/old" in line for line in bad.failed)
    same = replace(models, new_view=models.old, independent=models.new)
    criterion = evaluate(same, EvaluationOptions(n_resamples=20)).criterion
    assert not criterion.backward_compatible
    assert criterion.new_model_not_hurt is True
    hurt = evaluate(replace(models, new=replace(embedded("new", 24, 9.0, 2))), EvaluationOptions(n_resamples=20)).criterion
    assert hurt.new_model_not_hurt is False
    assert any("new/new" in line and "< independent/independent" in line for line in hurt.failed)
    result = evaluate(EvaluatedModels(models.old, models.new_view), EvaluationOptions(n_resamples=20))
    assert result.criterion.new_model_not_hurt is None and {case.label for case in result.cases} == {"old/old", "new/old"}


def test_zero_shot_is_a_case_and_counts(models: EvaluatedModels[EmbeddedPairs]) -> None:
    result = evaluate(models, EvaluationOptions(n_resamples=20))
    shots = {case.label: case for case in result.cases if "zero_shot@1" in case.metrics}
    assert set(shots) == {"old/old", "new/old"}
    view, old = models.new_view.zero_shot, models.old.zero_shot
    accuracy = zero_shot_accuracy(view.image_embeds_ND, old.class_embeds_CD, old.labels_N)
    assert shots["new/old"].metrics == {"zero_shot@1": accuracy}
    assert (shots["new/old"].n_gallery, shots["new/old"].direction) == (5, "image-to-text")
    wrong = replace(models.new_view, zero_shot=replace(view, image_embeds_ND=-np.asarray(view.image_embeds_ND)))
    failed = evaluate(replace(models, new_view=wrong), EvaluationOptions(n_resamples=20)).criterion.failed
    assert any("zero_shot@1" in line for line in failed)


def test_cut_offs_beyond_the_gallery_are_left_out(models: EvaluatedModels[EmbeddedPairs]) -> None:
    result = evaluate(models, EvaluationOptions(ks=(1, 10, 61, 100), n_resamples=20))
    for case in result.cases:
        if case.label == "old/old" and "recall@1" in case.metrics:
            kept = {"image-to-text": [1, 10], "text-to-image": [1, 10, 61, 100]}
            assert list(case.metrics) == [f"recall@{k}" for k in kept[case.direction]]
    assert result.notes[0] == "R@61, R@100 not measured for image-to-text: the gallery has only 61 items."
    refuses("no cutoff of ks", evaluate, models, EvaluationOptions(ks=(100,), n_resamples=20))


def images_of(labels: str, searched: str, **changes: Any) -> EmbeddedImages:
    """Each class is a direction; queries are images of their own unless changes say so."""
    sides = [np.array([np.eye(4)["abcd".index(label)] for label in of_side]) for of_side in (labels, searched)]
    ids = [f"q{row}" for row in range(len(labels))], [f"g{row}" for row in range(len(searched))]
    given: dict[str, Any] = dict(zip(("query_ids", "gallery_ids"), ids, strict=True)) | changes
    fingerprint = Fingerprint.from_string("images")
    return EmbeddedImages("images", fingerprint, *sides, query_labels=list(labels), gallery_labels=list(searched), **given)


@pytest.mark.parametrize(
    ("model", "kept"),
    [
        (images_of("aabbccdd", "abcd"), [1, 3]),
        (images_of("aabb", "aabb", query_ids=range(4), gallery_ids=range(4)), [1]),  # three besides itself
        (images_of("aabb", "aabb", query_ids=[*range(3), 9], gallery_ids=range(4)), [1, 3]),  # the last query is not in it
        (images_of("aabb", "aabb", query_cameras="vwvw", gallery_cameras="vwvw"), [1]),  # none of its class and camera
        (images_of("aabd", "aabb", query_ids=[*range(3), 9], gallery_ids=range(4)), [1]),  # the last query has no match
    ],
)
def test_places_that_every_image_is_found_in_are_left_out(model: EmbeddedImages, kept: list[int]) -> None:
    (direction,) = model.directions((1, 3, 4, 5))
    assert direction.ks == kept
    names = ", ".join(f"CMC@{k}" for k in (1, 3, 4, 5) if k not in kept)
    assert [note.partition(" not measured for ")[0] for note in direction.notes] == [names]
    refuses("image-to-image: no cutoff of ks=\\(4, 9\\) is from 1", model.directions, (4, 9))


def test_a_better_model_is_compatible_where_a_cut_off_shows_nothing() -> None:
    """Of four passages, ten are always found: recall ties for ever, and what asks for the place does not."""
    generator, ids = np.random.default_rng(0), [f"q{row}" for row in range(40)]
    truth_QD = np.eye(4)[np.arange(40) % 4]
    old, new = (
        EmbeddedTexts(
            name,
            Fingerprint.from_string(name),
            truth_QD + noise * generator.normal(size=(40, 4)),
            np.eye(4),
            ids,
            list("wxyz"),
            {each: {"wxyz"[row % 4]: 1} for row, each in enumerate(ids)},
        )
        for name, noise in (("old", 3), ("new", 0.1))
    )
    result = evaluate(EvaluatedModels(old, new), EvaluationOptions(ks=(1, 10), n_resamples=20))
    assert result.criterion.backward_compatible
    judged_by = [name for name in result.cases[0].metrics if not name.startswith("negative")]
    assert judged_by == ["ndcg@1", "mrr@1", "recall@1", "ndcg@10", "mrr@10", "map"]
    assert result.notes == ["R@10 not measured for text-to-text: the gallery has only 4 items."]


def test_models_must_agree_on_the_items(models: EvaluatedModels[EmbeddedPairs]) -> None:
    ids = list(models.new.image_ids)
    ids[4], ids[1] = ids[1], ids[4]
    refuses("image 1 is 1 in new but 0 in old", evaluate, replace(models, new=replace(models.new, image_ids=ids)))
    fewer = replace(models.independent, text_ids=models.independent.text_ids[:-1])
    refuses("independent has 60 texts but old has 61", evaluate, replace(models, independent=fewer))
    refuses("new_view has 24 dimensions but the old gallery has 16", evaluate, replace(models, new_view=models.new))
    broken = replace(models.new, text_embeds_MD=np.full((61, 24), np.nan))
    refuses("new/new image-to-text: NaN or infinite numbers in gallery", evaluate, replace(models, new=broken))
    shot = models.new_view.zero_shot_by_name[""]
    other = replace(models.new_view, zero_shot={"few": replace(shot, labels_N=shot.labels_N[::-1])})
    with pytest.raises(XcompatError, match="zero-shot label of few 0 is 4 in new_view but 0 in old"):
        evaluate(replace(models, old=replace(models.old, zero_shot={"few": shot}), new_view=other))
    refuses("cannot name an extra model", evaluate, replace(models, extra={"new": models.new_view}))
    embeds, ids = np.eye(6, 4, dtype=np.float32), list("abcdef")
    images = EmbeddedImages("old", Fingerprint.from_string("old"), embeds, embeds, ids, ids, [0, 1], [0, 0, 1, 1, 2, 2])
    refuses("query_labels: 6 rows but 2 ids; give an id per row", images.directions, [1])


def embedded_classes(name: str, seed: int, classes: list[str], noise: float) -> EmbeddedImages:
    """Embed five images of each class; the same class has the same centre for every seed."""
    centres = np.random.default_rng(7).standard_normal((len(classes), DIM)).repeat(EACH, axis=0)
    embeds = (centres + noise * np.random.default_rng(seed).standard_normal(centres.shape)).astype(np.float32)
    ids, labels = [str(row) for row in range(len(embeds))], np.repeat(classes, EACH).tolist()
    return EmbeddedImages(name, Fingerprint.from_string(name), embeds, embeds, ids, ids, labels, labels)


@pytest.fixture
def contestants() -> EvaluatedModels:
    old, new = embedded_classes("old", 0, ["a", "b", "c", "d"], 1.0), embedded_classes("new", 1, ["a", "b", "c", "d"], 0.5)
    return EvaluatedModels(old, replace(new, gallery_embeds_GD=old.gallery_embeds_GD))


def with_learned(contestants: EvaluatedModels) -> EvaluatedModels:
    learned_LD = np.random.default_rng(3).standard_normal((30, DIM)).astype(np.float32)
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


def test_intervals_draw_classes_unless_there_is_only_one(contestants: EvaluatedModels) -> None:
    evaluation = evaluate(contestants)
    classes = np.repeat(np.arange(4), EACH)
    np.testing.assert_array_equal(evaluation.clusters["image-to-image"], classes)
    (case,) = [case for case in evaluation.cases if case.label == "old/old"]
    hits_Q = (evaluation.ranks["old", "old", "image-to-image"] == 0).astype(float)
    assert case.ci95["cmc@1"] == pytest.approx(bootstrap_interval(hits_Q, clusters_Q=classes))
    old = embedded_classes("old", 0, ["a"], 1.0)
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


Q, G, D, E, CLASSES = 60, 200, 8, 9, 10
IDS = [f"q{row}" for row in range(Q)], [f"g{row}" for row in range(G)]
QRELS = {f"q{row}": {f"g{row}": 2.0, f"g{row + 7}": 1.0} for row in range(Q)}


def rows(count: int, dim: int, seed: int) -> NDArray[np.float64]:
    embeds_ND = np.random.default_rng(seed).normal(size=(count, dim))
    return embeds_ND / np.linalg.norm(embeds_ND, axis=1, keepdims=True)


def naive_order(old_QG: NDArray[np.float64], new_QG: NDArray[np.float64], k: int, weight: float) -> NDArray[np.int64]:
    ordered = []
    for old_G, new_G in zip(old_QG, new_QG, strict=True):
        plain_G = np.argsort(-old_G, kind="stable")
        first_k = plain_G[:k]
        again_k = (1 - weight) * new_G[first_k] + weight * old_G[first_k]
        ordered.append(np.concatenate([first_k[np.argsort(-again_k, kind="stable")], plain_G[k:]]))
    return np.array(ordered)


@pytest.mark.parametrize("chunk_size", [7, 1024])
@pytest.mark.parametrize(("k", "weight"), [(1, 0.5), (5, 0.0), (20, 1 / 3), (200, 0.0)])
def test_ranks_equal_a_naive_sort(k: int, weight: float, chunk_size: int) -> None:
    old_QD, old_GD, new_QE, new_GE = rows(Q, D, 0), rows(G, D, 1), rows(Q, E, 2), rows(G, E, 3)
    labels_Q, labels_G = np.arange(Q) % CLASSES, np.arange(G) % CLASSES
    pairs = LabelledPairs(Items(old_QD, labels_Q), Items(old_GD, labels_G), chunk_size)
    found = rank(rerank(pairs, new_QE, new_GE, k, weight))
    right_QG = labels_G[naive_order(old_QD @ old_GD.T, new_QE @ new_GE.T, k, weight)] == labels_Q[:, None]
    np.testing.assert_array_equal(found.first_hit_ranks_Q, right_QG.argmax(axis=1))
    precision_QG = right_QG.cumsum(axis=1) / np.arange(1, G + 1)
    np.testing.assert_allclose(found.average_precision_Q, (precision_QG * right_QG).sum(axis=1) / right_QG.sum(axis=1))
    of_many = rank(find_first_hits(pairs, new_QE, new_GE, G).rerank(k, weight))
    np.testing.assert_array_equal(of_many.average_precision_Q, found.average_precision_Q)


def test_candidates_are_other_items_and_of_equal_ones_the_first() -> None:
    old_ND, new_NE = rows(20, D, 0), rows(20, E, 1)
    items = Items(old_ND, np.arange(20) % 2, np.arange(20))
    found = rank(rerank(LabelledPairs(items, items), new_NE, new_NE, candidates=3, old_weight=0.0))
    old_NN, new_NN = old_ND @ old_ND.T, new_NE @ new_NE.T
    np.fill_diagonal(old_NN, -9)
    right_NN = (naive_order(old_NN, new_NN, 3, 0.0) % 2) == (np.arange(20) % 2)[:, None]
    np.testing.assert_array_equal(found.first_hit_ranks_Q, right_NN.argmax(axis=1))
    old_GD, new_GE = np.ones((5, 2)), np.eye(5)
    for label, expected in (("a", 4), ("b", 4), ("e", 4)):
        pairs = LabelledPairs(Items(old_GD[:1], label), Items(old_GD, "abcde"))
        assert rank(pairs).first_hit_ranks_Q[0] == expected  # all tie
    query = new_GE[1:2]
    pairs = LabelledPairs(Items(old_GD[:1], "b"), Items(old_GD, "abcde"))
    assert rank(rerank(pairs, query, new_GE, candidates=2)).first_hit_ranks_Q[0] == 0
    assert rank(rerank(pairs, query, new_GE, candidates=1)).first_hit_ranks_Q[0] == 4


def embedded_by_both(kind: Any, count: int, *about: Any) -> list[Any]:
    return [
        kind(name, Fingerprint.from_string(name), rows(Q, dim, seed), rows(count, dim, seed + 1), *about)
        for name, dim, seed in (("old", D, 0), ("new", E, 2))
    ]


IMAGES = embedded_by_both(EmbeddedImages, G, *IDS, *(np.arange(count) % CLASSES for count in (Q, G)))
TEXTS = embedded_by_both(EmbeddedTexts, G, *IDS, QRELS)
PAIRS = embedded_by_both(EmbeddedPairs, Q, IDS[0], IDS[0])


def test_a_report_has_the_case_of_every_kind_of_test_set() -> None:
    options = EvaluationOptions(ks=(1, 5), n_resamples=20, rerank=10)
    for old, new in (IMAGES, TEXTS, PAIRS):
        result = evaluate(EvaluatedModels(old, old, new), options)
        plain, again = (
            {c.direction: c.metrics for c in result.cases if c.label == f"{name}/old"} for name in ("new", "new+rerank")
        )
        assert plain.keys() == again.keys() and plain != again
        assert any("10 hits per query re-ranked" in note for note in result.notes)
        same = evaluate(EvaluatedModels(old, old, old), replace(options, rerank=G)).cases
        of_old, reranked = (
            [{**c.metrics, FLIP_METRIC: None} for c in same if c.label == label] for label in ("old/old", "new+rerank/old")
        )
        assert of_old == reranked, "the same scores again change nothing"
    learned = [LearnedItems(frozenset(range(3)), rows(40, dim, 7), np.arange(40) % 3) for dim in (D, E)]
    old, new = (replace(side, learned=its) for side, its in zip(IMAGES, learned, strict=True))
    of = {case.population for case in evaluate(EvaluatedModels(old, old, new), options).cases if case.label == "new+rerank/old"}
    assert of == {"all", "known", "new", "new in the whole gallery"}


def test_graded_metrics_equal_a_naive_sort() -> None:
    old, new = TEXTS
    result = evaluate(EvaluatedModels(old, old, new), EvaluationOptions(ks=(10,), n_resamples=20, rerank=20))
    order_QG = naive_order(rows(Q, D, 0) @ rows(G, D, 1).T, rows(Q, E, 2) @ rows(G, E, 3).T, 20, 1 / 3)
    gains_QG = (order_QG == np.arange(Q)[:, None]) * 2.0 + (order_QG == np.arange(Q)[:, None] + 7)
    best = 2 + 1 / np.log2(3)
    expected = (gains_QG[:, :10] / np.log2(np.arange(2, 12))).sum(axis=1).mean() / best
    case = next(case for case in result.cases if case.label == "new+rerank/old")
    assert case.metrics["ndcg@10"] == pytest.approx(expected)


def test_what_cannot_be_measured_is_refused() -> None:
    old = IMAGES[0]
    refuses("--new-own", evaluate, EvaluatedModels(old, old), EvaluationOptions(rerank=5))
    refuses("re-ranking needs cosines", evaluate, EvaluatedModels(*[replace(old, metric="l2")] * 3), EvaluationOptions(rerank=5))
    refuses("between -1 and 1", evaluate, EvaluatedModels(old, old), EvaluationOptions(threshold=1.5))
    refuses("L2 distance", evaluate, EvaluatedModels(*[replace(old, metric="l2")] * 2), EvaluationOptions(threshold=0.5))
    with pytest.raises(XcompatError, match="differ in number or dimension"):
        rerank(LabelledPairs(Items(rows(3, 2, 0), "abc"), Items(rows(3, 2, 1), "abc")), rows(3, 2, 0), rows(2, 2, 0), 1)


AT = 0.5


def clouds(name: str, noise: float, stretch: float = 0.0) -> EmbeddedImages:
    """Return images whose similarities are pulled towards 1 by ``stretch``, as those of another model may be."""
    draw = np.random.default_rng(3)
    centres_CD = draw.normal(size=(CLASSES, D))
    sides = []
    for count in (Q, G):
        labels_N = np.arange(count) % CLASSES
        embeds_ND = centres_CD[labels_N] + noise * draw.normal(size=(count, D))
        embeds_ND /= np.linalg.norm(embeds_ND, axis=1, keepdims=True)
        sides.append((np.hstack([embeds_ND, np.full((count, 1), stretch)]), labels_N))
    (queries_QD, labels_Q), (gallery_GD, labels_G) = sides
    return EmbeddedImages(name, Fingerprint.from_string(name), queries_QD, gallery_GD, *IDS, labels_Q, labels_G)


def cosines(asking: EmbeddedImages, searched: EmbeddedImages) -> np.ndarray:
    queries_QD, gallery_GD = np.asarray(asking.query_embeds_QD), np.asarray(searched.gallery_embeds_GD)
    lengths = np.linalg.norm(queries_QD, axis=1)[:, None] * np.linalg.norm(gallery_GD, axis=1)
    return np.asarray(queries_QD @ gallery_GD.T / lengths)


def found_by(contestants: EvaluatedModels, **options: float) -> dict[tuple[str, str], Threshold]:
    result = evaluate(contestants, EvaluationOptions(n_resamples=200, threshold=AT, **options))
    return {(each.query, each.keeps): each for each in result.thresholds}


def test_thresholds_keep_matches_or_hits_as_naive_counts_do(tmp_path: Path) -> None:
    old, new = clouds("old", 0.6), clouds("new", 0.6, stretch=0.7)
    contestants = EvaluatedModels(old, new)
    found = found_by(contestants)
    result = evaluate(contestants, EvaluationOptions(n_resamples=50, threshold=AT))
    save_report(tmp_path / "report", build_report(ReportContent(result, contestants, "map", tsne_pairs=0)))
    assert load_report(tmp_path / "report").thresholds == result.thresholds, "a report keeps them"
    # both galleries hold the same items; new queries score higher against the old gallery
    old_QG, new_QG = cosines(old, old), cosines(new, old)
    is_match_QG = np.arange(Q)[:, None] % CLASSES == np.arange(G) % CLASSES
    before = found["old", "matches"]
    assert before.matches == pytest.approx((old_QG[is_match_QG] >= AT).mean())
    assert before.hits == pytest.approx((old_QG >= AT).sum(axis=1).mean())
    for keeps, chosen_QG in (("matches", is_match_QG), ("hits", np.ones_like(is_match_QG))):
        each = found["new", keeps]
        wanted = int((old_QG[chosen_QG] >= AT).sum())
        naive = np.sort(new_QG[chosen_QG])[::-1][wanted - 1]
        assert each.score == pytest.approx(naive, abs=0.003)
        assert each.ci95 is not None and each.ci95[0] <= each.score <= each.ci95[1]
        assert each.matches == pytest.approx((new_QG[is_match_QG] >= each.score).mean(), abs=0.01)
        assert each.hits == pytest.approx((new_QG >= each.score).sum(axis=1).mean(), abs=0.3)


def test_reranked_queries_cut_off_by_their_own_scores() -> None:
    old, new = clouds("old", 0.5), clouds("new", 0.2)
    found = found_by(EvaluatedModels(old, old, new), rerank=G)
    again_QG = 2 / 3 * cosines(new, new) + 1 / 3 * cosines(old, old)
    is_match_QG = np.arange(Q)[:, None] % CLASSES == np.arange(G) % CLASSES
    wanted = int((cosines(old, old)[is_match_QG] >= AT).sum())
    naive = np.sort(again_QG[is_match_QG])[::-1][wanted - 1]
    assert found["new+rerank", "matches"].score == pytest.approx(naive, abs=0.003)
    few = found_by(EvaluatedModels(old, old, new), rerank=2)["new+rerank", "matches"]
    assert few.score is None and few.hits == pytest.approx(2), "two candidates hold fewer matches"


def test_matches_of_captions_and_judgements() -> None:
    def embeds_of(each: EmbeddedImages) -> tuple[Any, Any]:
        return each.query_embeds_QD, each.gallery_embeds_GD

    both = clouds("old", 0.6), clouds("new", 0.6, stretch=0.7)
    qrels = {f"q{q}": {f"g{g}": 1.0 for g in range(G) if g % CLASSES == q % CLASSES} for q in range(Q)}
    sides = [EmbeddedTexts(each.name, each.fingerprint, *embeds_of(each), *IDS, qrels) for each in both]
    of_texts, of_images = found_by(EvaluatedModels(*sides)), found_by(EvaluatedModels(*both))
    assert {key: each.score for key, each in of_texts.items()} == pytest.approx(
        {key: each.score for key, each in of_images.items()}
    )
    pairs = [
        EmbeddedPairs(each.name, each.fingerprint, *embeds_of(each), each.query_labels, each.gallery_labels) for each in both
    ]
    result = evaluate(EvaluatedModels(*pairs), EvaluationOptions(ks=(1,), n_resamples=200, threshold=AT))
    of_pairs = {(each.query, each.keeps): each.score for each in result.thresholds if each.direction == "image-to-text"}
    assert of_pairs == pytest.approx({key: each.score for key, each in of_images.items()})
