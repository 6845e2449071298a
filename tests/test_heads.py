"""Modules on top of an encoder: an orthogonal transformation stays one, and mixed queries lie on the arc between them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from xcompat.core.errors import XcompatError
from xcompat.heads import OrthogonalTransform, slerp


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


def naive_slerp(new: list[float], old: list[float], share: float) -> list[float]:
    """Return Shoemake's formula for one row, in float64, with the arc cosine."""
    n, o = ([x / math.hypot(*row) for x in row] for row in (new, old))
    angle = math.acos(sum(x * y for x, y in zip(n, o, strict=True)))
    return [
        (math.sin((1 - share) * angle) * x + math.sin(share * angle) * y) / math.sin(angle) for x, y in zip(n, o, strict=True)
    ]


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_mixed_queries_equal_the_formula(share: float, dtype: torch.dtype) -> None:
    new, old = (3 * torch.randn(9, 6)).to(dtype), torch.randn(9, 6).to(dtype)
    mixed = slerp(new, old, share)
    expected = [naive_slerp(x, y, share) for x, y in zip(new.double().tolist(), old.double().tolist(), strict=True)]
    torch.testing.assert_close(mixed, torch.tensor(expected), rtol=1e-5, atol=1e-6)
    assert mixed.dtype == torch.float32
    torch.testing.assert_close(mixed.norm(dim=-1), torch.ones(9))


@pytest.mark.parametrize("distance", [0.0, 1e-30, 1e-8, 1e-4])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_close_directions_are_no_special_case(distance: float, share: float) -> None:
    new = F.normalize(torch.randn(4, 5)).requires_grad_()
    old = (new.detach() + distance * torch.randn(4, 5)).requires_grad_()
    mixed = slerp(new, old, share)
    torch.testing.assert_close(mixed, F.normalize((1 - share) * new + share * old), rtol=0, atol=1e-6)
    gradients = torch.autograd.grad((mixed * torch.randn(4, 5)).sum(), (new, old))
    for gradient, weight in zip(gradients, (1 - share, share), strict=True):
        assert gradient.isfinite().all() and gradient.norm(dim=-1).max() < 10
        assert (gradient.abs().max() > 0) == (weight > 0)


def test_what_neither_model_could_read_is_no_query() -> None:
    new, old = torch.randn(4, 5), torch.randn(4, 5)
    new[0], old[2] = torch.nan, torch.nan
    mixed = slerp(new, old, 0.5)
    assert mixed.isnan().all(dim=1).tolist() == [True, False, True, False]
    torch.testing.assert_close(mixed[1::2], slerp(new[1::2], old[1::2], 0.5))
    assert slerp(new[:0], old[:0], 0.5).shape == (0, 5)


def test_what_cannot_be_mixed_is_said_in_one_line() -> None:
    new = torch.randn(3, 5)
    with pytest.raises(XcompatError, match="share is 1.5"):
        slerp(new, new, 1.5)
    with pytest.raises(XcompatError, match="share is nan"):
        slerp(new, new, math.nan)
    with pytest.raises(XcompatError, match=r"\(3, 5\) and old queries of \(3, 4\) cannot be mixed"):
        slerp(new, new[:, :4], 0.5)
    with pytest.raises(XcompatError, match="row 2 are opposite"):
        slerp(new, torch.stack([new[0], new[0], -2 * new[2]]), 0.5)
    almost = F.normalize(torch.tensor([[-1.0, 1e-4]]))  # the arc leads over the second axis
    torch.testing.assert_close(slerp(torch.tensor([[1.0, 0.0]]), almost, 0.5), torch.tensor([[0.0, 1.0]]), rtol=0, atol=1e-3)
