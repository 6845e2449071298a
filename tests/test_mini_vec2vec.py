"""mini-vec2vec: a rotation that is found without pairs, whatever the order of the rows, and refused where spaces do not match."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from schedule import mostly_nightly
from torch.nn import functional as F

from xcompat import Fingerprint, MiniVec2VecConfig, MiniVec2VecModel, XcompatError
from xcompat.models import describe_old

DIM, ROWS = 8, 600
UNMATCHED = "the two spaces do not match: maps from two halves of the data agree by a cosine of .*, and 0.8 is needed"


def cloud(seed: int, around: float = 0.3) -> torch.Tensor:
    """Return unit vectors in ten clusters of unequal sizes."""
    draws = np.random.default_rng(seed)
    centres, shares = draws.normal(size=(10, DIM)), draws.dirichlet(np.full(10, 2))
    rows = centres[draws.choice(10, ROWS, p=shares)] + 0.25 * draws.normal(size=(ROWS, DIM)) + around
    return F.normalize(torch.tensor(rows, dtype=torch.float32), dim=-1)


@cache
def rotated() -> torch.Tensor:
    return cloud(0) @ torch.linalg.qr(torch.randn(DIM, DIM, generator=torch.Generator().manual_seed(0))).Q


def shuffled(rows: torch.Tensor, seed: int = 3) -> torch.Tensor:
    return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))]


def model(**options: float | str) -> MiniVec2VecModel:
    old = describe_old(Fingerprint.from_string("old"), DIM)
    return MiniVec2VecModel(MiniVec2VecConfig(old=old, embedding_dim=DIM, clusters=10, runs=9, rounds=10, **options))


@pytest.mark.parametrize("direction", mostly_nightly(["new_to_old", "old_to_new"], "new_to_old".__eq__))
def test_a_rotation_is_found_and_the_order_of_either_side_changes_nothing(direction: str) -> None:
    new, old = (cloud(0), rotated()) if direction == "new_to_old" else (rotated(), cloud(0))
    found = model(direction=direction).fit([(shuffled(new), old)])
    mapped, target = (found.to_space(new), old) if direction == "new_to_old" else (found.upgrade(old), new)
    assert F.cosine_similarity(mapped, target).mean() > 0.99
    again = model(direction=direction).fit(zip(new.split(100), shuffled(old, 4).split(100), strict=True))
    assert torch.equal(found.weight, again.weight) and torch.equal(found.bias, again.bias)
    scale = torch.linalg.matrix_norm(found.weight, 2)
    torch.testing.assert_close(found.weight.T @ found.weight / scale**2, torch.eye(DIM), atol=1e-5, rtol=0)


def test_spaces_that_do_not_match_are_refused() -> None:
    """Another cloud, and the same one whose dimensions were shuffled one by one."""
    dimensions = torch.stack([shuffled(column, seed) for seed, column in enumerate(rotated().T)], dim=1)
    for other in (cloud(7), dimensions):
        with pytest.raises(XcompatError, match=UNMATCHED):
            model().fit([(cloud(0), other)])


def test_the_two_sides_need_not_be_equally_many_nor_of_one_dimension() -> None:
    old = describe_old(Fingerprint.from_string("old"), 5)
    config = MiniVec2VecConfig(old=old, embedding_dim=DIM, clusters=6, runs=1, rounds=1, sample=40, least_agreement=-1.0)
    found = MiniVec2VecModel(config).fit([(cloud(0), rotated()[:50, :5])])
    assert found.to_space(cloud(0)).shape == (ROWS, 5) and found.weight.isfinite().all()


def test_too_few_embeddings_and_sizes_below_one_are_refused() -> None:
    with pytest.raises(XcompatError, match="at least 4 different embeddings of each model, found 3"):
        model().fit([(cloud(0)[:3], rotated()[:3].repeat(2, 1))])
    with pytest.raises(XcompatError, match="options.rounds is 0; give a number from 1"):
        MiniVec2VecModel(MiniVec2VecConfig(old=describe_old(Fingerprint.from_string("old"), 5), embedding_dim=DIM, rounds=0))
