"""Maps over cached embeddings: their formulas against naive ones, where they begin, and galleries that are mapped."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import UNTRAINED, recipe_of, refuses, unit, write_embeds
from data_layouts.images import write_classes
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from schedule import mostly_nightly_rows
from torch import nn
from torch.distributions import Categorical, kl_divergence
from torch.nn import functional as F
from transformers import AutoModel

from xcompat import Fingerprint, FingerprintMismatchError
from xcompat.data import Augmentation, LabelledSource, PairCollator, load_labelled
from xcompat.data.schema import IMAGE, SEED
from xcompat.evaluation import EmbeddedImages, EvaluatedModels, cmc, linear_cka
from xcompat.heads import ForwardTransform, ResidualBottleneck
from xcompat.losses import alignment, classifier_kl_loss, nt_xent_loss
from xcompat.methods import METHODS
from xcompat.models import CompatModel, describe_old
from xcompat.models.closed_form import Moments, solve_procrustes, solve_ridge
from xcompat.models.embedder import load_embedder
from xcompat.models.old_knowledge import OldKnowledge
from xcompat.report import load_report
from xcompat.retrieval import Gallery
from xcompat.training.model_evaluation import evaluate_cases, side_info_of
from xcompat.training.run import embed_recipe, run_recipe
from xcompat.training.sections import EvaluationSettings

pytestmark = pytest.mark.usefixtures("undrawn")
OLD = describe_old(Fingerprint.from_string("old"), dim=6)
SIDE = describe_old(Fingerprint.from_string("seen otherwise"), dim=5)
NEW_SIDE = describe_old(Fingerprint.from_string("newly seen otherwise"), dim=4)
LABELS = np.array([0, 0, 0, 2, 2, 2, 3, 3])  # no sample of class 1


def build(method: str, **options: Any) -> Any:
    """Return a map of 7 new dimensions to 6 old ones, unless told otherwise."""
    return METHODS[method](METHODS[method].config_class(**{"old": OLD, "embedding_dim": 7} | options))


def moments(rows: int = 80, seed: int = 0) -> Moments:
    """Return those of new embeddings with very unequal variances, and old ones that are nearly linear in them."""
    generator = torch.Generator().manual_seed(seed)
    new = torch.randn(rows, 7, generator=generator, dtype=torch.float64) * torch.logspace(0, -1.5, 7, dtype=torch.float64) + 0.3
    old = new @ torch.randn(7, 6, generator=generator, dtype=torch.float64)
    return Moments.compute([(new, old + 0.05 * torch.randn(rows, 6, generator=generator, dtype=torch.float64))])


def ridge_loss(solved: tuple[torch.Tensor, torch.Tensor], data: Moments, regularisation: float) -> float:
    """Return the penalised loss of a weight with its best bias, but for a constant, from the moments."""
    covariance, cross = data.covariances()
    damped = covariance + regularisation * covariance.diagonal().mean() * torch.eye(len(covariance), dtype=torch.float64)
    weight = solved[0]
    return float((weight * (damped @ weight)).sum() - 2 * (weight * cross).sum())


@given(rank=st.sampled_from([1, 2, 3, 4, 5, 6, 7, 50]), seed=st.integers(0, 50), regularisation=st.sampled_from([1e-3, 0.1, 1.0]))
def test_no_map_of_its_rank_has_a_smaller_ridge_loss(rank: int, seed: int, regularisation: float) -> None:
    data = moments(seed=seed)
    reduced, full = solve_ridge(data, regularisation, rank), solve_ridge(data, regularisation)
    if rank > 5:
        torch.testing.assert_close(reduced, full)
        rank = 6
    assert torch.linalg.matrix_rank(reduced[0]) == rank
    loss = ridge_loss(reduced, data, regularisation)
    left, values, right = torch.linalg.svd(full[0], full_matrices=False)
    truncated = left[:, :rank] * values[:rank] @ right[:rank]
    assert loss <= ridge_loss((truncated, full[1]), data, regularisation) + 1e-12
    generator = torch.Generator().manual_seed(seed)
    for size in (1e-3, 0.1, 1.0):  # of what its two factors are changed by
        down, values, up = torch.linalg.svd(reduced[0], full_matrices=False)
        first = down[:, :rank] * values[:rank] + size * torch.randn(7, rank, generator=generator, dtype=torch.float64)
        second = up[:rank] + size * torch.randn(rank, 6, generator=generator, dtype=torch.float64)
        assert loss <= ridge_loss((first @ second, full[1]), data, regularisation) + 1e-12


@pytest.mark.parametrize("method", ["procrustes", "ridge"])
def test_a_closed_form_maps_galleries_as_it_maps_queries_with_both_spaces_exchanged(method: str) -> None:
    new, old = unit(40, 7), unit(40, 6, 1)
    forward = build(method, direction="old_to_new").fit([(new, old)])
    exchanged = build(method, old=OLD | {"dim": 7}, embedding_dim=6, direction="new_to_old").fit([(old, new)])
    torch.testing.assert_close(forward.upgrade(old), exchanged.to_space(old))
    refuses("maps galleries: upgrade the stored embeddings instead", forward.to_space, new)
    assert torch.equal(exchanged.upgrade(new), new), "galleries stay"


def test_centred_procrustes_finds_a_rotation_and_a_shift() -> None:
    generator = torch.Generator().manual_seed(0)
    rotation = torch.linalg.qr(torch.randn(7, 7, generator=generator, dtype=torch.float64)).Q[:, :6]
    new = torch.randn(60, 7, generator=generator, dtype=torch.float64) + 2
    shift = torch.arange(6, dtype=torch.float64)
    old = (new - new.mean(0)) @ rotation + shift
    weight, bias = solve_procrustes(Moments.compute([(new, old)]), centre=True)
    torch.testing.assert_close(weight.T @ weight, torch.eye(6, dtype=torch.float64))
    torch.testing.assert_close((new @ weight + bias).mean(0), old.mean(0))
    plain, none = solve_procrustes(Moments.compute([(new, old)]))
    assert not none.any()
    assert (new @ weight + bias - old).norm() < 0.9 * (new @ plain - old).norm()
    for _ in range(50):
        other = torch.linalg.qr(torch.randn(7, 6, generator=generator, dtype=torch.float64)).Q
        assert (new @ other * old).sum() <= (new @ plain * old).sum(), "no orthogonal map agrees more"


def distance_from_rotations(weight: torch.Tensor) -> float:
    gram = weight.T @ weight if len(weight) >= len(weight.T) else weight @ weight.T
    return float((gram - torch.eye(len(gram), dtype=gram.dtype)).norm())


@pytest.mark.parametrize(("dim", "old_dim"), [(7, 7), (7, 4), (4, 7)])
def test_lambda_orthogonality_lies_between_least_squares_and_procrustes(dim: int, old_dim: int) -> None:
    new, old = unit(80, dim), F.normalize(unit(80, dim, 1)[:, :old_dim] if dim >= old_dim else unit(80, old_dim, 1), dim=-1)
    pairs = Moments.compute([(new, F.normalize(old + 2 * F.pad(new, (0, max(old_dim - dim, 0)))[:, :old_dim], dim=-1))])

    def solved(strength: float) -> torch.Tensor:
        given = {"old": OLD | {"dim": old_dim}, "embedding_dim": dim, "strength": strength}
        return build("lambda_orthogonality", **given).solve(pairs)[0]

    covariance, cross = pairs.covariances()
    torch.testing.assert_close(solved(0.0), torch.linalg.solve(covariance, cross), atol=1e-5, rtol=1e-5)
    found = [distance_from_rotations(solved(strength)) for strength in (0.0, 1e-3, 1e-2, 1.0, 1e3)]
    assert found == sorted(found, reverse=True) and found[-1] < 1e-3 < 0.1 < found[0]
    if dim <= old_dim:
        torch.testing.assert_close(solved(1e3), solve_procrustes(pairs, centre=True)[0], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(("dim", "old_dim"), [(7, 7), (7, 4), (4, 7)])
@pytest.mark.parametrize("threshold", [1.0, 2.0])
def test_a_threshold_lets_the_line_leave_the_rotations_by_that_much(dim: int, old_dim: int, threshold: float) -> None:
    """Equation 6 of the paper, at a point that no step makes better; least squares is at a distance of 5 and more."""
    new = unit(80, dim).double()
    line = 3 * torch.randn(dim, old_dim, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    pairs = Moments.compute([(new, new @ line)])
    given = {"old": OLD | {"dim": old_dim}, "embedding_dim": dim, "threshold": threshold}

    def solved(**options: float) -> torch.Tensor:
        return build("lambda_orthogonality", **given, **options).solve(pairs)[0]

    def naive(weight: torch.Tensor) -> float:
        covariance, cross = pairs.covariances()
        fit = (weight * (covariance @ weight - 2 * cross)).sum()
        distance = distance_from_rotations(weight)
        return float(fit) + distance * 5 / (1 + math.exp(-20 * (distance - threshold)))

    found = solved(strength=5.0, steepness=20.0)
    free = solved(strength=0.0)
    assert distance_from_rotations(free) > 5 > 1.2 * threshold > distance_from_rotations(found) > 0.6 * threshold
    generator = torch.Generator().manual_seed(2)
    for size in (1e-4, 1e-3, 1e-2, 0.1):
        for _ in range(10):
            step = size * torch.randn(found.shape, generator=generator, dtype=found.dtype)
            assert naive(found) < naive(found + step)
    assert naive(found) < min(naive(free), naive(solve_procrustes(pairs, centre=True)[0]))


def knowledge() -> tuple[OldKnowledge, np.ndarray]:
    return OldKnowledge(4, LABELS, unit(8, 6, 1).numpy()), unit(8, 7, 2).numpy()


def batch() -> dict[str, torch.Tensor]:
    return {"old_embeds": unit(8, 6, 1), "new_embeds": unit(8, 7, 2), "labels": torch.from_numpy(LABELS)}


def sides(direction: str) -> tuple[torch.Tensor, torch.Tensor]:
    new, old = unit(8, 7, 2), unit(8, 6, 1)
    return (old, new) if direction == "old_to_new" else (new, old)


def begun(method: str, direction: str, **options: Any) -> tuple[CompatModel, torch.Tensor]:
    """Return a prepared model, and what it makes of one side."""
    torch.manual_seed(0)
    model = build(method, direction=direction, **options).eval()
    model.prepare(*knowledge())
    source, _ = sides(direction)
    return model, model.upgrade(source) if direction == "old_to_new" else model.to_space(source)


Line = tuple[torch.Tensor, torch.Tensor]
STARTS: list[tuple[str, dict[str, Any], Callable[[Moments], Line]]] = [
    ("residual_mlp", {"regularisation": 0.3}, lambda pairs: solve_ridge(pairs, 0.3)),
    ("drift_adapter", {"variant": "low_rank", "rank": 3}, lambda pairs: solve_ridge(pairs, 0.01, 3)),
    ("geometry_residual", {"start": "ridge"}, lambda pairs: solve_ridge(pairs, 0.01)),
    ("geometry_residual", {"start": "procrustes"}, lambda pairs: solve_procrustes(pairs, centre=True)),
    ("rbt", {"start": "procrustes"}, solve_procrustes),
    ("rbt", {"start": "identity"}, lambda pairs: (torch.eye(*pairs.covariances()[1].shape).double(), torch.zeros(1))),
]


@pytest.mark.parametrize("direction", ["new_to_old", "old_to_new"])
@pytest.mark.parametrize(("method", "options", "solve"), STARTS)
def test_networks_begin_at_a_line(method: str, options: dict[str, Any], solve: Callable[[Moments], Line], direction: str) -> None:
    source, target = sides(direction)
    model, mapped = begun(method, direction, **options)
    weight, bias = solve(Moments.compute([(source, target)]))
    torch.testing.assert_close(mapped.double(), F.normalize(source.double() @ weight + bias, dim=-1), atol=1e-5, rtol=1e-5)
    fixed = [name for name, part in model.named_parameters() if name.startswith("skip.") and part.requires_grad]
    assert not fixed, "what is solved stays"


@pytest.mark.parametrize("direction", ["new_to_old", "old_to_new"])
def test_residual_mlp_loss_is_the_mean_of_distances(direction: str) -> None:
    model, mapped = begun("residual_mlp", direction)
    pairs = zip(mapped.detach(), sides(direction)[1], strict=True)
    naive = sum(1 - float(a @ b) / float(a.norm() * b.norm()) for a, b in pairs) / 8
    loss = model(**{name: rows for name, rows in batch().items() if name != "labels"}).loss
    assert loss.item() == pytest.approx(naive, rel=1e-5)
    loss.backward()
    assert model.skip.weight.grad is None and model.residual[2].weight.grad.abs().max() > 0


@pytest.mark.parametrize("method", ["ridge", "drift_adapter", "query_map", "projection"])
def test_a_map_onto_an_expanded_model_reaches_the_versions_before_it(method: str, tmp_path: Path) -> None:
    """The first dimensions of an expanded old model are the space of the model before it, in views and in galleries."""
    earlier = Fingerprint.from_string("before the old")
    old = OLD | {"compatible_with": [{"name": earlier.name, "fingerprint": earlier.digest, "dim": 4}]}
    torch.manual_seed(0)
    model = build(method, old=old).eval()
    for parameter in model.parameters():
        parameter.data.normal_()
    new, nearest = unit(5, 7), model.compatible_with[0]
    with torch.no_grad():
        assert torch.equal(model.to_space(new, nearest), model.to_space(new)) and model.to_space(new).shape == (5, 6)
        torch.testing.assert_close(model.to_space(new, earlier), F.normalize(model.to_space(new)[:, :4], dim=-1))
        gallery = Gallery.create(tmp_path / "gallery", earlier, dim=4)
        gallery.add(model.to_space(new, earlier), [str(row) for row in range(5)])
    gallery.commit()
    assert [hits[0].id for hits in gallery.search(new, model, top_k=1)] == [str(row) for row in range(5)]


@pytest.mark.parametrize("direction", ["new_to_old", "old_to_new"])
@pytest.mark.parametrize("variant", ["orthogonal", "low_rank", "mlp"])
def test_drift_adapter_is_its_formula(variant: str, direction: str) -> None:
    model, _ = begun("drift_adapter", direction, variant=variant, hidden=5, rank=3)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    weights = {name: value.double() for name, value in model.state_dict().items()}
    source, target = sides(direction)
    total = 0.0
    for x, y in zip(source.double(), target.double(), strict=True):
        h = weights["linear.0.weight"] @ x
        if variant == "low_rank":
            assert len(h) == 3
            h = weights["linear.1.weight"] @ h + weights["linear.1.bias"]
        if variant == "mlp":
            before = weights["network.0.weight"] @ x + weights["network.0.bias"]
            hidden = torch.stack([v * (1 + torch.erf(v / math.sqrt(2))) / 2 for v in before])
            h = h + weights["network.2.weight"] @ hidden + weights["network.2.bias"]
        g = weights["scaling"] * h
        total += 1 - float(g @ y) / float(g.norm() * y.norm())
    given = {name: rows for name, rows in batch().items() if name != "labels"}
    assert model(**given).loss.item() == pytest.approx(total / 8, rel=1e-4)
    layers = model.own_view_layers
    assert (layers is None) is (variant == "mlp")
    if layers is not None:
        torch.testing.assert_close(F.normalize(nn.Sequential(*layers)(source), dim=-1), model.map(source))


@pytest.mark.parametrize("direction", ["new_to_old", "old_to_new"])
@pytest.mark.parametrize("variant", ["orthogonal", "mlp"])
def test_drift_adapter_begins_at_a_scaled_rotation(variant: str, direction: str) -> None:
    model, mapped = begun("drift_adapter", direction, variant=variant)
    source, target = sides(direction)
    rotated = source.double() @ solve_procrustes(Moments.compute([(source, target)]))[0]
    factors = (rotated * target).sum(0) / rotated.square().sum(0)
    torch.testing.assert_close(mapped.double(), F.normalize(rotated * factors, dim=-1), atol=1e-5, rtol=1e-5)
    assert model.scaling.requires_grad and not model.linear[0].weight.requires_grad


def test_drift_adapter_golden_trajectory() -> None:
    """Recorded losses of the three variants: a change here changes every result and is to be justified."""
    given = {name: rows for name, rows in batch().items() if name != "labels"}
    found = {}
    for variant in DRIFT_ADAPTER:
        model, losses = begun("drift_adapter", "new_to_old", variant=variant, hidden=5, rank=2)[0].train(), []
        optimiser = torch.optim.AdamW([part for part in model.parameters() if part.requires_grad], 1e-2)
        for _ in range(4):
            losses.append(model(**given).loss)
            losses[-1].backward()
            optimiser.step()
            optimiser.zero_grad()
        found[variant] = torch.stack(losses).tolist()
    for variant, losses in DRIFT_ADAPTER.items():
        np.testing.assert_allclose(found[variant], losses, atol=1e-5, err_msg=f"{variant}: {found[variant]}")


DRIFT_ADAPTER = {
    "orthogonal": [0.229619, 0.229393, 0.229214, 0.229092],
    "low_rank": [0.237279, 0.231185, 0.227415, 0.224287],
    "mlp": [0.229619, 0.22346, 0.217986, 0.213301],
}


@pytest.mark.parametrize("classes", [True, False])
def test_geometry_residual_loss_is_a_double_loop_over_near_triplets(classes: bool) -> None:
    model = build("geometry_residual", margin=0.3, neighbours=2).eval()
    model.prepare(*knowledge())
    given = {name: rows for name, rows in batch().items() if classes or name != "labels"}
    mapped, target = model.to_space(given["new_embeds"]).detach(), given["old_embeds"]
    terms = []
    for i in range(8):
        others = [j for j in range(8) if (LABELS[i] != LABELS[j] if classes else i != j)]
        for j in sorted(others, key=lambda j: -float(target[i] @ target[j]))[:2]:
            terms.append(max(0.0, 0.3 + float(mapped[i] @ target[j]) - float(mapped[i] @ target[i])))
    assert model(**given).loss.item() == pytest.approx(sum(terms) / len(terms), rel=1e-5)


@pytest.mark.parametrize("reverse", [False, True])
def test_kl_is_that_of_torch_and_knows_its_direction(reverse: bool) -> None:
    mapped, target, rows = 3 * unit(5, 7), unit(5, 7, 1), unit(4, 7, 2)
    seen = torch.cat([2 * rows[:2], torch.full((1, 7), torch.nan), rows[2:]])  # a class without a row, and rows of any length
    mapped_p, target_p = (Categorical(logits=9.0 * F.normalize(x, dim=-1) @ rows.T) for x in (mapped, target))
    wanted = kl_divergence(mapped_p, target_p) if reverse else kl_divergence(target_p, mapped_p)
    torch.testing.assert_close(classifier_kl_loss(mapped, target, seen, 9.0, reverse=reverse), wanted.mean())
    mapped.requires_grad_()
    nothing = classifier_kl_loss(mapped, target, torch.full((3, 7), torch.nan), 9.0, reverse=reverse)
    assert nothing == 0 and not torch.autograd.grad(nothing, mapped)[0].any()


@pytest.mark.parametrize("of", ["kl", "lce"])
def test_many_classes_in_parts_give_the_whole_gradient(of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    for logits, centres in ((1000, 3), (8, 2)):  # at once: all, and those of two samples, or two centres and one
        monkeypatch.setattr(alignment, "LOGITS_AT_ONCE", logits)
        monkeypatch.setattr("xcompat.methods.lce.CENTRES_AT_ONCE", centres)
        model, _ = begun("lce", "new_to_old")
        mapped = (3 * unit(5, 7)).requires_grad_()
        loss = model(**batch()).loss if of == "lce" else classifier_kl_loss(mapped, unit(5, 7, 1), unit(4, 7, 2), 9.0)
        made.append((loss.detach(), *torch.autograd.grad(loss, list(model.parameters()) if of == "lce" else mapped)))
    torch.testing.assert_close(made[1], made[0])


def test_rbt_loss_is_its_three_parts() -> None:
    model = build("rbt", similarity_weight=2.0, kl_weight=3.0, class_weight=5.0).eval()
    model.prepare(*knowledge())
    mapped, target = model.to_space(batch()["new_embeds"]).detach(), batch()["old_embeds"]
    centres = {c: target[torch.from_numpy(c == LABELS)].mean(0) for c in (0, 2, 3)}
    total = 0.0
    for m, t, label in zip(mapped, target, LABELS.tolist(), strict=True):
        logits = {
            name: {c: model.config.logit_scale * float(F.cosine_similarity(x, p, dim=0)) for c, p in centres.items()}
            for name, x in (("m", m), ("t", t))
        }
        sums = {name: math.log(sum(math.exp(value) for value in values.values())) for name, values in logits.items()}
        log_p = {name: {c: value - sums[name] for c, value in values.items()} for name, values in logits.items()}
        kl = sum(math.exp(log_p["t"][c]) * (log_p["t"][c] - log_p["m"][c]) for c in centres)
        total += 2 * float(((m - t) ** 2).sum()) + 3 * kl - 5 * log_p["m"][label]
    assert model(**batch()).loss.item() == pytest.approx(total / 8, rel=1e-4)


def test_transforms_have_the_published_size_and_add_their_paths() -> None:
    for width, millions in {512: 0.79, 1024: 1.9, 2048: 5.7, 4096: 19.6}.items():  # table 11 of FCT
        transform = ForwardTransform(128, 128, 128, width)
        assert sum(each.numel() for each in transform.parameters()) / 1e6 == pytest.approx(millions, rel=0.02)
    assert build("fct", side_info=SIDE, mixer_width=5).transform.mixer[1].in_features == 5
    block = ResidualBottleneck(5, width=3, paths=2)
    assert torch.equal(block(unit(4, 5)), unit(4, 5)), "it starts at the identity"
    for path in block.paths:
        nn.init.ones_(path[7].weight)
    torch.testing.assert_close(block(unit(4, 5)), unit(4, 5) + block.paths[0](unit(4, 5)) + block.paths[1](unit(4, 5)))


@pytest.mark.parametrize("direction", ["new_to_old", "old_to_new"])
def test_lce_loss_is_centres_and_boundaries(direction: str) -> None:
    model, _ = begun("lce", direction, alignment_weight=2.0, boundary_weight=3.0)
    source, target = sides(direction)
    model.requires_grad_(False)
    aligned, outside = 0.0, 0.0
    for c in (0, 2, 3):
        own = torch.from_numpy(c == LABELS)
        centre = F.normalize(target[own].mean(0), dim=0)
        aligned += 1 - float(model.map(F.normalize(source[own].mean(0), dim=0)[None])[0] @ centre)
        boundary = min(float(row @ centre) for row in target[own])
        outside += sum(max(boundary - float(row @ centre), 0) for row in model.map(source[own]))
    assert model(**batch()).loss.item() == pytest.approx(2 * aligned / 3 + 3 * outside / 8, rel=1e-4)


def test_classes_of_the_old_model_are_required_and_others_not_read() -> None:
    for model in (build("rbt"), build("lce")):
        refuses("is not prepared; call prepare", model, **batch())
    model.prepare(*knowledge())
    loss = model(**batch() | {"labels": torch.full((8,), 1)}).loss
    loss.backward()
    assert loss.isfinite() and all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("side_info", [None, SIDE])
def test_a_gallery_upgraded_in_a_stream_is_that_of_one_batch(side_info: dict[str, Any] | None) -> None:
    model = build("fct", side_info=side_info)
    for _ in range(3):  # move the running statistics
        model.transform(torch.randn(32, 6), torch.randn(32, 5) if side_info else None)
    model.eval()
    rows = (unit(50, 6), unit(50, 5, 1)) if side_info else (unit(50, 6),)
    with torch.no_grad():
        whole = model.upgrade(*rows)
        stream = torch.cat([model.upgrade(*chunk) for chunk in zip(*(side.split(7) for side in rows), strict=True)])
    torch.testing.assert_close(stream, whole, atol=1e-6, rtol=1e-5)
    if side_info:  # of any length
        torch.testing.assert_close(model.upgrade(rows[0], 9 * rows[1]), whole)
    torch.testing.assert_close(whole.norm(dim=-1), torch.ones(50))


def test_side_information_is_required_by_name() -> None:
    model = build("fct", side_info=SIDE).eval()
    assert model.columns == ("new_embeds", "old_embeds", "side_info")
    refuses("pass side_info of the same items, made by seen otherwise", model.upgrade, unit(3, 6))
    refuses("needs the column side_info", model, old_embeds=unit(3, 6), new_embeds=unit(3, 7))
    refuses("trained without side-information: remove side_info", build("fct").upgrade, unit(3, 6), unit(3, 5))
    refuses("set side_info too", build, "fct", new_side_info=NEW_SIDE)
    refuses("does not map side-information", model.upgrade_side, unit(3, 6), unit(3, 5))


def test_statistics_stay_from_half_of_the_training_on() -> None:
    model = build("fct", side_info=SIDE)
    given = {"old_embeds": unit(8, 6), "new_embeds": unit(8, 7), "side_info": unit(8, 5)}

    def statistics() -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in model.state_dict().items() if "running" in name}

    for progress, moves in ((0.0, True), (0.49, True), (0.5, False), (0.9, False)):
        model.train().progress = progress
        before = statistics()
        model(**given).loss.backward()
        after = statistics()
        assert all(torch.equal(before[name], after[name]) != moves for name in before), progress
    assert all(p.grad is not None for p in model.parameters()), "the affine part keeps training"


def test_fct_loss_is_the_squared_distance_of_h_and_of_g() -> None:
    model = build("fct", side_info=SIDE, new_side_info=NEW_SIDE).eval().requires_grad_(False)
    old, new, side, new_side = unit(5, 6), unit(5, 7), unit(5, 5), 3 * unit(5, 4)
    mapped, carried = model.upgrade(old, side), model.upgrade_side(old, side)
    total = 0.0
    for row in range(5):
        total += sum(float(a - b) ** 2 for a, b in zip(mapped[row], new[row], strict=True))
        total += sum(float(a - b / 3) ** 2 for a, b in zip(carried[row], new_side[row], strict=True))
    loss = model(old_embeds=old, new_embeds=new, side_info=side, new_side_info=new_side).loss
    assert loss.item() == pytest.approx(total / 5, rel=1e-5)


def test_fastfill_loss_is_a_gaussian_likelihood_of_distance_and_class() -> None:
    torch.manual_seed(0)
    options = {"side_info": SIDE, "alignment_weight": 2.0, "scale": 3.0, "smoothing": 0.2}
    model = build("fastfill", **options).eval().requires_grad_(False)
    new, old, side, labels = unit(8, 7), unit(8, 6, 1), unit(8, 5, 2), torch.from_numpy(LABELS)
    model.prepare(OldKnowledge(4, LABELS, old.numpy()), new.numpy())
    mapped, sure = model.upgrade(old, side), model.uncertainty(old, side)
    means = {label: F.normalize(new[labels == label].mean(0), dim=0) for label in (0, 2, 3)}  # class 1 has no sample
    total = 0.0
    for row in range(8):
        logits = {label: 3.0 * float(mapped[row] @ mean) for label, mean in means.items()}
        log_sum = math.log(sum(map(math.exp, logits.values())))
        wanted = {label: 0.2 / 3 + 0.8 * (label == LABELS[row]) for label in means}
        named = -sum(share * (logits[label] - log_sum) for label, share in wanted.items())
        error = 2.0 * float(((mapped[row] - new[row]) ** 2).sum()) + named
        total += 0.5 * math.exp(-float(sure[row])) * error + 0.5 * float(sure[row])
    given = {"old_embeds": old, "new_embeds": new, "side_info": side, "labels": labels}
    assert model(**given).loss.item() == pytest.approx(total / 8, rel=1e-5)
    refuses("pass side_info", model.uncertainty, old)


@pytest.mark.parametrize("loss", ["kl", "reversed_kl"])
def test_fct_kl_is_of_the_new_models_classifier(loss: str) -> None:
    model = build("fct", loss=loss).eval()
    given = {"old_embeds": unit(5, 6), "new_embeds": unit(5, 7)}
    refuses("not prepared with the new classifier", model, **given)
    weight = nn.Parameter(unit(4, 7, 3))
    model._get_encoder = lambda: SimpleNamespace(classifier=SimpleNamespace(weight=weight))
    model.prepare(*knowledge())
    expected = classifier_kl_loss(model.upgrade(unit(5, 6)), unit(5, 7), weight, 1 / 0.07, reverse=loss == "reversed_kl")
    torch.testing.assert_close(model(**given).loss, expected)
    assert "classifier_CD" not in model.state_dict()
    model._get_encoder = SimpleNamespace
    refuses("has no classifier of its embeddings; set options.loss to mse", model.prepare, *knowledge())


def naive_nt_xent(first: torch.Tensor, second: torch.Tensor, crops: list[torch.Tensor], temperature: float) -> float:
    """Average over all that look for a whole view of their image, each among all whole views but the other one of its image."""
    whole, terms = (first, second), []
    for i in range(len(first)):
        for wanted in (0, 1):
            for mine in (whole[1 - wanted], *crops):
                others = [(view, j) for view in (0, 1) for j in range(len(first)) if (view, j) != (1 - wanted, i)]
                logits = [float(mine[i] @ whole[view][j]) / temperature for view, j in others]
                found = float(mine[i] @ whole[wanted][i]) / temperature
                terms.append(math.log(sum(math.exp(logit) for logit in logits)) - found)
    return sum(terms) / len(terms)


@pytest.mark.parametrize(("rows", "count"), [(1, 0), (2, 0), (7, 0), (5, 1), (5, 3)])
@pytest.mark.parametrize("temperature", [0.1, 1.0])
def test_views_and_crops_look_for_whole_views_of_their_image(rows: int, count: int, temperature: float) -> None:
    first, second, *crops = F.normalize(torch.randn(2 + count, rows, 4, dtype=torch.float64), dim=-1)
    expected = naive_nt_xent(first, second, crops, temperature)
    assert float(nt_xent_loss(first, second, temperature, crops)) == pytest.approx(expected, abs=1e-9)
    for views, more in (([first, second[:, :3]], crops), ([first, second], [*crops, first[:-1]])):
        with pytest.raises(ValueError, match="must have the same shape"):
            nt_xent_loss(*views, temperature, more)


def test_simclr_normalises_once(image_folder_of: dict[str, str], images: list[Image.Image]) -> None:
    model = METHODS["simclr"].from_encoder(image_folder_of["vit"], dim=6).train()
    pixels = model.processor.images(images)
    for _ in range(200):  # until the statistics are those of these images
        model.features(pixels)
    model.eval()
    with torch.no_grad():
        projected = model.neck(model.encoder.image_features(pixels))
        variance = projected.var(0)  # as batch norm remembers it
        stored = model.features(pixels)
    torch.testing.assert_close(model.norm.running_mean, projected.mean(0), atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(stored, (projected - projected.mean(0)) / (variance + model.norm.eps).sqrt(), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("kind", ["resnet", "vit"])
def test_simclr_sees_small_crops(kind: str, image_folder_of: dict[str, str], images: list[Image.Image]) -> None:
    model = METHODS["simclr"].from_encoder(image_folder_of[kind], dim=6, crops=3, crop_size=16, crop_scale=0.3).train()
    collator = PairCollator(model.processor, Augmentation(), model.views)
    items = [{IMAGE: image, SEED: seed} for seed, image in enumerate(images)]
    batch, again = collator(items), collator(items)
    assert all(torch.equal(batch[name], again[name]) for name in batch)
    assert not torch.equal(batch["pixel_values"], batch["second_pixel_values"])
    refuses("set data.augmentation", PairCollator, model.processor, views=model.views)
    crops = batch["crop_pixel_values"]
    assert crops.shape == (len(images), 3, 3, 16, 16)
    assert len({crop.numpy().tobytes() for crop in crops.flatten(0, 1)}) == 3 * len(images), "each is another"
    a, b, small = (F.normalize(model.features(views), dim=-1) for views in (*list(batch.values())[:2], crops.flatten(0, 1)))
    expected = nt_xent_loss(a, b, model.config.temperature, list(small.view(len(images), 3, -1).unbind(1)))
    torch.testing.assert_close(model(**batch).loss, expected)
    refuses("crop_pixel_values", model, **{name: batch[name] for name in ("pixel_values", "second_pixel_values")})


def test_impossible_options_are_refused(image_folder_of: dict[str, str]) -> None:
    for method, options, message in (
        ("ridge", {"rank": 0}, "options.rank is 0"),
        ("lambda_orthogonality", {"strength": -1}, "options.strength is -1; give 0"),
        ("lambda_orthogonality", {"threshold": -1}, "options.threshold is -1; give 0 or more"),
        ("lambda_orthogonality", {"threshold": 12, "steepness": 0}, "options.steepness is 0; give more than 0"),
        ("drift_adapter", {"variant": "low_rank", "rank": 0}, "options.rank is 0; give a number from 1, or remove it"),
        ("drift_adapter", {"hidden": -1}, "options.hidden is -1; give a number from 1"),
        ("fct", {"mixer_width": 0}, "options.mixer_width is 0; set 1 or more"),
        ("simclr", {"crops": -1}, "set 0 or more crops"),
        ("simclr", {"crops": 2, "crop_size": 0}, "of at least 1 pixel"),
        ("simclr", {"crops": 2, "crop_scale": 0.01}, "use 0.05 to 1"),
        ("simclr", {"crops": 2, "crop_size": 3}, "does not support images of 3 pixels .*; set options.crop_size"),
        ("simclr", {"batch_norm": True}, "options.batch_norm: simclr has its own batch norm; remove"),
        ("independent", {"mixup": 0.2, "head": "triplet", "classes": ["a", "b"]}, "set options.mixup to 0, or no triplets"),
    ):
        old = OLD if METHODS[method].compares_with_old else None
        refuses(message, METHODS[method].from_encoder, image_folder_of["vit"], old=old, **options)


def test_simclr_trains_the_bits_it_stores(image_folder_of: dict[str, str], images: list[Image.Image], tmp_path: Path) -> None:
    model = METHODS["simclr"].from_encoder(image_folder_of["resnet"], dim=6, binarise=True).train()
    first, second = (model.processor.images([image.rotate(angle) for image in images]) for angle in (0, 20))
    features = [model.features(views) for views in (first, second)]
    signs = [F.normalize(torch.where(each > 0, 1.0, -1.0), dim=-1) for each in features]
    output = model(pixel_values=first, second_pixel_values=second, return_loss=True)
    loss = output.loss
    torch.testing.assert_close(loss, nt_xent_loss(*signs, model.config.temperature))
    assert torch.equal(output.image_embeds, (features[0] > 0).float())
    loss.backward()
    gradient = model.neck.weight.grad
    assert gradient is not None and gradient.abs().sum() > 0, "signs alone have none"
    model.export(tmp_path)
    embedder = load_embedder(str(tmp_path))
    bits = embedder.embed({"pixel_values": first})
    assert bits.shape == (4, 6) and set(bits.unique().tolist()) == {0.0, 1.0}
    with torch.no_grad():
        assert torch.equal(bits.bool(), model.eval().features(first) > 0)


def test_mixup_mixes_images_and_losses(image_folder_of: dict[str, str], images: list[Image.Image]) -> None:
    vit = image_folder_of["vit"]
    plain, mixed = (METHODS["independent"].from_encoder(vit, classes=["a", "b", "c"], mixup=alpha) for alpha in (0.0, 0.4))
    mixed.load_state_dict(plain.state_dict())
    given = {"pixel_values": plain.processor.images(images), "labels": torch.tensor([0, 1, 2, 0])}
    assert torch.equal(mixed.eval()(**given).loss, plain.eval()(**given).loss), "in training alone"
    torch.manual_seed(3)
    loss = mixed.train()(**given).loss
    torch.manual_seed(3)
    share = float(torch.distributions.Beta(0.4, 0.4).sample())
    order = torch.randperm(4)
    pixels = share * given["pixel_values"] + (1 - share) * given["pixel_values"][order]
    first, second = (plain.train()(pixel_values=pixels, labels=given["labels"][rows]).loss for rows in (slice(None), order))
    torch.testing.assert_close(loss, share * first + (1 - share) * second)


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return a recipe that trains an old and a new model, and two kinds of side-information, on three classes of images."""
    base = tmp_path_factory.mktemp("mapping")
    write_classes(base, {"train": 8, "test": 3})
    binary = {"dim": 5, "binarise": True, "crops": 2, "crop_size": 8}
    stages = [
        {"name": "old", "method": "independent", "options": {"dim": 6}},
        {"name": "fresh", "method": "independent", "options": {"dim": 7}},
        {"name": "views", "method": "simclr", "data": {"augmentation": {}}, "options": binary},
        {"name": "drawing", "method": "autoencoder", "options": {"dim": 4}},
    ]
    made = {
        "output_dir": str(base / "run"),
        "cache_dir": str(base / "cache"),
        "data": {"images": {"path": str(base / "train")}, "queries": {"path": str(base / "test")}},
        "training": {"max_steps": 4, "per_device_train_batch_size": 8, "learning_rate": 1e-3, "save_strategy": "no"},
        "evaluation": {"resamples": 100, "ks": [1, 2], "examples": 1},
    }
    run_recipe(recipe_of(made, new=UNTRAINED, stages=stages))
    return made | {"old": f"{base}/run/old/model", "new": f"{base}/run/fresh/model"}


def embeds_of(folder: str, raw: dict[str, Any]) -> np.ndarray:
    embedder = load_embedder(folder)
    images = [Image.open(file) for file in sorted(Path(raw["data"]["queries"]["path"]).rglob("*.png"))]
    return embedder.embed({"pixel_values": embedder.processor.images(images)}).numpy().astype(np.float64)


def test_side_information_that_is_the_same_for_all_images_leaves_a_report() -> None:
    items = [str(row) for row in range(6)], ["ant", "bee"] * 3
    models = {
        name: EmbeddedImages(name, Fingerprint.from_string(name), rows, rows, items[0], items[0], items[1], items[1])
        for name, rows in (("old", unit(6, 4).numpy()), ("same", np.ones((6, 3))), ("turned", unit(6, 4).numpy()[:, ::-1]))
    }
    notes = {}
    for side in ("same", "turned"):
        contestants = EvaluatedModels(models["old"], models["old"], upgraded=models["old"], side_info=models[side])
        notes[side] = evaluate_cases(contestants, EvaluationSettings(resamples=100, ks=[1]), 0)[0].notes[-1]
    assert "side-information of same could not be computed: all rows of y are equal" in notes["same"]
    assert "side-information of turned: 1.00 (1: side-information" in notes["turned"]


@pytest.mark.parametrize(
    ("side", "loss"), mostly_nightly_rows([("views", "mse"), ("drawing", "kl")], lambda side, _: side == "drawing")
)
def test_a_gallery_with_side_information_is_mapped_and_judged(side: str, loss: str, raw: dict[str, Any], tmp_path: Path) -> None:
    folders = {name: f"{raw['output_dir']}/{name}/model" for name in ("views", "drawing")}
    changes = {"method": "fct", "options": {"loss": loss}, "side_info": folders[side], "new_side_info": folders["views"]}
    recipe = recipe_of(raw, **changes, output_dir=str(tmp_path / "run"))
    embed_recipe(recipe)
    run_recipe(recipe)
    cases = {case.label: case for case in load_report(tmp_path / "run").cases}
    assert set(cases) == {"old/old", "independent/old", "new/old", "mapped/mapped", "new/new", "independent/independent"}
    assert cases["new/new"].metrics == cases["independent/independent"].metrics, "the new model is not touched"
    cka = linear_cka(*(embeds_of(folder, raw) for folder in (raw["old"], folders[side])))
    (note,) = [note for note in load_report(tmp_path / "run").notes if "CKA" in note]
    assert f"side-information of {side}: " in note and "(1: side-information adds nothing linear)" in note
    assert float(note.split(": ")[1].split(" ")[0]) == pytest.approx(cka, abs=0.01)
    assert "Linear CKA" in (tmp_path / "run" / "report" / "report.html").read_text()
    model = AutoModel.from_pretrained(tmp_path / "run" / "model")
    assert model.config.side_info["dim"] == {"views": 5, "drawing": 4}[side] and model.config.new_side_info["dim"] == 5
    embedder, new = load_embedder(str(tmp_path / "run" / "model")), load_embedder(raw["new"])
    pixels = {"pixel_values": new.processor.images([Image.new("RGB", (16, 16), "red")])}
    assert embedder.dim == 7, "the next update sees the new model"
    # weights are equal to the bit; where they lie in memory may change the last one of a convolution
    torch.testing.assert_close(embedder.embed(pixels), new.embed(pixels), atol=1e-6, rtol=0)
    model.config.side_info["name"] = folders["drawing" if side == "views" else "views"]
    with pytest.raises(FingerprintMismatchError, match="embeddings of different models cannot be compared"):
        side_info_of(model, None, tmp_path)  # before the test set is embedded


def test_stored_embeddings_have_no_views(raw: dict[str, Any], tmp_path: Path) -> None:
    ids = load_labelled(LabelledSource(path=raw["data"]["images"]["path"])).dataset["id"]
    stored = write_embeds(tmp_path / "left", ids, image=unit(24, 6))
    data = raw["data"] | {"augmentation": {"min_scale": 0.3}, "views": 2}
    recipe = recipe_of(raw, method="ridge", old=str(stored), data=data, output_dir=str(tmp_path / "run"), evaluation=None)
    refuses("left contains embeddings of plain images, but data.views needs a model; set old", run_recipe, recipe)


def test_a_mapped_gallery_is_mapped_again(raw: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    views, drawing = (f"{raw['output_dir']}/{name}/model" for name in ("views", "drawing"))
    stages = [
        {"name": "last", "method": "independent", "options": {"dim": 5}, "new": UNTRAINED},
        {"name": "h2", "method": "fct", "side_info": views, "new_side_info": drawing},
        {"name": "h2_alone", "method": "fct"},
        {"name": "h3", "method": "fct", "old": raw["new"], "new": "stage:last", "side_info": drawing},
        {"name": "h3_alone", "method": "fct", "old": raw["new"], "new": "stage:last"},
    ]
    run_recipe(recipe_of(raw, stages=stages, output_dir=str(tmp_path / "run")))
    assert "image-to-image CMC@1, percent" in " ".join(capsys.readouterr().out.split())
    table = pd.read_csv(tmp_path / "run" / "sequence.csv").query("metric == 'cmc@1'")
    found = {(row.query, row.gallery): row.value for row in table.itertuples()}
    folders = (f"{tmp_path}/run/last/model", raw["old"], views)
    asked, old, side = (torch.from_numpy(embeds_of(folder, raw)).float() for folder in folders)
    names = ("h2", "h3", "h2_alone", "h3_alone")
    maps = {name: AutoModel.from_pretrained(tmp_path / "run" / name / "model").eval() for name in names}
    with torch.inference_mode():
        again = {
            "h3": maps["h3"].upgrade(maps["h2"].upgrade(old, side), maps["h2"].upgrade_side(old, side)),
            "h3_alone": maps["h3_alone"].upgrade(maps["h2_alone"].upgrade(old)),
        }
    labels, ids = np.repeat(np.arange(3), 3), np.arange(9)
    for name, mapped in again.items():
        wanted = cmc(asked.numpy(), mapped.numpy(), labels, labels, ids, ids, ks=(1,))[1]
        assert found[name, "old"] == pytest.approx(wanted, abs=0.12)  # caches are float16
        assert (name, "fresh") in found
    assert {gallery for query, gallery in found if query == "h2"} == {"old", "h2"}, "nothing was mapped before it"
