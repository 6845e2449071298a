"""UniBCT, NCCL and AdvBCT: every term of their losses against double loops, and what each promises beside it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import refuses, unit
from data_layouts.images import draw
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import nn
from torch.nn import functional as F
from transformers import AutoModel, TrainerControl, TrainerState, TrainingArguments

import xcompat
from xcompat import Fingerprint, XcompatError
from xcompat.data import BadSamples, LabelledSource, PairCollator, PairDataset, load_labelled
from xcompat.methods import METHODS
from xcompat.methods.advbct import class_radii
from xcompat.methods.nccl import class_entropies, consensus
from xcompat.methods.unibct import refined_weights
from xcompat.models import describe_old
from xcompat.models.classified import ClassifiedModel
from xcompat.models.old_knowledge import OldKnowledge, class_means, samples_of_classes
from xcompat.outputs import CompatOutput
from xcompat.training import refreshing
from xcompat.training.refreshing import RefreshCallback, embed_training_set
from xcompat.training.stage_recipe import StageRecipe
from xcompat.training.trainer import train
from xcompat.training.training_sets import Data

NAMES = ["unibct", "nccl", "advbct"]
CLASSES = ["cat", "dog", "shoe", "tree"]
LABELS_N = np.array([0, 2, 2, 0, 1, 2, 0, 1, 2, 2, 1, 0])  # no image of the last class
DIM, OLD_DIM = 8, 6


def knowledge(old_Nd: torch.Tensor | None = None) -> OldKnowledge:
    old_Nd = unit(len(LABELS_N), OLD_DIM, seed=1) if old_Nd is None else old_Nd
    return OldKnowledge(len(CLASSES), LABELS_N, old_Nd.numpy())


def build(method: str, folder_of: dict[str, str], old: OldKnowledge | None = None, **options: Any) -> Any:
    described = describe_old(Fingerprint.from_string("old"), dim=OLD_DIM)
    model = METHODS[method].from_encoder(folder_of["clip"], old=described, classes=CLASSES, **({"dim": DIM} | options))
    model.prepare(old or knowledge())
    return model


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    features = torch.randn(8, DIM, generator=torch.Generator().manual_seed(3)).requires_grad_()
    return features, torch.from_numpy(LABELS_N[:8]), unit(8, OLD_DIM, seed=1)


def compatibility(model: Any, features: torch.Tensor, labels: torch.Tensor, old: torch.Tensor | None) -> torch.Tensor:
    """Return the loss beside the new classifier's own."""
    return loss_of(model, features, labels, old) - model.classification_loss(features, labels)


def loss_of(model: Any, features: torch.Tensor, labels: torch.Tensor, old: torch.Tensor | None) -> torch.Tensor:
    return model.loss(CompatOutput(features=features), {"labels": labels, "old_embeds": old})


@pytest.mark.parametrize("adapters", [None, {"lora": {"rank": 2}}])
@pytest.mark.parametrize("name", ["clip", "open_clip", "siglip", "blip", "vision-text-dual-encoder", "vit"])
def test_what_images_go_through_is_trained_and_nothing_else(
    name: str, adapters: Any, folder_of: dict[str, str], image_folder_of: dict[str, str], images: list[Image.Image]
) -> None:
    folders, options = {"clip": {**folder_of, **image_folder_of}[name]}, {"dim": DIM, "adapters": adapters}
    model = build("l2", folders, **options).train()
    given = {"pixel_values": model.processor.images(images), "labels": torch.from_numpy(LABELS_N[:4])}
    model(**given, old_embeds=unit(4, OLD_DIM)).loss.backward()
    trained = [name for name, parameter in model.encoder.named_parameters() if parameter.requires_grad]
    unused = [name for name, parameter in model.named_parameters() if parameter.requires_grad and parameter.grad is None]
    assert trained and not unused, "a parameter without gradient hangs data-parallel training"
    assert all("lora_" in name for name in trained) == (adapters is not None)


@pytest.mark.parametrize("method", NAMES)
def test_losses_need_old_embeddings_and_single_precision(method: str, folder_of: dict[str, str], tmp_path: Path) -> None:
    prototypes = OldKnowledge(len(CLASSES), LABELS_N, None, given_prototypes_Cd=unit(len(CLASSES), OLD_DIM).numpy())
    refuses(f"{method} needs an old embedding of every training image", build, method, folder_of, prototypes)
    described = describe_old(Fingerprint.from_string("old"), dim=OLD_DIM)
    model: Any = METHODS[method].from_encoder(folder_of["clip"], old=described, classes=CLASSES, dim=DIM)
    refuses(f"{method} is not prepared", loss_of, model, *batch())
    model = build(method, folder_of)
    plain = compatibility(model, *batch())
    with torch.autocast("cpu", torch.bfloat16):
        half = compatibility(model, *batch())
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, plain, atol=1e-2 if method == "nccl" else 1e-6, rtol=0)
    model.export(tmp_path)
    names = {name.split(".")[0] for name in AutoModel.from_pretrained(tmp_path).state_dict()}
    assert names == {"encoder", "neck", "classifier"}


@pytest.mark.parametrize("method", NAMES)
def test_unreadable_old_embeddings_and_unknown_classes_count_for_nothing(method: str, folder_of: dict[str, str]) -> None:
    stored = unit(len(LABELS_N), OLD_DIM, seed=1)
    stored[5] = torch.nan
    model = build(method, folder_of, knowledge(stored))
    features, labels, old = batch()
    labels = torch.where(torch.arange(8) == 2, 3, labels)  # a class without old samples
    old[torch.arange(8) == 5] = torch.nan
    loss = loss_of(model, features, labels, old)
    loss.backward()
    assert loss.isfinite() and features.grad is not None and features.grad.isfinite().all()
    nothing_known = compatibility(model, features, torch.full((8,), 3), torch.full_like(old, torch.nan))
    torch.testing.assert_close(nothing_known, torch.zeros(()), atol=1e-5, rtol=0)
    nothing_known.backward()
    trained = [p for name, p in model.named_parameters() if not name.startswith(("encoder.", "neck."))]
    assert all(p.grad is not None and p.grad.isfinite().all() for p in trained), "every process needs every gradient"


@given(n=st.integers(1, 9), propagation=st.floats(0, 0.99), temperature=st.floats(0.02, 2), seed=st.integers(0, 99))
def test_refined_weights_are_a_distribution(n: int, propagation: float, temperature: float, seed: int) -> None:
    weights = refined_weights(unit(n, 4, seed), propagation, temperature)
    assert weights.shape == (n,) and (weights >= 0).all()
    assert float(weights.sum()) == pytest.approx(1)


def test_refined_weights_average_propagated_embeddings() -> None:
    new, old, share, temperature = unit(5, 4), unit(5, 3, seed=1).double(), 0.9, 0.2
    trust = torch.zeros(5, 5, dtype=torch.float64)
    for i in range(5):
        for j in range(5):
            if i != j:
                trust[i, j] = torch.exp(new[i].double() @ new[j].double() / temperature)
        trust[i] /= trust[i].sum()
    propagated = (1 - share) * old  # the series of the inverse: (1 − λ) Σ_k (λE)^k O
    for _ in range(400):
        propagated = (1 - share) * old + share * trust @ propagated
    torch.testing.assert_close(refined_weights(new, share, temperature) @ old, propagated.mean(dim=0))


def test_unibct_classifies_by_class_means_and_then_by_refined_ones(folder_of: dict[str, str], tmp_path: Path) -> None:
    model = build("unibct", folder_of, compat_weight=2.0, old_scale=10.0)
    features, labels, _ = batch()
    old, new = knowledge().embeddings("test"), unit(len(LABELS_N), DIM, seed=9)

    def naive(prototypes: dict[int, torch.Tensor]) -> torch.Tensor:
        total = torch.zeros(())
        for f, label in zip(features, labels.tolist(), strict=True):
            cosines = {k: 10 * F.cosine_similarity(f[:OLD_DIM], p, dim=0) for k, p in prototypes.items()}
            total = total + torch.stack(list(cosines.values())).logsumexp(dim=0) - cosines[label]
        return 2 * total / len(features)

    means = {k: torch.from_numpy(old[k == LABELS_N].mean(axis=0)) for k in range(3)}
    torch.testing.assert_close(compatibility(model, features, labels, None), naive(means))
    new[4] = torch.nan
    model.refresh(new.numpy())
    refined = {}
    for k in range(3):
        rows = [row for row in np.flatnonzero(k == LABELS_N) if row != 4]
        refined[k] = (refined_weights(new[rows], 0.9, 0.05)[:, None] * torch.from_numpy(old[rows])).sum(dim=0).float()
    torch.testing.assert_close(compatibility(model, features, labels, None), naive(refined))
    model.save_pretrained(tmp_path)
    assert torch.equal(AutoModel.from_pretrained(tmp_path).prototypes_Cd, model.prototypes_Cd), "a run that continues has them"


def naive_neighbourhood(scores: torch.Tensor, weights: torch.Tensor, temperature: float) -> torch.Tensor:
    losses = []
    for row, weight in zip(scores / temperature, weights, strict=True):
        shares = row.exp() / row.exp().sum()
        taught = [w * -share.log() for share, w in zip(shares, weight, strict=True) if w > 0]
        losses.append(torch.stack(taught).sum() / len(taught))
    return torch.stack(losses).mean()


@pytest.mark.parametrize(("feature_weight", "logit_weight"), [(1.0, 0.0), (0.0, 1.0), (0.7, 0.3)])
def test_nccl_is_its_double_loop(feature_weight: float, logit_weight: float, folder_of: dict[str, str]) -> None:
    options = {"feature_weight": feature_weight, "logit_weight": logit_weight, "max_entropy": 1.0, "temperature": 0.5}
    model = build("nccl", folder_of, **options)
    features, labels, old = batch()
    bank = torch.from_numpy(knowledge().embeddings("test"))
    new = F.normalize(features[:, :OLD_DIM], dim=-1)
    weights = torch.zeros(8, len(bank))
    for i in range(8):
        for q in range(len(bank)):
            if labels[i] == LABELS_N[q]:
                weights[i, q] = (1 + old[i] @ bank[q]) / 2
    rows = F.normalize(model.classifier.weight[:, :OLD_DIM], dim=-1)
    said, stored = new @ rows.T, bank @ rows.T
    logit_scores = F.cosine_similarity(said[:, None], stored[None], dim=-1)
    expected = feature_weight * naive_neighbourhood(new @ bank.T, weights, 0.5)
    expected = expected + logit_weight * naive_neighbourhood(logit_scores, weights, 0.5)
    torch.testing.assert_close(compatibility(model, features, labels, old), expected, atol=1e-5, rtol=1e-5)


def test_the_logit_term_has_the_gradient_of_new_logits_alone() -> None:
    new, bank, rows = unit(4, 5).requires_grad_(), unit(7, 5, seed=1), unit(9, 5, seed=2).requires_grad_()
    said, stored = consensus(new, bank, rows)
    weights = unit(4, 7, seed=4)
    (said @ stored.T * weights).sum().backward()
    gradients = new.grad.clone(), rows.grad.clone()
    assert gradients[1].abs().max() > 1e-3, "it reaches the classifier"
    new.grad = rows.grad = None
    target = bank @ rows.detach().T
    (F.cosine_similarity((new @ rows.T)[:, None], target[None], dim=-1) * weights).sum().backward()
    torch.testing.assert_close(gradients, (new.grad, rows.grad))


def test_entropies_are_those_of_gaussians_around_all_centres() -> None:
    old = knowledge()
    embeds, centres = old.embeddings_Nd, class_means(old.embeddings_Nd, LABELS_N, 4)[:3]
    variance = np.mean([np.sum((o - centres[y]) ** 2) for o, y in zip(embeds, LABELS_N, strict=True)]) / OLD_DIM
    expected = []
    for o in embeds:
        shares = np.exp([-np.sum((o - c) ** 2) / (2 * variance) for c in centres])
        shares /= shares.sum()
        expected.append(-sum(p * np.log(p) for p in shares))
    entropies, classes = class_entropies(old)
    assert classes == 3
    np.testing.assert_allclose(entropies, expected, rtol=1e-4)


def test_the_bank_holds_what_is_credible_or_a_seeded_draw(folder_of: dict[str, str]) -> None:
    centres = torch.eye(OLD_DIM)[:3]
    stored = F.normalize(centres[LABELS_N] + 0.05 * unit(len(LABELS_N), OLD_DIM), dim=-1)
    stored[3] = F.normalize(centres[1] + centres[2], dim=0)  # between the two other classes
    stored[5] = torch.nan
    model = build("nccl", folder_of, knowledge(stored))
    kept = [row for row in range(len(LABELS_N)) if row not in (3, 5)]
    assert model.bank_labels_Q.tolist() == LABELS_N[kept].tolist()
    torch.testing.assert_close(model.bank_Qd, stored[kept])
    everything = build("nccl", folder_of, knowledge(stored), max_entropy=1.0)
    assert len(everything.bank_Qd) == len(LABELS_N) - 1, "all but the unreadable one"
    banks = []
    for seed in (0, 0, 1):
        model = build("nccl", folder_of, max_entropy=1.0, bank_size=5)
        torch.manual_seed(seed)
        model.prepare(knowledge())
        banks.append(model.bank_Qd)
    assert banks[0].shape == (5, OLD_DIM) and torch.equal(banks[0], banks[1]) and not torch.equal(banks[0], banks[2])
    rows = knowledge().embeddings("test")
    assert all(any(np.allclose(row, other) for other in rows) for row in banks[0].numpy())


def test_what_cannot_be_learned_from_is_refused(folder_of: dict[str, str]) -> None:
    refuses("has only the text tower", build, "l2", folder_of, adapters={"lora": {"rank": 2, "towers": ["text"]}})
    refuses("propagation is 1", build, "unibct", folder_of, propagation=1.0)
    with pytest.raises(XcompatError, match="two images of some class"):
        build("advbct", folder_of, OldKnowledge(len(CLASSES), np.arange(4), unit(4, OLD_DIM).numpy()))
    refuses("no training image passes", build, "nccl", folder_of, knowledge(unit(1, OLD_DIM).repeat(len(LABELS_N), 1)))
    refuses("set options.logit_weight to 0", build, "nccl", folder_of, head="triplet")


def naive_radius(distances: np.ndarray) -> float:
    if len(distances) >= 4:
        low, high = np.percentile(distances, 25), np.percentile(distances, 75)
        distances = np.array([r for r in distances if r <= high + 1.5 * (high - low)])
    return float(distances.max()) if len(distances) > 1 else np.nan


@given(counts=st.lists(st.integers(0, 12), min_size=1, max_size=5), seed=st.integers(0, 99))
def test_radii_are_numpys(counts: list[int], seed: int) -> None:
    generator = np.random.default_rng(seed)
    labels = generator.permutation(np.repeat(np.arange(len(counts)), counts))
    embeds = generator.normal(size=(len(labels), 3)) * generator.exponential(size=(len(labels), 1)) ** 2
    embeds = embeds.astype(np.float32)
    embeds[generator.random(len(labels)) < 0.1] = np.nan
    centres = class_means(embeds, labels, len(counts))
    radii = class_radii(embeds, centres, samples_of_classes(labels, len(counts)))
    for k, radius in enumerate(radii):
        distances = np.array([np.linalg.norm(row - centres[k]) for row in embeds[labels == k] if np.isfinite(row[0])])
        np.testing.assert_allclose(radius, naive_radius(distances), rtol=1e-6)


@pytest.mark.parametrize("threshold", [None, 0.3])
def test_the_boundary_loss_is_its_loop(threshold: float | None, folder_of: dict[str, str]) -> None:
    model = build("advbct", folder_of, threshold=threshold, adversarial_weight=0.0, boundary_weight=1.0)
    features, labels, old = batch()
    centres, radii = model.centres_Cd, model.radii_C
    largest = float(np.nanmedian(radii[:3].numpy())) if threshold is None else threshold
    violations = []
    for f, label in zip(features, labels.tolist(), strict=True):
        elastic = radii[label] + torch.sigmoid(model.growth_C[label]) * (largest - radii[label])
        beyond = (F.normalize(f[:OLD_DIM], dim=0) - centres[label]).norm() - elastic
        if beyond > 0:
            violations.append(beyond)
    assert violations
    torch.testing.assert_close(compatibility(model, features, labels, old), torch.stack(violations).mean())


def test_balls_grow_only(folder_of: dict[str, str]) -> None:
    for threshold, sign in ((2.0, 1), (1e-9, -1)):  # towards T above the radius, back to the radius from T below it
        model = build("advbct", folder_of, threshold=threshold, adversarial_weight=0.0, boundary_weight=1.0)
        model.growth_C.data.fill_(-2.0 * sign)
        features, labels, old = batch()
        model.radii_C.clamp_(max=0.2)
        compatibility(model, features, labels, old).backward()
        assert (model.growth_C.grad[:3] * sign <= 0).all() and model.growth_C.grad.abs().max() > 0


@pytest.mark.parametrize("unreadable", [[], [1, 6], list(range(5))])
def test_features_get_the_reversed_gradient_of_the_discriminator(unreadable: list[int], folder_of: dict[str, str]) -> None:
    model = build("advbct", folder_of, boundary_weight=0.0)
    width = model.discriminator.hidden.out_features
    norm = nn.BatchNorm1d(width, track_running_stats=False)
    discriminator = nn.Sequential(nn.Linear(OLD_DIM, width), norm, nn.ReLU(), nn.Linear(width, 2))
    model.discriminator.norm.weight.data.uniform_(0.5, 2)
    discriminator.load_state_dict(dict(zip(discriminator.state_dict(), model.discriminator.state_dict().values(), strict=True)))
    features, _, old = batch()
    rows = [row for row in range(8) if row not in unreadable]
    both = torch.cat([F.normalize(features[rows, :OLD_DIM], dim=-1), old[rows]])
    plain = F.cross_entropy(discriminator(both), torch.tensor([0] * len(rows) + [1] * len(rows)))
    expected = torch.autograd.grad(plain, [features, *discriminator.parameters()])
    for progress in (0.0, 0.25, 0.9):
        model.progress = progress
        features, labels, old = batch()
        old[unreadable] = torch.nan
        loss = compatibility(model, features, labels, old)
        in_features, *in_parameters = torch.autograd.grad(loss, [features, *model.discriminator.parameters()])
        torch.testing.assert_close(loss.detach(), (1 - progress) * plain.detach(), atol=1e-6, rtol=1e-5)
        strength = 2 / (1 + np.exp(-10 * progress)) - 1
        torch.testing.assert_close(in_features, -strength * (1 - progress) * expected[0], atol=1e-7, rtol=1e-4)
        for got, wanted in zip(in_parameters, expected[1:], strict=True):
            torch.testing.assert_close(got, (1 - progress) * wanted, atol=1e-7, rtol=1e-4)


@pytest.fixture
def labelled(tmp_path: Path) -> PairDataset:
    for row in range(7):
        draw(tmp_path / "data" / f"class {row % 2}" / f"{row}.png")
    (tmp_path / "data" / "class 0" / "2.png").write_bytes(b"no image")
    images = load_labelled(LabelledSource(path=str(tmp_path / "data")))
    return PairDataset(images.dataset, bad=BadSamples(max_share=0.2, total=7))


def test_training_set_embeds_as_usual(labelled: PairDataset, folder_of: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("unibct", folder_of).train()
    embeds = embed_training_set(model, labelled, model.processor)
    assert model.training and embeds.shape == (7, DIM)
    bad = np.flatnonzero(~np.isfinite(embeds[:, 0]))
    assert len(bad) == 1
    image = labelled[6]["image"]
    with torch.no_grad():
        expected = model.eval().embed_images(model.processor.images([image]))[0]
    torch.testing.assert_close(torch.from_numpy(embeds[6]), expected, atol=1e-5, rtol=0)
    shares: list[torch.Tensor] = []
    monkeypatch.setattr(refreshing, "world_size", lambda: 3)
    monkeypatch.setattr(refreshing, "gather_with_grad", lambda mine: shares.append(mine) or mine)
    for rank in range(3):
        monkeypatch.setattr(refreshing, "rank", lambda rank=rank: rank)
        embed_training_set(model, labelled, model.processor)
    assert {len(share) for share in shares} == {3}, "as many forwards on every process"
    np.testing.assert_allclose(torch.cat(shares)[:7].numpy(), embeds, atol=1e-5)


def test_progress_and_refreshes_follow_the_step(
    labelled: PairDataset, folder_of: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build("unibct", folder_of, refresh_at=[0.3, 0.6])
    refreshed: list[int] = []
    monkeypatch.setattr(model, "refresh", lambda new: refreshed.append(state.global_step))
    callback = RefreshCallback(model, labelled, PairCollator(model.processor))
    state = TrainerState(max_steps=10)
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    for step in range(10):
        state.global_step = step
        callback.on_step_begin(arguments, state, TrainerControl())
        assert model.progress == step / 10
    assert refreshed == [3, 6]
    assert ClassifiedModel.progress == 0.0 and xcompat.BctModel.refresh_at == ()


def test_a_run_that_continues_has_the_same_prototypes(labelled: PairDataset, folder_of: dict[str, str], tmp_path: Path) -> None:
    training: dict[str, Any] = {"max_steps": 6, "per_device_train_batch_size": 2, "learning_rate": 1e-3}
    training |= {"save_steps": 2, "save_total_limit": None}
    part = StageRecipe(name="it", method="unibct", old="some/old", new="some/new", training=training)
    stored = unit(7, OLD_DIM, seed=1)
    stored[2] = torch.nan

    def trained(folder: Path) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        old = OldKnowledge(len(CLASSES), np.arange(7) % 2, stored.numpy())
        model = build("unibct", folder_of, old, refresh_at=[0.4, 0.7])  # before the steps 2 and 4
        means = model.prototypes_Cd.clone()
        train(model, Data(labelled, PairCollator(model.processor)), part, 0, folder)
        assert not torch.allclose(model.prototypes_Cd, means) and (model.prototypes_Cd[2:] == 0).all()
        return {name: value.clone() for name, value in model.state_dict().items()}

    whole = trained(tmp_path / "whole")
    for step in (2, 4):
        folder = tmp_path / f"from_{step}"
        shutil.copytree(tmp_path / "whole" / f"checkpoint-{step}", folder / f"checkpoint-{step}")
        for name, value in trained(folder).items():
            assert torch.equal(value, whole[name]), name
