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
from xcompat.evaluation import (
    Contestants,
    EmbeddedImages,
    EvaluationOptions,
    bootstrap_interval,
    cmc,
    evaluate,
    tar_at_far,
    tpir_at_far,
)
from xcompat.evaluation.verification import share_per_query
from xcompat.files import read_json
from xcompat.fingerprint import Fingerprint
from xcompat.methods import METHODS
from xcompat.models import describe_old
from xcompat.report import load_report
from xcompat.report.comparison.files import comparison_file
from xcompat.training.compare import compare_recipe
from xcompat.training.paths import check_paths
from xcompat.training.recipe import parse_recipe

TINY = {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}


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


# -------------------------------------------------------------------------------------------------------------- rates


def random_images(name: str, seed: int, n_queries: int = 60, n_gallery: int = 40) -> EmbeddedImages:
    """Embed eight classes, of which the gallery lacks two."""
    labels = np.arange(n_queries) % 8, np.arange(n_gallery) % 6
    generator = np.random.default_rng(seed)
    queries, gallery = (3 * np.eye(8)[side] + generator.normal(size=(len(side), 8)) for side in labels)
    ids = [f"q{row}" for row in range(n_queries)], [f"g{row}" for row in range(n_gallery)]
    return EmbeddedImages(name, Fingerprint.from_string(name), queries, gallery, *ids, *labels)


def test_rates_of_a_report_are_those_of_the_functions() -> None:
    old, new = random_images("old", 0), random_images("new", 1)
    options = EvaluationOptions(ks=(1,), n_resamples=300, fars=(0.01, 0.1), fpirs=(0.2,))
    found = evaluate(Contestants(old, new), options)
    for case in found.cases:
        asking = old if case.query == "old" else new
        problem = (asking.query_embeds_QD, old.gallery_embeds_GD, old.query_labels, old.gallery_labels)
        expected = {f"tar@far={name}": tar_at_far(*problem, fars=(far,))[far] for name, far in (("1e-2", 0.01), ("1e-1", 0.1))}
        expected["tpir@fpir=2e-1"] = tpir_at_far(*problem, fars=(0.2,))[0.2]
        assert expected.items() <= case.metrics.items() and case.n_queries == 46
        assert all(low <= expected[name] <= high for name, (low, high) in case.ci95.items() if name in expected)
    assert {each.metric for each in found.criterion.differences} >= {"tar@far=1e-2", "tar@far=1e-1", "tpir@fpir=2e-1"}
    assert found.notes == [
        "14 queries have no image of their class in the gallery and are left out, except that they are the impostors of TPIR."
    ]


def test_the_interval_of_a_share_of_pairs_is_that_of_drawing_queries_with_their_pairs() -> None:
    generator = np.random.default_rng(3)
    pairs_Q = generator.integers(0, 9, 400)
    accepted_Q = generator.binomial(pairs_Q, generator.beta(2, 1, 400))
    values_Q, share = share_per_query(accepted_Q, pairs_Q)
    known_Q = pairs_Q > 0
    assert share == accepted_Q.sum() / pairs_Q.sum() == pytest.approx(np.nanmean(values_Q))
    rows = np.flatnonzero(known_Q)
    drawn_RQ = generator.choice(rows, size=(4000, len(rows)))
    naive = np.quantile(accepted_Q[drawn_RQ].sum(axis=1) / pairs_Q[drawn_RQ].sum(axis=1), [0.025, 0.975])
    assert bootstrap_interval(values_Q[known_Q], 4000) == pytest.approx(naive, abs=0.004)


def test_rates_that_are_equal_are_not_told_apart() -> None:
    old = random_images("old", 0)
    criterion = evaluate(Contestants(old, old), EvaluationOptions(ks=(1,), n_resamples=100, fars=(0.03,))).criterion
    assert not criterion.backward_compatible and any("tar@far=3e-2" in line for line in criterion.failed)


def test_rates_are_of_images_with_classes_and_between_nothing_and_all(market: Path) -> None:
    raw = {"method": "bct", "old": "o/o", "new": "n/n", "data": {"test": {"path": str(market)}}}
    with pytest.raises(XcompatError, match=r"evaluation.fars would change nothing: data.queries names no images"):
        parse_recipe(raw | {"evaluation": {"fars": [0.1]}}, "demo", "demo.yaml")
    with pytest.raises(XcompatError, match=r"evaluation.fars.0"):
        parse_recipe(raw | {"evaluation": {"fars": [0]}}, "demo", "demo.yaml")


def test_a_study_of_people_compares_rates(market: Path, tmp_path: Path, undrawn: None) -> None:
    people = {"format": "market1501"}
    raw: dict[str, Any] = {
        "output_dir": str(tmp_path / "run"),
        "cache_dir": str(tmp_path / "cache"),
        "old": "stage:old",
        "new": {"model": TINY, "image_size": 16, "stem": "small"},
        "data": {
            "images": people | {"path": str(market / "bounding_box_train")},
            "queries": people | {"path": str(market / "query")},
            "gallery": people | {"path": str(market / "bounding_box_test")},
            "samples_per_class": 2,
        },
        "options": {"triplet_weight": 1.0},
        "training": {"max_steps": 2, "per_device_train_batch_size": 4, "save_strategy": "no"},
        "evaluation": {"resamples": 100, "ks": [1], "examples": 1, "tsne_pairs": 0, "fars": [0.1]},
    }
    old = {"name": "old", "method": "independent", "old": None, "options": {"dim": 8, "triplet_weight": 0}}
    compare_recipe(parse_recipe(raw | {"stages": [old, {"method": "mixbct"}]}, "people", "people.yaml"))
    report = load_report(tmp_path / "run" / "seed-0")
    case = next(case for case in report.cases if case.label == "new/old")
    assert case.n_queries == 6 and case.n_gallery == 14 and {"cmc@1", "map", "tar@far=1e-1"} <= case.metrics.keys()
    found = read_json(comparison_file(tmp_path / "run"))["rows"][1]
    assert found["old_gallery"]["image-to-image"]["tar@far=1e-1"]["mean"] == case.metrics["tar@far=1e-1"]
    gain = next(each for each in report.criterion.differences if each.metric == "tar@far=1e-1")
    assert found["gain"]["image-to-image"]["tar@far=1e-1"]["mean"] == pytest.approx(gain.mean, abs=1e-6)
    for file in ("compare.html", "compare.md"):
        assert "TAR@FAR=1e-1" in (tmp_path / "run" / "comparison" / file).read_text()
    page = (tmp_path / "run" / "seed-0" / "report" / "report.html").read_text()
    assert "TAR@FAR=1e-1" in page and "true acceptance rate of verification" in page
    hits = report.examples[0].rows[0].hits
    assert sum(hit.is_hit for hit in hits) <= 2, "two of the four pictures of the person are by the query's own camera"


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
