"""Embeddings of any length: judged, mapped and stored by L2 distance, and by their direction alone where cosines count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import recipe_of, refuses, store
from data_layouts.images import write_classes
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from schedule import mostly_nightly
from store_places import unit_vectors

from xcompat import Fingerprint, ProcrustesConfig, ProcrustesModel, XcompatError
from xcompat.core.arrays import normalise_rows, row_lengths
from xcompat.evaluation import ranking_per_query
from xcompat.evaluation.scores import lift_rows
from xcompat.methods import BctModel, FctModel, IndependentModel, OcaModel
from xcompat.methods.fct import FctConfig
from xcompat.models import describe_old
from xcompat.models.embedder import load_checkpoint, load_embedder
from xcompat.models.memory_contents import ClassStatistics
from xcompat.report import load_report
from xcompat.report.tsne import _tsne
from xcompat.retrieval import Gallery
from xcompat.retrieval.commands import build
from xcompat.retrieval.originals import load_originals
from xcompat.training.run import run_recipe

pytestmark = pytest.mark.usefixtures("undrawn")
TINY = {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}
RAW = {"metric": "l2"}


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return a recipe whose old model, new model and side-information are trained already, all of any length."""
    base = tmp_path_factory.mktemp("distances")
    write_classes(base, {"train": 8, "test": 4})
    made: dict[str, Any] = {"output_dir": str(base / "run"), "cache_dir": str(base / "cache")}
    made["data"] = {"images": {"path": str(base / "train")}, "queries": {"path": str(base / "test")}}
    made["training"] = {"max_steps": 4, "per_device_train_batch_size": 8, "learning_rate": 1e-3, "save_strategy": "no"}
    made |= {"new": {"model": TINY, "image_size": 16, "stem": "small"}}
    made["evaluation"] = {"resamples": 100, "ks": [1, 2], "examples": 1}
    stages = [
        {"name": "old", "method": "independent", "options": RAW | {"dim": 6}},
        {"name": "fresh", "method": "independent", "options": RAW | {"dim": 7}},
        {"name": "unit", "method": "independent", "options": {"dim": 7}},
        {"name": "views", "method": "simclr", "options": RAW | {"dim": 5}, "data": {"augmentation": {}}},
    ]
    run_recipe(recipe_of(made, stages=stages))
    return made | {"old": f"{base}/run/old/model"}


def embedded(folder: str, raw: dict[str, Any]) -> torch.Tensor:
    embedder = load_embedder(folder)
    files = sorted(Path(raw["data"]["queries"]["path"]).rglob("*.png"))
    return embedder.embed({"pixel_values": embedder.processor.images([Image.open(file) for file in files])})


def nearest_is_right(queries_QD: torch.Tensor, gallery_GD: torch.Tensor) -> float:
    """Return CMC@1 by L2 distance, each query left out of the gallery; four images of each class lie in order."""
    right = 0
    for query, row_D in enumerate(queries_QD):
        distances = [(float(((row_D - item_D) ** 2).sum()), item) for item, item_D in enumerate(gallery_GD) if item != query]
        right += min(distances)[1] // 4 == query // 4
    return right / len(queries_QD)


@settings(max_examples=50)
@given(st.integers(0, 10_000), st.floats(1e-3, 1e3), st.floats(-20, 20))
def test_cosines_of_lifted_rows_are_distances(seed: int, scale: float, shift: float) -> None:
    generator = np.random.default_rng(seed)
    queries, gallery = (scale * (generator.normal(size=(rows, 3)) + shift) for rows in (4, 9))
    gallery[1] = gallery[0]
    lifts = lift_rows(queries, gallery)
    for rows in lifts:
        np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1.5)
    naive = np.array([[np.sum((query - item) ** 2) for item in gallery] for query in queries])
    cosines = lifts[0] @ lifts[1].T / 2.25
    longest = max(np.sum((row - gallery.mean(axis=0)) ** 2) for row in (*queries, *gallery))
    np.testing.assert_allclose(-cosines * 4.5 * longest, naive, rtol=1e-6, atol=1e-9 * longest)
    assert np.array_equal(lifts[1][0], lifts[1][1])
    assert np.isfinite(np.concatenate(lift_rows(np.ones((2, 3)), np.ones((2, 3))))).all(), "rows that are all equal too"


@pytest.mark.parametrize("side", ["gallery", "query"])
def test_a_row_far_out_is_refused_where_it_would_spoil_the_ranks_of_others(side: str) -> None:
    generator = np.random.default_rng(0)
    rows = generator.normal(size=(200, 16))
    asking, labels = rows + 0.15 * generator.normal(size=rows.shape), [*range(200)]
    usual = np.median(np.linalg.norm(rows, axis=1))

    def found(times: float) -> np.ndarray:
        far = np.eye(16)[:1] * times * usual
        sides = (asking, np.concatenate([rows, far])) if side == "gallery" else (np.concatenate([asking, far]), rows)
        named = [[*labels, -1][: len(each)] for each in sides]
        return ranking_per_query(*lift_rows(*sides), *named).first_hit_ranks_Q[:200]

    squared = np.square(asking[:, None] - rows[None]).sum(axis=2)
    exact = (squared < np.diag(squared)[:, None]).sum(axis=1)
    assert (found(400) == exact).all()
    refuses(f"{side} row 200 is [0-9,]+ times as far from the centre", found, 10_000)
    strangers = 1e4 * asking  # all queries of another model: far out, and none beside another
    lift_rows(strangers, rows)


def test_h_learns_raw_embeddings() -> None:
    torch.manual_seed(0)
    old, side, new_side = (describe_old(Fingerprint.from_string(f"of {dim}"), dim=dim) | RAW for dim in (6, 5, 4))
    model = FctModel(FctConfig(old=old, side_info=side, new_side_info=new_side, embedding_dim=7)).eval().requires_grad_(False)
    old_B, new_B, side_B, new_side_B = (3 * torch.randn(5, dim) for dim in (6, 7, 5, 4))
    mapped, carried = model.upgrade(old_B, side_B), model.upgrade_side(old_B, side_B)
    assert (mapped.norm(dim=-1) - 1).abs().min() > 1e-3, "h keeps lengths"
    assert not torch.allclose(mapped, model.upgrade(old_B, 9 * side_B)), "as ψ does"
    total = 0.0
    for row in range(5):
        total += sum(float(a - b) ** 2 for a, b in zip(mapped[row], new_B[row], strict=True))
        total += sum(float(a - b) ** 2 for a, b in zip(carried[row], new_side_B[row], strict=True))
    given = {"old_embeds": old_B, "new_embeds": new_B, "side_info": side_B, "new_side_info": new_side_B}
    assert model(**given).loss.item() == pytest.approx(total / 5, rel=1e-5)


@pytest.mark.parametrize("loss", mostly_nightly(["mse", "kl"], "mse".__eq__))
def test_raw_embeddings_are_mapped_and_judged_by_distance(loss: str, raw: dict[str, Any], tmp_path: Path) -> None:
    run = Path(raw["output_dir"])
    changes = {"method": "fct", "new": f"{run}/fresh/model", "side_info": f"{run}/views/model", "options": {"loss": loss}}
    run_recipe(recipe_of(raw, **changes, output_dir=str(tmp_path / "run")))
    table = {case.label: case.metrics["cmc@1"] for case in load_report(tmp_path / "run").cases}
    old, new, side = (embedded(f"{run}/{name}/model", raw) for name in ("old", "fresh", "views"))
    assert (old.norm(dim=-1) - 1).abs().min() > 1e-3
    model = load_checkpoint(str(tmp_path / "run" / "model"))
    assert model.metric == "l2" and model.config.side_info["metric"] == "l2"
    with torch.inference_mode():
        mapped = model.upgrade(old, side)
    searches = {"old/old": (old, old), "new/old": (new, mapped), "mapped/mapped": (mapped, mapped), "new/new": (new, new)}
    for label, sides in searches.items():
        assert table[label] == pytest.approx(nearest_is_right(*sides), abs=0.1)  # caches are float16


def test_bct_is_judged_by_distance_too(raw: dict[str, Any], tmp_path: Path) -> None:
    run_recipe(recipe_of(raw, method="bct", options=RAW | {"extra_dim": 2}, output_dir=str(tmp_path / "run")))
    table = {case.label: case.metrics["cmc@1"] for case in load_report(tmp_path / "run").cases}
    new, old = embedded(str(tmp_path / "run" / "model"), raw), embedded(raw["old"], raw)
    assert new.shape[1] == 8
    assert table["new/old"] == pytest.approx(nearest_is_right(new[:, :6], old), abs=0.1)


def test_a_gallery_keeps_lengths_and_is_upgraded(raw: dict[str, Any], tmp_path: Path) -> None:
    run = Path(raw["output_dir"])
    run_recipe(recipe_of(raw, method="fct", new=f"{run}/fresh/model", output_dir=str(tmp_path / "run")))
    build(tmp_path / "gallery", load_originals(raw["data"]["queries"]["path"]), load_embedder(raw["old"]), None, None)
    gallery, model = Gallery.open(tmp_path / "gallery"), load_checkpoint(str(tmp_path / "run" / "model"))
    assert gallery.metric == "l2"
    gallery.upgrade(model)
    with torch.inference_mode():
        mapped = model.upgrade(embedded(raw["old"], raw))
    asked = embedded(f"{run}/fresh/model", raw)
    for query, hits in zip(asked, gallery.search(asked.numpy(), model, top_k=1), strict=True):
        assert hits[0].score == pytest.approx(-float(((mapped - query) ** 2).sum(dim=1).min()), rel=1e-3)
    refuses("this gallery compares by cosine", Gallery.create, tmp_path / "other", load_embedder(raw["old"]), metric="cosine")
    unit = Gallery.create(tmp_path / "unit", Fingerprint.from_string("unit"), 7)
    with pytest.raises(XcompatError, match="this gallery compares by cosine"):
        unit.add(asked, [str(row) for row in range(12)], version=load_embedder(f"{run}/fresh/model"))


def test_what_does_not_fit_is_refused_in_one_line(raw: dict[str, Any], image_folder_of: dict[str, str], tmp_path: Path) -> None:
    run = Path(raw["output_dir"])
    with pytest.raises(XcompatError, match="cosine, but FctModel has l2"):
        run_recipe(recipe_of(raw, method="fct", new=f"{run}/unit/model", output_dir=str(tmp_path / "a")))
    with pytest.raises(XcompatError, match="RidgeModel gives unit vectors"):
        run_recipe(recipe_of(raw, method="ridge", new=f"{run}/fresh/model", output_dir=str(tmp_path / "b")))
    with pytest.raises(XcompatError, match="options.metric: OcaModel gives unit vectors"):
        OcaModel.from_encoder(image_folder_of["resnet"], classes=["a"], metric="l2")
    refuses("metric l2, but BctModel has cosine", BctModel.from_encoder, image_folder_of["resnet"], old=raw["old"])
    refuses("options.metric does not apply", IndependentModel.from_encoder, image_folder_of["resnet"], metric="l2")
    said = r"'b' is too long \(length 2e\+30\) to be compared by ip"
    with Gallery.create(tmp_path / "gallery", OLD, 4, metric="ip") as gallery, pytest.raises(XcompatError, match=said):
        gallery.add(np.array([[1, 0, 0, 0], [1e30] * 4], np.float32), ["a", "b"])


LENGTHS = [1e-22, 1e-30, 1e22, 1e30]
OLD = Fingerprint.from_string("old")


def scale_half(rows: np.ndarray, length: float) -> np.ndarray:
    scaled = rows.astype(np.float32)
    scaled[::2] *= np.float32(length)
    return scaled


@pytest.mark.parametrize("length", LENGTHS)
def test_any_length_keeps_its_direction(length: float, tmp_path: Path) -> None:
    unit, labels = unit_vectors(60, 16), np.arange(60) % 3
    scaled = scale_half(unit, length)
    np.testing.assert_allclose(normalise_rows(scaled), unit, atol=1e-6)
    np.testing.assert_allclose(row_lengths(unit.astype(np.float64) * length), length, rtol=1e-6)
    remembered, expected = (ClassStatistics.compute(rows, labels, 3).means_Cd for rows in (scaled, unit))
    torch.testing.assert_close(remembered, expected, atol=1e-6, rtol=0)
    assert np.isfinite(_tsne(scaled[:20], 0)).all(), "a report draws them"
    stored, queries = unit_vectors(200, 16, 0), unit_vectors(300, 16, 1)
    names = [str(row) for row in range(200)]
    with store(Gallery.create(tmp_path / "gallery", OLD, 16), scale_half(stored, length), names) as gallery:
        hits = gallery.search(scale_half(queries, length), OLD, top_k=1)
    cosines = queries @ stored.T
    assert [int(found[0].id) for found in hits] == cosines.argmax(1).tolist()
    np.testing.assert_allclose([found[0].score for found in hits], cosines.max(1), atol=1e-5)
    new, old = unit_vectors(300, 24, 0), unit_vectors(300, 16, 1) + 0.3  # a mean that the map's bias carries
    old /= np.linalg.norm(old, axis=1, keepdims=True)
    config = ProcrustesConfig(old=describe_old(OLD, dim=16), embedding_dim=24)
    pairs = torch.from_numpy(new).float(), torch.from_numpy(old).float()
    model = ProcrustesModel(config).fit([pairs])
    with store(Gallery.create(tmp_path / "mapped", OLD, 16), old, [str(row) for row in range(300)]) as gallery:
        expected, found = (gallery.search(rows, model, top_k=3) for rows in (new, scale_half(new, length)))
        refuses("query 1 is not finite", gallery.search, np.stack([new[0], 0 * new[0]]), model)
    assert [[hit.id for hit in each] for each in found] == [[hit.id for hit in each] for each in expected]
