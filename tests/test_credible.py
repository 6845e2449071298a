"""Credible old embeddings against a loop over samples."""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xcompat.core.errors import XcompatError
from xcompat.models import credible
from xcompat.models.credible import credible_mask


def naive_mask(embeds: np.ndarray, labels: np.ndarray, keep: str) -> list[bool]:
    readable = [i for i in range(len(embeds)) if not np.isnan(embeds[i]).any()]
    unit = {i: embeds[i] / (np.linalg.norm(embeds[i]) or 1) for i in readable}
    lengths = [math.sqrt(sum(unit[i][d] ** 2 for i in readable)) or 1 for d in range(embeds.shape[1])]
    scaled = {i: unit[i] / lengths for i in readable}
    mask = [False] * len(embeds)
    for label in set(labels.tolist()):
        members = [i for i in readable if labels[i] == label]
        if not members:
            continue
        centre = sum(scaled[i] for i in members) / len(members)
        members.sort(key=lambda i: round(float(np.linalg.norm(scaled[i] - centre)), 9))  # stable: ties in the order of the data
        for i in members[: math.ceil(Fraction(keep) * len(members))]:
            mask[i] = True
    return mask


@given(
    st.lists(st.integers(-2, 3), min_size=1, max_size=60),
    st.sampled_from(["0.1", "0.35", "0.5", "0.55", "0.9", "1"]),
    st.integers(0, 99),
)
def test_mask_equals_the_loop(labels: list[int], keep: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    embeds = rng.normal(size=(len(labels), 4))
    embeds[rng.random(len(labels)) < 0.1] = np.nan
    found = credible_mask(embeds, np.array(labels), float(keep))
    assert found.dtype == bool
    assert found.tolist() == naive_mask(embeds, np.array(labels), keep)


@given(st.lists(st.tuples(st.integers(-1, 1), st.integers(-1, 1), st.integers(0, 2)), min_size=1, max_size=40))
def test_ties_go_to_the_first(rows: list[tuple[int, int, int]]) -> None:
    table = np.array(rows)
    found = credible_mask(table[:, :2].astype(np.float32), table[:, 2], 0.5)
    assert found.tolist() == naive_mask(table[:, :2].astype(np.float64), table[:, 2], "0.5")


def test_copies_are_kept_in_the_order_of_the_data() -> None:
    assert credible_mask(np.ones((10, 3)), np.zeros(10, dtype=int), 0.3).tolist() == [True] * 3 + [False] * 7
    opposite = np.array([[0.3, 0.7], [-0.7, 0.3]] * 3)  # two places, equally far from their centre
    assert credible_mask(opposite, np.array([0, 0, 1, 1, 2, 2]), 0.5).tolist() == [True, False] * 3


def test_exactly_the_share_of_each_class_is_kept() -> None:
    labels = np.repeat([4, 7, 1, 9], [1, 2, 30, 100])
    np.random.default_rng(0).shuffle(labels)
    embeds = np.random.default_rng(1).normal(size=(len(labels), 5))
    for keep, expected in ((0.9, [1, 2, 27, 90]), (0.55, [1, 2, 17, 55]), (1.0, [1, 2, 30, 100]), (0.01, [1, 1, 1, 1])):
        mask = credible_mask(embeds, labels, keep)
        assert [int(mask[labels == label].sum()) for label in (4, 7, 1, 9)] == expected


def test_an_outlier_is_left_out_also_in_a_dimension_of_small_numbers() -> None:
    """Normalising each dimension is what makes the second one count."""
    embeds = np.column_stack([np.ones(10) + 1e-3 * np.arange(10), 1e-4 * np.ones(10)])
    embeds[4, 1] = 1e-2
    assert np.flatnonzero(~credible_mask(embeds, np.zeros(10, dtype=int))).tolist() == [4]


def test_blocks_and_kinds_of_arrays_do_not_matter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    halves = rng.normal(size=(500, 8)).astype(np.float16)
    embeds, labels = halves.astype(np.float32), rng.integers(0, 20, 500)
    whole = credible_mask(embeds, labels, 0.7)
    np.save(tmp_path / "embeds.npy", embeds)
    mapped = np.load(tmp_path / "embeds.npy", mmap_mode="r")
    monkeypatch.setattr(credible, "_ROWS", 7)
    for same in (mapped, embeds.astype(np.float64), halves):
        assert np.array_equal(credible_mask(same, labels, 0.7), whole)


def test_length_of_an_embedding_does_not_matter() -> None:
    rng = np.random.default_rng(3)
    embeds, labels = rng.normal(size=(60, 4)), rng.integers(0, 4, 60)
    longer = embeds * rng.uniform(0.1, 10, (60, 1))
    assert np.array_equal(credible_mask(embeds, labels, 0.5), credible_mask(longer, labels, 0.5))


@pytest.mark.parametrize(
    ("rows", "labels", "keep", "message"),
    [(3, 2, 0.9, "found 2 for 3"), (0, 0, 0.9, "found 0 for 0"), (3, 3, 0.0, "not 0.0"), (3, 3, 1.1, "not 1.1")],
)
def test_bad_input_is_one_line(rows: int, labels: int, keep: float, message: str) -> None:
    with pytest.raises(XcompatError, match=message) as raised:
        credible_mask(np.ones((rows, 2)), np.zeros(labels, dtype=int), keep)
    assert "\n" not in str(raised.value)
