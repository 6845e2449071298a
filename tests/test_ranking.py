"""Ranking by class and acceptance rates against sorted lists and loops over every threshold; ties, chunks and processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.distributed as dist
import warm
from conftest import refuses
from hypothesis import given, settings
from hypothesis import strategies as st

from xcompat import Fingerprint, XcompatError
from xcompat.evaluation import (
    EmbeddedImages,
    EvaluatedModels,
    EvaluationOptions,
    counting,
    evaluate,
    labelled,
    ranking,
    verification,
)
from xcompat.evaluation.graded import graded_metrics
from xcompat.evaluation.metrics import first_hit_ranks, zero_shot_accuracy
from xcompat.evaluation.ranking import RankedQueries, cmc, mean_average_precision, ranking_per_query
from xcompat.evaluation.scores import ExactRows, lift_rows, tie_margin
from xcompat.evaluation.verification import tar_at_far, tpir_at_far

# One or four entries of +-1: norms are 1 and 2, so normalised vectors and their products are exact in any arithmetic; many tie.
_SPARSE = st.tuples(st.integers(0, 3), st.sampled_from([-1.0, 1.0])).map(lambda pick: np.eye(4)[pick[0]] * pick[1])
_DENSE = st.lists(st.sampled_from([-1.0, 1.0]), min_size=4, max_size=4).map(np.array)
_ROW = _SPARSE | _DENSE


def scored_pairs(
    queries: Sequence, gallery: Sequence, query_labels: Sequence, gallery_labels: Sequence, *ids: Any, cameras: Any = (None, None)
) -> list[list[tuple[float, bool]]]:
    """Return for each query the score of each item, without itself and those of its class and camera, and if it has its class."""
    found = []
    for row, query in enumerate(queries):
        pairs = []
        for column, item in enumerate(gallery):
            is_right = query_labels[row] == gallery_labels[column]
            is_itself, same_camera = (bool(of) and of[0] is not None and of[0][row] == of[1][column] for of in (ids, cameras))
            if not is_itself and not (same_camera and is_right):
                pairs.append((float(query @ item / (np.linalg.norm(query) * np.linalg.norm(item))), is_right))
        found.append(pairs)
    return found


def naive_ranking(*problem: Any, cameras: Any = (None, None)) -> list[tuple[int, float, float, float, int]]:
    """Sort each query's gallery, negatives first among equals, and walk down: first hit, AP, AP@R, AP@3, positives."""
    found = []
    for pairs in scored_pairs(*problem, cameras=cameras):
        ranked = [is_right for _, is_right in sorted((-score, is_right) for score, is_right in pairs)]
        n = sum(ranked)
        precisions = [(place, sum(ranked[:place]) / place) for place, hit in enumerate(ranked, 1) if hit]
        whole, at_r, at_3 = (sum(value for place, value in precisions if place <= cut) for cut in (len(ranked), n, 3))
        if n:
            found.append((ranked.index(True), whole / n, at_r / n, at_3 / min(n, 3), n))
        else:
            found.append((-1, np.nan, np.nan, np.nan, 0))
    return found


def assert_same(ranked: RankedQueries, expected: list[tuple[int, float, float, float, int]]) -> None:
    first, whole, at_r, _, positives = zip(*expected, strict=True)
    assert ranked.first_hit_ranks_Q.tolist() == list(first)
    assert ranked.positives_Q.tolist() == list(positives)
    assert np.allclose(ranked.average_precision_Q, whole, rtol=1e-12, equal_nan=True)
    assert np.allclose(ranked.average_precision_at_r_Q, at_r, rtol=1e-12, equal_nan=True)


def assert_identical(one: RankedQueries, other: RankedQueries) -> None:
    for name in RankedQueries.__dataclass_fields__:
        assert getattr(one, name).tobytes() == getattr(other, name).tobytes()


def random_problem(seed: int, n_queries: int, n_gallery: int, dim: int, n_classes: int) -> tuple:
    generator = np.random.default_rng(seed)
    centres = generator.normal(size=(n_classes, dim))
    labels = [generator.integers(n_classes, size=n) for n in (n_queries, n_gallery)]
    embeds = [(centres[side] + generator.normal(size=(len(side), dim))).astype(np.float32) for side in labels]
    return (*embeds, *labels)


@pytest.mark.parametrize("n_classes", [1, 2, 7, 60])
def test_ranking_equals_sorted_lists(n_classes: int) -> None:
    problem = random_problem(n_classes, 23, 67, 24, n_classes)
    expected = naive_ranking(*problem)
    assert_same(ranking_per_query(*problem, chunk_size=3), expected)
    assert first_hit_ranks(*problem).tolist() == [row[0] for row in expected]
    known = [row for row in expected if row[-1]]
    assert (len(known) < len(expected)) == (n_classes == 60)
    assert cmc(*problem, ks=(1, 4)) == {k: np.mean([row[0] < k for row in known]) for k in (1, 4)}
    for at, column in ((None, 1), ("R", 2), (3, 3)):
        assert mean_average_precision(*problem, at=at) == pytest.approx(np.mean([row[column] for row in known]))


@given(st.lists(_ROW, min_size=1, max_size=8), st.lists(_ROW, min_size=1, max_size=40), st.data())
@settings(max_examples=150)
def test_ties_are_pessimistic_and_chunks_do_not_matter(queries: list, gallery: list, data: st.DataObject) -> None:
    def draw(values: Sequence, size: int) -> list:
        return data.draw(st.lists(st.sampled_from(values), min_size=size, max_size=size))

    labels = draw("abc", len(queries)), draw("abd", len(gallery))
    ids = data.draw(st.sampled_from([(None, None), (draw(range(9)[:4], len(queries)), draw(range(12), len(gallery)))]))
    cameras = data.draw(st.sampled_from([(None, None), (draw("xy", len(queries)), draw("xyz", len(gallery)))]))
    problem = (np.array(queries), np.array(gallery), *labels, *ids)
    first_hits = [row[0] for row in naive_ranking(*problem[:4])]
    for chunk_size in (1, 3, 64):
        assert first_hit_ranks(*problem[:4], chunk_size).tolist() == first_hits
    taken_by: dict = {"query_cameras": cameras[0], "gallery_cameras": cameras[1]}
    expected = naive_ranking(*problem, cameras=cameras)
    if not any(row[-1] for row in expected):
        refuses("no query has another item of its class", ranking_per_query, *problem, **taken_by)
        return
    ranked = ranking_per_query(*problem, **taken_by)
    assert_same(ranked, expected)
    for chunk_size in (1, 2):
        assert_identical(ranking_per_query(*problem, **taken_by, chunk_size=chunk_size), ranked)
    at_three = [row[3] for row in expected if row[-1]]
    assert mean_average_precision(*problem, **taken_by, at=3) == pytest.approx(np.mean(at_three))
    assert mean_average_precision(*problem, **taken_by, at=np.int64(3)) == mean_average_precision(*problem, **taken_by, at=3)
    assert cmc(*problem, **taken_by, ks=(2,)) == {2: np.mean([row[0] < 2 for row in expected if row[-1]])}


@given(st.integers(0, 10_000), st.integers(1, 40), st.sampled_from([1, 7, 96]))
@settings(max_examples=30)
def test_copies_tie_in_any_position_chunk_and_scale(seed: int, chunk_size: int, dim: int) -> None:
    """Rounding must not break the tie between copies: a negative twin before each positive leaves precision at most half."""
    generator = np.random.default_rng(seed)
    items = generator.normal(size=(20, dim)).astype(np.float32)
    order = generator.permutation(40)
    gallery, labels = np.concatenate([items, items * 4])[order], np.repeat([0, 1], 20)[order]
    ranked = ranking_per_query(items, gallery, [0] * 20, labels, chunk_size=chunk_size)
    assert (ranked.first_hit_ranks_Q >= 1).all()
    assert (ranked.average_precision_Q <= 0.5).all()
    assert_identical(ranked, ranking_per_query(items, gallery, [0] * 20, labels))


def test_every_way_to_cut_the_work_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = (*random_problem(0, 60, 300, 8, 3), range(60), np.random.default_rng(0).permutation(300))
    whole = ranking_per_query(*problem)
    assert_same(whole, naive_ranking(*problem))
    for module, name, value in (
        (labelled, "_BLOCK_POSITIVES", 1000),
        (labelled, "_TILE", 700),
        (counting, "_TILE", {"cpu": 1200, "cuda": 1200}),
        (counting, "_BUCKETS", (5, 9)),
    ):
        monkeypatch.setattr(module, name, value)
        for chunk_size in (3, 16):
            assert_identical(ranking_per_query(*problem, chunk_size=chunk_size), whole)


@pytest.mark.parametrize(("n_far", "dim"), [(600, 96), (3, 96), (600, 2)])
def test_scores_that_float32_cannot_tell_apart_are_ranked_exactly(n_far: int, dim: int) -> None:
    """Each positive has negatives within 1e-5 of it, above and below: few among others, or most of the gallery."""
    generator = np.random.default_rng(0)
    queries = generator.normal(size=(12, dim))
    positives = np.repeat(queries, 4, axis=0) + generator.normal(size=(48, dim))
    nearly = np.concatenate([positives + 1e-5 * generator.normal(size=positives.shape) for _ in range(2)])
    gallery = np.concatenate([positives, nearly, generator.normal(size=(n_far, dim))])
    labels = np.concatenate([np.repeat(np.arange(12), 4), np.full(len(gallery) - 48, -1)])
    exact_QD, exact_GD = (ExactRows(rows, "rows", torch.device("cpu")).block(slice(None)).numpy() for rows in (queries, gallery))
    scores = exact_QD @ exact_GD.T
    expected_first, expected_precision = [], []
    for query, row in enumerate(scores):
        own, others = row[labels == query], row[labels != query]
        ranks = sorted(int((own > best).sum() + 1 + (others >= best - tie_margin(dim)).sum()) for best in own)
        expected_first.append(ranks[0] - 1)
        expected_precision.append(np.mean([place / rank for place, rank in enumerate(ranks, 1)]))
    ranked = ranking_per_query(queries, gallery, range(12), labels)
    assert ranked.first_hit_ranks_Q.tolist() == expected_first == first_hit_ranks(queries, gallery, range(12), labels).tolist()
    assert np.allclose(ranked.average_precision_Q, expected_precision, rtol=1e-12)


def test_crowded_and_equal_scores_are_ranked_exactly() -> None:
    """Buckets span a query's positives: here all but one stand in a sliver of that, and most scores share a bucket."""
    generator = np.random.default_rng(1)
    crowd = np.array([1.0, 0, 0, 0]) + generator.normal(size=(60, 4)) * 0.05
    gallery, labels = np.concatenate([-crowd[:1], crowd]), np.concatenate([[0], generator.integers(2, size=60)])
    assert_same(ranking_per_query(crowd[:5], gallery, [0] * 5, labels), naive_ranking(crowd[:5], gallery, [0] * 5, labels))
    labels = "aabbcc"
    for embeds in (np.ones((6, 3)), np.zeros((6, 3))):
        assert cmc(embeds, embeds, labels, labels, range(6), range(6), ks=(1, 4, 5)) == {1: 0.0, 4: 0.0, 5: 1.0}
        assert mean_average_precision(embeds, embeds, labels, labels, range(6), range(6)) == pytest.approx(1 / 5)
        assert mean_average_precision(embeds, embeds, labels, labels, range(6), range(6), at="R") == 0.0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_kinds_of_arrays_do_not_matter(dtype: torch.dtype, tmp_path: Path) -> None:
    queries, gallery, *labels = random_problem(8, 30, 60, 32, 5)
    queries_t, gallery_t = torch.tensor(queries).to(dtype), torch.tensor(gallery).to(dtype).requires_grad_()
    plain = queries_t.double().numpy(), gallery_t.detach().double().numpy()
    expected = ranking_per_query(*plain, *labels)
    assert_identical(ranking_per_query(queries_t, gallery_t, *map(torch.tensor, labels)), expected)
    first_hits = first_hit_ranks(queries_t, gallery_t, *map(torch.tensor, labels))
    assert first_hits.dtype == np.int64 and first_hits.tolist() == expected.first_hit_ranks_Q.tolist()
    np.save(tmp_path / "gallery.npy", plain[1])
    mapped = np.load(tmp_path / "gallery.npy", mmap_mode="r")
    assert_identical(ranking_per_query(plain[0], mapped, *labels, chunk_size=1), expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("n_classes", [2, 40])
def test_cuda_gives_the_same_bits_and_rates(n_classes: int) -> None:
    queries, gallery, *labels = random_problem(10, 700, 3000, 64, n_classes)
    ids, on_device = (range(700), range(3000)), (torch.tensor(queries).cuda(), torch.tensor(gallery).cuda())
    found = ranking_per_query(*on_device, *labels, *ids, chunk_size=64)
    assert_identical(found, ranking_per_query(queries, gallery, *labels, *ids))
    labels[0] += 1  # the last class has no item
    for rate in (tar_at_far, tpir_at_far):
        assert rate(*on_device, *labels, fars=_FARS) == rate(queries, gallery, *labels, fars=_FARS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((np.eye(2), np.eye(2), "a", "ab"), "query labels: 2 rows but 1 ids"),
        ((np.eye(2), np.eye(2), "ab", "abc"), "gallery labels: 2 rows but 3 ids"),
        ((np.eye(2), np.eye(2), "ab", "ab", "x", "xy"), "query ids: 2 rows but 1 ids"),
        ((np.eye(2), np.eye(2), "ab", "ab", "xy"), "only one side has sample ids"),
        ((np.eye(2), np.eye(2) * np.nan, "ab", "ab"), "NaN or infinite numbers in gallery"),
        ((np.eye(2), np.eye(2), "ab", "cd"), "no query has another item of its class"),
        ((np.eye(2), np.eye(2), "ab", "ab", "xy", "xy"), "no query has another item of its class"),
    ],
)
def test_bad_input_is_one_clear_line(arguments: tuple, message: str) -> None:
    for metric in (cmc, mean_average_precision, ranking_per_query):
        refuses(message, metric, *arguments)


def test_cuts_chunks_shares_and_ranks_have_ranges() -> None:
    problem = (np.eye(2), np.eye(2), "ab", "ab")
    for at in (0, "r", 0.5):
        refuses("at must be None", mean_average_precision, *problem, at=at)
    for ks in ((), (1, 0)):
        refuses("cut-offs of at least 1", cmc, *problem, ks=ks)
    refuses("chunk_size must be at least 1", ranking_per_query, *problem, chunk_size=0)
    for metric in (tar_at_far, tpir_at_far):
        for fars in ((), (0.1, -1e-3), (np.nan,)):
            refuses("fars must be one or more shares", metric, np.eye(3), np.eye(3), "abz", "aab", fars=fars)
    refuses("rank must be at least 1", tpir_at_far, np.eye(2), np.eye(2), "az", "ab", rank=0)


def draw_ties(dim: int, values: int, count: int, seed: int = 0) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Return queries with two items of exactly equal cosines, found in integers: (q·a)² (b·b) = (q·b)² (a·a)."""
    generator, found = np.random.default_rng(seed), list[tuple[np.ndarray, np.ndarray, np.ndarray]]()
    while len(found) < count:
        rows = generator.integers(0, values, (20_000, 3, dim))
        query, one, other = rows[:, 0], rows[:, 1], rows[:, 2]
        to_one, to_other = (query * one).sum(1), (query * other).sum(1)
        is_tie = (to_one > 0) & (to_one**2 * (other**2).sum(1) == to_other**2 * (one**2).sum(1))
        is_copy = (one * (other**2).sum(1)[:, None] == other * (one * other).sum(1)[:, None]).all(1)
        found += [tuple(row.astype(float)) for row in rows[is_tie & ~is_copy]]
    return found[:count]


TIES = {"integers": (4, 5, 200), "binary": (24, 2, 200)}


@pytest.mark.parametrize("kind", TIES)
def test_the_wrong_one_of_two_tied_items_ranks_first(kind: str) -> None:
    for query, one, other in draw_ties(*TIES[kind]):
        asked, pair = query[None], np.stack([one, other])
        assert first_hit_ranks(asked, pair, "a", "ab").tolist() == [1]
        assert ranking_per_query(asked, pair, "a", "ab").average_precision_Q.tolist() == [0.5]
        assert graded_metrics(asked, pair, "q", "ab", {"q": {"a": 1}}, (1,))["mrr@1"] == 0
        lower_gain_first = graded_metrics(asked, pair, "q", "ab", {"q": {"a": 3, "b": 1}}, (1,))
        assert lower_gain_first["ndcg@1"] == pytest.approx(1 / 3)
        assert zero_shot_accuracy(asked, pair, [0]) == 0
        assert tar_at_far(asked, pair, "a", "ab", fars=(0,)) == {0: 0}, "no threshold is between them"
        assert tpir_at_far(np.stack([query, query]), pair, "az", "ab", fars=(0,)) == {0: 0}
        both = ranking_per_query(asked, np.stack([one, other, -query]), "a", "aab")
        assert (both.first_hit_ranks_Q.tolist(), both.average_precision_Q.tolist()) == ([0], [1.0]), "both are right"


def test_prepared_pairs_rank_distances_and_other_queries() -> None:
    generator, looked_at = np.random.default_rng(0), 0
    for query, one, other in generator.integers(0, 5, (4000, 3, 4)).astype(float):
        if ((query - one) ** 2).sum() == ((query - other) ** 2).sum() > 0 and not np.array_equal(one, other):
            queries, gallery = lift_rows(query[None], np.stack([one, other, query + 3]))
            pairs = labelled.LabelledPairs(labelled.Items(queries, "a"), labelled.Items(gallery, "abc"), are_lifted=True)
            assert ranking.rank(pairs).first_hit_ranks_Q.tolist() == [1]
            looked_at += 1
    assert looked_at > 50
    queries, gallery, *labels = random_problem(7, 23, 67, 24, 7)
    ids = range(23), range(20, 87)
    pairs = labelled.LabelledPairs(labelled.Items(-queries, labels[0], ids[0]), labelled.Items(gallery, labels[1], ids[1]))
    assert_identical(ranking.rank(pairs.with_queries(queries)), ranking_per_query(queries, gallery, *labels, *ids))
    refuses("queries have 23 dimensions but the gallery has 24", pairs.with_queries, queries[:, :23])


RANKS = 3


def _data() -> tuple[np.ndarray, np.ndarray, list[int], list[int]]:
    """Return coarse embeddings, so that many scores tie, and classes of which some are on one side only."""
    generator = np.random.default_rng(0)
    queries, gallery = generator.integers(-1, 2, (50, 4)) + 0.5, generator.integers(-1, 2, (70, 4)) + 0.5
    return queries, gallery, generator.integers(0, 9, 50).tolist(), generator.integers(3, 12, 70).tolist()


def _ranked(shared: bool, queries_at: slice) -> dict[str, Any]:
    queries, gallery, query_labels, gallery_labels = _data()
    queries, query_labels = queries[queries_at], query_labels[queries_at]
    found = ranking_per_query(queries, gallery, query_labels, gallery_labels, chunk_size=7, shared=shared)
    first = first_hit_ranks(queries, gallery, query_labels, gallery_labels, chunk_size=7, shared=shared)
    return {"first": first, **vars(found)}


def _rank_main(rank: int, store: str, out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    results: dict[str, Any] = {"many": _ranked(True, slice(None)), "fewer_than_ranks": _ranked(True, slice(0, 2))}
    try:
        ranking_per_query(np.eye(4), np.eye(4), "abcd", "efgh", shared=True)
    except XcompatError as error:
        results["none"] = str(error)
    torch.save(results, f"{out}.{rank}")
    dist.destroy_process_group()


def test_shared_ranks_are_those_of_one_process(tmp_path: Path) -> None:
    warm.spawn(_rank_main, (str(tmp_path / "store"), str(tmp_path / "out")), RANKS)
    assert {0, 1, 2} & set(_data()[2]), "some queries find nothing"
    for rank in range(RANKS):
        results = torch.load(tmp_path / f"out.{rank}", weights_only=False)
        for name, queries_at in (("many", slice(None)), ("fewer_than_ranks", slice(0, 2))):
            for key, expected in _ranked(False, queries_at).items():
                np.testing.assert_array_equal(results[name][key], expected, err_msg=f"{name} {key} on rank {rank}")
        assert results["none"].startswith("no query has another item of its class")


_ROWS = st.lists(_ROW, min_size=1, max_size=12)
_FARS = (0.0, 0.1, 0.25, 0.5, 1.0)


def naive_share(genuine: list[float], impostors: list[float], far: float) -> float:
    """Try every threshold and keep the best share of genuine scores among those that accept few enough impostors.

    What is not found has a score of minus infinity, which passes no threshold.
    """
    shares = [0.0]
    for threshold in {*genuine, *impostors} - {-np.inf}:
        if sum(score >= threshold for score in impostors) / len(impostors) <= far:
            shares.append(sum(score >= threshold for score in genuine) / len(genuine))
    return max(shares)


def naive_tar(problem: tuple) -> dict[float, float] | None:
    pairs = [pair for of_query in scored_pairs(*problem) for pair in of_query]
    genuine, impostors = [score for score, same in pairs if same], [score for score, same in pairs if not same]
    return {far: naive_share(genuine, impostors, far) for far in _FARS} if genuine and impostors else None


def naive_tpir(problem: tuple, rank: int) -> dict[float, float] | None:
    genuine, impostors = [], []
    for pairs in scored_pairs(*problem):
        own = [score for score, same in pairs if same]
        if not own:
            impostors.append(max((score for score, _ in pairs), default=-np.inf))
        else:
            before = sum(score >= max(own) for score, same in pairs if not same)
            genuine.append(max(own) if before < rank else -np.inf)
    return {far: naive_share(genuine, impostors, far) for far in _FARS} if genuine and impostors else None


@st.composite
def problems(draw: Callable) -> tuple:
    queries, gallery = np.array(draw(_ROWS)), np.array(draw(_ROWS))
    sides = [(values, len(rows)) for values, rows in (("abc", queries), ("abd", gallery))]
    labels = [draw(st.lists(st.sampled_from(values), min_size=n, max_size=n)) for values, n in sides]
    ids = [draw(st.lists(st.integers(0, 9), min_size=n, max_size=n)) for _, n in sides]
    return (queries, gallery, *labels, *draw(st.sampled_from([(), tuple(ids)])))


@given(problems(), st.integers(1, 3))
@settings(max_examples=100)
def test_rates_equal_trying_every_threshold(problem: tuple, rank: int) -> None:
    for rate, options, expected, said in (
        (tar_at_far, {}, naive_tar(problem), "no pair of (one class|two classes)"),
        (tpir_at_far, {"rank": rank}, naive_tpir(problem, rank), "no query has another item|there are no impostors"),
    ):
        if expected is None:
            refuses(said, rate, *problem, fars=_FARS, **options)
        else:
            assert rate(*problem, fars=_FARS, **options) == expected


def test_rates_are_exact_shares_of_random_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = random_problem(0, 30, 40, 12, 20)
    assert tar_at_far(*problem, fars=_FARS) == naive_tar(problem)
    for rank in (1, 5):
        assert tpir_at_far(*problem, fars=_FARS, rank=rank) == naive_tpir(problem, rank)
    fars = np.linspace(0, 0.5, 26).tolist()
    expected = tar_at_far(*problem, fars=fars)
    monkeypatch.setattr(verification, "_SLACK", 1)
    monkeypatch.setattr("xcompat.evaluation.labelled._TILE", 70)
    for far in fars:
        assert tar_at_far(*problem, fars=(far,)) == {far: expected[far]}
    scores = np.arange(100) / 200  # 0.29 of 100 is 28.999999999999996 in floats, and 29 of 100 is 0.29 all the same
    gallery = np.stack([scores, np.sqrt(1 - scores**2)], axis=1)
    bar = np.array([[0.3525, np.sqrt(1 - 0.3525**2)]])  # between the 29th highest negative and the 30th
    arguments = (np.array([[1.0, 0.0]]), np.concatenate([gallery, bar]), [0], [1] * 100 + [0])
    assert tar_at_far(*arguments, fars=(0.28, 0.29)) == {0.28: 0.0, 0.29: 1.0}


@pytest.mark.parametrize("metric", ["cosine", "l2"])
def test_copies_tie_in_an_evaluation_by_either_metric(metric: Literal["cosine", "l2"]) -> None:
    """Whatever a query's class has in the gallery, a copy of another class is there too, and nothing can be accepted."""
    rows, half = np.random.default_rng(0).normal(size=(60, 32)), [*range(60)]
    names = [f"q{row}" for row in range(120)], [f"g{row}" for row in range(120)]
    twice = np.concatenate([rows, rows])
    strange = [100 + row for row in half]
    verified = EmbeddedImages(
        "m", Fingerprint.from_string("m"), rows, twice, names[0][:60], names[1], half, [*half, *np.roll(half, 1)], metric=metric
    )
    case = evaluate(EvaluatedModels(verified, verified), EvaluationOptions(n_resamples=2, fars=(0.0, 1e-3))).cases[0]
    assert [case.metrics[name] for name in ("tar@far=0e+0", "tar@far=1e-3")] == [0, 0]
    identified = EmbeddedImages(
        "m", Fingerprint.from_string("m"), twice, rows, names[0], names[1][:60], [*half, *strange], half, metric=metric
    )
    case = evaluate(EvaluatedModels(identified, identified), EvaluationOptions(n_resamples=2, fpirs=(0.0, 0.1))).cases[0]
    assert [case.metrics[name] for name in ("tpir@fpir=0e+0", "tpir@fpir=1e-1")] == [0, 0]
