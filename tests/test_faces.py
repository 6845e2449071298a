"""Faces and re-identification: cameras, Market-1501's names, IJB-C's templates and pairs, rates in reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from data_layouts.faces import make_market1501

from xcompat.data import LabelledSource, load_labelled
from xcompat.errors import XcompatError
from xcompat.evaluation import Contestants, EmbeddedImages, EvaluationOptions, cmc, evaluate
from xcompat.fingerprint import Fingerprint
from xcompat.methods import METHODS
from xcompat.models import describe_old
from xcompat.training.paths import check_paths
from xcompat.training.recipe import parse_recipe


@pytest.fixture(scope="module")
def market(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_market1501(tmp_path_factory.mktemp("market"))


def test_names_of_market1501_give_people_and_cameras(market: Path) -> None:
    gallery = load_labelled(LabelledSource(path=str(market / "bounding_box_test"), format="market1501"))
    ids, cameras = gallery.dataset["id"][:], gallery.cameras()
    assert cameras == [name[6] for name in ids] and not any(name.startswith("-1") for name in ids)
    people = gallery.class_names()
    assert people[0] != people[1] and people[:2] == ids[:2] and ids[0].startswith("0000")  # nobody is nobody's positive
    assert people[2:] == [name[:4] for name in ids[2:]]
    trained = load_labelled(LabelledSource(path=str(market / "bounding_box_train"), format="market1501"))
    assert trained.classes == ["0001", "0002", "0003", "0004"] and len(trained) == 16


def test_cameras_are_a_column_of_any_other_data(market: Path, tmp_path: Path) -> None:
    names = sorted(file.name for file in (market / "query").iterdir())
    rows = [{"image": str(market / "query" / name), "label": name[:4], "device": name[5:7]} for name in names]
    pd.DataFrame(rows).to_csv(tmp_path / "labels.csv", index=False)
    pd.DataFrame(rows).to_parquet(tmp_path / "people.parquet")
    for file in ("labels.csv", "people.parquet"):
        found = load_labelled(LabelledSource(path=str(tmp_path / file), camera_column="device"))
        assert found.cameras() == [name[5:7] for name in names]
        assert load_labelled(LabelledSource(path=str(tmp_path / file))).cameras() is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"format": "market1501", "camera_column": "c"}, "reads names of files and no column 'c'"),
        ({"camera_column": "c"}, "images in folders have no column 'c'"),
    ],
)
def test_cameras_of_images_in_folders_are_those_of_their_names(market: Path, given: dict[str, Any], message: str) -> None:
    with pytest.raises(XcompatError, match=message):
        load_labelled(LabelledSource(path=[str(market / "query"), str(market / "bounding_box_train")], **given))


def test_a_name_without_camera_is_refused_before_training(market: Path) -> None:
    person = market / "query" / "0031.jpg"
    person.write_bytes(next((market / "query").iterdir()).read_bytes())
    searched = {"path": str(market / "bounding_box_test"), "format": "market1501"}
    data = {"images": {"path": str(market)}, "queries": searched | {"path": str(market / "query")}, "gallery": searched}
    raw = {"method": "bct", "old": "old", "new": "google/vit", "data": data}
    recipe = parse_recipe(raw | {"old": {"name": "google/vit"}}, "demo", "demo.yaml")
    try:
        with pytest.raises(XcompatError, match=r"data.queries.path: .*0031.jpg is not named as in Market-1501") as caught:
            check_paths(recipe.stages[0])
        assert "\n" not in str(caught.value)
    finally:
        person.unlink()
    check_paths(recipe.stages[0])
    data["gallery"] = {"path": str(market / "bounding_box_test")}
    with pytest.raises(XcompatError, match="gallery: the other side has cameras and this one has none"):
        parse_recipe(raw, "demo", "demo.yaml")


def test_cameras_reach_every_case_and_interval() -> None:
    generator, labels, cameras = np.random.default_rng(0), np.arange(48) % 6, np.arange(48) // 6 % 2
    kinds = {"query_ids": range(48), "gallery_ids": range(48), "query_labels": labels, "gallery_labels": labels}

    def embedded(name: str, **taken_by: Any) -> EmbeddedImages:
        embeds = generator.normal(size=(48, 4)) + np.eye(6)[labels][:, :4]
        return EmbeddedImages(name, Fingerprint.from_string(name), embeds, embeds, **kinds, **taken_by)

    both = {"query_cameras": cameras, "gallery_cameras": cameras}
    old, new = embedded("old", **both), embedded("new", **both)
    options = EvaluationOptions(ks=(1,), n_resamples=100)
    cases = {case.label: case for case in evaluate(Contestants(old, new), options).cases}
    for label, asking in (("old/old", old), ("new/old", new)):
        problem = (asking.query_embeds_QD, old.gallery_embeds_GD, labels, labels, range(48), range(48))
        expected = cmc(*problem, ks=(1,), **both)[1]
        assert cases[label].metrics["cmc@1"] == expected != cmc(*problem, ks=(1,))[1]
    kept = old.keep((np.arange(48) > 1, np.arange(48) > 2))
    assert list(kept.query_cameras or ()) == cameras[2:].tolist() and list(kept.gallery_cameras or ()) == cameras[3:].tolist()
    with pytest.raises(XcompatError, match="query_cameras of new_view are not those of old"):
        evaluate(Contestants(old, embedded("new")), options)


# ------------------------------------------------------------------------------------------- classification and triplets


def naive_triplets(features: np.ndarray, labels: list[int], margin: float) -> float:
    """Loop over anchors, and over everything for the farthest of the own class and the nearest of another."""
    units = [row / np.linalg.norm(row) for row in features]
    losses = []
    for anchor, own in enumerate(labels):
        away = [float(np.linalg.norm(units[anchor] - other)) for other in units]
        same = [away[row] for row, label in enumerate(labels) if label == own and row != anchor]
        others = [away[row] for row, label in enumerate(labels) if label != own]
        if same and others:
            losses.append(max(0.0, max(same) - min(others) + margin))
    return float(np.mean(losses))


@pytest.mark.parametrize("margin", [None, 1.0])
@pytest.mark.parametrize("method", ["independent", "bct", "mixbct"])
def test_triplets_are_added_to_the_classification_loss(
    method: str, margin: float | None, image_folder_of: dict[str, str]
) -> None:
    labels, given = [0, 0, 1, 1, 2], {"triplet_weight": 0.5, "triplet_margin": margin}
    features = torch.from_numpy(np.random.default_rng(5).normal(size=(5, 6)))
    options = {"classes": list("abc"), "old": describe_old(Fingerprint.from_string("old"), 6)}
    options |= {"old": None, "dim": 6} if method == "independent" else {}
    plain, summed = (METHODS[method].from_encoder(image_folder_of["resnet"], **options, **more) for more in ({}, given))
    summed.load_state_dict(plain.state_dict())
    losses = [model.double().classification_loss(features, torch.tensor(labels)).item() for model in (plain, summed)]
    expected = naive_triplets(features.numpy(), labels, 0.3 if margin is None else margin)
    assert losses[1] - losses[0] == pytest.approx(0.5 * expected, rel=1e-9) and expected > 0


def test_triplets_need_balanced_batches_and_something_to_be_added_to(image_folder_of: dict[str, str]) -> None:
    raw = {"method": "independent", "new": "google/vit", "options": {"triplet_weight": 1.0}, "evaluation": None}
    with pytest.raises(XcompatError, match=r"a batch of triplets holds 4 images .* is 6; make it a multiple of 4"):
        parse_recipe(raw | {"training": {"per_device_train_batch_size": 6}}, "demo", "demo.yaml")
    stage = parse_recipe(raw | {"training": {"per_device_train_batch_size": 8}}, "demo", "demo.yaml").stages[0]
    assert stage.is_balanced and not stage.model_copy(update={"options": {"triplet_weight": 0.0}}).is_balanced
    for options, message in (
        ({"head": "triplet", "triplet_weight": 1.0}, "head: triplet is one of triplets alone"),
        ({"triplet_margin": 0.3}, "changes nothing without triplet_weight"),
        ({"triplet_weight": -1.0}, "give a weight of 0 or more"),
        ({"triplet_weight": 1.0, "mixup": 0.2}, "set options.mixup to 0, or no triplets"),
    ):
        with pytest.raises(XcompatError, match=message):
            METHODS["independent"].from_encoder(image_folder_of["resnet"], classes=["a", "b"], **options)
