"""Modules on top of an encoder: an orthogonal transformation stays one."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from xcompat.heads import OrthogonalTransform


def turned(dim: int, steps: int = 5) -> OrthogonalTransform:
    """Return a transformation after large steps of an optimiser towards a random target."""
    transform = OrthogonalTransform(dim)
    optimiser = torch.optim.Adam(transform.parameters(), lr=0.3)
    x, y = torch.randn(16, dim), torch.randn(16, dim)
    for _ in range(steps):
        optimiser.zero_grad()
        (transform(x) - y).square().mean().backward()
        optimiser.step()
    return transform


def test_it_starts_at_the_identity() -> None:
    x = torch.randn(4, 6)
    assert torch.equal(OrthogonalTransform(6)(x), x)


@given(st.integers(2, 12), st.integers(0, 99))
def test_lengths_and_inner_products_stay_after_training(dim: int, seed: int) -> None:
    torch.manual_seed(seed)
    transform, x = turned(dim).double(), torch.randn(9, dim).double()
    with torch.no_grad():
        y = transform(x)
    assert not torch.allclose(x, y)
    torch.testing.assert_close(y @ y.T, x @ x.T, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(transform.weight @ transform.weight.T, torch.eye(dim).double(), rtol=1e-10, atol=1e-10)
    assert float(torch.linalg.det(transform.weight.detach())) == pytest.approx(1)  # a rotation, never a reflection


def test_it_learns_a_rotation() -> None:
    target = turned(4).weight.detach()
    x, transform = torch.randn(64, 4), OrthogonalTransform(4)
    optimiser = torch.optim.Adam(transform.parameters(), lr=0.05)
    for _ in range(300):
        optimiser.zero_grad()
        loss = (transform(x) - x @ target.T).square().mean()
        loss.backward()
        optimiser.step()
    assert loss < 1e-3


def test_it_has_no_bias_and_learns_a_triangle() -> None:
    transform = turned(5)
    assert [name for name, _ in transform.named_parameters()] == ["parametrizations.weight.original"]
    moved = transform.parametrizations.weight.original.detach() != 0
    assert torch.equal(moved, torch.ones(5, 5, dtype=torch.bool).tril(-1))


def test_it_comes_back_from_a_file(tmp_path: Path) -> None:
    transform, x = turned(5), torch.randn(3, 5)
    save_file(transform.state_dict(), tmp_path / "transform.safetensors")
    again = OrthogonalTransform(5)
    again.load_state_dict(load_file(tmp_path / "transform.safetensors"))
    assert torch.equal(again(x), transform(x))
    assert torch.equal(copy.deepcopy(transform)(x), transform(x))
    again(x).sum().backward()
    assert again.parametrizations.weight.original.grad is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_nothing_is_rounded_beside_a_model_in_half_precision(dtype: torch.dtype) -> None:
    transform, x = turned(5), torch.randn(3, 5)
    expected = transform(x)
    assert torch.equal(transform.to(dtype)(x), expected)
    assert transform.double().weight.dtype == torch.float64
    assert transform.float().weight.dtype == torch.float32


def test_angles_are_not_bent_under_autocast() -> None:
    transform, x = turned(5), torch.randn(3, 5)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(transform(x), transform(x).float())
        inside = transform(x)
        assert transform(x.bfloat16()).dtype == torch.float32
    assert torch.equal(inside, transform(x))
