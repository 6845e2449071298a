"""The whitened map: its formula, its limits, and what it finds where the models weigh directions differently."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from xcompat import Fingerprint, XcompatError
from xcompat.methods import WhitenedConfig, WhitenedModel
from xcompat.methods.whitened import DAMPING, DAMPING_OF_FEW
from xcompat.models import describe_old

NEW, OLD = 7, 5


def pairs(rows: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return new and old embeddings of the same items, with unequal variances and a mean."""
    draw = torch.Generator().manual_seed(seed)
    new = torch.randn(rows, NEW, generator=draw, dtype=torch.float64) * torch.logspace(0, -1, NEW, dtype=torch.float64) + 0.4
    old = new @ torch.randn(NEW, OLD, generator=draw, dtype=torch.float64)
    return new, old + 0.3 * torch.randn(rows, OLD, generator=draw, dtype=torch.float64)


def solved(new: torch.Tensor, old: torch.Tensor, **options: object) -> WhitenedModel:
    config = WhitenedConfig(old=describe_old(Fingerprint.from_string("old"), OLD), embedding_dim=NEW, **options)
    return WhitenedModel(config).fit([(new, old)])


def naive_power(moment: np.ndarray, power: float, damping: float) -> np.ndarray:
    values, vectors = np.linalg.eigh(moment + damping * np.trace(moment) / len(moment) * np.eye(len(moment)))
    return vectors @ np.diag(values**power) @ vectors.T


@pytest.mark.parametrize("powers", [(0.75, 0.75), (0.5, 0.75), (1.0, 0.0)])
@pytest.mark.parametrize(("rows", "damping"), [(200, DAMPING), (13, DAMPING_OF_FEW)])
def test_it_is_the_formula(powers: tuple[float, float], rows: int, damping: float) -> None:
    new, old = (side.numpy() for side in pairs(rows))
    found = solved(*pairs(rows), source_power=powers[0], target_power=powers[1])
    source, target = (naive_power(side.T @ side / rows, -power, damping) for side, power in zip((new, old), powers, strict=True))
    np.testing.assert_allclose(found.weight.numpy(), source @ (new.T @ old / rows) @ target, rtol=1e-5, atol=1e-6)
    assert not found.bias.any()


@pytest.mark.parametrize("factors", [(3.0, 1.0), (1.0, 0.2)])
def test_the_lengths_of_a_side_do_not_matter(factors: tuple[float, float]) -> None:
    new, old = pairs(100)
    scaled = solved(factors[0] * new, factors[1] * old)
    expected = solved(new, old).to_space(new.float())
    torch.testing.assert_close(scaled.to_space(factors[0] * new.float()), expected, rtol=1e-4, atol=1e-5)


def test_the_other_direction_exchanges_the_sides() -> None:
    new, old = pairs(100)
    found = solved(new, old, direction="old_to_new", source_power=0.5, target_power=0.25)
    mapped = solved(new, old, source_power=0.25, target_power=0.5)
    torch.testing.assert_close(found.weight.T, mapped.weight, rtol=1e-5, atol=1e-6)


def test_a_side_of_zeros_is_refused() -> None:
    new, old = pairs(20)
    with pytest.raises(XcompatError, match="all embeddings of one side are zero"):
        solved(new, 0 * old)


@pytest.mark.parametrize("option", [{"source_power": -0.1}, {"target_power": 1.5}, {"damping": 0.0}])
def test_options_have_ranges(option: dict[str, float]) -> None:
    config = WhitenedConfig(old=describe_old(Fingerprint.from_string("old"), OLD), embedding_dim=NEW, **option)
    with pytest.raises(XcompatError, match=next(iter(option))):
        config.require_ranges()
