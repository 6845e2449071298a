"""`xcompat evaluate CHECKPOINT --data PHOTOS`: what a run found with its model is found again on images with classes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from conftest import without_drawings
from PIL import Image

from xcompat import Fingerprint, ProcrustesConfig, ProcrustesModel
from xcompat.data import load_labelled, open_image
from xcompat.models import describe_old
from xcompat.models.embedder import load_checkpoint, load_embedder
from xcompat.report import load_report
from xcompat.training.recipe import parse_recipe
from xcompat.training.run import run_recipe

pytestmark = pytest.mark.usefixtures("undrawn")
TINY = {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}
OWN = {"old/old", "new/old", "new/new"}
WITH_INDEPENDENT = OWN | {"independent/old", "independent/independent"}
SIDES = (("train", 6), ("test", 3), ("more", 4))


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    base = tmp_path_factory.mktemp("photos")
    generator = np.random.default_rng(0)
    for side, count in SIDES:
        for number in range(3):
            (base / side / f"class {number}").mkdir(parents=True)
            for image in range(count):
                pixels = generator.integers(0, 120, (16, 16, 3)) + np.array([number * 60, 120 - number * 60, 60])
                Image.fromarray(pixels.astype(np.uint8)).save(base / side / f"class {number}" / f"{side}-{image}.png")
    return {side: str(base / side) for side, _ in SIDES}


def raw_recipe(folder: Path, photos: dict[str, str], **training: Any) -> dict[str, Any]:
    raw: dict[str, Any] = {"output_dir": str(folder / "run"), "cache_dir": str(folder / "cache")}
    raw["data"] = {"images": {"path": photos["train"]}, "queries": {"path": photos["test"]}}
    raw["training"] = training | {"per_device_train_batch_size": 8, "save_strategy": "no"}
    return raw | {"evaluation": {"resamples": 100, "examples": 0, "tsne_pairs": 0}}


@pytest.fixture(scope="module")
def trained(photos: dict[str, str], old_folder: str, folder_of: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run with a stage for every way in which a checkpoint comes to its models."""
    folder = tmp_path_factory.mktemp("verdict")
    images = {"method": "independent", "evaluation": None}
    stages = [
        {**images, "name": "old", "options": {"dim": 8}},
        {**images, "name": "fresh", "options": {"dim": 7}},
        {**images, "name": "views", "options": {"dim": 5}},
        {"name": "bct", "method": "bct", "old": "stage:old"},
        {"name": "map", "method": "query_map", "old": "stage:old", "new": "stage:fresh"},
        {"name": "fct", "method": "fct", "old": "stage:old", "new": "stage:fresh", "side_info": "stage:views"},
        {"name": "texts", "method": "procrustes", "old": old_folder, "new": folder_of["clip"]},
    ]
    raw = raw_recipe(folder, photos, max_steps=4, learning_rate=1e-3)
    raw |= {"new": {"model": TINY, "image_size": 16, "stem": "small"}, "stages": stages}
    with without_drawings():
        run_recipe(parse_recipe(raw, "demo", "demo.yaml"))
    return folder / "run"


@pytest.fixture
def judge(tmp_path: Path, run_xcompat: Callable[..., tuple[int, str, str]]) -> Callable[..., Any]:
    """Return a function that evaluates a checkpoint from the command line: its report, or the one line of a refusal."""

    def judged(checkpoint: Path, *arguments: object) -> Any:
        transformers.utils.logging.enable_progress_bar()  # as in a new process
        code, _, err = run_xcompat("evaluate", checkpoint, "--output", tmp_path / "judged", *arguments)
        assert "Loading weights" not in err, "a bar of a library"
        lines = [line for line in err.splitlines() if line.startswith("xcompat: ")]
        assert code == 2 * len(lines) <= 2
        return lines[0] if lines else load_report(tmp_path / "judged")

    return judged


@pytest.mark.parametrize(
    ("stage", "overrides", "labels"),
    [
        ("bct", [], OWN),
        ("map", [], WITH_INDEPENDENT | {"new/backfilled"}),
        ("fct", [], WITH_INDEPENDENT | {"mapped/mapped"}),
        ("texts", ["label_column=folder"], WITH_INDEPENDENT | {"new/backfilled"}),
    ],
)
def test_a_checkpoint_is_judged_as_in_its_run(
    stage: str, overrides: list[str], labels: set[str], trained: Path, photos: dict[str, str], judge: Callable[..., Any]
) -> None:
    found = judge(trained / stage / "model", *overrides, "--data", photos["test"])
    wanted = load_report(trained if stage == "texts" else trained / stage)  # the last stage's report stands at the top
    assert {case.label for case in found.cases} == {case.label for case in wanted.cases} == labels
    assert [case.metrics for case in found.cases] == [case.metrics for case in wanted.cases]
    assert (found.old.fingerprint, found.new.fingerprint) == (wanted.old.fingerprint, wanted.new.fingerprint)
    assert found.method == wanted.method and found.notes == wanted.notes


def test_other_images_may_be_searched(trained: Path, photos: dict[str, str], judge: Callable[..., Any]) -> None:
    found = judge(trained / "bct" / "model", f"gallery={photos['more']}", "--data", photos["test"])
    assert {(case.n_queries, case.n_gallery) for case in found.cases} == {(9, 12)}


def test_an_old_model_that_is_gone(trained: Path, photos: dict[str, str], tmp_path: Path, judge: Callable[..., Any]) -> None:
    labelled = [load_labelled(photos[side]) for side in ("train", "test")]
    images = [open_image(record["image"]) for side in labelled for record in side.dataset]
    old = load_embedder(str(trained / "old" / "model"))
    left = tmp_path / "left"
    left.mkdir()
    np.save(left / "image_embeds.npy", old.embed({"pixel_values": old.processor.images(images)}).numpy())
    (left / "image_ids.txt").write_text("".join(f"{name}\n" for side in labelled for name in side.dataset["id"]))
    raw = raw_recipe(tmp_path, photos, max_steps=2) | {"old": str(left), "new": str(trained / "fresh")}
    run_recipe(parse_recipe(raw, "demo", "demo.yaml"))
    assert load_checkpoint(str(tmp_path / "run" / "model")).config.input == "penultimate", "a guess, of what may be tried"
    found = judge(tmp_path / "run" / "model", "--data", photos["test"])
    assert [case.metrics for case in found.cases] == [case.metrics for case in load_report(tmp_path / "run").cases]
    assert "has no embedding of 12 of 12 images" in judge(tmp_path / "run" / "model", "--data", photos["more"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "set --data to test images with captions or classes"),
        (["label_colum=folder", "--data", "test"], "--data: unknown key 'label_colum'; did you mean 'label_column'"),
        (["label_column=nowhere", "--data", "test"], "nowhere"),
        (["gallery=no/such/photos", "--data", "test"], "no/such/photos does not exist"),
        (["gallery={}", "--data", "test"], "gallery: path"),
        (["--data", "test", "--old", "views"], "cannot be compared"),
        (["--data", "pairs"], "label_column"),
    ],
)
def test_what_cannot_be_judged_is_refused(
    arguments: list[str], message: str, trained: Path, photos: dict[str, str], pairs_folder: str, judge: Callable[..., Any]
) -> None:
    places = photos | {"pairs": pairs_folder, "views": str(trained / "views" / "model")}
    assert message in judge(trained / "bct" / "model", *(places.get(word, word) for word in arguments))


def test_a_name_is_no_model_to_load(photos: dict[str, str], tmp_path: Path, judge: Callable[..., Any]) -> None:
    old = describe_old(Fingerprint.from_string("old"), dim=8)
    ProcrustesModel(ProcrustesConfig(old=old, embedding_dim=16)).export(tmp_path / "map")
    for more in ((), ("--old", photos["test"])):
        said = judge(tmp_path / "map", "--data", photos["test"], *more)
        assert "'old', which is only a name" in said and "evaluate embeddings of both models (--old, --new)" in said


def test_a_model_that_embeds_texts_is_judged_with_captions(
    trained: Path, pairs_folder: str, photos: dict[str, str], judge: Callable[..., Any]
) -> None:
    found = judge(trained / "texts" / "model", "--data", pairs_folder)
    assert {case.direction for case in found.cases} == {"image-to-text", "text-to-image"}
    assert "caption" in judge(trained / "texts" / "model", "--data", photos["test"])
