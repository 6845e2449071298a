"""The query map, whitened maps and mini-vec2vec: formulas against loops, where they start, what they refuse."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ARCHITECTURES, IMAGE_ARCHITECTURES, TEXTS, refuses, unit
from PIL import Image
from schedule import mostly_nightly
from torch.nn import functional as F
from transformers import AutoModel

from xcompat import Fingerprint, FingerprintMismatchError, MiniVec2VecConfig, MiniVec2VecModel, XcompatError
from xcompat.encoders import load_encoder
from xcompat.encoders.base import Encoder
from xcompat.encoders.penultimate import Penultimate
from xcompat.losses import bank_contrast_loss
from xcompat.methods import METHODS, QueryMapConfig, QueryMapModel, WhitenedConfig, WhitenedModel
from xcompat.methods.whitened import DAMPING, DAMPING_OF_FEW, PRIOR
from xcompat.models import describe_old
from xcompat.models.backbone import BackboneModel
from xcompat.models.classified import ClassifiedModel
from xcompat.models.closed_form import Moments, solve_procrustes
from xcompat.models.embedder import load_checkpoint, load_embedder, penultimate_embedder
from xcompat.models.old_knowledge import OldKnowledge

LABELS = torch.tensor([0, 1, 0, 2, 1, 0])
BATCH = {"new_embeds": unit(6, 6, 2), "old_embeds": unit(6, 4, 1), "labels": LABELS, "index": torch.arange(6)}


def old_model(dim: int) -> dict[str, Any]:
    return describe_old(Fingerprint.from_string("old"), dim)


def make(**options: object) -> QueryMapModel:
    model = QueryMapModel(QueryMapConfig(old=old_model(4), embedding_dim=6, **options))
    model.prepare(OldKnowledge(3, LABELS.numpy(), unit(6, 4, 1).numpy()), unit(6, 6, 2).numpy())
    return model


def naive_loss(mapped: torch.Tensor, own: torch.Tensor, bank: torch.Tensor, scale: float, labels: list[int] | None) -> float:
    total = 0.0
    for row in range(len(mapped)):
        others = [other for other in range(len(bank)) if other != row]
        scores = {other: scale * float(mapped[row] @ bank[other]) for other in others}
        positives = [other for other in others if labels is not None and labels[other] == labels[row]]
        if not positives:
            scores[row] = scale * float(mapped[row] @ own[row])
            positives = [row]
        norm = math.log(sum(math.exp(score) for score in scores.values()))
        total -= sum(scores[positive] - norm for positive in positives) / len(positives)
    return total / len(mapped)


@pytest.mark.parametrize("labelled", [True, False])
def test_bank_contrast_is_the_double_loop_without_unread_rows(labelled: bool) -> None:
    mapped, bank = unit(6, 4, 3).double(), unit(6, 4, 1).double()
    rows = torch.arange(6)
    labels = LABELS if labelled else None
    loss = bank_contrast_loss(mapped, bank, bank, 7.0, labels, labels, rows, rows)
    assert float(loss) == pytest.approx(naive_loss(mapped, bank, bank, 7.0, LABELS.tolist() if labelled else None), rel=1e-5)
    mapped, bank = unit(2, 4, 3), unit(6, 4, 1)
    kept = torch.tensor([0, 1, 3, 4, 5])
    broken = bank.clone()
    broken[2] = torch.nan
    given = (mapped, bank[:2], broken, 7.0, LABELS[:2], LABELS, torch.arange(2), torch.arange(6))
    without = (mapped, bank[:2], bank[kept], 7.0, LABELS[:2], LABELS[kept], torch.arange(2), kept)
    torch.testing.assert_close(bank_contrast_loss(*given), bank_contrast_loss(*without))


@pytest.mark.parametrize("shape", ["linear", "residual"])
def test_it_starts_at_centred_procrustes(shape: str) -> None:
    model = make(shape=shape, pull=0.0)
    weight, bias = solve_procrustes(Moments.compute([(unit(6, 6, 2), unit(6, 4, 1))]), centre=True)
    inputs = unit(5, 6, 9)
    start = F.normalize(inputs @ weight.float() + bias.float(), dim=-1)
    torch.testing.assert_close(model.to_space(inputs), start, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(make(shape=shape)(**BATCH).loss, model(**BATCH).loss, atol=1e-6, rtol=1e-6)  # not yet moved


def test_a_bank_is_drawn_if_too_large_and_prototypes_need_labels() -> None:
    exact = make(bank_size=6)(**BATCH).loss
    assert torch.equal(exact, make(bank_size=100)(**BATCH).loss)
    model = make(bank_size=3)
    torch.manual_seed(0)
    first = model(**BATCH).loss
    torch.manual_seed(0)
    assert torch.equal(model(**BATCH).loss, first) and not torch.equal(first, exact)
    batch = {name: column for name, column in BATCH.items() if name != "labels"}
    assert make()(**batch).loss.isfinite()
    with pytest.raises(XcompatError, match="loss prototypes needs classes"):
        make(loss="prototypes")(**batch)
    with pytest.raises(XcompatError, match="loss prototypes needs classes"):  # and before training begins
        make(loss="prototypes").prepare(OldKnowledge(0, LABELS.numpy()[:0], unit(6, 4, 1).numpy()), unit(6, 6, 2).numpy())
    assert set(make().state_dict()) == {"linear.weight", "linear.bias"}, "the map alone is saved"
    with pytest.raises(XcompatError, match="query_map needs an old embedding of every training image"):
        make().prepare(OldKnowledge(2, np.zeros(0, np.int64), given_prototypes_Cd=np.eye(2, 4, dtype=np.float32)), np.eye(2, 6))


OLD = old_model(4)
PROJECTED = ("blip", "clip", "clip_vision_model", "vision-text-dual-encoder")
BACKBONES = [name for name, model in METHODS.items() if issubclass(model, BackboneModel)]
BACKBONE_OPTIONS: dict[str, dict[str, Any]] = {"bt2": {"extra_dim": 2, "dim": 6}, "mixbct": {"dim": 4}}


def before_the_projection(architecture: str, encoder: Encoder, pixels: torch.Tensor) -> torch.Tensor:
    output = encoder.model.vision_model(pixel_values=pixels)
    return output.last_hidden_state[:, 0] if architecture == "blip" else output.pooler_output


@torch.no_grad()
@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *IMAGE_ARCHITECTURES])
def test_penultimate_features_are_what_the_last_layer_reads(
    architecture: str, folder_of: dict[str, str], image_folder_of: dict[str, str], images: list[Image.Image]
) -> None:
    encoder, processor = load_encoder({**folder_of, **image_folder_of}[architecture])
    if architecture not in PROJECTED:
        refuses(f"{architecture} has no penultimate features.*set options.input to embedding", Penultimate, encoder, encoder.name)
        return
    pixels = processor.images(images)
    source = Penultimate(encoder, encoder.name)
    features = source.embed_images(pixels)
    assert features.shape == (4, source.head.in_features) and features.dtype == torch.float32
    assert torch.equal(features, before_the_projection(architecture, encoder, pixels))
    assert torch.equal(F.normalize(source.head(features), dim=-1), encoder.embed_images(pixels))
    assert not source.head._forward_pre_hooks, "nothing stays behind"


@torch.no_grad()
@pytest.mark.parametrize("method", BACKBONES)
def test_a_trained_projection_is_the_last_layer(method: str, image_folder_of: dict[str, str], images: list[Image.Image]) -> None:
    options = {"dim": 6} | BACKBONE_OPTIONS.get(method, {})
    if issubclass(METHODS[method], ClassifiedModel):
        options["classes"] = ["cat", "dog"]
    old = OLD if METHODS[method].compares_with_old else None
    model = METHODS[method].from_encoder(image_folder_of["resnet"], old=old, **options)
    if method in ("bt2", "simclr"):
        refuses("has no penultimate features", Penultimate, model, method)
        return
    pixels, source = model.processor.images(images), Penultimate(model, method)
    features = source.embed_images(pixels)
    assert torch.equal(features, model.encoder.image_features(pixels))
    assert torch.equal(F.normalize(source.head(features), dim=-1), model.embed_images(pixels))


@pytest.fixture
def features(folder_of: dict[str, str], images: list[Image.Image]) -> torch.Tensor:
    embedder = penultimate_embedder(load_embedder(folder_of["clip"]))
    return embedder.embed({"pixel_values": embedder.processor.images(images)}).clone()


def on_penultimate(folder: str, features: torch.Tensor, **options: object) -> QueryMapModel:
    model = QueryMapModel.from_encoder(folder, old=OLD, input="penultimate", **options)
    model.prepare(OldKnowledge(3, LABELS[:4].numpy(), unit(4, 4, 1).numpy()), features.numpy())
    return model


@torch.no_grad()
@pytest.mark.parametrize("shape", ["linear", "residual", "projection"])
def test_a_map_of_penultimate_features_keeps_the_new_model_as_it_is(
    shape: str, folder_of: dict[str, str], images: list[Image.Image], features: torch.Tensor, tmp_path: Path
) -> None:
    encoder, processor = load_encoder(folder_of["clip"])
    pixels = processor.images(images)
    model = on_penultimate(folder_of["clip"], features, shape=shape)
    embeds = model.embed_images(pixels)
    assert torch.equal(embeds, before_the_projection("clip", encoder, pixels)) and model.config.embedding_dim == 32
    torch.testing.assert_close(model.self_view(embeds), encoder.embed_images(pixels), atol=1e-6, rtol=0)
    view = model.to_space(embeds)
    assert view.shape == (4, 4) and model.lineage.stores.dim == 4
    torch.testing.assert_close(view.norm(dim=-1), torch.ones(4))
    torch.testing.assert_close(model.to_space(3 * embeds), view, atol=1e-6, rtol=0)  # their direction is mapped
    with pytest.raises(XcompatError, match="penultimate features do not support texts; set options.input to embedding"):
        model.embed_texts(**processor.texts(TEXTS))
    model.save_pretrained(tmp_path)
    again = AutoModel.from_pretrained(tmp_path)
    assert torch.equal(again.embed_images(pixels), embeds) and again.fingerprint() == model.fingerprint()
    assert torch.equal(again.to_space(embeds), view) and torch.equal(again.self_view(embeds), model.self_view(embeds))
    trained = {name for name, parameter in again.named_parameters() if parameter.requires_grad}
    assert set(again.state_dict()) - trained == {"head.weight", "head.bias"}
    assert load_embedder(str(tmp_path)).dim == 4, "the next update sees its view"
    plain = load_embedder(folder_of["clip"])
    other = penultimate_embedder(plain)
    assert other.fingerprint != plain.fingerprint and other.name == plain.name and (plain.dim, other.dim) == (16, 32)


def test_penultimate_maps_start_at_procrustes(folder_of: dict[str, str], old_folder: str, features: torch.Tensor) -> None:
    model = on_penultimate(folder_of["clip"], features)
    directions = features / features.square().sum(dim=1, keepdim=True).sqrt()
    weight, bias = solve_procrustes(Moments.compute([(directions, unit(4, 4, 1))]), centre=True)
    start = F.normalize(directions @ weight.float() + bias.float(), dim=-1)
    torch.testing.assert_close(model.to_space(features), start, atol=1e-6, rtol=1e-5)
    batch = {"new_embeds": features, "old_embeds": unit(4, 4, 1), "labels": LABELS[:4], "index": torch.arange(4)}
    loss = bank_contrast_loss(
        start, batch["old_embeds"], batch["old_embeds"], 15.0, LABELS[:4], LABELS[:4], *[torch.arange(4)] * 2
    )
    torch.testing.assert_close(model(**batch).loss, loss, atol=1e-5, rtol=1e-5)  # the pull is 0 where it starts
    refuses("siglip has no penultimate features", QueryMapModel.from_encoder, folder_of["siglip"], old=OLD, input="penultimate")
    refuses("input penultimate needs the last layer of the new model", make, input="penultimate")
    refuses("QueryMapConfig has no input 'penultima'; did you mean 'penultimate'", make, input="penultima")
    model._outside_encoder = []
    model.config.encoder["name"] = old_folder
    with pytest.raises(FingerprintMismatchError, match="cannot be compared"):
        model.embed_images(torch.zeros(1, 3, 32, 32))


NEW_DIM, OLD_DIM = 7, 5


def pairs(rows: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return new and old embeddings of the same items, with unequal variances and a mean."""
    draw = torch.Generator().manual_seed(seed)
    new = (
        torch.randn(rows, NEW_DIM, generator=draw, dtype=torch.float64) * torch.logspace(0, -1, NEW_DIM, dtype=torch.float64)
        + 0.4
    )
    old = new @ torch.randn(NEW_DIM, OLD_DIM, generator=draw, dtype=torch.float64)
    return new, old + 0.3 * torch.randn(rows, OLD_DIM, generator=draw, dtype=torch.float64)


def whitened(**options: object) -> WhitenedModel:
    return WhitenedModel(WhitenedConfig(old=old_model(OLD_DIM), embedding_dim=NEW_DIM, **options))


def solved(new: torch.Tensor, old: torch.Tensor, **options: object) -> WhitenedModel:
    return whitened(**options).fit([(new, old)])


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


def test_sides_of_any_length_are_whitened_in_both_directions() -> None:
    new, old = pairs(100)
    plain = solved(new, old).to_space(new.float())
    for scaled in (solved(3 * new, old).to_space(3 * new.float()), solved(new, 0.2 * old).to_space(new.float())):
        torch.testing.assert_close(scaled, plain, rtol=1e-4, atol=1e-5)
    found = solved(new, old, direction="old_to_new", source_power=0.5, target_power=0.25)
    mapped = solved(new, old, source_power=0.25, target_power=0.5)
    torch.testing.assert_close(found.weight.T, mapped.weight, rtol=1e-5, atol=1e-6)
    refuses("all embeddings of one side are zero", solved, new, 0 * old)
    for option, value in {"source_power": -0.1, "target_power": 1.5, "damping": 0.0}.items():
        refuses(option, whitened(**{option: value}).config.require_ranges)


@pytest.mark.parametrize("direction", ["new_to_old", "old_to_new"])
def test_each_cluster_has_a_whitened_map_of_its_own(direction: str, tmp_path: Path) -> None:
    new, old = pairs(1200)
    far = torch.where(torch.arange(1200) % 3 == 0, 8.0, 0.0)[:, None]
    new, old = new + far, old + far
    source, target = (new, old) if direction == "new_to_old" else (old, new)
    model = whitened(clusters=2, direction=direction).fit([(new[:700], old[:700]), (new[700:], old[700:])])
    mapped = (model.to_space if direction == "new_to_old" else model.upgrade)(source.float())
    all_N, all_M = source.numpy(), target.numpy()
    for rows in ((far[:, 0] > 0).numpy(), (far[:, 0] == 0).numpy()):

        def moment(one: np.ndarray, other: np.ndarray, rows: np.ndarray = rows) -> np.ndarray:
            return (one[rows].T @ other[rows] + PRIOR / 1200 * one.T @ other) / (rows.sum() + PRIOR)

        whitening = [naive_power(moment(side, side), -0.75, DAMPING) for side in (all_N, all_M)]
        wanted = all_N[rows] @ whitening[0] @ moment(all_N, all_M) @ whitening[1]
        wanted /= np.linalg.norm(wanted, axis=1, keepdims=True)
        np.testing.assert_allclose(mapped[torch.from_numpy(rows)].numpy(), wanted, rtol=1e-3, atol=1e-5)
    model.save_pretrained(tmp_path)
    again = load_checkpoint(str(tmp_path))
    assert torch.equal((again.to_space if direction == "new_to_old" else again.upgrade)(source.float()), mapped)
    assert model.own_view_layers is None, "it is not a linear layer"
    refuses("options.clusters is 5, but there are 4 pairs", whitened(clusters=5).fit, [(new[:4], old[:4])])


DIM, ROWS = 8, 600
UNMATCHED = "the two spaces do not match: maps from two halves of the data agree by a cosine of .*, and 0.8 is needed"


def cloud(seed: int) -> torch.Tensor:
    draws = np.random.default_rng(seed)
    centres, shares = draws.normal(size=(10, DIM)), draws.dirichlet(np.full(10, 2))
    rows = centres[draws.choice(10, ROWS, p=shares)] + 0.25 * draws.normal(size=(ROWS, DIM)) + 0.3
    return F.normalize(torch.tensor(rows, dtype=torch.float32), dim=-1)


@cache
def rotated() -> torch.Tensor:
    return cloud(0) @ torch.linalg.qr(torch.randn(DIM, DIM, generator=torch.Generator().manual_seed(0))).Q


def shuffled(rows: torch.Tensor, seed: int = 3) -> torch.Tensor:
    return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))]


def unpaired(old_dim: int = DIM, **options: float | str) -> MiniVec2VecModel:
    options = {"clusters": 10, "runs": 9, "rounds": 10, **options}
    return MiniVec2VecModel(MiniVec2VecConfig(old=old_model(old_dim), embedding_dim=DIM, **options))


@pytest.mark.parametrize("direction", mostly_nightly(["new_to_old", "old_to_new"], "new_to_old".__eq__))
def test_a_rotation_is_found_whatever_the_order_of_rows(direction: str) -> None:
    new, old = (cloud(0), rotated()) if direction == "new_to_old" else (rotated(), cloud(0))
    found = unpaired(direction=direction).fit([(shuffled(new), old)])
    mapped, target = (found.to_space(new), old) if direction == "new_to_old" else (found.upgrade(old), new)
    assert F.cosine_similarity(mapped, target).mean() > 0.99
    again = unpaired(direction=direction).fit(zip(new.split(100), shuffled(old, 4).split(100), strict=True))
    assert torch.equal(found.weight, again.weight) and torch.equal(found.bias, again.bias)
    scale = torch.linalg.matrix_norm(found.weight, 2)
    torch.testing.assert_close(found.weight.T @ found.weight / scale**2, torch.eye(DIM), atol=1e-5, rtol=0)


def test_unpaired_sides_may_differ_but_must_match() -> None:
    found = unpaired(5, clusters=6, runs=1, rounds=1, sample=40, least_agreement=-1.0)
    found.fit([(cloud(0), rotated()[:50, :5])])
    assert found.to_space(cloud(0)).shape == (ROWS, 5) and found.weight.isfinite().all()
    with pytest.raises(XcompatError, match="at least 4 different embeddings of each model, found 3"):
        unpaired().fit([(cloud(0)[:3], rotated()[:3].repeat(2, 1))])
    refuses("options.rounds is 0; give a number from 1", unpaired, rounds=0)
    dimensions = torch.stack([shuffled(column, seed) for seed, column in enumerate(rotated().T)], dim=1)
    for other in (cloud(7), dimensions):  # another cloud, and one whose dimensions were shuffled one by one
        refuses(UNMATCHED, unpaired().fit, [(cloud(0), other)])
