"""Training from Python on data sets in memory, the same as a recipe; and the notebooks of docs/notebooks, whose cells run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import datasets
import matplotlib.pyplot as plt
import nbformat
import numpy as np
import pytest
import torch
from conftest import refusing
from nbclient import NotebookClient
from PIL import Image
from test_docs import ROOT
from transformers import AutoModel, TrainingArguments

from xcompat import FingerprintMismatchError, ProjectionModel, XcompatError
from xcompat.methods import METHODS
from xcompat.models import CompatModel
from xcompat.models.embedder import load_embedder
from xcompat.training import CompatTrainer
from xcompat.training.recipe import parse_recipe
from xcompat.training.run import run_recipe

CLASSES = ["cat", "dog", "shoe"]
COUNT = 12


@pytest.fixture(scope="module")
def images() -> list[Image.Image]:
    pixels = np.random.default_rng(0).integers(0, 255, (COUNT, 40, 40, 3), dtype=np.uint8)
    return [Image.fromarray(image) for image in pixels]


@pytest.fixture(scope="module")
def photos(images: list[Image.Image]) -> datasets.Dataset:
    columns = {"image": images, "label": [row % len(CLASSES) for row in range(COUNT)]}
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=CLASSES)})
    return datasets.Dataset.from_dict(columns, features=features)


@pytest.fixture(scope="module")
def pairs(images: list[Image.Image]) -> datasets.Dataset:
    columns = {"picture": images, "caption": [f"thing number {row} of many" for row in range(COUNT)]}
    features = datasets.Features({"picture": datasets.Image(), "caption": datasets.Value("string")})
    return datasets.Dataset.from_dict(columns, features=features)


@pytest.fixture(scope="module")
def texts() -> datasets.Dataset:
    return datasets.Dataset.from_dict({"text": [f"sentence {row} about a dog" for row in range(COUNT)]})


def settings(folder: Path, **given: Any) -> TrainingArguments:
    usual = {"per_device_train_batch_size": 4, "learning_rate": 1e-3, "max_steps": 4, "report_to": "none", "save_strategy": "no"}
    usual["optim"] = "adamw_torch"  # that of a recipe; transformers' own rounds otherwise
    return TrainingArguments(str(folder), use_cpu=True, disable_tqdm=True, **(usual | given))


def built(method: str, folder_of: dict[str, str], old_folder: str, **options: Any) -> CompatModel:
    torch.manual_seed(0)
    return METHODS[method].from_encoder(folder_of["clip"], old=load_embedder(old_folder).describe_old(), **options)


def moved(model: CompatModel, trainer: CompatTrainer) -> set[str]:
    """Train; return the names of the weights that are others now."""
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    assert np.isfinite(trainer.train().training_loss)
    return {name for name, value in model.named_parameters() if not torch.equal(value, before[name])}


def test_old_models_embed_batches(photos: datasets.Dataset, folder_of: dict[str, str], old_folder: str, tmp_path: Path) -> None:
    model, data = built("contrast", folder_of, old_folder, classes=CLASSES), {"augmentation": {"min_scale": 0.3}}

    def first_batch(workers: int = 0, **given: str) -> dict[str, torch.Tensor]:
        arguments = settings(tmp_path, dataloader_num_workers=workers)
        trainer = CompatTrainer(model, arguments, photos, old=old_folder, data=data | given)
        return trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))

    cached, online = first_batch(), first_batch(old_embeddings="online")
    assert cached.keys() == online.keys()
    assert torch.equal(cached["labels"], online["labels"]) and cached["old_embeds"].shape == online["old_embeds"].shape
    assert not torch.allclose(cached["old_embeds"], online["old_embeds"], atol=1e-2), "of plain images, and of the views"
    by_worker = first_batch(1, old_embeddings="online")
    assert all(torch.equal(by_worker[name], column) for name, column in online.items())


@pytest.mark.parametrize("kind", ["photos", "pairs", "texts"])
def test_a_map_learns_from_whatever_both_models_embed(
    kind: str, folder_of: dict[str, str], old_folder: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    model, old = built("query_map", folder_of, old_folder), load_embedder(old_folder)
    assert moved(model, CompatTrainer(model, settings(tmp_path), request.getfixturevalue(kind), old=old))
    model.save_pretrained(tmp_path / "model")
    assert AutoModel.from_pretrained(tmp_path / "model").fingerprint() == model.fingerprint()
    assert len(list((tmp_path / "cache").iterdir())) == 2, "of both models, computed once"
    if kind != "texts":
        views = {"augmentation": {"min_scale": 0.3}, "views": 3}
        trainer = CompatTrainer(model, settings(tmp_path / "views"), request.getfixturevalue(kind), old=old_folder, data=views)
        assert len(trainer.train_dataset) == 3 * COUNT and len(list((tmp_path / "views" / "cache").iterdir())) == 6


def test_batch_embeds_equal_cache(pairs: datasets.Dataset, folder_of: dict[str, str], old_folder: str, tmp_path: Path) -> None:
    model = built("direct", folder_of, old_folder, train_encoder="all")

    def batches(how: str, data: Any = pairs) -> list[dict[str, torch.Tensor]]:
        trainer = CompatTrainer(model, settings(tmp_path), data, old=old_folder, data={"old_embeddings": how})
        return [trainer._prepare_inputs(batch) for batch in trainer.get_train_dataloader()]

    for cached, online in zip(batches("cached"), batches("online"), strict=True):
        assert cached.keys() == online.keys() > {"old_embeds", "old_text_embeds"}
        for name, column in cached.items():
            torch.testing.assert_close(online[name], column, atol=1e-3, rtol=0)  # the cache is float16
    with pytest.raises(XcompatError, match=r"a stream has no rows; set data\.old_embeddings: online"):
        batches("cached", pairs.to_iterable_dataset())


def test_direct_learns_from_a_stream(pairs: datasets.Dataset, folder_of: dict[str, str], old_folder: str, tmp_path: Path) -> None:
    model, old = built("direct", folder_of, old_folder, train_encoder="all"), load_embedder(old_folder)
    online = {"old_embeddings": "online", "shuffle_buffer": 4}
    trainer = CompatTrainer(model, settings(tmp_path), pairs.to_iterable_dataset(), old=old, data=online)
    batch = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    assert moved(model, trainer) and not (tmp_path / "cache").exists(), "nothing is embedded beforehand"
    texts = {name: batch[name] for name in ("input_ids", "attention_mask") if name in batch}  # both read CLIP's tokens here
    torch.testing.assert_close(batch["old_text_embeds"], old.embed(texts), atol=1e-5, rtol=0)
    torch.testing.assert_close(batch["old_embeds"], old.embed({"pixel_values": batch["pixel_values"]}), atol=1e-5, rtol=0)


@pytest.mark.parametrize("given", [None, True])
def test_processes_read_a_stream_themselves_unless_the_user_says_otherwise(
    given: bool | None, pairs: datasets.Dataset, folder_of: dict[str, str], old_folder: str, tmp_path: Path
) -> None:
    """``accelerate`` would read every stream on the first process by default."""
    model = built("xbt", folder_of, old_folder)
    args = settings(tmp_path, accelerator_config={"dispatch_batches": given})
    trainer = CompatTrainer(model, args, pairs.to_iterable_dataset(num_shards=2))
    assert trainer.accelerator.dataloader_config.dispatch_batches is bool(given)
    assert args.accelerator_config.dispatch_batches is given, "the user's own arguments are not changed"
    assert moved(model, trainer)


def test_it_trains_what_a_recipe_trains(folder_of: dict[str, str], old_folder: str, texts_file: str, tmp_path: Path) -> None:
    """The same start, rows and settings give the same weights, bit by bit."""
    training = {"per_device_train_batch_size": 4, "learning_rate": 1e-3, "max_steps": 5, "save_strategy": "no"}
    recipe = {"output_dir": str(tmp_path / "run"), "cache_dir": str(tmp_path / "cache"), "method": "projection"}
    recipe |= {"old": old_folder, "new": folder_of["clip"], "data": {"texts": [{"path": texts_file}]}}
    run_recipe(parse_recipe({**recipe, "training": training, "evaluation": None}, "run", "run"))
    config = built("projection", folder_of, old_folder).config
    torch.manual_seed(0)
    model = ProjectionModel(config)
    lines = dict.fromkeys(Path(texts_file).read_text(encoding="utf-8").splitlines())
    corpus = datasets.Dataset.from_dict({"text": list(lines)})
    CompatTrainer(model, settings(tmp_path / "here", **training, seed=0, data_seed=0), corpus, old=old_folder).train()
    made = AutoModel.from_pretrained(tmp_path / "run").state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(value, made[name]), name


def test_what_cannot_be_trained_so_is_refused_in_one_line(
    photos: datasets.Dataset, pairs: datasets.Dataset, folder_of: dict[str, str], old_folder: str, tmp_path: Path
) -> None:
    arguments = settings(tmp_path)
    contrast = built("contrast", folder_of, old_folder, classes=CLASSES)
    refused: list[tuple[CompatModel, Any, dict[str, Any], str]] = [
        (built("ridge", folder_of, old_folder), photos, {}, "RidgeModel is solved, not trained"),
        (contrast, photos, {}, "ContrastModel learns from embeddings of the old model; pass old"),
        (contrast, pairs, {"old": old_folder}, "train_dataset.*label"),
        (contrast, photos, {"old": old_folder, "mini_batch": 2}, "unknown key 'mini_batch'; did you mean 'mini_batch_size'"),
        (contrast, photos, {"old": old_folder, "mini_batch_size": 2}, "the loss of method contrast"),
        (contrast, photos, {"old": old_folder, "seed_offset": 1}, "set args.seed"),
        (contrast, photos.select(range(3)), {"old": old_folder}, "3 training samples do not fill one batch of 4"),
        (built("xbt", folder_of, old_folder), photos, {}, "train_dataset.*caption"),
    ]
    for model, dataset, given, message in refused:
        with refusing(message):
            CompatTrainer(model, arguments, dataset, **given)
    with pytest.raises(FingerprintMismatchError, match="cannot be compared"):
        CompatTrainer(contrast, arguments, photos, old=folder_of["clip"])
    assert arguments.remove_unused_columns, "the user's own arguments stay as they are"


FOLDER = ROOT / "docs" / "notebooks"

NOTEBOOKS = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
RESULT = "import json; print(json.dumps([(case.label, case.direction, case.metrics) for case in result.cases]))"


def found_by(name: str, folder: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Execute a notebook in a folder, in a process of its own; return the metrics of its cases by case and direction."""
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell(RESULT))
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(folder)}}).execute()
    (output,) = notebook.cells[-1].outputs
    return {(case, direction): metrics for case, direction, metrics in json.loads(output["text"])}


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_every_cell_runs_and_is_kept_without_output(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, with one step or epoch for each training. Outputs would hold images and folders of whoever ran it last."""
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    nbformat.validate(notebook)
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert f"(notebooks/{name}.ipynb)" in (ROOT / "docs" / "notebooks.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for cell in notebook.cells:
        assert not cell.get("outputs") and not cell.get("execution_count")
        if cell.cell_type == "code":
            exec(compile(re.sub(r"\b(epochs|steps)=\d+", r"\1=1", cell.source), name, "exec"), names)  # noqa: S102 - our own
    plt.close("all")
    assert {"old/old", "new/old", "independent/old"} <= {case.label for case in names["result"].cases}


@pytest.mark.nightly
def test_models_of_notebooks_find_what_no_model_found_before(tmp_path: Path) -> None:
    """A map lets a better model find more in the index of a weak one; φ, which saw no image, maps images as well as texts."""
    found = {case: metrics["cmc@5"] for (case, _), metrics in found_by("photos", tmp_path).items()}
    assert found["independent/old"] < 0.3 < found["old/old"] + 0.1 < found["new/old"] < found["new/new"]
    cases = found_by("image_text", tmp_path)
    for direction in ("image-to-text", "text-to-image"):
        found = {case: metrics["recall@10"] for (case, way), metrics in cases.items() if way == direction}
        assert found["independent/old"] < 0.3, "of 100 items, chance is a tenth"
        assert found["phi/old"] > 0.8 and found["new/old"] > 0.8
    assert set(found) == {"old/old", "independent/old", "phi/old", "rotation/old", "new/old", "independent/independent"}
