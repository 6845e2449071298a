"""Bootstrap intervals against a loop that draws and averages one resample at a time."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xcompat.core.errors import XcompatError
from xcompat.evaluation import Difference, PairedDifference, bootstrap_interval, paired_bootstrap, queries_needed
from xcompat.evaluation import intervals as module
from xcompat.evaluation.cases import find_deciding_difference
from xcompat.evaluation.verification import share_per_query


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
def test_equals_the_naive_loop(items: list, seed: int) -> None:
    values = np.array([value for value, _ in items])
    clusters = [cluster for _, cluster in items]
    for chosen in (clusters, None):
        expected = naive_interval(values, chosen or list(range(len(values))), 40, 0.9, seed)
        assert bootstrap_interval(values, 40, 0.9, seed, chosen) == pytest.approx(expected, abs=1e-9)
    numbers = np.array([ord(cluster) for cluster in clusters])
    assert bootstrap_interval(values, 40, 0.9, seed, numbers) == bootstrap_interval(values, 40, 0.9, seed, clusters)


def test_memory_blocks_do_not_change_the_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(0).normal(size=50)
    whole = bootstrap_interval(values, 100)
    monkeypatch.setattr(module, "_BLOCK_NUMBERS", 333)
    assert bootstrap_interval(values, 100) == whole


def test_covers_the_true_mean_about_as_often_as_it_says() -> None:
    generator = np.random.default_rng(1)
    inside = 0
    for trial in range(200):
        low, high = bootstrap_interval(generator.random(120) < 0.3, 300, 0.95, trial)
        inside += low <= 0.3 <= high
    assert 0.90 <= inside / 200 <= 0.99


def test_clusters_widen_the_interval_of_repeated_answers() -> None:
    answers = np.random.default_rng(2).random(60) < 0.5
    repeated, clusters = np.repeat(answers, 16), np.repeat(np.arange(60), 16)
    alone, together = bootstrap_interval(answers), bootstrap_interval(repeated, clusters_Q=clusters)
    assert together == pytest.approx(alone)
    naive_low, naive_high = bootstrap_interval(repeated)
    assert (naive_high - naive_low) < 0.5 * (together[1] - together[0])


def test_paired_difference_sees_what_single_intervals_miss() -> None:
    generator = np.random.default_rng(3)
    old = generator.random(400) < 0.4
    new = old | (generator.random(400) < 0.05)
    difference = paired_bootstrap(new, old)
    assert difference.mean == pytest.approx(new.mean() - old.mean())
    assert difference.excludes_zero
    assert bootstrap_interval(new)[0] < bootstrap_interval(old)[1]
    mirrored = paired_bootstrap(old, new)
    assert (mirrored.mean, mirrored.low, mirrored.high) == pytest.approx((-difference.mean, -difference.high, -difference.low))
    assert not paired_bootstrap(old, old).excludes_zero
    assert not PairedDifference(0.1, -0.1, 0.2).excludes_zero


def test_so_many_queries_tell_as_often_as_they_are_said_to() -> None:
    """Simulated: new queries find 6 in 20 that old ones miss, and lose 4, in clusters of three that agree."""
    generator = np.random.default_rng(4)

    def drawn(n_clusters: int) -> np.ndarray:
        return np.repeat(generator.choice([1.0, -1.0, 0.0], n_clusters, p=[0.3, 0.2, 0.5]), 3)

    many = drawn(100_000)
    needed = queries_needed(many, clusters_Q=np.arange(len(many)) // 3)
    assert needed is not None
    told = 0
    for trial in range(400):
        values = drawn(needed // 3)
        told += paired_bootstrap(values, np.zeros_like(values), 300, seed=trial, clusters_Q=np.arange(len(values)) // 3).low > 0
    assert told / 400 == pytest.approx(0.8, abs=0.05)  # 400 trials are within 0.04 of the truth 95 times of 100


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
    assert not find_deciding_difference(
        [Difference("image-to-image", "tar@far=1e-2", tie.mean, (tie.low, tie.high), tie.queries_needed)]
    )


def test_bad_input_is_refused() -> None:
    with pytest.raises(XcompatError, match="empty"):
        bootstrap_interval(np.array([]))
    with pytest.raises(XcompatError, match="level"):
        bootstrap_interval(np.ones(3), level=95)
    with pytest.raises(XcompatError, match="3 rows but 2 ids"):
        bootstrap_interval(np.ones(3), clusters_Q=["a", "b"])
    with pytest.raises(XcompatError, match="same queries"):
        paired_bootstrap(np.ones(3), np.ones(4))
    with pytest.raises(XcompatError, match="a number per query"):
        bootstrap_interval(np.ones((3, 2)))
