"""BCT, Contrast, L2, MixBCT, BT² and OCA: losses written out sample by sample, credible old embeddings, turns and mixtures."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import refuses, unit
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F
from transformers import AutoModel

from xcompat import Fingerprint
from xcompat.core.checksums import CHECKSUMS
from xcompat.core.errors import XcompatError
from xcompat.heads import OrthogonalTransform, slerp
from xcompat.methods import METHODS
from xcompat.models import credible, describe_old
from xcompat.models.credible import credible_mask
from xcompat.models.old_knowledge import OldKnowledge
from xcompat.outputs import CompatOutput

CLASSES = ["cat", "dog", "shoe", "tree"]
LABELS_N = np.array([0, 2, 2, 0, 1, 2, 0, 1])  # no image of the last class
OLD_DIM = 6
OLD = Fingerprint.from_string("old")
Vector = torch.Tensor
OLD_Nd = unit(len(LABELS_N), OLD_DIM, seed=1)
PROTOTYPES = {label: OLD_Nd[torch.from_numpy(label == LABELS_N)].mean(0) for label in (0, 1, 2)}


def build(method: str, folder_of: dict[str, str], **options: Any) -> Any:
    """Make a method that has left its start: orthogonal transforms are the identity there."""
    old = describe_old(OLD, dim=OLD_DIM)
    model = METHODS[method].from_encoder(folder_of["clip"], old=old, classes=CLASSES, **options)
    model.prepare(OldKnowledge(len(CLASSES), LABELS_N, OLD_Nd.numpy()))
    generator = torch.Generator().manual_seed(7)
    for name, parameter in model.named_parameters():
        if not name.startswith("encoder."):
            parameter.data.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def test_bct_of_l2_distances_sees_lengths(image_folder_of: dict[str, str]) -> None:
    """Cosines would not: queries of any length would have one loss, and only those of the right length find anything."""
    old = describe_old(OLD, dim=OLD_DIM) | {"metric": "l2"}
    make = partial(METHODS["bct"].from_encoder, image_folder_of["resnet"], old=old, classes=CLASSES)
    model = make(metric="l2", dim=OLD_DIM)
    model.prepare(OldKnowledge(len(CLASSES), LABELS_N, OLD_Nd.numpy()))
    labels = torch.tensor(LABELS_N)
    losses = [float(model.old_classification_loss(factor * OLD_Nd.float(), labels)) for factor in (0.1, 1.0)]
    assert losses[0] > losses[1] + 0.01
    refuses("options.old_scale: metric: l2", make, metric="l2", old_scale=4.0)
    refuses("did you mean 'arcface'", make, head="arcfase")


def features(dim: int) -> torch.Tensor:
    return 3 * torch.randn(len(LABELS_N), dim, generator=torch.Generator().manual_seed(3))


def cosine(x: Vector, y: Vector) -> float:
    return float(x @ y) / math.sqrt(float(x @ x) * float(y @ y))


def cross_entropy(logits: dict[int, float], label: int) -> float:
    return math.log(sum(math.exp(logit) for logit in logits.values())) - logits[label]


def by_classifier(model: Any, x: Vector, label: int) -> float:
    return cross_entropy({row: float(weight @ x) for row, weight in enumerate(model.classifier.weight)}, label)


def by_prototypes(x: Vector, label: int, scale: float | None) -> float:
    if scale is None:
        return cross_entropy({row: float(prototype @ x) for row, prototype in PROTOTYPES.items()}, label)
    return cross_entropy({row: scale * cosine(prototype, x) for row, prototype in PROTOTYPES.items()}, label)


def loss_of(model: Any, features_ND: Vector) -> float:
    return float(model.loss(CompatOutput(features=features_ND), {"labels": torch.from_numpy(LABELS_N), "old_embeds": OLD_Nd}))


def mean(terms: list[float]) -> Any:
    return pytest.approx(sum(terms) / len(terms), rel=1e-4)


@pytest.mark.parametrize("scale", [16.0, None])
@pytest.mark.parametrize("extra", [0, 3])
def test_bct(extra: int, scale: float | None, folder_of: dict[str, str]) -> None:
    model = build("bct", folder_of, extra_dim=extra, compat_weight=2.5, old_scale=scale)
    given = features(OLD_DIM + extra)
    terms = []
    for x, label in zip(given, LABELS_N.tolist(), strict=True):
        terms.append(by_classifier(model, x, label) + 2.5 * by_prototypes(x[:OLD_DIM], label, scale))
    assert loss_of(model, given) == mean(terms)


def test_l2(folder_of: dict[str, str]) -> None:
    model = build("l2", folder_of, extra_dim=2)
    given, terms = features(OLD_DIM + 2), []
    for x, label, old in zip(given, LABELS_N.tolist(), OLD_Nd, strict=True):
        compared = x[:OLD_DIM] / x[:OLD_DIM].norm()
        terms.append(by_classifier(model, x, label) + 10 * math.sqrt(float((compared - old).square().sum())))
    assert loss_of(model, given) == mean(terms)
    model = build("l2", folder_of, keep=0.6)
    known = OldKnowledge(len(CLASSES), LABELS_N, OLD_Nd.numpy())
    credible_N = model.extra_columns(known)["credible"]
    assert credible_N.tolist() == credible_mask(OLD_Nd.numpy(), LABELS_N, 0.6).tolist() and 0 < credible_N.sum() < len(LABELS_N)
    given = features(OLD_DIM)
    batch = {"labels": torch.from_numpy(LABELS_N), "old_embeds": OLD_Nd, "credible": torch.from_numpy(credible_N)}
    found = float(model.loss(CompatOutput(features=given), batch))
    pulls = [float((F.normalize(x, dim=0) - old).norm()) for x, old, use in zip(given, OLD_Nd, credible_N, strict=True) if use]
    own = [by_classifier(model, x, label) for x, label in zip(given, LABELS_N.tolist(), strict=True)]
    assert found == pytest.approx(sum(own) / len(own) + 10 * sum(pulls) / len(pulls), rel=1e-4)
    assert build("l2", folder_of).extra_columns(known) == {}


@pytest.mark.parametrize("hardest", [None, 2])
def test_contrast(hardest: int | None, folder_of: dict[str, str]) -> None:
    model = build("contrast", folder_of, extra_dim=2, compat_weight=0.5, temperature=0.2, topk_negatives=hardest)
    given, terms = features(OLD_DIM + 2), []
    for i, label in enumerate(LABELS_N.tolist()):
        others = [k for k, other in enumerate(LABELS_N.tolist()) if other != label]
        logits = [cosine(given[i][:OLD_DIM], OLD_Nd[i]) / 0.2]
        for side in (OLD_Nd, given[:, :OLD_DIM]):
            logits += sorted((cosine(given[i][:OLD_DIM], side[k]) / 0.2 for k in others), reverse=True)[:hardest]
        terms.append(by_classifier(model, given[i], label) + 0.5 * cross_entropy(dict(enumerate(logits)), 0))
    assert loss_of(model, given) == mean(terms)


@pytest.mark.parametrize("transform", ["orthogonal", "linear", "none"])
def test_oca(transform: str, folder_of: dict[str, str]) -> None:
    model = build("oca", folder_of, extra_dim=3, transform=transform)
    given, terms = features(OLD_DIM + 3), []
    turn = torch.eye(OLD_DIM + 3) if transform == "none" else model.transform.weight.detach()
    assert torch.allclose(turn @ turn.T, torch.eye(len(turn)), atol=1e-5) is (transform != "linear")
    assert torch.allclose(turn, torch.eye(len(turn)), atol=0.1) is (transform == "none")
    for x, label in zip(given, LABELS_N.tolist(), strict=True):
        compatible = by_prototypes(x[:OLD_DIM], label, 16.0), 1 - cosine(x[:OLD_DIM], PROTOTYPES[label])
        terms.append(by_classifier(model, turn @ x, label) + 10 * compatible[0] + 5 * compatible[1])
    assert loss_of(model, given) == mean(terms)


@pytest.mark.parametrize(
    ("method", "options", "names"),
    [
        ("oca", {"transform": "orthogonal"}, ["transform"]),
        ("oca", {"transform": "linear"}, ["transform"]),
        ("bt2", {"dim": 9, "extra_dim": 4}, ["new_basis", "old_basis"]),
    ],
)
def test_matrices_start_as_asked(method: str, options: dict[str, Any], names: list[str], folder_of: dict[str, str]) -> None:
    old = describe_old(OLD, dim=OLD_DIM)
    plain, drawn = (
        METHODS[method].from_encoder(folder_of["clip"], classes=CLASSES, old=old, **options, random_start=random_start)
        for random_start in (False, True)
    )
    for name in names:
        identity, turned = (getattr(model, name).weight.detach() for model in (plain, drawn))
        assert torch.equal(identity, torch.eye(len(identity))) and not torch.allclose(turned, identity, atol=0.1)
        assert torch.allclose(turned @ turned.T, identity, atol=1e-5) or options.get("transform") == "linear"
    if method == "oca":
        with pytest.raises(XcompatError, match="options.transform is none"):
            METHODS["oca"].from_encoder(folder_of["clip"], old, classes=CLASSES, transform="none", random_start=True)


@pytest.mark.parametrize("classified", ["new_part", "whole"])
@pytest.mark.parametrize(("new_dim", "extra"), [(6, 4), (9, 4), (6, 6)])
def test_bt2(new_dim: int, extra: int, classified: str, folder_of: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("bt2", folder_of, dim=new_dim, extra_dim=extra, classified=classified)
    backbone, new_embeds = features(model.encoder.embedding_dim), unit(len(LABELS_N), new_dim, seed=2)
    monkeypatch.setattr(model.encoder, "image_features", lambda _: backbone)
    first, second = model.new_basis.weight.detach(), model.old_basis.weight.detach()
    terms, embeds = [], []
    for x, label, old, new in zip(model.neck(backbone).detach(), LABELS_N.tolist(), OLD_Nd, new_embeds, strict=True):
        phi2, phi3 = model.extra(x).detach(), x[:new_dim] / x[:new_dim].norm()
        phi4 = 2 * first @ phi3
        phi5 = second @ torch.cat([phi2 / phi2.norm(), phi4[: OLD_DIM - extra]])
        embeds.append(torch.cat([phi5, phi4[OLD_DIM - extra :]]))
        own = by_classifier(model, phi3 if classified == "new_part" else embeds[-1], label) + (1 - cosine(phi3, new))
        terms.append(own + 10 * by_prototypes(phi5, label, 16.0) + 5 * (1 - cosine(phi5, old)))
    batch = {"pixel_values": torch.zeros(1), "labels": torch.from_numpy(LABELS_N), "old_embeds": OLD_Nd}
    made = model(**batch, new_embeds=new_embeds)
    assert made.loss.item() == mean(terms)
    assert {round(float(embed.norm()), 4) for embed in embeds} == {round(math.sqrt(5), 4)}
    torch.testing.assert_close(made.image_embeds, F.normalize(torch.stack(embeds), dim=-1), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("share", "rows", "credible", "wanted"),
    [(0.29, 100, 60, 29), (0.3, 9, 9, 2), (0.5, 8, 3, 3), (0.3, 8, 0, 0)],
)
def test_mixbct_mixes_so_many_of_the_credible(
    share: float, rows: int, credible: int, wanted: int, folder_of: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build("mixbct", folder_of, mixed_share=share)
    given, old, labels = torch.randn(rows, OLD_DIM), unit(rows, OLD_DIM, seed=4), torch.arange(rows) % len(CLASSES)
    may_be_mixed = torch.randperm(rows) < credible
    seen: list[torch.Tensor] = []
    monkeypatch.setattr(model, "features", lambda _: given)
    monkeypatch.setattr(model, "classification_loss", lambda mixed, _: seen.append(mixed) or mixed.sum())
    model(pixel_values=torch.zeros(1), labels=labels, old_embeds=old, credible=may_be_mixed)
    is_old, is_new = (torch.isclose(seen[0], side).all(dim=1) for side in (old, F.normalize(given, dim=-1)))
    assert is_old.sum() == wanted and not (is_old & ~may_be_mixed).any() and (is_old ^ is_new).all()


def test_mixbct_classifies_the_mixture_by_one_classifier(folder_of: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("mixbct", folder_of, mixed_share=1.0)
    given, credible = features(OLD_DIM), torch.arange(len(LABELS_N)) % 2 == 0
    monkeypatch.setattr(model, "features", lambda _: given)
    batch = {"pixel_values": torch.zeros(1), "labels": torch.from_numpy(LABELS_N), "old_embeds": OLD_Nd, "credible": credible}
    terms = []
    for row, label in enumerate(LABELS_N.tolist()):
        x = OLD_Nd[row] if credible[row] else given[row]
        terms.append(cross_entropy({c: 20 * cosine(weight, x) for c, weight in enumerate(model.classifier.weight)}, label))
    assert model(**batch).loss.item() == mean(terms)


@pytest.mark.parametrize(
    ("method", "options"),
    [
        *(("oca", {"extra_dim": 3, "transform": transform}) for transform in ("orthogonal", "linear", "none")),
        *(("bt2", {"dim": 8, "extra_dim": 2, "classified": classified}) for classified in ("new_part", "whole")),
    ],
)
def test_exported_classifiers_fit(method: str, options: dict[str, Any], folder_of: dict[str, str], tmp_path: Path) -> None:
    model = build(method, folder_of, **options).eval()
    pixels = torch.randn(5, 3, 32, 32, generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        output = model.embed_batch({"pixel_values": pixels})
        if method == "oca":
            classified = model.transform(output["features"])
        else:
            classified = output["new_part" if options["classified"] == "new_part" else "features"]
        logits_BC = classified @ model.classifier.weight.T
        model.export(tmp_path / "model")
        again = AutoModel.from_pretrained(tmp_path / "model")
        assert again.config.keeps_classifier and getattr(again, "transform", None) is None
        torch.testing.assert_close(output["features"] @ again.classifier.weight.T, logits_BC, atol=1e-5, rtol=1e-5)
    again.for_inference().export(tmp_path / "again")
    assert torch.equal(AutoModel.from_pretrained(tmp_path / "again").classifier.weight, again.classifier.weight)


def test_old_classifiers_may_lack_rows_or_be_missing(folder_of: dict[str, str], tmp_path: Path) -> None:
    model = build("oca", folder_of, extra_dim=3).for_inference()
    model.save_pretrained(tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config.pop("keeps_classifier") is False
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    (tmp_path / "model" / CHECKSUMS).unlink(missing_ok=True)
    again = AutoModel.from_pretrained(tmp_path / "model")
    assert again.classifier is None and again.fingerprint() == model.fingerprint()
    rows = np.array([[3, 0, 0, 0, 0, 4], [0, 0, 0, 0, 1, 0], [np.nan] * 6, [np.nan] * 6], np.float32)
    known = OldKnowledge(len(CLASSES), LABELS_N, OLD_Nd.numpy(), classifier_Cd=rows)
    both = known.weights("both")
    assert torch.equal(both[:2], torch.from_numpy(rows[:2])) and torch.isnan(both[3]).all(), "the last class has no image"
    assert cosine(both[2], PROTOTYPES[2]) == pytest.approx(1, abs=1e-6) and float(both[2].norm()) == pytest.approx(3, rel=1e-6)
    refuses("the old model has no classifier", OldKnowledge(len(CLASSES), LABELS_N, OLD_Nd.numpy()).weights, "both")


def test_a_batch_norm_shifts_features_and_does_not_stretch_them(folder_of: dict[str, str], tmp_path: Path) -> None:
    model = build("mixbct", folder_of, head="arcface", batch_norm=True)
    model.norm = type(model.norm)(OLD_DIM)
    model.norm.weight.requires_grad_(False)
    pixels = torch.randn(16, 3, 32, 32, generator=torch.Generator().manual_seed(2))
    features_BD = model.train().features(pixels)
    torch.testing.assert_close(features_BD.mean(0), torch.zeros(OLD_DIM), atol=1e-5, rtol=0)
    torch.testing.assert_close(features_BD.var(0, unbiased=False), torch.ones(OLD_DIM), atol=2e-2, rtol=0)
    assert not any(name == "norm.weight" for name, parameter in model.named_parameters() if parameter.requires_grad)
    model.eval().export(tmp_path / "model")
    again = AutoModel.from_pretrained(tmp_path / "model")
    with torch.inference_mode():
        assert torch.equal(again.embed_images(pixels), model.embed_images(pixels)) and again.image_head is None
    refuses("options.batch_norm: bt2 normalises", build, "bt2", folder_of, dim=8, extra_dim=2, batch_norm=True)


def naive_mask(embeds: np.ndarray, labels: np.ndarray, keep: str) -> list[bool]:
    readable = [i for i in range(len(embeds)) if not np.isnan(embeds[i]).any()]
    unit = {i: embeds[i] / (np.linalg.norm(embeds[i]) or 1) for i in readable}
    lengths = [math.sqrt(sum(unit[i][d] ** 2 for i in readable)) or 1 for d in range(embeds.shape[1])]
    scaled = {i: unit[i] / lengths for i in readable}
    mask = [False] * len(embeds)
    for label in set(labels.tolist()):
        members = [i for i in readable if labels[i] == label]
        if not members:
            continue
        centre = sum(scaled[i] for i in members) / len(members)
        members.sort(key=lambda i: round(float(np.linalg.norm(scaled[i] - centre)), 9))  # stable: ties in the order of the data
        for i in members[: math.ceil(Fraction(keep) * len(members))]:
            mask[i] = True
    return mask


@given(
    st.lists(st.integers(-2, 3), min_size=1, max_size=60),
    st.sampled_from(["0.1", "0.35", "0.5", "0.55", "0.9", "1"]),
    st.integers(0, 99),
)
def test_mask_equals_the_loop(labels: list[int], keep: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    embeds = rng.normal(size=(len(labels), 4))
    embeds[rng.random(len(labels)) < 0.1] = np.nan
    found = credible_mask(embeds, np.array(labels), float(keep))
    assert found.dtype == bool
    assert found.tolist() == naive_mask(embeds, np.array(labels), keep)


@given(st.lists(st.tuples(st.integers(-1, 1), st.integers(-1, 1), st.integers(0, 2)), min_size=1, max_size=40))
def test_ties_go_to_the_first(rows: list[tuple[int, int, int]]) -> None:
    table = np.array(rows)
    found = credible_mask(table[:, :2].astype(np.float32), table[:, 2], 0.5)
    assert found.tolist() == naive_mask(table[:, :2].astype(np.float64), table[:, 2], "0.5")


def test_blocks_and_kinds_of_arrays_do_not_matter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    halves = rng.normal(size=(500, 8)).astype(np.float16)
    embeds, labels = halves.astype(np.float32), rng.integers(0, 20, 500)
    whole = credible_mask(embeds, labels, 0.7)
    np.save(tmp_path / "embeds.npy", embeds)
    mapped = np.load(tmp_path / "embeds.npy", mmap_mode="r")
    monkeypatch.setattr(credible, "_ROWS", 7)
    for same in (mapped, embeds.astype(np.float64), halves):
        assert np.array_equal(credible_mask(same, labels, 0.7), whole)


@pytest.mark.parametrize(
    ("rows", "labels", "keep", "message"),
    [(3, 2, 0.9, "found 2 for 3"), (0, 0, 0.9, "found 0 for 0"), (3, 3, 0.0, "not 0.0"), (3, 3, 1.1, "not 1.1")],
)
def test_bad_input_is_one_line(rows: int, labels: int, keep: float, message: str) -> None:
    refuses(message, credible_mask, np.ones((rows, 2)), np.zeros(labels, dtype=int), keep)


def turned(dim: int, steps: int = 5) -> OrthogonalTransform:
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
def test_angles_are_not_rounded_in_half_precision(dtype: torch.dtype) -> None:
    transform, x = turned(5), torch.randn(3, 5)
    expected = transform(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(transform(x), expected) and transform(x.bfloat16()).dtype == torch.float32
    assert torch.equal(transform.to(dtype)(x), expected)
    assert transform.double().weight.dtype == torch.float64
    assert transform.float().weight.dtype == torch.float32


def naive_slerp(new: list[float], old: list[float], share: float) -> list[float]:
    """Return Shoemake's formula for one row, in float64, with the arc cosine."""
    n, o = ([x / math.hypot(*row) for x in row] for row in (new, old))
    angle = math.acos(sum(x * y for x, y in zip(n, o, strict=True)))
    shares = math.sin((1 - share) * angle) / math.sin(angle), math.sin(share * angle) / math.sin(angle)
    return [shares[0] * x + shares[1] * y for x, y in zip(n, o, strict=True)]


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


def test_what_cannot_be_mixed() -> None:
    new, old = torch.randn(4, 5), torch.randn(4, 5)
    new[0], old[2] = torch.nan, torch.nan
    mixed = slerp(new, old, 0.5)
    assert mixed.isnan().all(dim=1).tolist() == [True, False, True, False]
    torch.testing.assert_close(mixed[1::2], slerp(new[1::2], old[1::2], 0.5))
    assert slerp(new[:0], old[:0], 0.5).shape == (0, 5)
    new = torch.randn(3, 5)
    refuses("share is 1.5", slerp, new, new, 1.5)
    refuses("share is nan", slerp, new, new, math.nan)
    refuses(r"\(3, 5\) and old queries of \(3, 4\) cannot be mixed", slerp, new, new[:, :4], 0.5)
    refuses("row 2 are opposite", slerp, new, torch.stack([new[0], new[0], -2 * new[2]]), 0.5)
    almost = F.normalize(torch.tensor([[-1.0, 1e-4]]))  # the arc leads over the second axis
    torch.testing.assert_close(slerp(torch.tensor([[1.0, 0.0]]), almost, 0.5), torch.tensor([[0.0, 1.0]]), rtol=0, atol=1e-3)
