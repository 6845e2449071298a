"""Evaluations of re-ranked searches beside a naive sort of all scores."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from xcompat import Fingerprint, XcompatError
from xcompat.evaluation import EmbeddedImages, EmbeddedPairs, EmbeddedTexts, EvaluatedModels, EvaluationOptions, evaluate
from xcompat.evaluation.cases import FLIP_METRIC
from xcompat.evaluation.embedded_images import LearnedItems
from xcompat.evaluation.labelled import Items, LabelledPairs
from xcompat.evaluation.ranking import rank
from xcompat.evaluation.reranked import find_first_hits, rerank

Q, G, D, E, CLASSES = 30, 80, 6, 9, 7


def rows(count: int, dim: int, seed: int) -> NDArray[np.float64]:
    embeds_ND = np.random.default_rng(seed).normal(size=(count, dim))
    return embeds_ND / np.linalg.norm(embeds_ND, axis=1, keepdims=True)


def naive_order(old_QG: NDArray[np.float64], new_QG: NDArray[np.float64], k: int, weight: float) -> NDArray[np.int64]:
    """Return the items of each query, the best first."""
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
    ids_Q, ids_G = [f"q{row}" for row in range(Q)], [f"g{row}" for row in range(G)]
    labels = [np.arange(count) % CLASSES for count in (Q, G)]
    return EmbeddedImages(seed, Fingerprint.from_string(seed), asking, searched, ids_Q, ids_G, *labels)


def test_a_report_has_the_case_of_every_kind_of_test_set() -> None:
    texts_GD = [rows(G, D, 1), rows(G, E, 3)]
    qrels = {f"q{row}": {f"g{row}": 2.0, f"g{row + 7}": 1.0} for row in range(Q)}
    ids_Q, ids_G = [f"q{row}" for row in range(Q)], [f"g{row}" for row in range(G)]
    prints = [Fingerprint.from_string(name) for name in ("old", "new")]
    texts = [
        EmbeddedTexts(f"{number}", prints[number], rows(Q, dim, 2), texts_GD[number], ids_Q, ids_G, qrels)
        for number, dim in enumerate((D, E))
    ]
    pairs = [
        EmbeddedPairs(f"{number}", prints[number], rows(Q, dim, 2), rows(Q, dim, 3), ids_Q, ids_Q)
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
    qrels = {f"q{row}": {f"g{row}": 2.0, f"g{row + 7}": 1.0} for row in range(Q)}
    ids_Q, ids_G = [f"q{row}" for row in range(Q)], [f"g{row}" for row in range(G)]
    old, new = (
        EmbeddedTexts(name, Fingerprint.from_string(name), rows(Q, dim, seed), rows(G, dim, seed + 1), ids_Q, ids_G, qrels)
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
    with pytest.raises(XcompatError, match="differ in number or dimension"):
        rerank(LabelledPairs(Items(rows(3, 2, 0), "abc"), Items(rows(3, 2, 1), "abc")), rows(3, 2, 0), rows(2, 2, 0), 1)
