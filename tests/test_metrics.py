"""Ranks, recall, graded judgements, linear CKA and intervals against double loops, trec_eval and what must not change them."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest
import pytrec_eval
import torch
from conftest import invoke, refuses, write_embeds
from hypothesis import given, settings
from hypothesis import strategies as st
from test_ranking import random_problem

from xcompat.core.precision import ieee_products
from xcompat.data import read_qrels
from xcompat.evaluation import first_hit_ranks, graded, intervals, linear_cka, negative_flip_rate, recall_at_k, similarity
from xcompat.evaluation.cases import Difference, find_deciding_difference
from xcompat.evaluation.graded import graded_metrics, graded_per_query
from xcompat.evaluation.intervals import PairedDifference, bootstrap_interval, paired_bootstrap, queries_needed
from xcompat.evaluation.metrics import class_embeddings, zero_shot_accuracy, zero_shot_ranks
from xcompat.evaluation.scores import UNIT, ExactRows, rounding_error, to_float32
from xcompat.evaluation.verification import share_per_query
from xcompat.report import load_report
from xcompat.training.evaluate_command import evaluate_embeddings


@given(st.integers(0, 10_000), st.sampled_from([1, 3, 64, 777]), st.sampled_from(["highest", "medium"]))
@settings(max_examples=40, deadline=None)
def test_float32_scores_are_as_near_as_promised_whatever_precision_is_allowed(seed: int, dim: int, precision: str) -> None:
    generator = np.random.default_rng(seed)
    rows = generator.normal(size=(20, dim)) * generator.choice([1e-3, 1.0], size=(20, dim))
    block = ExactRows(rows, "rows", torch.device("cpu")).block(slice(None))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        with ieee_products():
            scores = to_float32(block) @ to_float32(block).T
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision(before)
    assert (scores.double() - block @ block.T / UNIT).abs().max() <= rounding_error(dim)


def test_equal_scores_ids_of_any_kind_and_queries_without_a_match() -> None:
    ones, zeros, ids = np.ones((6, 3)), np.zeros((6, 3)), list("abcdef")
    for gallery in (ones, zeros):
        assert recall_at_k(ones, gallery, ids, ids, ks=(1, 5, 6)) == {1: 0.0, 5: 0.0, 6: 1.0}
    assert first_hit_ranks(np.ones((1, 3)), np.ones((5, 3)), ["a"], list("aaabb")).tolist() == [2]
    assert first_hit_ranks(np.eye(3), np.eye(3), [("a", 1), 7, "7"], [("a", 1), "7", 7]).tolist() == [0, 2, 2]
    scale = np.array([[1e-30], [1e30], [1e300]])
    assert first_hit_ranks(np.eye(3) * scale, np.eye(3) * scale[::-1], "abc", "abc").tolist() == [0, 0, 0]
    assert recall_at_k(np.eye(3), np.eye(3), ["a", "b", "z"], ["a", "b", "c"], ks=(1,)) == {1: 1.0}
    refuses("no query id occurs", recall_at_k, np.eye(2), np.eye(2), ["x", "y"], ["a", "b"])


def test_bad_input_is_one_clear_line() -> None:
    for arguments, message in (
        ((np.eye(2), np.eye(3), "ab", "abc"), "2 dimensions but the gallery has 3"),
        ((np.eye(2), np.eye(2), "a", "ab"), "2 rows but 1 ids"),
        ((np.eye(2), np.eye(2) * np.nan, "ab", "ab"), "NaN or infinite numbers in gallery"),
        ((np.eye(3)[:1], np.diag([1, 1, np.nan]), "a", "abc", (1,), 1), "NaN or infinite numbers in gallery"),
        ((np.full((2, 2), np.inf), np.eye(2), "ab", "ab"), "NaN or infinite numbers in queries"),
        ((np.empty((0, 2)), np.eye(2), "", "ab"), "queries are empty"),
        ((np.ones(2), np.eye(2), "ab", "ab"), "must be a matrix"),
        ((np.eye(2), np.eye(2), [[1], [2]], "ab"), "id 0 is a list"),
        ((np.eye(2), np.eye(2), "ab", "ab", (0,)), "at least 1"),
        ((np.eye(2), np.eye(2), "ab", "ab", (1,), 0), "chunk_size"),
    ):
        refuses(message, recall_at_k, *arguments)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=20), st.integers(1, 3))
def test_negative_flips_equal_a_loop(pairs: list[tuple[int, int]], k: int) -> None:
    flips = sum(1 for old, new in pairs if old < k <= new)
    old_ranks, new_ranks = (np.array(side) for side in zip(*pairs, strict=True))
    assert negative_flip_rate(old_ranks, new_ranks, k) == pytest.approx(flips / len(pairs))
    assert negative_flip_rate(np.append(old_ranks, -1), np.append(new_ranks, -1), k) == pytest.approx(flips / len(pairs))
    for other in (np.array([0]), np.array([0, -1])):
        refuses("same", negative_flip_rate, np.array([0, 0]), other)


def test_zero_shot_is_the_nearest_mean_of_prompts() -> None:
    prompts = np.random.default_rng(0).normal(size=(4, 3, 8)).astype(np.float32)
    classes = class_embeddings(torch.tensor(prompts))
    for class_prompts, embedding in zip(prompts.astype(float), classes, strict=True):
        mean = sum(prompt / np.linalg.norm(prompt) for prompt in class_prompts) / 3
        assert np.allclose(embedding, mean / np.linalg.norm(mean))
    refuses("cancel out", class_embeddings, np.array([[[1.0, 0.0], [-2.0, 0.0]]]))
    refuses("classes, templates, dimensions", class_embeddings, np.eye(2))
    images, classes, labels, _ = random_problem(8, 50, 6, 10, 6)
    nearest = (images @ (classes / np.linalg.norm(classes, axis=1, keepdims=True)).T).argmax(axis=1)
    assert zero_shot_accuracy(images, classes, labels) == pytest.approx((nearest == labels).mean())
    refuses("not one of the 6 classes", zero_shot_ranks, images, classes, labels + 3)


def naive_cka(x: np.ndarray, y: np.ndarray) -> float:
    n = len(x)
    centring = np.eye(n) - 1 / n
    k, m = (centring @ rows @ rows.T @ centring for rows in (x, y))
    return float((k * m).sum() / np.sqrt((k * k).sum() * (m * m).sum()))


def two_spaces(seed: int, n: int, dim: int, other_dim: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(n, dim)) + 3
    return x, x @ generator.normal(size=(dim, other_dim)) + generator.normal(size=(n, other_dim))


@given(st.integers(0, 1000), st.integers(2, 30), st.integers(1, 9), st.integers(1, 9))
def test_cka_equals_its_kernels_in_both_orders(seed: int, n: int, dim: int, other_dim: int) -> None:
    x, y = two_spaces(seed, n, dim, other_dim)
    assert linear_cka(x, y) == pytest.approx(naive_cka(x, y), abs=1e-9)
    assert linear_cka(x, y) == pytest.approx(linear_cka(y, x), abs=1e-9)


def test_cka_ignores_rotation_scale_shift_blocks_and_types(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    x, y = two_spaces(0, 50, 6, 4)
    rotation = np.linalg.qr(np.random.default_rng(1).normal(size=(6, 6)))[0]
    for moved in (x @ rotation, x * 1e-200, x * 1e300, x - 40):
        assert linear_cka(moved, y) == pytest.approx(linear_cka(x, y), rel=1e-9)
        assert linear_cka(moved, x) == pytest.approx(1.0, rel=1e-9)
    stretched = x * np.arange(1, 7)
    assert linear_cka(stretched, x) < 0.99
    x, y = (rows.astype(np.float16) for rows in two_spaces(2, 40, 6, 4))
    expected = linear_cka(x.astype(np.float64), y.astype(np.float64))
    monkeypatch.setattr(similarity, "_ROWS", 7)
    np.save(tmp_path / "x.npy", x)
    for read in (x, torch.tensor(x), np.load(tmp_path / "x.npy", mmap_mode="r")):
        assert linear_cka(read, y) == pytest.approx(expected, rel=1e-9)
    coarse = torch.tensor(x).bfloat16()
    assert linear_cka(coarse, y) == pytest.approx(linear_cka(coarse.double().numpy(), y), rel=1e-9)


def test_bad_matrices_are_one_line() -> None:
    for x, y, message in (
        (np.eye(2), np.eye(3), "x has 2 rows but y has 3"),
        (np.eye(2), np.full((2, 3), 0.1), "all rows of y are equal"),
        (np.zeros((2, 2)), np.eye(2), "all rows of x are equal"),
        (np.ones((1, 2)), np.ones((1, 2)), "all rows of x are equal"),
        (np.eye(2), np.eye(2) * np.nan, "y contains NaN"),
        (np.full((2, 2), np.inf), np.eye(2), "x contains NaN or infinite"),
        (np.eye(2), np.ones(2), "y must be a matrix"),
        (np.empty((0, 2)), np.eye(2), "x are empty"),
    ):
        refuses(message, linear_cka, x, y)


KS = (1, 3, 10)


def drawn(seed: int, queries: int = 40, items: int = 60, dim: int = 8) -> tuple[np.ndarray, np.ndarray, list[str], list[str]]:
    draw = np.random.default_rng(seed)
    names = [f"q{row}" for row in range(queries)], [f"d{row}" for row in range(items)]
    return draw.standard_normal((queries, dim)), draw.standard_normal((items, dim)), *names


def judgements(seed: int, query_ids: list[str], gallery_ids: list[str], lowest: int = 0) -> dict[str, dict[str, int]]:
    draw = np.random.default_rng(seed)
    qrels = {}
    for query in query_ids:
        items = draw.choice(gallery_ids, size=int(draw.integers(1, 9)), replace=False)
        qrels[query] = {item: int(draw.integers(lowest, 4)) for item in items}
    return qrels


@pytest.mark.parametrize("lowest", [0, 1, -1])
def test_metrics_are_those_of_trec_eval(lowest: int) -> None:
    queries, gallery, query_ids, gallery_ids = drawn(0)
    qrels = judgements(1, query_ids, [*gallery_ids, "gone"], lowest)
    unit = [rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (queries, gallery)]
    scores = unit[0] @ unit[1].T
    run = {query: dict(zip(gallery_ids, map(float, row), strict=True)) for query, row in zip(query_ids, scores, strict=True)}
    wanted = {f"{name}.{','.join(map(str, KS))}" for name in ("ndcg_cut", "recall")} | {"map", "recip_rank"}
    per_query = pytrec_eval.RelevanceEvaluator(qrels, wanted).evaluate(run)
    found = graded_metrics(queries, gallery, query_ids, gallery_ids, qrels, KS)
    means = {name: np.mean([values[name] for values in per_query.values()]) for name in per_query["q0"]}
    for k in KS:
        cut = [values["recip_rank"] if values["recip_rank"] >= 1 / k else 0.0 for values in per_query.values()]
        assert found[f"ndcg@{k}"] == pytest.approx(means[f"ndcg_cut_{k}"], abs=1e-9)
        assert found[f"recall@{k}"] == pytest.approx(means[f"recall_{k}"], abs=1e-9)
        assert found[f"mrr@{k}"] == pytest.approx(np.mean(cut), abs=1e-9)
    assert found["map"] == pytest.approx(means["map"], abs=1e-9)


def naive_graded(scores_G: np.ndarray, gains: dict[int, int], missing: list[int], k: int) -> dict[str, float]:
    """Sort the ranking, the lower gain first where scores tie."""
    order = sorted(range(len(scores_G)), key=lambda item: (-scores_G[item], max(gains.get(item, 0), 0)))
    relevant = sorted((gain for gain in [*gains.values(), *missing] if gain > 0), reverse=True)
    if not relevant:
        return dict.fromkeys((f"ndcg@{k}", f"mrr@{k}", f"recall@{k}", "map"), 0.0)
    hits = [(rank, gains[item]) for rank, item in enumerate(order, 1) if gains.get(item, 0) > 0]
    best = sum(gain / math.log2(1 + rank) for rank, gain in enumerate(relevant[:k], 1))
    first = hits[0][0] if hits else math.inf
    return {
        f"ndcg@{k}": sum(gain / math.log2(1 + rank) for rank, gain in hits if rank <= k) / best,
        f"mrr@{k}": 1 / first if first <= k else 0.0,
        f"recall@{k}": sum(rank <= k for rank, _ in hits) / len(relevant),
        "map": sum(place / rank for place, (rank, _) in enumerate(hits, 1)) / len(relevant),
    }


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_ties_are_against_you_as_in_a_sorted_ranking(data: st.DataObject) -> None:
    directions = np.array([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])  # so that most scores tie
    places = st.integers(0, 2)
    gallery = directions[data.draw(st.lists(places, min_size=1, max_size=7))]
    queries = directions[data.draw(st.lists(places, min_size=1, max_size=4))]
    gains = st.dictionaries(st.integers(0, len(gallery) - 1), st.integers(-1, 3), max_size=len(gallery))
    judged = {query: data.draw(gains) for query in range(len(queries))}
    missing = {query: data.draw(st.lists(st.integers(1, 3), max_size=2)) for query in judged}
    qrels = {query: gains | {100 + place: gain for place, gain in enumerate(missing[query])} for query, gains in judged.items()}
    k = data.draw(st.integers(1, 8))
    asked = queries, gallery, range(len(queries)), range(len(gallery)), qrels, (k,)
    if not any(qrels.values()):
        refuses("no query has a judgement", graded_metrics, *asked)
        return
    found = graded_per_query(*asked)
    expected = [naive_graded(gallery @ queries[row], judged[row], missing[row], k) for row in found.rows_J.tolist()]
    assert found.rows_J.tolist() == [query for query, gains in qrels.items() if gains]
    for metric, values in found.values.items():
        assert values.tolist() == pytest.approx([each[metric] for each in expected], abs=1e-12)


def test_unusable_and_bad_judgements_are_named() -> None:
    queries, gallery, query_ids, gallery_ids = drawn(4, queries=4, items=5)
    qrels = {"q0": {"d1": 1, "gone": 2}, "q1": {"d2": 0}, "q2": {}, "stranger": {"d1": 1}}
    found = graded_per_query(queries, gallery, query_ids, gallery_ids, qrels)
    assert found.rows_J.tolist() == [0, 1]
    assert found.unusable == graded.UnusableIds(["q2", "q3"], ["q1"], ["stranger"], ["gone"])
    assert found.values["recall@10"].tolist() == [0.5, 0.0], "what is not in the gallery cannot be found, and counts"
    queries, gallery, query_ids, gallery_ids = drawn(5, queries=3, items=4)
    for change, message in (
        ({"query_ids": ["q0", "q0", "q2"]}, "two rows have the id 'q0'"),
        ({"gallery_ids": ["d0", "d1", "d2", "d2"]}, "two rows have the id 'd2'"),
        ({"query_ids": ["q0"]}, "3 rows but 1 ids"),
        ({"qrels": {"stranger": {"d0": 1}}}, "no query has a judgement"),
        ({"ks": (0,)}, "cut-offs of at least 1"),
        ({"qrels": {"q0": {"d0": 1, "d1": float("nan")}}}, "the gain of 'd1' for the query 'q0' is nan"),
        ({"qrels": {"q0": {"d0": float("inf")}}}, "the gain of 'd0' for the query 'q0' is inf"),
    ):
        given = {"query_ids": query_ids, "gallery_ids": gallery_ids, "qrels": {"q0": {"d0": 1}}, "ks": (10,)} | change
        refuses(message, graded_metrics, queries, gallery, **given)


def judged_folder(folder: Path, queries: np.ndarray, texts: np.ndarray | None = None) -> Path:
    for kind, rows in (("query", queries), ("text", texts)):
        if rows is not None:
            write_embeds(folder, [f"{kind[0]}{row}" for row in range(len(rows))], **{kind: rows.astype(np.float32)})
    return folder


def test_evaluate_judges_folders_by_their_judgements(tmp_path: Path) -> None:
    draw = np.random.default_rng(6)
    texts = draw.standard_normal((40, 16))
    old = judged_folder(tmp_path / "old", texts[:12] + 3 * draw.standard_normal((12, 16)), texts)
    new = judged_folder(tmp_path / "new", texts[:12] + 0.1 * draw.standard_normal((12, 16)))
    qrels = {f"q{row}": {f"t{row}": 2, f"t{row + 12}": 1} for row in range(10)} | {"q10": {"gone": 1}, "q99": {"t0": 1}}
    lines = [f"{query} 0 {item} {gain}" for query, items in qrels.items() for item, gain in items.items()]
    (tmp_path / "qrels.txt").write_text("\n".join(lines) + "\n")
    asked = ["evaluate", "--old", old, "--new", new, "--qrels", tmp_path / "qrels.txt", "--output", tmp_path / "out"]
    said = " ".join(invoke(*asked).split())
    report = load_report(tmp_path / "out")
    cases = {case.label: case for case in report.cases}
    assert set(cases) == {"old/old", "new/old"}
    stored = np.load(old / "text_embeds.npy")
    ids = [[f"{kind}{row}" for row in range(count)] for kind, count in (("q", 12), ("t", 40))]
    for label, folder in (("old/old", old), ("new/old", new)):
        found = graded_metrics(np.load(folder / "query_embeds.npy"), stored, *ids, qrels)
        assert {name: cases[label].metrics[name] for name in found} == pytest.approx(found)
        assert cases[label].n_queries == 11, "q11 has no judgement, and q99 is not there"
    assert report.criterion.backward_compatible
    for note in ("excluded: 1, e.g. 'q99'", "not found: 1, e.g. 'gone'", "1 queries have no judgement", "nDCG@10"):
        assert note in said
    refuses("lacks text_embeds.npy", evaluate_embeddings, new, new, None, None, tmp_path / "bare", tmp_path / "qrels.txt")


def test_judgements_are_read_as_trec_beir_and_mteb_write_them(tmp_path: Path) -> None:
    trec, beir, mteb = tmp_path / "qrels.txt", tmp_path / "test.tsv", tmp_path / "test.jsonl"
    trec.write_text("1 0 a b\n1 0 d1 2\n\n2 0 d2 -1\n")
    beir.write_text("query-id\tcorpus-id\tscore\n1\td1\t2\n2\td2\t-1\n")
    mteb.write_text('{"query-id": "1", "corpus-id": "d1", "score": 2}\n{"query-id": 2, "corpus-id": "d2", "score": -1}\n')
    assert read_qrels(trec) == read_qrels(beir) == read_qrels(mteb) == {"1": {"d1": 2.0}, "2": {"d2": -1.0}}
    for text, message in (
        ("q d 1\nq d\n", "line 2 is not a judgement"),
        ("q d nan\nq d inf\n", "line 2 is not a judgement"),
        ("q d 1\nq d 2\n", "line 2 contradicts an earlier gain of 'd' for 'q'"),
        ('{"query-id": "q", "score": 1}\n', "line 1 is not a judgement"),
        ('{"query-id": "q", "corpus-id"\n', "line 1 is not a judgement"),
        ("query item gain\n", "contains no judgements"),
    ):
        (tmp_path / "qrels.tsv").write_text(text)
        refuses(message, read_qrels, tmp_path / "qrels.tsv")
    refuses("does not exist", read_qrels, tmp_path / "gone.tsv")


def naive_interval(values: np.ndarray, clusters: list, n_resamples: int, level: float, seed: int) -> tuple[float, float]:
    generator = np.random.default_rng(seed)
    names = list(dict.fromkeys(clusters))
    means = []
    for _ in range(n_resamples):
        drawn = []
        for index in generator.integers(len(names), size=len(names)):
            drawn += [value for value, cluster in zip(values, clusters, strict=True) if cluster == names[index]]
        means.append(np.mean(drawn))
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


@given(st.lists(st.tuples(st.floats(-5, 5), st.sampled_from("abcde")), min_size=1, max_size=25), st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_intervals_equal_a_naive_loop(items: list, seed: int) -> None:
    values = np.array([value for value, _ in items])
    clusters = [cluster for _, cluster in items]
    for chosen in (clusters, None):
        expected = naive_interval(values, chosen or list(range(len(values))), 40, 0.9, seed)
        assert bootstrap_interval(values, 40, 0.9, seed, chosen) == pytest.approx(expected, abs=1e-9)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(intervals, "_BLOCK_NUMBERS", 33)
        assert bootstrap_interval(values, 40, 0.9, seed) == pytest.approx(expected, abs=1e-9), "memory changes no draws"
    numbers = np.array([ord(cluster) for cluster in clusters])
    assert bootstrap_interval(values, 40, 0.9, seed, numbers) == bootstrap_interval(values, 40, 0.9, seed, clusters)


def test_paired_difference_sees_what_single_intervals_miss() -> None:
    generator = np.random.default_rng(3)
    old = generator.random(400) < 0.4
    new = old | (generator.random(400) < 0.05)
    difference = paired_bootstrap(new, old)
    assert difference.mean == pytest.approx(new.mean() - old.mean()) and difference.excludes_zero
    assert bootstrap_interval(new)[0] < bootstrap_interval(old)[1]
    mirrored = paired_bootstrap(old, new)
    assert (mirrored.mean, mirrored.low, mirrored.high) == pytest.approx((-difference.mean, -difference.high, -difference.low))
    assert not paired_bootstrap(old, old).excludes_zero
    assert not PairedDifference(0.1, -0.1, 0.2).excludes_zero


@given(st.lists(st.tuples(st.integers(-1, 1), st.sampled_from("abcdef")), min_size=2, max_size=40), st.floats(0.5, 0.99))
@settings(max_examples=50, deadline=None)
def test_the_queries_needed_are_the_fewest_with_that_power(items: list, power: float) -> None:
    """The power of a test on n queries, by its definition, with the variance summed in a loop."""
    values, clusters = np.array([float(value) for value, _ in items]), [cluster for _, cluster in items]
    names, mean = sorted(set(clusters)), sum(values) / len(values)
    needed = queries_needed(values, 0.95, power, clusters)
    if mean == 0 or len(names) == 1:
        assert needed is None
        return
    assert needed is not None
    squares = 0.0
    for name in names:
        squares += sum(value - mean for value, cluster in zip(values, clusters, strict=True) if cluster == name) ** 2
    variance = squares * len(names) / (len(names) - 1) / len(values)  # of one query's share in the mean

    def power_of(n: int) -> float:
        return NormalDist().cdf(abs(mean) / (variance / n) ** 0.5 - NormalDist().inv_cdf(0.975)) if variance > 0 else 1.0

    assert power_of(needed) >= power - 1e-9
    assert needed == 1 or power_of(needed - 1) <= power + 1e-9


def test_differences_that_cancel_but_for_rounding_are_none() -> None:
    """Equal shares of pairs by other queries: their linearised numbers have means that rounding tells apart."""
    pairs = np.array([1, 3, 3, 2])
    (mine, share), (other, same) = (share_per_query(np.array(each), pairs) for each in ([1, 1, 0, 1], [0, 1, 2, 0]))
    assert share == same and (mine - other).mean() != 0, "rounding is what this is about"
    tie = paired_bootstrap(mine, other)
    assert (tie.mean, tie.queries_needed) == (0, None)
    assert tie.low < 0 < tie.high
    assert paired_bootstrap(np.full(9, 1e-18), np.zeros(9)) == PairedDifference(0, 0, 0)
    assert queries_needed(np.array([0.1, 0.2, -0.3] * 50)) is None
    assert queries_needed(np.array([0.1, 0.2, -0.3] * 50) * 1e6) is None, "rounding grows with the numbers"
    assert queries_needed(np.array([0.1, 0.2, -0.3] * 50) + 1e-6) is not None
    difference = Difference("image-to-image", "tar@far=1e-2", tie.mean, (tie.low, tie.high), tie.queries_needed)
    assert not find_deciding_difference([difference])


def test_values_without_an_interval_are_refused() -> None:
    for values, options, said in (
        (np.array([]), {}, "empty"),
        (np.ones(3), {"level": 95}, "level"),
        (np.ones(3), {"clusters_Q": ["a", "b"]}, "3 rows but 2 ids"),
        (np.ones((3, 2)), {}, "a number per query"),
    ):
        refuses(said, bootstrap_interval, values, **options)
    refuses("same queries", paired_bootstrap, np.ones(3), np.ones(4))
