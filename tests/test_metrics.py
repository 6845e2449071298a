"""Ranks and recall against double loops, torchmetrics, and the properties that ties and chunks must keep."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from xcompat.core.errors import XcompatError
from xcompat.core.precision import ieee_products
from xcompat.evaluation import (
    class_embeddings,
    first_hit_ranks,
    negative_flip_rate,
    recall_at_k,
    zero_shot_accuracy,
    zero_shot_ranks,
)
from xcompat.evaluation.scores import UNIT, ExactRows, rounding_error, tie_margin, to_float32

# One or four entries of +-1: norms are 1 and 2, so normalised vectors and their products are exact in any arithmetic; many tie.
_SPARSE = st.tuples(st.integers(0, 3), st.sampled_from([-1.0, 1.0])).map(lambda pick: np.eye(4)[pick[0]] * pick[1])
_DENSE = st.lists(st.sampled_from([-1.0, 1.0]), min_size=4, max_size=4).map(np.array)
_ROWS = st.lists(_SPARSE | _DENSE, min_size=1, max_size=12)


def naive_ranks(queries: np.ndarray, gallery: np.ndarray, query_ids: list, gallery_ids: list) -> list[int]:
    """Rank of the best positive, negatives of equal score first; -1 without positives."""
    ranks = []
    for query, query_id in zip(queries, query_ids, strict=True):
        positives, negatives = [], []
        for item, item_id in zip(gallery, gallery_ids, strict=True):
            score = float(query @ item / (np.linalg.norm(query) * np.linalg.norm(item)))
            (positives if item_id == query_id else negatives).append(score)
        ranks.append(sum(score >= max(positives) for score in negatives) if positives else -1)
    return ranks


def random_problem(seed: int, n_queries: int, n_gallery: int, dim: int, n_ids: int) -> tuple:
    generator = np.random.default_rng(seed)
    return (
        generator.normal(size=(n_queries, dim)).astype(np.float32),
        generator.normal(size=(n_gallery, dim)).astype(np.float32),
        generator.integers(n_ids, size=n_queries),
        generator.integers(n_ids, size=n_gallery),
    )


@pytest.mark.parametrize("n_ids", [2, 15, 60])
def test_ranks_equal_the_double_loop(n_ids: int) -> None:
    problem = random_problem(n_ids, 37, 53, 24, n_ids)
    expected = naive_ranks(*problem)
    assert -1 in expected or n_ids < 60
    assert first_hit_ranks(*problem, chunk_size=8).tolist() == expected


@given(_ROWS, _ROWS, st.data())
@settings(max_examples=60, deadline=None)
def test_ties_are_pessimistic_and_chunks_do_not_matter(queries: list, gallery: list, data: st.DataObject) -> None:
    query_ids = data.draw(st.lists(st.sampled_from("abc"), min_size=len(queries), max_size=len(queries)))
    gallery_ids = data.draw(st.lists(st.sampled_from("abd"), min_size=len(gallery), max_size=len(gallery)))
    expected = naive_ranks(np.array(queries), np.array(gallery), query_ids, gallery_ids)
    for chunk_size in (1, 3, 64):
        assert first_hit_ranks(np.array(queries), np.array(gallery), query_ids, gallery_ids, chunk_size).tolist() == expected


@given(st.integers(0, 10_000), st.integers(1, 40), st.sampled_from([1, 7, 96, 300]))
@settings(max_examples=20, deadline=None)
def test_copies_tie_in_any_position_chunk_and_scale(seed: int, chunk_size: int, dim: int) -> None:
    """Rounding must not break the tie between copies: each positive has a negative twin, so no rank is 0 and no chunk matters."""
    generator = np.random.default_rng(seed)
    items = generator.normal(size=(20, dim)).astype(np.float32)
    order = generator.permutation(40)
    gallery = np.concatenate([items, items * 4])[order]
    gallery_ids = np.concatenate([np.arange(20), np.arange(100, 120)])[order]
    queries = items + generator.normal(size=items.shape).astype(np.float32) * 1e-3
    ranks = first_hit_ranks(queries, gallery, np.arange(20), gallery_ids, chunk_size)
    assert (ranks >= 1).all()
    assert ranks.tolist() == first_hit_ranks(queries, gallery, np.arange(20), gallery_ids).tolist()


@pytest.mark.parametrize(("copies", "one_by_one"), [(1, True), (40, False)])
def test_scores_that_float32_cannot_tell_apart_are_ranked_exactly(copies: int, one_by_one: bool) -> None:
    generator = np.random.default_rng(0)
    queries = generator.normal(size=(30, 96))
    positives = queries + generator.normal(size=queries.shape)
    nearly = np.concatenate([positives + 1e-5 * generator.normal(size=queries.shape) for _ in range(copies)])
    gallery = np.concatenate([positives, nearly, generator.normal(size=(400, 96))])
    gallery_ids = np.concatenate([np.arange(30), np.arange(100, 100 + len(gallery) - 30)])
    exact_QG, exact_GG = (ExactRows(rows, "rows", torch.device("cpu")).block(slice(None)) for rows in (queries, gallery))
    scores = (exact_QG @ exact_GG.T).numpy()
    best = np.diag(scores)[:, None]
    close = np.abs(scores - best) < rounding_error(96) * UNIT
    assert close.any(axis=1).all() and (close.mean() < 1 / 64) == one_by_one
    expected = (scores >= best - tie_margin(96)).sum(axis=1) - 1
    assert 0 < (expected > 0).sum() < 30 * (1 + (copies > 1)), "some twins must be above and some below"
    assert first_hit_ranks(queries, gallery, np.arange(30), gallery_ids).tolist() == expected.tolist()


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


def test_all_equal_scores_do_not_score() -> None:
    ones, zeros, ids = np.ones((6, 3)), np.zeros((6, 3)), list("abcdef")
    for gallery in (ones, zeros):
        assert recall_at_k(ones, gallery, ids, ids, ks=(1, 5, 6)) == {1: 0.0, 5: 0.0, 6: 1.0}
    assert first_hit_ranks(np.ones((1, 3)), np.ones((5, 3)), ["a"], list("aaabb")).tolist() == [2]


def test_queries_without_a_match_are_dropped() -> None:
    assert recall_at_k(np.eye(3), np.eye(3), ["a", "b", "z"], ["a", "b", "c"], ks=(1,)) == {1: 1.0}
    with pytest.raises(XcompatError, match="no query id occurs"):
        recall_at_k(np.eye(2), np.eye(2), ["x", "y"], ["a", "b"])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_torch_of_any_dtype_equals_numpy(dtype: torch.dtype) -> None:
    queries, gallery, query_ids, gallery_ids = random_problem(5, 30, 40, 32, 9)
    queries_t, gallery_t = torch.tensor(queries).to(dtype), torch.tensor(gallery).to(dtype).requires_grad_()
    as_torch = first_hit_ranks(queries_t, gallery_t, torch.tensor(query_ids), torch.tensor(gallery_ids))
    plain = first_hit_ranks(queries_t.double().numpy(), gallery_t.detach().double().numpy(), query_ids, gallery_ids)
    assert as_torch.dtype == np.int64
    assert as_torch.tolist() == plain.tolist()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_gives_the_same_ranks() -> None:
    queries, gallery, query_ids, gallery_ids = random_problem(6, 200, 300, 64, 40)
    on_device = first_hit_ranks(torch.tensor(queries).cuda(), torch.tensor(gallery).cuda(), query_ids, gallery_ids, 64)
    assert on_device.tolist() == first_hit_ranks(queries, gallery, query_ids, gallery_ids).tolist()


def test_ids_are_any_hashables_and_equal_only_when_equal() -> None:
    assert first_hit_ranks(np.eye(3), np.eye(3), [("a", 1), 7, "7"], [("a", 1), "7", 7]).tolist() == [0, 2, 2]


def test_extreme_magnitudes_are_normalised() -> None:
    scale = np.array([[1e-30], [1e30], [1e300]])
    assert first_hit_ranks(np.eye(3) * scale, np.eye(3) * scale[::-1], "abc", "abc").tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((np.eye(2), np.eye(3), "ab", "abc"), "2 dimensions but the gallery has 3"),
        ((np.eye(2), np.eye(2), "a", "ab"), "2 rows but 1 ids"),
        ((np.eye(2), np.eye(2) * np.nan, "ab", "ab"), "NaN or infinite numbers in gallery"),
        ((np.full((2, 2), np.inf), np.eye(2), "ab", "ab"), "NaN or infinite numbers in queries"),
        ((np.empty((0, 2)), np.eye(2), "", "ab"), "queries are empty"),
        ((np.ones(2), np.eye(2), "ab", "ab"), "must be a matrix"),
        ((np.eye(2), np.eye(2), [[1], [2]], "ab"), "id 0 is a list"),
        ((np.eye(2), np.eye(2), "ab", "ab", (0,)), "at least 1"),
        ((np.eye(2), np.eye(2), "ab", "ab", (1,), 0), "chunk_size"),
    ],
)
def test_bad_input_is_one_clear_line(arguments: tuple, message: str) -> None:
    with pytest.raises(XcompatError, match=message) as caught:
        recall_at_k(*arguments)
    assert "\n" not in str(caught.value)


def test_nan_among_negatives_of_no_query_is_still_refused() -> None:
    gallery = np.eye(3)
    gallery[2] = np.nan
    with pytest.raises(XcompatError, match="NaN"):
        first_hit_ranks(np.eye(3)[:1], gallery, "a", "abc", chunk_size=1)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=20), st.integers(1, 3))
def test_negative_flips_equal_a_loop(pairs: list[tuple[int, int]], k: int) -> None:
    flips = sum(1 for old, new in pairs if old < k <= new)
    old_ranks, new_ranks = (np.array(side) for side in zip(*pairs, strict=True))
    assert negative_flip_rate(old_ranks, new_ranks, k) == pytest.approx(flips / len(pairs))
    assert negative_flip_rate(np.append(old_ranks, -1), np.append(new_ranks, -1), k) == pytest.approx(flips / len(pairs))


def test_negative_flips_need_the_same_queries() -> None:
    for other in (np.array([0]), np.array([0, -1])):
        with pytest.raises(XcompatError, match="same"):
            negative_flip_rate(np.array([0, 0]), other)


def test_class_embeddings_equal_a_loop() -> None:
    prompts = np.random.default_rng(0).normal(size=(4, 3, 8)).astype(np.float32)
    classes = class_embeddings(torch.tensor(prompts))
    for class_prompts, embedding in zip(prompts.astype(float), classes, strict=True):
        mean = sum(prompt / np.linalg.norm(prompt) for prompt in class_prompts) / 3
        assert np.allclose(embedding, mean / np.linalg.norm(mean))
    with pytest.raises(XcompatError, match="cancel out"):
        class_embeddings(np.array([[[1.0, 0.0], [-2.0, 0.0]]]))
    with pytest.raises(XcompatError, match="classes, templates, dimensions"):
        class_embeddings(np.eye(2))


def test_zero_shot_is_nearest_class() -> None:
    images, classes, labels, _ = random_problem(8, 50, 6, 10, 6)
    nearest = (images @ (classes / np.linalg.norm(classes, axis=1, keepdims=True)).T).argmax(axis=1)
    assert zero_shot_accuracy(images, classes, labels) == pytest.approx((nearest == labels).mean())
    with pytest.raises(XcompatError, match="not one of the 6 classes"):
        zero_shot_ranks(images, classes, labels + 3)
