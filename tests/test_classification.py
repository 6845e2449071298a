"""Classification and alignment losses against double loops, and their sums over blocks and processes against the whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import warm
from conftest import refuses
from pytorch_metric_learning import losses
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from xcompat.losses import classification
from xcompat.losses.alignment import ace_loss, angular_alignment_loss, l2_alignment_loss
from xcompat.losses.classification import ClassificationHead, batch_hard_triplet_loss, cross_entropy_to, softmax_loss
from xcompat.losses.contrastive import neighbour_weights, neighbourhood_loss, ract_loss

DTYPES = [torch.float32, torch.float64]
MARGINS = [(None, 0.0, 0.0), (20.0, 0.0, 0.0), (64.0, 0.5, 0.0), (64.0, 0.0, 0.35), (30.0, 0.3, 0.2)]


def tolerance(dtype: torch.dtype) -> float:
    return 1e-9 if dtype == torch.float64 else 1e-4


def dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(float(x) * float(y) for x, y in zip(a, b, strict=True))


def cosine(a: Sequence[float], b: Sequence[float]) -> float:
    return dot(a, b) / math.sqrt(dot(a, a) * dot(b, b))


def naive_cross_entropy(logits: list[float], label: int) -> float:
    top = max(logits)
    return top + math.log(sum(math.exp(logit - top) for logit in logits)) - logits[label]


def naive_softmax_loss(
    features: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, scale: float | None, angular: float, cos_margin: float
) -> float:
    total = 0.0
    for x, label in zip(features.tolist(), labels.tolist(), strict=True):
        logits = []
        for c, w in enumerate(weight.tolist()):
            if scale is None:
                logits.append(dot(x, w))
                continue
            value = cosine(x, w)
            if c == label:
                angle = math.acos(value)
                turned = math.cos(angle + angular) if angle <= math.pi - angular else value - angular * math.sin(angular)
                value = turned - cos_margin
            logits.append(scale * value)
        total += naive_cross_entropy(logits, label)
    return total / len(features)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("scale", "angular", "cos_margin"), MARGINS)
def test_softmax_equals_the_double_loop(dtype: torch.dtype, scale: float | None, angular: float, cos_margin: float) -> None:
    features, weight = torch.randn(7, 4, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64)
    labels = torch.tensor([0, 5, 2, 2, 1, 3, 0])
    features[0] = -weight[0] + 0.01 * torch.randn(4, dtype=torch.float64)  # beyond π − m
    found = softmax_loss(features.to(dtype), weight.to(dtype), labels, scale, angular_margin=angular, cosine_margin=cos_margin)
    expected = naive_softmax_loss(features, weight, labels, scale, angular, cos_margin)
    assert found.dtype == dtype
    assert float(found) == pytest.approx(expected, rel=tolerance(dtype))


@pytest.mark.parametrize(("scale", "angular", "cos_margin"), MARGINS)
def test_blocks_equal_the_whole(monkeypatch: pytest.MonkeyPatch, scale: float | None, angular: float, cos_margin: float) -> None:
    sides = torch.randn(7, 4).double().requires_grad_(), torch.randn(6, 4).double().requires_grad_()
    labels, results = torch.randint(6, (7,)), []

    def loss(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return softmax_loss(x, w, labels, scale, angular_margin=angular, cosine_margin=cos_margin)

    for at_once in (2**23, 17, 1):  # the whole, two samples to a block of six classes, one
        monkeypatch.setattr(classification, "LOGITS_AT_ONCE", at_once)
        results.append((loss(*sides), *torch.autograd.grad(loss(*sides), sides)))
    for blocks in results[1:]:
        torch.testing.assert_close(blocks, results[0], rtol=1e-12, atol=1e-13)
    assert torch.autograd.gradcheck(loss, sides)


class LargestTensor(TorchDispatchMode):
    """Remember the largest tensor that any operation makes, forward or backward."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else [result]:
            if isinstance(value, torch.Tensor):
                self.numel = max(self.numel, value.numel())
        return result


def test_a_hundred_thousand_classes_make_no_matrix_of_all_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(classification, "LOGITS_AT_ONCE", 2**20)
    head, features = ClassificationHead(4, 100_000, "arcface"), torch.randn(24, 4, requires_grad=True)
    saved = []
    with LargestTensor() as largest:
        with torch.autograd.graph.saved_tensors_hooks(lambda each: saved.append(each.numel()) or each, lambda each: each):
            loss = head(features, torch.arange(24))
        loss.backward()
    assert largest.numel == 10 * 100_000  # ten samples at a time fit into 2**20
    assert max(saved) <= head.weight.numel()  # nothing waits for the backward pass but weights and features
    whole = F.cross_entropy(64 * F.normalize(features) @ F.normalize(head.weight).T, torch.arange(24))
    assert loss > whole  # the margin


def test_heads_equal_pytorch_metric_learning() -> None:
    given: dict[str, float] = {"scale": 30.0, "margin": 0.2}
    oracles = [
        ("arcface", {}, losses.ArcFaceLoss(9, 5, margin=math.degrees(0.5), scale=64)),
        ("arcface", given, losses.ArcFaceLoss(9, 5, margin=math.degrees(0.2), scale=30)),
        ("cosface", {}, losses.CosFaceLoss(9, 5, margin=0.35, scale=64)),
        ("cosface", given, losses.CosFaceLoss(9, 5, margin=0.2, scale=30)),
        ("normalized_softmax", {}, losses.NormalizedSoftmaxLoss(9, 5, temperature=1 / 20)),
    ]
    features, labels = torch.randn(16, 5).double(), torch.randint(9, (16,))
    for kind, options, oracle in oracles:
        head = ClassificationHead(5, 9, kind, **options).double()
        oracle.W.data = head.weight.detach().T.clone()
        ours, theirs = features.clone().requires_grad_(), features.clone().requires_grad_()
        loss, expected = head(ours, labels), oracle(theirs, labels)
        loss.backward()
        expected.backward()
        for found, reference in ((loss, expected), (ours.grad, theirs.grad), (head.weight.grad, oracle.W.grad.T)):
            torch.testing.assert_close(found, reference, rtol=1e-9, atol=1e-10)


def test_gradients_are_finite_where_angles_end_and_rows_are_copies() -> None:
    weight = torch.eye(3).requires_grad_()
    features = torch.tensor([[2.0, 0, 0], [0, -1.0, 0], [0, 0, 0]], requires_grad=True)  # θ = 0, θ = π, no angle
    softmax_loss(features, weight, torch.arange(3), 64.0, angular_margin=0.5).backward()
    assert features.grad.isfinite().all() and weight.grad.isfinite().all()
    copies = torch.randn(2, 3).repeat_interleave(2, dim=0).requires_grad_()
    batch_hard_triplet_loss(copies, torch.tensor([0, 0, 1, 1]), 2.0).backward()
    assert copies.grad.isfinite().all() and copies.grad.any()


def test_half_precision_is_computed_in_float32() -> None:
    features, old, weight = torch.randn(8, 5), torch.randn(8, 5), torch.randn(4, 5)
    labels = torch.randint(4, (8,))
    with torch.autocast("cpu", torch.bfloat16):
        inside = softmax_loss(features, weight, labels, 64.0, angular_margin=0.5), ract_loss(features, old, labels, 0.05)
        assert softmax_loss(features.bfloat16(), weight, labels).dtype == torch.float32
        assert cross_entropy_to(weight, features, labels, 64.0).dtype == torch.float32
    outside = softmax_loss(features, weight, labels, 64.0, angular_margin=0.5), ract_loss(features, old, labels, 0.05)
    torch.testing.assert_close(inside, outside, rtol=0, atol=0)


@pytest.mark.parametrize("weights", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("given", [torch.float16, torch.float32, torch.float64])
def test_rows_of_any_precision_are_classified_by(weights: torch.dtype, given: torch.dtype) -> None:
    rows = torch.tensor([[1.0, 0.0], [torch.nan, torch.nan], [0.0, 2.0]], dtype=weights)
    loss = cross_entropy_to(rows, torch.tensor([[1.0, 1.0], [3.0, 0.5]], dtype=given), torch.tensor([0, 1]))
    assert loss.item() == pytest.approx(math.log(1 + math.exp(2 - 1)), rel=1e-6), "the first sample's, as no row is the second's"


def naive_cross_entropy_to(weights: torch.Tensor, embeds: torch.Tensor, labels: torch.Tensor, scale: float | None) -> float:
    kept = [c for c, row in enumerate(weights.tolist()) if not math.isnan(row[0])]
    total, count = 0.0, 0
    for x, label in zip(embeds.tolist(), labels.tolist(), strict=True):
        if label not in kept:
            continue
        old = weights.tolist()
        logits = [dot(x, old[c]) if scale is None else scale * cosine(x, old[c]) for c in kept]
        total, count = total + naive_cross_entropy(logits, kept.index(label)), count + 1
    return total / count if count else 0.0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [None, 16.0])
def test_known_rows_equal_the_double_loop(dtype: torch.dtype, scale: float | None) -> None:
    weights, embeds = torch.randn(5, 3, dtype=torch.float64), torch.randn(12, 3, dtype=torch.float64)
    weights[1] = torch.nan
    labels = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 0, 2, 1, 4])  # 5, 6 and 7 are new classes
    own = embeds.to(dtype).requires_grad_()
    found = cross_entropy_to(weights.to(dtype), own, labels, scale)
    expected = naive_cross_entropy_to(weights, embeds, labels, scale)
    assert float(found) == pytest.approx(expected, rel=tolerance(dtype))
    found.backward()
    assert own.grad.isfinite().all() and own.grad.any(dim=1).tolist() == [label in (0, 2, 3, 4) for label in labels.tolist()]
    embeds, weights = torch.randn(6, 4, dtype=torch.float64), 0.7 * torch.randn(5, 4, dtype=torch.float64)
    weights[2] = torch.nan
    labels = [0, 1, 2, 4, 4, 8]  # 2 has no prototype, and neither has 8
    found = ace_loss(embeds.to(dtype), weights.to(dtype), torch.tensor(labels), scale=scale)
    assert float(found) == pytest.approx(naive_ace_loss(embeds, weights, labels, scale), rel=tolerance(dtype))


def naive_triplet_loss(features: torch.Tensor, labels: torch.Tensor, margin: float) -> float:
    total, anchors = 0.0, 0
    unit = [[value / math.sqrt(dot(x, x)) for value in x] for x in features.tolist()]
    for i in range(len(unit)):
        others = [j for j in range(len(unit)) if j != i]
        own = [math.dist(unit[i], unit[j]) for j in others if labels[j] == labels[i]]
        foreign = [math.dist(unit[i], unit[j]) for j in others if labels[j] != labels[i]]
        if own and foreign:
            total, anchors = total + max(0.0, max(own) - min(foreign) + margin), anchors + 1
    return total / anchors


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("labels", [[0, 0, 1, 1, 2, 2], [0, 0, 0, 1, 2, 3], [5, 5, 5, 5, 5, 9]])
def test_triplets_equal_the_double_loop(dtype: torch.dtype, labels: list[int]) -> None:
    features = torch.randn(6, 3, dtype=torch.float64)
    found = batch_hard_triplet_loss(features.to(dtype), torch.tensor(labels), 0.3)
    assert float(found) == pytest.approx(naive_triplet_loss(features, torch.tensor(labels), 0.3), rel=tolerance(dtype))


UNEQUAL = r"the same shape, got \(3, 5\) and \(3, 4\)"
REFUSED: list[tuple[str, Callable[[], object]]] = [
    ("did you mean 'arcface'", lambda: ClassificationHead(3, 5, "arcfase")),
    ("a softmax head has no scale", lambda: ClassificationHead(3, 5, "softmax", scale=64.0)),
    ("a normalized_softmax head has no margin", lambda: ClassificationHead(3, 5, "normalized_softmax", margin=0.5)),
    ("a triplet head has no scale", lambda: ClassificationHead(3, 5, "triplet", scale=2.0)),
    ("fewer than two samples", lambda: ClassificationHead(3, 5, "triplet")(torch.eye(3), torch.tensor([0, 1, 2]))),
    ("or a single class", lambda: ClassificationHead(3, 5, "triplet")(torch.eye(3), torch.tensor([4, 4, 4]))),
    ("set a scale", lambda: softmax_loss(torch.eye(2), torch.eye(2), torch.arange(2), cosine_margin=0.35)),
    (
        "dimension 5 cannot be classified by weights of dimension 3",
        lambda: cross_entropy_to(torch.randn(4, 3), torch.randn(2, 5), torch.tensor([0, 1])),
    ),
    (UNEQUAL, lambda: angular_alignment_loss(torch.randn(3, 5), torch.randn(3, 4))),
    (UNEQUAL, lambda: l2_alignment_loss(torch.randn(3, 5), torch.randn(3, 4))),
    (UNEQUAL, lambda: ract_loss(torch.randn(3, 5), torch.randn(3, 4), torch.arange(3), 0.1)),
]


@pytest.mark.parametrize(("message", "call"), REFUSED)
def test_what_does_not_fit_is_refused_in_one_line(message: str, call: Callable[[], object]) -> None:
    refuses(message, call)


@pytest.mark.parametrize("dtype", DTYPES)
def test_alignment_equals_the_loop(dtype: torch.dtype) -> None:
    new, old = torch.randn(7, 5, dtype=torch.float64), torch.randn(7, 5, dtype=torch.float64)
    angles = sum(1 - cosine(x, y) for x, y in zip(new, old, strict=True)) / 7
    lengths = sum(math.dist(x, y) for x, y in zip(new.tolist(), old.tolist(), strict=True)) / 7
    assert float(angular_alignment_loss(new.to(dtype), old.to(dtype))) == pytest.approx(angles, rel=tolerance(dtype))
    assert float(l2_alignment_loss(new.to(dtype), old.to(dtype))) == pytest.approx(lengths, rel=tolerance(dtype))
    new, old, bank = (torch.randn(rows, 4, dtype=torch.float64) for rows in (5, 5, 7))
    labels, bank_labels = [0, 1, 2, 0, 9], [0, 0, 1, 2, 2, 2, 3]  # nothing in the bank is of class 9
    expected, anchors = 0.0, 0
    for i in range(5):
        shares = [math.exp(float(new[i] @ row) / 0.5) for row in bank]
        positives = [q for q in range(7) if bank_labels[q] == labels[i]]
        if positives:
            terms = [(1 + cosine(old[i], bank[q])) / 2 * math.log(shares[q] / sum(shares)) for q in positives]
            expected, anchors = expected - sum(terms) / len(positives), anchors + 1
    weights = neighbour_weights(old.to(dtype).requires_grad_(), bank.to(dtype), torch.tensor(labels), torch.tensor(bank_labels))
    assert not weights.requires_grad, "neighbours teach without being taught"
    found = neighbourhood_loss(new.to(dtype), bank.to(dtype), weights, 0.5)
    assert float(found) == pytest.approx(expected / anchors, rel=tolerance(dtype))


def test_unknown_old_sides_count_for_nothing() -> None:
    new, old = torch.ones(2, 3, requires_grad=True), torch.tensor([[1.0, 1.0, 3.0], [torch.nan] * 3])
    loss = l2_alignment_loss(new, old, torch.tensor([True, False]))
    loss.backward()
    assert loss.item() == 2 and torch.equal(new.grad, torch.tensor([[0.0, 0.0, -1.0], [0.0, 0.0, 0.0]]))
    embeds = torch.randn(3, 4, requires_grad=True)
    unknown, labels = torch.full((2, 4), torch.nan), torch.tensor([0, 1, 5])
    for loss in (ace_loss(embeds, unknown, labels, scale=16.0), cross_entropy_to(unknown, embeds, labels, 16.0)):
        loss.backward()
        assert loss == 0 and torch.equal(embeds.grad, torch.zeros(3, 4))


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
    own = new.to(dtype).requires_grad_()
    found = ract_loss(own, old.to(dtype), torch.tensor(labels), 0.2, topk)
    assert float(found) == pytest.approx(naive_ract_loss(new, old, labels, 0.2, topk), rel=tolerance(dtype), abs=1e-12)
    found.backward()
    assert own.grad.isfinite().all()


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
