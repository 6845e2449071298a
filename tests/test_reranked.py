"""Evaluations of re-ranked searches and of thresholds that are carried over, beside naive sorts and counts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from xcompat import Fingerprint, XcompatError
from xcompat.evaluation import EmbeddedImages, EmbeddedPairs, EmbeddedTexts, EvaluatedModels, EvaluationOptions, evaluate
from xcompat.evaluation.cases import FLIP_METRIC, Threshold
from xcompat.evaluation.embedded_images import LearnedItems
from xcompat.evaluation.labelled import Items, LabelledPairs
from xcompat.evaluation.ranking import rank
from xcompat.evaluation.reranked import find_first_hits, rerank
from xcompat.report import ReportContent, load_report
from xcompat.report.report import build_report
from xcompat.report.storage import save_report

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


def test_a_query_is_no_candidate_of_itself() -> None:
    old_ND, new_NE = rows(20, D, 0), rows(20, E, 1)
    items = Items(old_ND, np.arange(20) % 2, np.arange(20))
    found = rank(rerank(LabelledPairs(items, items), new_NE, new_NE, candidates=3, old_weight=0.0))
    old_NN, new_NN = old_ND @ old_ND.T, new_NE @ new_NE.T
    np.fill_diagonal(old_NN, -9)
    right_NN = (naive_order(old_NN, new_NN, 3, 0.0) % 2) == (np.arange(20) % 2)[:, None]
    np.testing.assert_array_equal(found.first_hit_ranks_Q, right_NN.argmax(axis=1))


def test_of_equal_old_scores_the_first_rows_are_candidates() -> None:
    old_GD, new_GE = np.ones((5, 2)), np.eye(5)
    for label, expected in (("a", 4), ("b", 4), ("e", 4)):
        pairs = LabelledPairs(Items(old_GD[:1], label), Items(old_GD, "abcde"))
        assert rank(pairs).first_hit_ranks_Q[0] == expected  # all tie
    query = new_GE[1:2]
    pairs = LabelledPairs(Items(old_GD[:1], "b"), Items(old_GD, "abcde"))
    assert rank(rerank(pairs, query, new_GE, candidates=2)).first_hit_ranks_Q[0] == 0
    assert rank(rerank(pairs, query, new_GE, candidates=1)).first_hit_ranks_Q[0] == 4


def images(old: bool) -> EmbeddedImages:
    asking, searched, seed = (rows(Q, D, 0), rows(G, D, 1), "old") if old else (rows(Q, E, 2), rows(G, E, 3), "new")
    labels = [np.arange(count) % CLASSES for count in (Q, G)]
    return EmbeddedImages(seed, Fingerprint.from_string(seed), asking, searched, *IDS, *labels)


def test_a_report_has_the_case_of_every_kind_of_test_set() -> None:
    prints = [Fingerprint.from_string(name) for name in ("old", "new")]
    texts = [
        EmbeddedTexts(f"{number}", prints[number], rows(Q, dim, 2), rows(G, dim, 3), *IDS, QRELS)
        for number, dim in enumerate((D, E))
    ]
    pairs = [
        EmbeddedPairs(f"{number}", prints[number], rows(Q, dim, 2), rows(Q, dim, 3), IDS[0], IDS[0])
        for number, dim in enumerate((D, E))
    ]
    options = EvaluationOptions(ks=(1, 5), n_resamples=20, rerank=10)
    for old, new in ((images(True), images(False)), texts, pairs):
        result = evaluate(EvaluatedModels(old, old, new), options)
        plain, again = (
            {c.direction: c.metrics for c in result.cases if c.label == f"{name}/old"} for name in ("new", "new+rerank")
        )
        assert plain.keys() == again.keys() and plain != again
        assert any("10 hits per query re-ranked" in note for note in result.notes)
        same = evaluate(EvaluatedModels(old, old, old), replace(options, rerank=G)).cases
        of_old, reranked = (
            {
                c.direction: {name: value for name, value in c.metrics.items() if name != FLIP_METRIC}
                for c in same
                if c.label == label
            }
            for label in ("old/old", "new+rerank/old")
        )
        assert of_old == reranked, "the same scores again change nothing"


def test_graded_metrics_equal_a_naive_sort() -> None:
    old, new = (
        EmbeddedTexts(name, Fingerprint.from_string(name), rows(Q, dim, seed), rows(G, dim, seed + 1), *IDS, QRELS)
        for name, dim, seed in (("old", D, 0), ("new", E, 2))
    )
    result = evaluate(EvaluatedModels(old, old, new), EvaluationOptions(ks=(10,), n_resamples=20, rerank=20))
    order_QG = naive_order(rows(Q, D, 0) @ rows(G, D, 1).T, rows(Q, E, 2) @ rows(G, E, 3).T, 20, 1 / 3)
    gains_QG = (order_QG == np.arange(Q)[:, None]) * 2.0 + (order_QG == np.arange(Q)[:, None] + 7)
    best = 2 + 1 / np.log2(3)
    expected = (gains_QG[:, :10] / np.log2(np.arange(2, 12))).sum(axis=1).mean() / best
    case = next(case for case in result.cases if case.label == "new+rerank/old")
    assert case.metrics["ndcg@10"] == pytest.approx(expected)


def test_queries_of_new_classes_in_the_whole_gallery() -> None:
    learned = [LearnedItems(frozenset(range(3)), rows(40, dim, 7), np.arange(40) % 3) for dim in (D, E)]
    old, new = (replace(side, learned=its) for side, its in zip((images(True), images(False)), learned, strict=True))
    options = EvaluationOptions(ks=(1, 5), n_resamples=20, rerank=10)
    of = {case.population for case in evaluate(EvaluatedModels(old, old, new), options).cases if case.label == "new+rerank/old"}
    assert of == {"all", "known", "new", "new in the whole gallery"}


def test_what_cannot_be_measured_is_refused() -> None:
    old = images(True)
    with pytest.raises(XcompatError, match="--new-own"):
        evaluate(EvaluatedModels(old, old), EvaluationOptions(rerank=5))
    with pytest.raises(XcompatError, match="re-ranking needs cosines"):
        evaluate(EvaluatedModels(*[replace(old, metric="l2")] * 3), EvaluationOptions(rerank=5))
    with pytest.raises(XcompatError, match="between -1 and 1"):
        evaluate(EvaluatedModels(old, old), EvaluationOptions(threshold=1.5))
    with pytest.raises(XcompatError, match="L2 distance"):
        evaluate(EvaluatedModels(*[replace(old, metric="l2")] * 2), EvaluationOptions(threshold=0.5))
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
