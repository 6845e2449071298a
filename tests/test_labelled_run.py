"""Recipes on labelled images from end to end: every method, scenarios, class order, refusals before training."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from conftest import UNTRAINED, recipe_of, refuses, store, write_embeds
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from schedule import METHOD_OF_EACH_KIND, mostly_nightly, mostly_nightly_rows
from transformers import AutoModel
from typer.testing import CliRunner

import xcompat
from xcompat.cli import app
from xcompat.core.errors import FingerprintMismatchError, XcompatError
from xcompat.core.files import read_json
from xcompat.core.fingerprint import Fingerprint
from xcompat.core.progress import notice_once
from xcompat.data import load_labelled, open_image
from xcompat.data.images import UnusableSampleError
from xcompat.data.overlap import shared_images
from xcompat.evaluation.cases import IMAGE_TO_IMAGE
from xcompat.mapping.candidates import LINES
from xcompat.mapping.held_out import Trial
from xcompat.mapping.selection import OLD_SHARES, Choice
from xcompat.methods import METHODS
from xcompat.models.embedder import load_checkpoint, load_embedder
from xcompat.report import load_report
from xcompat.report.wording import NOT_SHOWN
from xcompat.retrieval import Gallery
from xcompat.training.auto_map import read_verdict
from xcompat.training.evaluate_command import evaluate_checkpoint
from xcompat.training.evaluation_sets import LabelledTestSet, load_test_set
from xcompat.training.model_evaluation import embed_new
from xcompat.training.recipe import Recipe
from xcompat.training.record import CHOICE
from xcompat.training.run import embed_recipe, run_recipe
from xcompat.training.sections import DataSettings
from xcompat.training.stage import Stage

pytestmark = pytest.mark.usefixtures("undrawn")
CLASSES = ["ant", "bee", "cat", "dog"]

OPTIONS = {"bt2": {"extra_dim": 4}, "oca": {"extra_dim": 4}, "mini_vec2vec": {"least_agreement": -1.0}}
SEEN = [name for name, model in METHODS.items() if model.compares_with_old and "labels" in model.columns]
MAPS = [name for name, model in METHODS.items() if model.embeds_in_memory and name not in SEEN]
PENULTIMATE = {"method": "query_map", "options": {"input": "penultimate"}}
MODALITY = {
    "old_reads": "captions",
    "images": {"path": "glyphs:fit", "limit": 200},
    "queries": {"path": "glyphs:validation", "limit": 200},
    "gallery": {"path": "glyphs:fit", "limit": 200},
}


def write_classes(folder: Path, per_class: int, seed: int) -> str:
    generator = np.random.default_rng(seed)
    for number, name in enumerate(CLASSES):
        (folder / name).mkdir(parents=True)
        for image in range(per_class):
            pixels = generator.integers(0, 80, (16, 16, 3)) + np.array([number * 40, 120 - number * 40, 60])
            Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / name / f"{seed}-{image}.png")
    return str(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    base = tmp_path_factory.mktemp("labelled")
    return {name: write_classes(base / name, count, seed) for seed, (name, count) in enumerate((("train", 6), ("test", 3)))}


@pytest.fixture(scope="module")
def trained(folders: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return a recipe whose old and independent models are trained already."""
    base = tmp_path_factory.mktemp("runs")
    raw = {
        "output_dir": str(base / "run"),
        "cache_dir": str(base / "cache"),
        "new": UNTRAINED,
        "data": {"images": {"path": folders["train"]}, "queries": {"path": folders["test"]}},
        "training": {"num_train_epochs": 1, "per_device_train_batch_size": 8, "learning_rate": 1e-3, "save_strategy": "no"},
        "evaluation": {"resamples": 100, "ks": [1, 2], "examples": 1},
    }
    half = {"subset": {"scenario": "extended-class", "fraction": 0.5, "side": "old"}}
    stages = [
        {"name": "old", "method": "independent", "options": {"dim": 8}, "data": half},
        {"name": "independent", "method": "independent", "options": {"dim": 8}},
    ]
    run_recipe(recipe_of(raw, stages=stages))
    return raw | {"old": f"{base}/run/old/model", "independent": f"{base}/run/independent/model"}


def recipe_for(method: str, trained: dict[str, Any], folder: Path, **changes: Any) -> Recipe:
    """Return the recipe of a method; a map takes the independent model as the new one."""
    new = {"new": trained["independent"]} if METHODS[method].embeds_in_memory else {}
    return recipe_of(trained, method=method, output_dir=str(folder), **{"options": OPTIONS.get(method, {}), **new, **changes})


@pytest.fixture
def left(trained: dict[str, Any], folders: dict[str, str], tmp_path: Path) -> str:
    model = AutoModel.from_pretrained(trained["old"])
    labelled = [load_labelled(folders[name]) for name in ("train", "test")]
    ids = [name for side in labelled for name in side.dataset["id"]]
    images = [open_image(record["image"]) for side in labelled for record in side.dataset]
    with torch.inference_mode():
        embeds = model.embed_images(model.processor.images(images)).numpy()
    return str(write_embeds(tmp_path / "left", ids, image=embeds))


def test_a_limit_that_gives_both_models_the_same_images(folders: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    raw = {"new": UNTRAINED, "data": {"images": {"path": folders["train"]}}}
    stages: list[dict[str, Any]] = [
        {"name": "old", "method": "independent", "old": None, "options": {"dim": 8}},
        {"name": "new", "method": "bct", "old": "stage:old"},
    ]
    for scenario, limit, said in (("extended-data", 2, True), ("extended-data", 1, False), ("open-data", 2, False)):
        for stage, most in zip(stages, (limit, 2), strict=True):
            subset = {"scenario": scenario, "fraction": 0.5, "side": stage["name"], "limit_per_class": most}
            stage["data"] = {"subset": subset}
        recipe = recipe_of(raw, stages=stages)
        notice_once.cache_clear()
        assert len(Stage(recipe, recipe.stages[1]).images) == 8, "it is said, and done"
        assert ("old model was trained on 100% of the new" in " ".join(capsys.readouterr().out.split())) is said


@pytest.mark.parametrize("method", mostly_nightly(["bct", "oca", "query_map", "ridge"], ("oca", "ridge").__contains__))
def test_queries_remember_classes(method: str, trained: dict[str, Any], tmp_path: Path) -> None:
    run_recipe(recipe_for(method, trained, tmp_path / "run", memory="classes", searched_classes="known"))
    said = read_json(tmp_path / "run" / CHOICE)
    assert set(said["floor"]) == {"known classes"}
    assert {trial["line"] for trial in said["trials"]} == {method}
    model = AutoModel.from_pretrained(tmp_path / "run" / "model")
    labels = {f"{case.query}/{case.gallery}" for case in load_report(tmp_path / "run").cases}
    chosen = max(said["trials"], key=lambda trial: (round(1000 * trial["worst"]), trial["mean"]))
    assert said["chosen"] == chosen["name"] and (model.memory is not None) == (" + " in said["chosen"])
    assert (model.memory is not None) == ({"old+memory/old", "without memory/old"} <= labels)
    assert (model.memory is not None) == ("same learned transform and memory" in str(load_report(tmp_path / "run").notes))
    entries = 4 if chosen["share"] else 0
    assert (said["memory"] or {}).get("entries", 0) == entries


@pytest.mark.parametrize(
    ("method", "guessed"),
    mostly_nightly_rows(
        itertools.product(["fct", "procrustes"], [False, True]), lambda method, guessed: (method == "fct") is not guessed
    ),
)
def test_upgrades_of_galleries_remember_classes(
    method: str, guessed: bool, trained: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if guessed:
        monkeypatch.setattr("xcompat.mapping.folds.FEWEST", 100)
    changes = {"side_info": trained["old"]} if method == "fct" else {"options": {"direction": "old_to_new"}}
    run_recipe(recipe_for(method, trained, tmp_path / "run", memory="classes", searched_classes="known", **changes))
    said, report = read_json(tmp_path / "run" / CHOICE), load_report(tmp_path / "run")
    model = load_checkpoint(str(tmp_path / "run" / "model"))
    if guessed:
        assert said == {"chosen": f"{method} + memory, β 30, λ 0.5", "memory": {"entries": 4, "sharpness": 30.0, "share": 0.5}}
    else:
        assert said["chosen"] in {trial["name"] for trial in said["trials"]}
        assert {trial["power"] for trial in said["trials"]} == {None}
    rows = ["without memory/old", "new+memory/new+memory"] if said["memory"] is not None else []
    wanted = ["old/old", "independent/old", "new/old", *rows, "mapped/mapped", "new/new", "independent/independent"]
    assert [case.label for case in report.cases] == wanted and (model.memory is not None) == bool(rows)


def test_queries_of_new_classes_are_judged_by_themselves(trained: dict[str, Any], tmp_path: Path) -> None:
    data = trained["data"] | {"subset": {"scenario": "extended-class", "fraction": 0.5, "side": "old"}}
    run_recipe(recipe_for("ridge", trained, tmp_path / "run", data=data))
    sizes = {case.population: (case.n_queries, case.n_gallery) for case in load_report(tmp_path / "run").cases}
    assert sizes == {"all": (12, 12), "known": (6, 12), "new": (6, 12), "new in the whole gallery": (6, 24)}


@pytest.mark.parametrize("allowed", mostly_nightly([False, True], False.__eq__))
def test_unproven_map_fails_run(allowed: bool, trained: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Choice, "is_safe", property(lambda _: False))
    raw = trained | {"new": trained["independent"], "output_dir": str(tmp_path / "run"), "allow_worse": allowed}
    (tmp_path / "demo.yaml").write_text(yaml.safe_dump(raw))
    result = CliRunner().invoke(app, ["train", str(tmp_path / "demo.yaml")])
    assert result.exit_code == (0 if allowed else 1), result.output
    assert ("no map is surely at or above old queries" in " ".join(result.output.split())) is not allowed
    report = load_report(tmp_path / "run")
    assert report.verdict is False and NOT_SHOWN in report.notes
    assert read_json(tmp_path / "run" / "report" / "report.json")["verdict"] is False
    assert read_verdict(tmp_path / "run") is False, "the card is marked with it"
    trials = read_json(tmp_path / "run" / CHOICE)["trials"]
    assert {trial["line"] for trial in trials} == {"procrustes of penultimate features"}, "the model was trained for the classes"


def test_without_a_method_the_map_is_chosen(trained: dict[str, Any], tmp_path: Path) -> None:
    other = load_embedder(trained["independent"]).model
    other.config.classes = [f"another {name}" for name in other.config.classes]
    other.export(tmp_path / "other")
    run_recipe(recipe_of(trained, new=str(tmp_path / "other"), output_dir=str(tmp_path / "run")))
    said, report = read_json(tmp_path / "run" / CHOICE), load_report(tmp_path / "run")
    assert report.method == "map"
    (cost,) = report.costs.values()
    assert cost.samples == len(load_labelled(trained["data"]["images"]["path"]).dataset) and cost.parameters > 0, "it was solved"
    assert {trial["line"] for trial in said["trials"]} == {*LINES, "procrustes of penultimate features"} - {"ridge"}, "few items"
    assert said["chosen"] in {trial["name"] for trial in said["trials"]}
    model = AutoModel.from_pretrained(tmp_path / "run" / "model")
    assert model.embeds_in_memory and model.compatible_with == [load_embedder(trained["old"]).fingerprint]
    cases = {f"{case.query}/{case.gallery}": case.metrics for case in report.cases}
    assert cases["new/new"] == cases["independent/independent"], "the new model stays as it is"
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*") if path.is_file()}
    run_recipe(recipe_of(trained, new=str(tmp_path / "other"), output_dir=str(tmp_path / "run")))
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*") if path.is_file()}


@pytest.mark.parametrize("method", mostly_nightly([*SEEN, *MAPS], (*METHOD_OF_EACH_KIND, "oca").__contains__))
def test_every_method_runs_and_is_judged(method: str, trained: dict[str, Any], tmp_path: Path) -> None:
    run_recipe(recipe_for(method, trained, tmp_path / "run", evaluation=trained["evaluation"] | {"rerank": 3}))
    report = load_report(tmp_path / "run")
    cases = {case.label: case for case in report.cases}
    assert cases.pop("new+rerank/old").metrics.keys() == cases["new/old"].metrics.keys()
    assert any("Re-ranking embeds at most 3 images per query" in note for note in report.notes)
    mapped = {"mapped/mapped"} if METHODS[method].maps_galleries_with(OPTIONS.get(method, {})) else set()
    model = AutoModel.from_pretrained(tmp_path / "run" / "model")
    if model.stores_view and (model.embeds_in_memory or model.lineage.stores.dim != model.config.embedding_dim):
        mapped = {"new/backfilled"}
    assert set(cases) == {"old/old", "independent/old", "new/old", "new/new", "independent/independent"} | mapped
    assert {"cmc@1", "cmc@2", "map", "map@R"} <= set(cases["new/old"].metrics)
    assert cases["new/old"].n_queries == 12 and "negative_flip_rate@1" in cases["new/old"].metrics
    assert (tmp_path / "run" / "report" / "report.html").exists()
    model = AutoModel.from_pretrained(tmp_path / "run" / "model")
    if not model.embeds_in_memory:
        assert model.config.classes == CLASSES, "the class order is stored"
        for name in set(model.only_for_training) - {"classifier"}:
            assert getattr(model, name, None) is None, f"{name} leaves when training is done"
        assert model.classifier.weight.shape == (len(CLASSES), model.config.embedding_dim), "for the next update"


def test_queries_that_are_trained_on_are_counted(
    trained: dict[str, Any], folders: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(folders["test"], tmp_path / "mixed")
    for number in range(2):
        shutil.copy(Path(folders["train"]) / "cat" / f"0-{number}.png", tmp_path / "mixed" / "cat" / f"again-{number}.png")
    stage = {"method": "procrustes", "new": trained["independent"]}
    sides = {"images": folders["train"], "queries": str(tmp_path / "mixed"), "gallery": folders["train"]}
    data = {side: {"path": path} for side, path in sides.items()}
    run_recipe(recipe_of(trained, output_dir=str(tmp_path / "run"), stages=[stage], data=data, independent=None))
    said = " ".join(capsys.readouterr().out.split())
    assert "2 of 14 images of data.queries are also in data.images, so the result will be too optimistic" in said
    assert "24 of 24 images of data.gallery are also in data.images" in said


@given(st.lists(st.binary(max_size=2)), st.lists(st.binary(max_size=2)), st.booleans())
@settings(max_examples=25, deadline=None)
def test_shared_images_are_those_of_equal_bytes(test: list[bytes], train: list[bytes], is_view: bool) -> None:
    features = datasets.Features({"image": datasets.Image(decode=False)})

    def rows(contents: list[bytes]) -> datasets.Dataset:
        return datasets.Dataset.from_dict({"image": [{"bytes": each, "path": None} for each in contents]}, features=features)

    first, second = rows(test), rows(train[::-1] if is_view else train)
    if is_view and train:
        second = second.select(range(len(train) - 1, -1, -1))
    assert shared_images(first, second) == sum(each in train for each in test if each)


def test_a_map_of_penultimate_features_is_trained_and_judged_on_them(trained: dict[str, Any], tmp_path: Path) -> None:
    changes = {"method": "query_map", "new": trained["independent"], "cache_dir": str(tmp_path / "cache")}
    recipe = recipe_of(trained, **changes, options={"input": "penultimate"}, output_dir=str(tmp_path / "run"))
    embed_recipe(recipe)
    filled = set((tmp_path / "cache").iterdir())
    run_recipe(recipe)
    assert set((tmp_path / "cache").iterdir()) == filled, "nothing is left to embed"
    cases = {case.label: case for case in load_report(tmp_path / "run").cases}
    assert cases["new/new"].metrics == cases["independent/independent"].metrics, "the new model is not touched"
    model = AutoModel.from_pretrained(tmp_path / "run" / "model")
    stage = Stage(recipe, recipe.stages[0])
    plain = stage.embedder("new")
    features = torch.from_numpy(stage.cache(stage.as_input(plain))[:])
    pixels = plain.processor.images([open_image(record["image"]) for record in stage.images.dataset])
    with torch.inference_mode():
        torch.testing.assert_close(features, plain.model.encoder.image_features(pixels), atol=1e-3, rtol=1e-3)  # float16
        torch.testing.assert_close(model.self_view(features), plain.embed({"pixel_values": pixels}), atol=2e-3, rtol=0)
        view, expected = model.to_space(features), load_embedder(str(tmp_path / "run")).embed({"pixel_values": pixels})
    torch.testing.assert_close(view, expected, atol=2e-3, rtol=0)
    test_images = Path(trained["data"]["queries"]["path"])
    judged = evaluate_checkpoint(tmp_path / "run" / "model", test_images, ["label_column=folder"], None, tmp_path / "report")
    again = {case.label: case.metrics for case in judged.cases}
    assert again["new/old"]["map"] == pytest.approx(cases["new/old"].metrics["map"], abs=1e-6)


def test_a_map_of_penultimate_features_is_not_judged_on_another_model(trained: dict[str, Any], tmp_path: Path) -> None:
    changes = {"method": "query_map", "new": trained["independent"], "evaluation": None}
    run_recipe(recipe_of(trained, **changes, options={"input": "penultimate"}, output_dir=str(tmp_path / "run")))
    model = AutoModel.from_pretrained(tmp_path / "run" / "model")
    test = load_test_set(recipe_of(trained, **changes, options={"input": "penultimate"}).stages[0].data)
    assert test is not None
    old, independent = (test.embed(load_embedder(trained[role]), tmp_path / "cache") for role in ("old", "independent"))
    with pytest.raises(FingerprintMismatchError, match="cannot be compared"):
        embed_new(model, old, old, test, tmp_path / "cache")
    model.config.encoder["name"] = trained["old"]  # whoever trained another model into the folder
    with pytest.raises(FingerprintMismatchError, match="cannot be compared"):
        embed_new(model, old, independent, test, tmp_path / "cache")


def test_impossible_stages_are_refused(
    trained: dict[str, Any], left: str, image_folder_of: dict[str, str], pairs_folder: str, tmp_path: Path
) -> None:
    without_features = PENULTIMATE | {"new": image_folder_of["resnet"]}
    captioned = PENULTIMATE | {"new": trained["independent"], "data": {"test": {"path": pairs_folder}}}
    for changes, message in (
        ({"method": "bct", "old": None}, "method bct needs an old model; set old"),
        ({"method": "bct", "data": {}, "evaluation": None}, "needs labelled images; set data.images"),
        ({"method": "bt2", "options": {"extra_dim": 4}, "independent": None}, "learns from an independent new model; set indep"),
        ({"method": "bt2", "options": {"extra_dim": 4, "dim": 6}}, "its 6 added dimensions with the 8 of .*: set dim to 8"),
        ({"method": "bct", "options": {"extra_dim": -1}}, "options.extra_dim is -1"),
        ({"method": "l2", "options": {"dim": 0}}, "options.dim is 0; set 1 or more"),
        ({"method": "bct", "data": MODALITY}, "an image encoder has no tokenizer"),
        (captioned, "data.test has captions.*set options.input to embedding"),
        (without_features, "has no penultimate features.*set options.input to embedding"),
        ({"method": "query_map", "new": left}, "contains embeddings, not a model; set new to a model"),
    ):
        refuses(message, run_recipe, recipe_of(trained, output_dir=str(tmp_path / "run"), **changes))
        assert not (tmp_path / "run" / "checkpoints").exists()
        shutil.rmtree(tmp_path / "run", ignore_errors=True)


def test_a_later_stage_is_checked_before_training(trained: dict[str, Any], folders: dict[str, str], tmp_path: Path) -> None:
    first = {"name": "plain", "method": "independent", "old": None, "independent": None, "options": {"dim": 8}}
    wider = {"name": "wider", "method": "oca", "old": "stage:plain", "options": {"extra_dim": 4}}
    first_id = load_labelled(folders["train"]).dataset["id"][:1]
    stored = str(write_embeds(tmp_path / "stored", first_id, image=np.ones((1, 8), np.float32)))
    for changes, message in (
        ({"data": {"subset": {"classes": ["ant", "unicorn"]}}}, "unicorn"),
        ({"options": {"head": "triplet"}, "data": {"subset": {"classes": CLASSES, "limit_per_class": 1}}}, "ant"),
        ({"old": stored}, "has no embedding of 23 of 24 images"),
        ({"method": "bt2", "options": {"extra_dim": 9}}, "extra_dim from 1 to the old dimension 8"),
        ({"method": "mixbct", "options": {"extra_dim": 4}}, "the new dimension 12 must equal the old, 8"),
        ({"method": "nccl", "options": {"dim": 8}, "old": "stage:wider"}, "at least the 12 dimensions .* give 8; increase them"),
    ):
        last = {"name": "last", "method": "bct", "old": "stage:plain", **changes}
        refuses(message, run_recipe, recipe_of(trained, stages=[first, wider, last], output_dir=str(tmp_path / "run")))
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("method", mostly_nightly(["bct", "oca", "query_map"], "query_map".__eq__))
def test_an_old_text_encoder_is_searched_by_images(method: str, trained: dict[str, Any], old_folder: str, tmp_path: Path) -> None:
    evaluation = {**trained["evaluation"], "old_on_new": True}
    run_recipe(recipe_for(method, trained, tmp_path / "run", old=old_folder, data=MODALITY, evaluation=evaluation))
    cases = {case.label: case for case in load_report(tmp_path / "run").cases}
    assert cases["old/old"].metrics["cmc@1"] > 0.2  # names search names; those of one class are equal
    assert {"new/old", "old/new", "new/new"} <= cases.keys()


@pytest.mark.parametrize("method", mostly_nightly(["bct", "l2", "query_map", "fct"], ("bct", "fct").__contains__))
def test_embeddings_replace_a_lost_model(method: str, trained: dict[str, Any], left: str, tmp_path: Path) -> None:
    """Old embeddings of fct are also its side-information."""
    for name, old in (("gone", left), ("here", trained["old"])):
        more = {"cache_dir": str(tmp_path / f"cache-{name}"), "side_info": old if method == "fct" else None}
        run_recipe(recipe_for(method, trained, tmp_path / name, old=old, **more))
    gone, here = ({case.label: case.metrics for case in load_report(tmp_path / name).cases} for name in ("gone", "here"))
    assert gone["old/old"] == pytest.approx(here["old/old"]) and gone["new/old"] == pytest.approx(here["new/old"], abs=0.1)


def test_no_lost_model_is_mixed_in(trained: dict[str, Any], left: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A search cannot embed its query with a folder of embeddings."""
    monkeypatch.setattr(Trial, "is_surely_no_worse", False)
    for name, old in (("gone", left), ("here", trained["old"])):
        raw = {"old": old, "new": trained["independent"], "output_dir": str(tmp_path / name)}
        run_recipe(recipe_of(trained, **raw, evaluation=None))
        shares = {trial["old_share"] for trial in read_json(tmp_path / name / CHOICE)["trials"]}
        assert shares == ({0.0} if name == "gone" else {0.0, *OLD_SHARES})
        if name == "gone":
            assert AutoModel.from_pretrained(tmp_path / name / "model").config.old_share is None


def test_a_gallery_replaces_an_old_model(trained: dict[str, Any], left: str, tmp_path: Path) -> None:
    embeds, ids = np.load(Path(left) / "image_embeds.npy"), (Path(left) / "image_ids.txt").read_text().split()
    made_by, found = Fingerprint.from_string("the old model"), {}
    store(Gallery.create(tmp_path / "gallery", made_by, embeds.shape[1]), embeds, ids)
    for old in ("left", "gallery"):
        out = tmp_path / f"run-{old}"
        run_recipe(recipe_for("ridge", trained, out, old=str(tmp_path / old), cache_dir=str(tmp_path / "cache")))
        found[old] = {case.label: case.metrics for case in load_report(out).cases}
    assert found["gallery"]["new/old"] == pytest.approx(found["left"]["new/old"])
    assert AutoModel.from_pretrained(tmp_path / "run-gallery" / "model").compatible_with[0] == made_by
    with pytest.raises(XcompatError, match="contains embeddings, not a model; set independent to a model"):
        run_recipe(recipe_for("ridge", trained, tmp_path / "other", independent=left))


def test_prototypes_alone_are_an_old_model(trained: dict[str, Any], image_folder_of: dict[str, str], tmp_path: Path) -> None:
    left = str(tmp_path)
    np.save(tmp_path / "prototypes.npy", np.eye(2, 8, dtype=np.float32))
    (tmp_path / "classes.txt").write_text("bee\nant\n")
    alone = recipe_of(trained, method="bct", old=left, evaluation=None, output_dir=str(tmp_path / "bct"))
    embed_recipe(alone)
    run_recipe(alone)
    for method in {*SEEN, *MAPS} - {"bct", "oca"}:
        with pytest.raises(XcompatError, match=f"{method} needs an old embedding of every training image, but .* only class"):
            run_recipe(recipe_for(method, trained, tmp_path / method, old=left))
    with pytest.raises(XcompatError, match="contains only class prototypes.*set evaluation to null"):
        run_recipe(recipe_of(trained, method="bct", output_dir=str(tmp_path / "judged"), old=left))
    of_a_run = xcompat.OcaModel.from_encoder(image_folder_of["resnet"], old=str(Path(trained["old"]).parent), extra_dim=4)
    assert of_a_run.config.classes == ["ant", "bee"] and of_a_run.config.embedding_dim == 12, "what a run ended with is meant"
    model = xcompat.BctModel.from_encoder(image_folder_of["resnet"], old=left)
    assert model.config.classes == ["bee", "ant"] and model.config.old["dim"] == 8
    with pytest.raises(XcompatError, match="IndependentModel is trained without an old model and cannot search an old gallery"):
        xcompat.IndependentModel.from_encoder(image_folder_of["resnet"], old=left)
    with pytest.raises(XcompatError, match="FctModel needs a description of the old model; pass load_embedder"):
        xcompat.FctModel.from_encoder(image_folder_of["resnet"], old=left)


def test_bad_rows_are_refused(trained: dict[str, Any], tmp_path: Path) -> None:
    for rows, lines, message in (
        (np.ones((3, 8)), ["a", "b"], "has shape .3, 8., but image_ids.txt has 2 lines"),
        (np.full((2, 8), np.nan), ["a", "b"], "2 of 2 rows .* row 0 .*a.* has no embedding; row 1"),
        (np.eye(2, 8) * [[1.0], [0.0]], ["a", "b"], "1 of 2 rows .* row 1 .*b.* holds only zeros; fix them"),
        (np.ones((2, 8)), ["a", "a"], "image_ids.txt: 'a' is on two lines"),
    ):
        write_embeds(tmp_path / "left", lines, image=rows)
        refuses(message, run_recipe, recipe_for("l2", trained, tmp_path / "run", old=str(tmp_path / "left")))
        assert not (tmp_path / "run" / "checkpoints").exists()


def test_online_equals_cached_unaugmented(trained: dict[str, Any], tmp_path: Path) -> None:
    for name in ("cached", "online"):
        data = {**trained["data"], "old_embeddings": name, "new_embeddings": name}
        run_recipe(recipe_for("bt2", trained, tmp_path / name, evaluation=None, data=data))
    cached, online = (AutoModel.from_pretrained(tmp_path / name / "model").state_dict() for name in ("cached", "online"))
    for name, tensor in cached.items():
        torch.testing.assert_close(online[name], tensor, atol=1e-3, rtol=1e-2)  # the cache is float16


@pytest.mark.parametrize("method", mostly_nightly(["l2", "contrast", "bt2"], "bt2".__eq__))
def test_what_could_not_be_embedded_is_not_trained_on(
    method: str, trained: dict[str, Any], folders: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An image whose storage failed while it was embedded, and was well again when it was trained on."""
    data = {**trained["data"], "images": {"path": folders["train"], "max_bad_share": 0.5}}
    recipe = recipe_for(method, trained, tmp_path / "run", data=data, evaluation=None, cache_dir=str(tmp_path / "cache"))

    def failing(image: Any) -> Image.Image:
        image = open_image(image)
        if image.tobytes() == unlucky:
            raise UnusableSampleError("the storage does not answer")
        return image

    unlucky = open_image(Stage(recipe, recipe.stages[0]).images.dataset[0]["image"]).tobytes()
    with monkeypatch.context() as patch:
        patch.setattr("xcompat.data.pairs.open_image", failing)
        embed_recipe(recipe)
    run_recipe(recipe)
    model = AutoModel.from_pretrained(tmp_path / "run" / "model")
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())


def test_a_name_means_one_image(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of a query is the query itself; what only has its name is another image, of the same size in bytes or not."""
    images = {"queries": {"copy": 1, "size": 2, "bytes": 3}, "all": {"copy": 1, "size": 44, "bytes": 5, "more": 6}}
    for side, named in images.items():
        (tmp_path / side / "ant").mkdir(parents=True)
        for name, content in named.items():
            pixels = Image.new("RGB", (content if name == "size" else 4, 4), (content, 0, 0))
            pixels.save(tmp_path / side / "ant" / f"{name}.png")
    paths = {side: {"path": str(tmp_path / side)} for side in images}
    test = load_test_set(DataSettings(queries=paths["queries"], gallery=paths["all"]))
    assert isinstance(test, LabelledTestSet)
    assert test.gallery_ids == ["ant/bytes.png (gallery)", "ant/copy.png", "ant/more.png", "ant/size.png (gallery)"]
    assert "2 of 4 images of the gallery have the id of a different query image, e.g. 'ant/bytes.png'" in caplog.text
    itself = test.questions()[IMAGE_TO_IMAGE].own_id
    assert sorted(filter(None, map(itself, range(3)))) == ["ant/copy.png"]
    assert test.galleries()[0].ids == test.gallery_ids
    monkeypatch.setattr("xcompat.data.overlap._digest", lambda _: pytest.fail("the same files are not read"))
    for gallery in (None, paths["queries"]):
        same = load_test_set(DataSettings(queries=paths["queries"], gallery=gallery))
        assert isinstance(same, LabelledTestSet) and same.gallery_ids == list(same.queries.dataset["id"])


def test_slerp_needs_queries(trained: dict[str, Any], left: str, tmp_path: Path) -> None:
    for changes, message in (
        ({"method": "fct"}, "method fct moves the old gallery to the new space; set it to null"),
        ({"options": {"direction": "old_to_new"}}, "method procrustes moves the old gallery"),
        ({"old": left}, "left contains embeddings and cannot embed a query; set it to null"),
        ({"data": {"old_reads": "captions"}}, "the old model reads captions and the new model reads images"),
    ):
        changes = {"method": "procrustes", **changes, "data": {**trained["data"], **changes.get("data", {})}}
        stages = [{"name": "first", "method": "ridge"}, {"name": "second", "evaluation": {"slerp": 0.5}, **changes}]
        with pytest.raises(XcompatError, match=f"second: evaluation.slerp needs old queries, but .*{message}"):
            run_recipe(recipe_of(trained, new=trained["independent"], stages=stages, output_dir=str(tmp_path / "run")))
        assert not (tmp_path / "run").exists(), "nothing is trained for nothing"


def test_a_sequence_of_updates_is_judged_on_every_earlier_gallery(trained: dict[str, Any], tmp_path: Path) -> None:
    classifier = {"old_weights": "classifier"}
    stages = [
        {"name": "second", "method": "oca", "options": {"extra_dim": 4, **classifier}},
        {"name": "third", "method": "bct", "old": "stage:second", "options": classifier | {"old_scale": None}},
    ]
    run_recipe(recipe_of(trained, stages=stages, output_dir=str(tmp_path / "run")))
    third = AutoModel.from_pretrained(tmp_path / "run" / "third" / "model")
    assert [Path(version.name).parent.name for version in third.compatible_with] == ["second", "old"]
    embeds = torch.nn.functional.normalize(torch.randn(3, 12), dim=-1)
    second, first = (third.to_space(embeds, version) for version in third.compatible_with)
    torch.testing.assert_close(second, embeds)
    assert first.shape == (3, 8) and torch.allclose(first, torch.nn.functional.normalize(embeds[:, :8], dim=-1))
    table = pd.read_csv(tmp_path / "run" / "sequence.csv")
    pairs = set(zip(table["query"], table["gallery"], strict=True))
    models = ["old", "second", "third"]
    assert pairs == {(query, gallery) for number, query in enumerate(models) for gallery in models[: number + 1]}
    (against,) = (tmp_path / "run").glob("against-*")
    report = {case.label: case.metrics["cmc@1"] for case in load_report(against).cases}
    assert report["new/old"] == table.query("query == 'third' and gallery == 'old' and metric == 'cmc@1'")["value"].item()
