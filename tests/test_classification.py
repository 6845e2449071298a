"""Classification losses against double loops and pytorch-metric-learning, block by block against all at once."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pytorch_metric_learning import distances, losses, miners, reducers
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from xcompat.core.errors import XcompatError
from xcompat.losses import ClassificationHead, batch_hard_triplet_loss, classification, cross_entropy_to, softmax_loss

DTYPES = [torch.float32, torch.float64]
MARGINS = [(None, 0.0, 0.0), (20.0, 0.0, 0.0), (64.0, 0.5, 0.0), (64.0, 0.0, 0.35), (30.0, 0.3, 0.2)]


def tolerance(dtype: torch.dtype) -> float:
    return 1e-9 if dtype == torch.float64 else 1e-4


def dot(a: list[float], b: list[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def cosine(a: list[float], b: list[float]) -> float:
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


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two samples to a block of six classes."""
    monkeypatch.setattr(classification, "LOGITS_AT_ONCE", 17)


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
    features, weight, labels = torch.randn(7, 4).double(), torch.randn(6, 4).double(), torch.randint(6, (7,))
    results = []
    for at_once in (2**23, 17, 1):
        monkeypatch.setattr(classification, "LOGITS_AT_ONCE", at_once)
        x, w = features.clone().requires_grad_(), weight.clone().requires_grad_()
        loss = softmax_loss(x, w, labels, scale, angular_margin=angular, cosine_margin=cos_margin)
        results.append((loss, *torch.autograd.grad(loss, (x, w))))
    for blocks in results[1:]:
        torch.testing.assert_close(blocks, results[0], rtol=1e-12, atol=1e-13)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(("scale", "angular", "cos_margin"), MARGINS)
def test_gradient_through_blocks(scale: float | None, angular: float, cos_margin: float) -> None:
    features, weight = torch.randn(5, 4).double().requires_grad_(), torch.randn(6, 4).double().requires_grad_()
    labels = torch.tensor([0, 5, 2, 2, 1])

    def loss(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return softmax_loss(x, w, labels, scale, angular_margin=angular, cosine_margin=cos_margin)

    assert torch.autograd.gradcheck(loss, (features, weight))


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
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: (saved.append(tensor.numel()), tensor)[1], lambda tensor: tensor
        ):
            loss = head(features, torch.arange(24))
        loss.backward()
    assert largest.numel == 10 * 100_000  # ten samples at a time fit into 2**20
    assert max(saved) <= head.weight.numel()  # nothing waits for the backward pass but weights and features
    whole = F.cross_entropy(64 * F.normalize(features) @ F.normalize(head.weight).T, torch.arange(24))
    assert loss > whole  # the margin


def test_heads_equal_pytorch_metric_learning() -> None:
    oracles = {
        "arcface": losses.ArcFaceLoss(9, 5, margin=math.degrees(0.5), scale=64),
        "cosface": losses.CosFaceLoss(9, 5, margin=0.35, scale=64),
        "normalized_softmax": losses.NormalizedSoftmaxLoss(9, 5, temperature=1 / 20),
    }
    features, labels = torch.randn(16, 5).double(), torch.randint(9, (16,))
    for kind, oracle in oracles.items():
        head = ClassificationHead(5, 9, kind).double()
        oracle.W.data = head.weight.detach().T.clone()
        ours, theirs = features.clone().requires_grad_(), features.clone().requires_grad_()
        loss, expected = head(ours, labels), oracle(theirs, labels)
        loss.backward()
        expected.backward()
        for found, reference in ((loss, expected), (ours.grad, theirs.grad), (head.weight.grad, oracle.W.grad.T)):
            torch.testing.assert_close(found, reference, rtol=1e-9, atol=1e-10)


def test_plain_softmax_is_a_linear_layer_without_bias() -> None:
    head, features, labels = ClassificationHead(5, 9), torch.randn(16, 5), torch.randint(9, (16,))
    torch.testing.assert_close(head(features, labels), F.cross_entropy(features @ head.weight.T, labels))
    assert {name: value.shape for name, value in head.state_dict().items()} == {"weight": (9, 5)}


def test_gradients_are_finite_where_angles_end() -> None:
    weight = torch.eye(3).requires_grad_()
    features = torch.tensor([[2.0, 0, 0], [0, -1.0, 0], [0, 0, 0]], requires_grad=True)  # θ = 0, θ = π, no angle
    softmax_loss(features, weight, torch.arange(3), 64.0, angular_margin=0.5).backward()
    assert features.grad.isfinite().all() and weight.grad.isfinite().all()


def test_margin_makes_the_task_harder_at_every_angle() -> None:
    angles = torch.linspace(0.01, math.pi - 0.01, 200).double()
    features, weight = torch.stack([angles.cos(), angles.sin()], dim=1), torch.tensor([[1.0, 0.0], [0.0, 1.0]]).double()
    at_0 = torch.zeros(1, dtype=torch.int64)

    def each(**margin: float) -> torch.Tensor:
        return torch.stack([softmax_loss(x[None], weight, at_0, 10.0, **margin) for x in features])

    for margin in ({"angular_margin": 0.5}, {"cosine_margin": 0.35}):
        assert (each(**margin) > each()).all()


def test_half_precision_is_computed_in_float32() -> None:
    features, weight, labels = torch.randn(8, 5), torch.randn(4, 5), torch.randint(4, (8,))
    with torch.autocast("cpu", torch.bfloat16):
        inside = softmax_loss(features, weight, labels, 64.0, angular_margin=0.5)
        assert softmax_loss(features.bfloat16(), weight, labels).dtype == torch.float32
        assert cross_entropy_to(weight, features, labels, 64.0).dtype == torch.float32
    torch.testing.assert_close(inside, softmax_loss(features, weight, labels, 64.0, angular_margin=0.5), rtol=0, atol=0)


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
def test_old_weights_equal_the_double_loop(dtype: torch.dtype, scale: float | None) -> None:
    weights, embeds = torch.randn(5, 3, dtype=torch.float64), torch.randn(12, 3, dtype=torch.float64)
    weights[1] = torch.nan
    labels = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 0, 2, 1, 4])  # 5, 6 and 7 are new classes
    found = cross_entropy_to(weights.to(dtype), embeds.to(dtype), labels, scale)
    expected = naive_cross_entropy_to(weights, embeds, labels, scale)
    assert float(found) == pytest.approx(expected, rel=tolerance(dtype))


@given(st.data())
def test_samples_without_a_row_change_nothing(data: st.DataObject) -> None:
    missing = data.draw(st.sets(st.integers(0, 4)))
    labels = torch.tensor(data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=9)))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    weights = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    weights[sorted(missing)] = torch.nan
    embeds = torch.randn(len(labels), 3, generator=generator, dtype=torch.float64).requires_grad_()
    scale = data.draw(st.sampled_from([None, 30.0]))
    loss = cross_entropy_to(weights, embeds, labels, scale)
    loss.backward()
    has_row = torch.tensor([label < 5 and label not in missing for label in labels.tolist()])
    assert embeds.grad.isfinite().all()
    assert (embeds.grad[~has_row] == 0).all()
    if has_row.any():
        present = [c for c in range(5) if c not in missing]
        order = torch.tensor([present.index(c) if c in present else -1 for c in range(7)])
        alone = cross_entropy_to(weights[present], embeds[has_row], order[labels[has_row]], scale)
        torch.testing.assert_close(loss, alone)
    else:
        assert loss == 0


def test_length_of_prototypes_matters_to_dot_products_alone() -> None:
    weights, embeds, labels = torch.randn(5, 3), torch.randn(8, 3), torch.randint(5, (8,))
    torch.testing.assert_close(
        cross_entropy_to(weights, embeds, labels, 16.0), cross_entropy_to(weights * torch.rand(5, 1), embeds, labels, 16.0)
    )
    assert not torch.allclose(cross_entropy_to(weights, embeds, labels), cross_entropy_to(0.5 * weights, embeds, labels))


def test_old_classes_that_new_data_lack_are_negatives() -> None:
    weights, embeds, labels = torch.randn(5, 3), torch.randn(8, 3), torch.randint(2, (8,))
    assert cross_entropy_to(weights, embeds, labels, 16.0) > cross_entropy_to(weights[:2], embeds, labels, 16.0)


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


def test_triplets_equal_pytorch_metric_learning() -> None:
    distance = distances.LpDistance(normalize_embeddings=True)
    oracle = losses.TripletMarginLoss(0.3, distance=distance, reducer=reducers.MeanReducer())
    features, labels = torch.randn(20, 6).double(), torch.arange(20) % 5
    expected = oracle(features, labels, miners.BatchHardMiner(distance=distance)(features, labels))
    torch.testing.assert_close(batch_hard_triplet_loss(features, labels), expected, rtol=1e-9, atol=1e-9)


def test_gradient_of_copies_is_finite() -> None:
    features = torch.randn(2, 3).repeat_interleave(2, dim=0).requires_grad_()
    batch_hard_triplet_loss(features, torch.tensor([0, 0, 1, 1]), 2.0).backward()
    assert features.grad.isfinite().all() and features.grad.any()


@pytest.mark.parametrize("labels", [[0, 1, 2], [4, 4, 4], [0]])
def test_a_batch_without_triplets_is_refused(labels: list[int]) -> None:
    with pytest.raises(XcompatError, match="fewer than two samples"):
        ClassificationHead(3, 5, "triplet")(torch.randn(len(labels), 3), torch.tensor(labels))


@pytest.mark.parametrize("kind", ["softmax", "normalized_softmax", "arcface", "cosface", "triplet"])
def test_every_head_learns_and_comes_back(kind: str) -> None:
    labels = torch.arange(12) % 3
    features = torch.randn(12, 4, requires_grad=True)
    head = ClassificationHead(4, 3, kind)
    optimiser = torch.optim.Adam([features, *head.parameters()], lr=0.1)
    first = head(features, labels)
    for _ in range(30):
        optimiser.zero_grad()
        head(features, labels).backward()
        optimiser.step()
    after = head(features, labels)
    assert after < first
    again = ClassificationHead(4, 3, kind)
    again.load_state_dict(head.state_dict())
    assert torch.equal(again(features, labels), after)


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        ("arcfase", {}, "did you mean 'arcface'"),
        ("softmax", {"scale": 64.0}, "a softmax head has no scale"),
        ("normalized_softmax", {"margin": 0.5}, "a normalized_softmax head has no margin"),
        ("triplet", {"scale": 2.0}, "a triplet head has no scale"),
    ],
)
def test_what_a_head_does_not_have_is_refused(kind: str, given: dict[str, float], message: str) -> None:
    with pytest.raises(XcompatError, match=message):
        ClassificationHead(3, 5, kind, **given)


def test_scale_and_margin_are_those_given() -> None:
    features, labels = torch.randn(6, 4), torch.arange(6) % 5
    for kind, margin in itertools.product(("arcface", "cosface"), (0.0, 0.2)):
        head = ClassificationHead(4, 5, kind, scale=30.0, margin=margin)
        angular, cos_margin = (margin, 0.0) if kind == "arcface" else (0.0, margin)
        expected = naive_softmax_loss(features.double(), head.weight.detach().double(), labels, 30.0, angular, cos_margin)
        assert head(features, labels).item() == pytest.approx(expected, rel=1e-4)


def test_expanded_features_are_refused_by_old_weights() -> None:
    with pytest.raises(XcompatError, match="dimension 5 cannot be classified by weights of dimension 3"):
        cross_entropy_to(torch.randn(4, 3), torch.randn(2, 5), torch.tensor([0, 1]))


def test_a_margin_needs_a_scale() -> None:
    with pytest.raises(XcompatError, match="set a scale"):
        softmax_loss(torch.eye(2), torch.eye(2), torch.arange(2), cosine_margin=0.35)
