"""Linear CKA against the kernels it is defined by, and what must not change it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from xcompat.core.errors import XcompatError
from xcompat.evaluation import linear_cka, similarity


def naive_cka(x: np.ndarray, y: np.ndarray) -> float:
    """Centre the N x N kernels themselves and compare them entry by entry."""
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


def test_rotation_scale_and_shift_change_nothing() -> None:
    x, y = two_spaces(0, 50, 6, 4)
    rotation = np.linalg.qr(np.random.default_rng(1).normal(size=(6, 6)))[0]
    for moved in (x @ rotation, x * 1e-200, x * 1e300, x - 40):
        assert linear_cka(moved, y) == pytest.approx(linear_cka(x, y), rel=1e-9)
        assert linear_cka(moved, x) == pytest.approx(1.0, rel=1e-9)
    stretched = x * np.arange(1, 7)
    assert linear_cka(stretched, x) < 0.99


def test_blocks_dtypes_and_files_change_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    x, y = (rows.astype(np.float16) for rows in two_spaces(2, 40, 6, 4))
    expected = linear_cka(x.astype(np.float64), y.astype(np.float64))
    monkeypatch.setattr(similarity, "_ROWS", 7)
    np.save(tmp_path / "x.npy", x)
    for read in (x, torch.tensor(x), np.load(tmp_path / "x.npy", mmap_mode="r")):
        assert linear_cka(read, y) == pytest.approx(expected, rel=1e-9)
    coarse = torch.tensor(x).bfloat16()
    assert linear_cka(coarse, y) == pytest.approx(linear_cka(coarse.double().numpy(), y), rel=1e-9)


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (np.eye(2), np.eye(3), "x has 2 rows but y has 3"),
        (np.eye(2), np.full((2, 3), 0.1), "all rows of y are equal"),
        (np.zeros((2, 2)), np.eye(2), "all rows of x are equal"),
        (np.ones((1, 2)), np.ones((1, 2)), "all rows of x are equal"),
        (np.eye(2), np.eye(2) * np.nan, "y contains NaN"),
        (np.full((2, 2), np.inf), np.eye(2), "x contains NaN or infinite"),
        (np.eye(2), np.ones(2), "y must be a matrix"),
        (np.empty((0, 2)), np.eye(2), "x are empty"),
    ],
)
def test_bad_input_is_one_clear_line(x: np.ndarray, y: np.ndarray, message: str) -> None:
    with pytest.raises(XcompatError, match=message) as caught:
        linear_cka(x, y)
    assert "\n" not in str(caught.value)
