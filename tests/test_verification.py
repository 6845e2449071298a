"""Acceptance rates against loops over every pair and every possible threshold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from xcompat.core.errors import XcompatError
from xcompat.core.fingerprint import Fingerprint
from xcompat.evaluation import EmbeddedImages, EvaluatedModels, EvaluationOptions, evaluate, tar_at_far, tpir_at_far, verification

# One or four entries of +-1: norms are 1 and 2, so normalised vectors and their products are exact in any arithmetic; many tie.
_SPARSE = st.tuples(st.integers(0, 3), st.sampled_from([-1.0, 1.0])).map(lambda pick: np.eye(4)[pick[0]] * pick[1])
_DENSE = st.lists(st.sampled_from([-1.0, 1.0]), min_size=4, max_size=4).map(np.array)
_ROWS = st.lists(_SPARSE | _DENSE, min_size=1, max_size=12)
_FARS = (0.0, 0.1, 0.25, 0.5, 1.0)


def scored_pairs(queries: Sequence, gallery: Sequence, query_labels: Sequence, gallery_labels: Sequence, *ids: Sequence) -> list:
    """Return (score, same class) of every pair that counts, per query."""
    found = []
    for row, query in enumerate(queries):
        pairs = []
        for column, item in enumerate(gallery):
            if not ids or ids[0][row] != ids[1][column]:
                score = float(query @ item / (np.linalg.norm(query) * np.linalg.norm(item)))
                pairs.append((score, query_labels[row] == gallery_labels[column]))
        found.append(pairs)
    return found


def naive_share(genuine: list[float], impostors: list[float], far: float) -> float:
    """Try every threshold and keep the best share of genuine scores among those that accept few enough impostors."""
    shares = [0.0]
    for threshold in [*genuine, *impostors]:
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
    if not genuine or not impostors:
        return None
    # a query that is not found passes no threshold, so those of minus infinity are not tried
    expected = {}
    for far in _FARS:
        thresholds = [score for score in [*genuine, *impostors, -2.0] if score > -np.inf]
        fine = [t for t in thresholds if sum(score >= t for score in impostors) / len(impostors) <= far]
        expected[far] = max((sum(score >= t for score in genuine) / len(genuine) for t in fine), default=0.0)
    return expected


@st.composite
def problems(draw: Callable) -> tuple:
    queries, gallery = np.array(draw(_ROWS)), np.array(draw(_ROWS))
    sides = [(values, len(rows)) for values, rows in (("abc", queries), ("abd", gallery))]
    labels = [draw(st.lists(st.sampled_from(values), min_size=n, max_size=n)) for values, n in sides]
    ids = [draw(st.lists(st.integers(0, 9), min_size=n, max_size=n)) for _, n in sides]
    return (queries, gallery, *labels, *draw(st.sampled_from([(), tuple(ids)])))


@given(problems())
@settings(max_examples=100)
def test_tar_equals_trying_every_threshold(problem: tuple) -> None:
    expected = naive_tar(problem)
    if expected is None:
        with pytest.raises(XcompatError, match="no pair of (one class|two classes)"):
            tar_at_far(*problem, fars=_FARS)
    else:
        assert tar_at_far(*problem, fars=_FARS) == expected


@given(problems(), st.integers(1, 3))
@settings(max_examples=100)
def test_tpir_equals_trying_every_threshold(problem: tuple, rank: int) -> None:
    expected = naive_tpir(problem, rank)
    if expected is None:
        with pytest.raises(XcompatError, match="no query has another item|there are no impostors"):
            tpir_at_far(*problem, fars=_FARS, rank=rank)
    else:
        assert tpir_at_far(*problem, fars=_FARS, rank=rank) == expected


def random_problem(seed: int) -> tuple:
    generator = np.random.default_rng(seed)
    labels = generator.integers(6, size=30), generator.integers(4, size=40)
    centres = generator.normal(size=(6, 12))
    return (*(centres[side] + generator.normal(size=(len(side), 12)) for side in labels), *labels)


def test_random_scores_equal_the_loops() -> None:
    problem = random_problem(0)
    assert tar_at_far(*problem, fars=_FARS) == naive_tar(problem)
    for rank in (1, 5):
        assert tpir_at_far(*problem, fars=_FARS, rank=rank) == naive_tpir(problem, rank)


def test_dropping_low_negatives_on_the_way_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = random_problem(1)
    fars = np.linspace(0, 0.5, 26).tolist()
    expected = tar_at_far(*problem, fars=fars)
    monkeypatch.setattr(verification, "_SLACK", 1)
    monkeypatch.setattr("xcompat.evaluation.labelled._TILE", 70)
    for far in fars:
        assert tar_at_far(*problem, fars=(far,)) == {far: expected[far]}


def test_a_share_is_what_dividing_says() -> None:
    """0.29 of 100 is 28.999999999999996 in floats, and 29 of 100 is 0.29 all the same."""
    scores = np.arange(100) / 200
    gallery = np.stack([scores, np.sqrt(1 - scores**2)], axis=1)
    bar = np.array([[0.3525, np.sqrt(1 - 0.3525**2)]])  # between the 29th highest negative and the 30th
    arguments = (np.array([[1.0, 0.0]]), np.concatenate([gallery, bar]), [0], [1] * 100 + [0])
    assert tar_at_far(*arguments, fars=(0.28, 0.29)) == {0.28: 0.0, 0.29: 1.0}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_gives_the_same_rates() -> None:
    queries, gallery, *labels = random_problem(3)
    for metric in (tar_at_far, tpir_at_far):
        on_device = metric(torch.tensor(queries).cuda(), torch.tensor(gallery).cuda(), *labels, fars=_FARS)
        assert on_device == metric(queries, gallery, *labels, fars=_FARS)


@pytest.mark.parametrize("metric", [tar_at_far, tpir_at_far])
def test_bad_input_is_one_clear_line(metric: Callable) -> None:
    good = (np.eye(3), np.eye(3), "abz", "aab")
    for arguments, message in (
        ((np.eye(3), np.eye(3), "ab", "aab"), "query labels: 3 rows but 2 ids"),
        ((np.eye(3), np.eye(3) * np.nan, "abz", "aab"), "NaN or infinite numbers in gallery"),
        ((*good, range(3)), "only one side has sample ids"),
        ((*good, None, None, ()), "fars must be one or more shares"),
        ((*good, None, None, (0.1, -1e-3)), "fars must be one or more shares"),
        ((*good, None, None, (np.nan,)), "fars must be one or more shares"),
    ):
        with pytest.raises(XcompatError, match=message) as caught:
            metric(*arguments)
        assert "\n" not in str(caught.value)


def test_one_sided_problems_are_refused() -> None:
    eye = np.eye(2)
    for labels, message in ((("ab", "cd"), "no pair of one class"), (("aa", "aa"), "no pair of two classes")):
        with pytest.raises(XcompatError, match=message):
            tar_at_far(eye, eye, *labels)
    with pytest.raises(XcompatError, match="there are no impostors"):
        tpir_at_far(eye, eye, "ab", "ab")
    with pytest.raises(XcompatError, match="no query has another item"):
        tpir_at_far(eye, eye, "ab", "cd")
    with pytest.raises(XcompatError, match="rank must be at least 1"):
        tpir_at_far(eye, eye, "az", "ab", rank=0)


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
