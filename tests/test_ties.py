"""Exact ties: items whose cosines are equal although their rows are neither copies nor parallel."""

from __future__ import annotations

import numpy as np
import pytest

from xcompat.evaluation import first_hit_ranks, graded_metrics, ranking_per_query, tar_at_far, tpir_at_far, zero_shot_accuracy


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
        pair = np.stack([one, other])
        assert first_hit_ranks(query[None], pair, "a", "ab").tolist() == [1]
        assert ranking_per_query(query[None], pair, "a", "ab").average_precision_Q.tolist() == [0.5]
        assert graded_metrics(query[None], pair, "q", "ab", {"q": {"a": 1}}, (1,))["mrr@1"] == 0
        assert zero_shot_accuracy(query[None], pair, [0]) == 0


def test_of_two_tied_gains_the_lower_one_ranks_first() -> None:
    for query, one, other in draw_ties(4, 5, 100):
        found = graded_metrics(query[None], np.stack([one, other]), "q", "ab", {"q": {"a": 3, "b": 1}}, (1,))
        assert found["ndcg@1"] == pytest.approx(1 / 3)


def test_a_threshold_accepts_no_pair_that_ties_with_a_refused_one() -> None:
    for query, one, other in draw_ties(4, 5, 100):
        assert tar_at_far(query[None], np.stack([one, other]), "a", "ab", fars=(0,)) == {0: 0}
        queries, labels = np.stack([query, query]), "az"
        assert tpir_at_far(queries, np.stack([one, other]), labels, "ab", fars=(0,)) == {0: 0}


def test_tied_positives_do_not_push_each_other_down() -> None:
    for query, one, other in draw_ties(4, 5, 100):
        found = ranking_per_query(query[None], np.stack([one, other, -query]), "a", "aab")
        assert (found.first_hit_ranks_Q.tolist(), found.average_precision_Q.tolist()) == ([0], [1.0])


def test_items_of_equal_distance_tie_too() -> None:
    from xcompat.evaluation.labelled import Items, LabelledPairs
    from xcompat.evaluation.ranking import rank
    from xcompat.evaluation.scores import lift_rows

    generator, looked_at = np.random.default_rng(0), 0
    for query, one, other in generator.integers(0, 5, (4000, 3, 4)).astype(float):
        if ((query - one) ** 2).sum() == ((query - other) ** 2).sum() > 0 and not np.array_equal(one, other):
            queries, gallery = lift_rows(query[None], np.stack([one, other, query + 3]))
            pairs = LabelledPairs(Items(queries, "a"), Items(gallery, "abc"), are_lifted=True)
            assert rank(pairs).first_hit_ranks_Q.tolist() == [1]
            looked_at += 1
    assert looked_at > 50
