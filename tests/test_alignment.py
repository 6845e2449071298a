"""Losses against old embeddings and prototypes: double loops, signs, and two processes against one."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import warm
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from xcompat.core.errors import XcompatError
from xcompat.losses import (
    ace_loss,
    angular_alignment_loss,
    cross_entropy_to,
    l2_alignment_loss,
    neighbour_weights,
    neighbourhood_loss,
    ract_loss,
)

DTYPES = [torch.float32, torch.float64]


def tolerance(dtype: torch.dtype) -> float:
    return 1e-9 if dtype == torch.float64 else 5e-5


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(a @ b) / math.sqrt(float(a @ a) * float(b @ b))


@pytest.mark.parametrize("dtype", DTYPES)
def test_alignment_equals_the_loop(dtype: torch.dtype) -> None:
    new, old = torch.randn(7, 5, dtype=torch.float64), torch.randn(7, 5, dtype=torch.float64)
    angles = sum(1 - cosine(x, y) for x, y in zip(new, old, strict=True)) / 7
    lengths = sum(math.dist(x, y) for x, y in zip(new.tolist(), old.tolist(), strict=True)) / 7
    assert float(angular_alignment_loss(new.to(dtype), old.to(dtype))) == pytest.approx(angles, rel=tolerance(dtype))
    assert float(l2_alignment_loss(new.to(dtype), old.to(dtype))) == pytest.approx(lengths, rel=tolerance(dtype))


@pytest.mark.parametrize("loss", [angular_alignment_loss, l2_alignment_loss])
def test_descent_draws_to_the_target(loss) -> None:
    new, old = torch.randn(7, 5, requires_grad=True), torch.randn(7, 5)
    before = F.cosine_similarity(new, old).detach()
    for _ in range(20):
        (gradient,) = torch.autograd.grad(loss(new, old), new)
        new = (new - gradient).detach().requires_grad_()
    assert (F.cosine_similarity(new, old) > before).all()


def test_l2_leaves_out_old_embeddings_of_images_that_could_not_be_read() -> None:
    new, old = torch.ones(2, 3, requires_grad=True), torch.tensor([[1.0, 1.0, 3.0], [torch.nan] * 3])
    loss = l2_alignment_loss(new, old, torch.tensor([True, False]))
    loss.backward()
    assert loss.item() == 2 and torch.equal(new.grad, torch.tensor([[0.0, 0.0, -1.0], [0.0, 0.0, 0.0]]))


def test_l2_at_its_target_has_no_gradient() -> None:
    new = torch.ones(2, 3, requires_grad=True)
    l2_alignment_loss(new, torch.ones(2, 3)).backward()
    assert torch.equal(new.grad, torch.zeros(2, 3))


@pytest.mark.parametrize("loss", [angular_alignment_loss, l2_alignment_loss, lambda a, b: ract_loss(a, b, torch.arange(3), 0.1)])
def test_unequal_shapes_are_refused_in_one_line(loss) -> None:
    with pytest.raises(XcompatError, match=r"the same shape, got \(3, 5\) and \(3, 4\)"):
        loss(torch.randn(3, 5), torch.randn(3, 4))


def naive_ace_loss(embeds: torch.Tensor, weights: torch.Tensor, labels: list[int], scale: float | None) -> float:
    kept = [c for c in range(len(weights)) if not weights[c].isnan().any()]
    entropy, angle, count = 0.0, 0.0, 0
    for x, label in zip(embeds, labels, strict=True):
        if label not in kept:
            continue
        exponents = {c: math.exp(float(x @ weights[c]) if scale is None else scale * cosine(x, weights[c])) for c in kept}
        entropy -= math.log(exponents[label] / sum(exponents.values()))
        angle += 1 - cosine(x, weights[label])
        count += 1
    return (10 * entropy + 5 * angle) / count


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [None, 16.0])
def test_ace_equals_the_double_loop(dtype: torch.dtype, scale: float | None) -> None:
    embeds, weights = torch.randn(6, 4, dtype=torch.float64), 0.7 * torch.randn(5, 4, dtype=torch.float64)
    weights[2] = torch.nan
    labels = [0, 1, 2, 4, 4, 8]  # 2 has no prototype, and neither has 8
    found = ace_loss(embeds.to(dtype), weights.to(dtype), torch.tensor(labels), scale=scale)
    assert float(found) == pytest.approx(naive_ace_loss(embeds, weights, labels, scale), rel=tolerance(dtype))


def test_ace_weights_its_two_terms() -> None:
    embeds, weights, labels = torch.randn(6, 4), torch.randn(5, 4), torch.randint(5, (6,))
    torch.testing.assert_close(ace_loss(embeds, weights, labels, 1.0, 0.0), cross_entropy_to(weights, embeds, labels))
    torch.testing.assert_close(ace_loss(embeds, weights, labels, 0.0, 1.0), angular_alignment_loss(embeds, weights[labels]))


def test_ace_without_any_known_class_is_nothing() -> None:
    embeds = torch.randn(3, 4, requires_grad=True)
    loss = ace_loss(embeds, torch.full((2, 4), torch.nan), torch.tensor([0, 1, 5]), scale=16.0)
    loss.backward()
    assert loss == 0
    assert torch.equal(embeds.grad, torch.zeros(3, 4))


def naive_ract_loss(new: torch.Tensor, old: torch.Tensor, labels: list[int], temperature: float, topk: int | None) -> float:
    total = 0.0
    for i in range(len(labels)):
        others = [k for k in range(len(labels)) if labels[k] != labels[i]]
        positive = math.exp(cosine(new[i], old[i]) / temperature)
        to_old = sorted((math.exp(cosine(new[i], old[k]) / temperature) for k in others), reverse=True)
        to_new = sorted((math.exp(cosine(new[i], new[k]) / temperature) for k in others), reverse=True)
        total += math.log(1 + (sum(to_old[:topk]) + sum(to_new[:topk])) / positive)
    return total / len(labels)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("labels", [[0, 1, 2, 3, 4], [0, 0, 1, 1, 2], [3, 3, 3, 3, 1], [6, 6, 6, 6, 6]])
@pytest.mark.parametrize("topk", [None, 1, 3, 40])
def test_ract_equals_the_double_loop(dtype: torch.dtype, labels: list[int], topk: int | None) -> None:
    new, old = torch.randn(5, 4, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
    found = ract_loss(new.to(dtype), old.to(dtype), torch.tensor(labels), 0.2, topk)
    assert float(found) == pytest.approx(naive_ract_loss(new, old, labels, 0.2, topk), rel=tolerance(dtype), abs=1e-12)


def test_ract_equals_cross_entropy_when_every_sample_has_its_class() -> None:
    new, old = (F.normalize(torch.randn(6, 4), dim=-1) for _ in range(2))
    logits = torch.cat([new @ old.T, (new @ new.T).fill_diagonal_(-torch.inf)], dim=1) / 0.05
    torch.testing.assert_close(ract_loss(3 * new, 0.1 * old, torch.arange(6), 0.05), F.cross_entropy(logits, torch.arange(6)))


@given(st.lists(st.integers(0, 3), min_size=1, max_size=8), st.sampled_from([None, 1, 2]), st.integers(0, 99))
def test_ract_does_not_depend_on_order_and_is_never_undefined(labels: list[int], topk: int | None, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    new, old = (torch.randn(len(labels), 3, generator=generator, dtype=torch.float64) for _ in range(2))
    new.requires_grad_()
    order = torch.randperm(len(labels), generator=generator)
    classes = torch.tensor(labels)
    loss = ract_loss(new, old, classes, 0.05, topk)
    loss.backward()
    assert new.grad.isfinite().all() and loss >= 0
    torch.testing.assert_close(loss, ract_loss(new[order], old[order], classes[order], 0.05, topk))


def test_ract_is_not_rounded_under_autocast() -> None:
    new, old, labels = torch.randn(6, 4), torch.randn(6, 4), torch.arange(6) % 3
    with torch.autocast("cpu", torch.bfloat16):
        inside = ract_loss(new, old, labels, 0.05)
    torch.testing.assert_close(inside, ract_loss(new, old, labels, 0.05), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_neighbourhood_equals_the_double_loop(dtype: torch.dtype) -> None:
    new, old, bank = (torch.randn(rows, 4, dtype=torch.float64) for rows in (5, 5, 7))
    labels, bank_labels = [0, 1, 2, 0, 9], [0, 0, 1, 2, 2, 2, 3]  # nothing in the bank is of class 9
    expected, anchors = 0.0, 0
    for i in range(5):
        shares = [math.exp(float(new[i] @ row) / 0.5) for row in bank]
        positives = [q for q in range(7) if bank_labels[q] == labels[i]]
        if positives:
            terms = [(1 + cosine(old[i], bank[q])) / 2 * math.log(shares[q] / sum(shares)) for q in positives]
            expected, anchors = expected - sum(terms) / len(positives), anchors + 1
    weights = neighbour_weights(old.to(dtype), bank.to(dtype), torch.tensor(labels), torch.tensor(bank_labels))
    found = neighbourhood_loss(new.to(dtype), bank.to(dtype), weights, 0.5)
    assert float(found) == pytest.approx(expected / anchors, rel=tolerance(dtype))


def test_neighbours_teach_without_being_taught() -> None:
    old = torch.randn(3, 4, requires_grad=True)
    weights = neighbour_weights(old, old, torch.zeros(3), torch.zeros(3))
    assert not weights.requires_grad
    torch.testing.assert_close(weights.diagonal(), torch.ones(3))


def _batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    new, old, weights = (torch.randn(rows, 5, generator=generator, dtype=torch.float64) for rows in (8, 8, 3))
    return {
        "new": new,
        "old": old,
        "weights": weights,
        "labels": torch.tensor([0, 1, 7, 7, 2, 2, 1, 0]),  # two of four known on one rank, four of four on the other
        "turn": torch.randn(5, 5, generator=generator, dtype=torch.float64),
    }


LOSSES = {
    "ract": lambda new, b: ract_loss(new, b["old"], b["labels"], 0.1),
    "ract_topk": lambda new, b: ract_loss(new, b["old"], b["labels"], 0.1, 2),
    "cross_entropy_to": lambda new, b: cross_entropy_to(b["weights"], new, b["labels"], 16.0),
    "ace": lambda new, b: ace_loss(new, b["weights"], b["labels"]),
}


def _rank_main(rank: int, store: str, out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    results = {}
    for name, loss_of in LOSSES.items():
        batch = _batch()
        turn = batch["turn"].requires_grad_()
        mine = {key: value if key in ("weights", "turn") else value[4 * rank : 4 * rank + 4] for key, value in batch.items()}
        loss = loss_of(mine["new"] @ turn, mine)
        loss.backward()
        both = torch.cat([loss.detach().reshape(1), turn.grad.flatten()]) / 2  # what data-parallel training averages
        dist.all_reduce(both)
        results[name] = both
    torch.save(results, f"{out}.{rank}")
    dist.destroy_process_group()


def test_two_ranks_of_four_equal_one_of_eight(tmp_path: Path) -> None:
    warm.spawn(_rank_main, (str(tmp_path / "store"), str(tmp_path / "out")))
    for name, loss_of in LOSSES.items():
        batch = _batch()
        turn = batch["turn"].requires_grad_()
        loss = loss_of(batch["new"] @ turn, batch)
        loss.backward()
        expected = torch.cat([loss.detach().reshape(1), turn.grad.flatten()])
        for rank in range(2):
            found = torch.load(tmp_path / f"out.{rank}", weights_only=True)[name]
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")
