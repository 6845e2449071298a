"""Recipes from end to end on tiny models: reuse, resume, refusal, and everything that can go wrong on the way."""

from __future__ import annotations

import gc
import json
import mmap
import shutil
import sys
import tarfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import yaml
from conftest import raw_recipe, recipe_of, refuses
from datasets import Features, Value
from PIL import Image
from schedule import mostly_nightly, mostly_nightly_rows
from transformers import AutoModel, AutoTokenizer, CLIPModel, TrainerCallback, TrainingArguments

from xcompat.core.checksums import CHECKSUMS
from xcompat.core.errors import TrainingDivergedError
from xcompat.data import load_pairs
from xcompat.embeddings.cache import EmbeddingCache
from xcompat.encoders.base import Encoder
from xcompat.methods import METHODS
from xcompat.models.embedder import load_embedder
from xcompat.report import load_report
from xcompat.report.comparison import EvaluatedMethod, compare
from xcompat.report.comparison.tables import tables
from xcompat.report.content import Cost
from xcompat.training import test_data as test_data_module
from xcompat.training import train_stage as train_stage_module
from xcompat.training.caches import cached_images
from xcompat.training.checkpoints import last_complete_checkpoint
from xcompat.training.cost import PeakMemory, SolvingCost, _status, cost_of
from xcompat.training.record import LOG, dump_settings, logged_losses, write_recipe
from xcompat.training.run import StageRun, embed_recipe, run_recipe
from xcompat.training.test_data import check_test_sets
from xcompat.training.trainer import check_services, training_arguments

pytestmark = pytest.mark.usefixtures("undrawn")
GOLDEN = [2.274101, 2.203351, 2.112457, 2.1465, 2.109634, 2.138596]
"""Losses of a seeded run: a change here changes every result and is to be justified."""
ADAPTERS = {"lora": {"rank": 2, "dropout": 0.1}, "prompts": 2}
PHI: dict[str, Any] = {"method": "projection", "projection": None, "options": {}, "data": {}, "evaluation": {}}


@pytest.fixture
def raw(folder_of: dict[str, str], old_folder: str, pairs_folder: str, texts_file: str, tmp_path: Path) -> dict[str, Any]:
    raw = raw_recipe(tmp_path, old_folder, folder_of["clip"], pairs_folder, texts=[{"path": texts_file}])
    raw["evaluation"] = {"resamples": 100, "ks": [1, 5], "examples": 1}
    training = {"max_steps": 6, "per_device_train_batch_size": 8, "learning_rate": 1e-3, "save_steps": 2, "logging_steps": 1}
    pair = {"name": "pair", "method": "xbt", "projection": "stage:phi", "options": {"adapters": ADAPTERS}}
    pair |= {"data": {"augmentation": {"min_scale": 0.7}}, "evaluation": {"compare_with": ["phi"]}}
    return raw | {"training": training, "stages": [{"name": "phi", "method": "projection"}, pair]}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return AutoModel.from_pretrained(folder).state_dict()


def test_the_whole_course(raw: dict[str, Any], tmp_path: Path, drawn: None) -> None:
    run_recipe(recipe_of(raw))
    run = tmp_path / "run"
    report = json.loads((run / "report" / "report.json").read_text())
    assert report["schema"] == 1 and report["method"] == "xbt"
    cases = {f"{case['query']}/{case['gallery']}" for case in report["cases"]}
    own = {"new/backfilled", "new/new", "independent/independent"}
    assert cases == {"old/old", "independent/old", "phi/old", "new/old", *own}
    assert (run / "report" / "report.html").stat().st_size > 10_000
    logged = json.loads((run / "pair" / "log_history.json").read_text())
    assert list(report["training"]) == ["phi", "pair"] and (run / "report" / "plots" / "loss-1.png").exists()
    assert [point["loss"] for point in report["training"]["pair"]] == [entry["loss"] for entry in logged if "loss" in entry]
    state = json.loads((run / "pair" / "checkpoints" / "checkpoint-6" / "trainer_state.json").read_text())
    np.testing.assert_allclose([entry["loss"] for entry in state["log_history"] if "loss" in entry], GOLDEN, atol=2e-3)
    assert [point["step"] for point in report["training"]["phi"]] == [1, 2, 3, 4, 5, 6]
    assert list(report["costs"]) == ["phi", "pair"]
    costs = {name: Cost(**cost) for name, cost in report["costs"].items()}
    assert costs["phi"].tokens == 0 and costs["phi"].samples == 6 * raw["training"]["per_device_train_batch_size"]
    assert costs["pair"].tokens > 0 and costs["pair"].trained_parameters < costs["pair"].parameters
    assert costs["pair"].device == "cpu" and costs["pair"].peak_memory > 2**20 and costs["pair"].device_hours > 0
    assert costs["pair"].own_memory == (costs["pair"].peak_memory if sys.platform == "linux" else None)
    environment = json.loads((run / "pair" / "environment.json").read_text())
    assert environment["versions"]["torch"] == torch.__version__
    written = (run / "pair" / "recipe.yaml").read_text()
    assert "noise_std" not in written and "seed: 0" in written
    pair, phi = (weights(run / stage / "model") for stage in ("pair", "phi"))
    shared = [name for name in phi if name.startswith("projection.")]
    changed = {name.removeprefix("projection.") for name in shared if not torch.equal(phi[name], pair[name])}
    assert changed == {"1.weight", "1.bias", "4.weight", "4.bias"}, "the LayerNorms of φ and nothing else of it"
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()}
    run_recipe(recipe_of(raw))
    assert before == {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()}, "what is done is reused"


def test_a_folder_is_continued_by_its_own_recipe_alone(raw: dict[str, Any], tmp_path: Path) -> None:
    """Also one of a version that had fewer settings, or other usual values."""
    raw["stages"] = raw["stages"][:1]
    run_recipe(recipe_of(raw))
    record = tmp_path / "run" / "recipe.yaml"
    written = yaml.safe_load(record.read_text())
    assert written["options"]["noise_std"] == 0.05, "what is not given is recorded too"

    def refuse(key: str, **changes: Any) -> None:
        refuses(f"a recipe with another {key}; choose another output_dir", run_recipe, recipe_of(raw, **changes))

    refuse("training.learning_rate", training={**raw["training"], "learning_rate": 2e-3})
    refuse("seed", seed=1)
    refuse("data.test.limit", data={**raw["data"], "test": {**raw["data"]["test"], "limit": 10}})  # φ leaves its captions out
    run_recipe(recipe_of(raw, options={"noise_std": 0.05}))
    record.write_text(yaml.safe_dump({**written, "options": {**written["options"], "noise_std": 0.1}}))
    refuse("options.noise_std")
    run_recipe(recipe_of(raw, options={"noise_std": 0.1}))
    record.write_text(yaml.safe_dump({**written, "a_setting_that_is_gone": 1}))
    refuse("a_setting_that_is_gone")
    del written["encoder_lr_factor"], written["data"]["texts_limit"]
    record.write_text(yaml.safe_dump(written))
    run_recipe(recipe_of(raw))
    refuse("data.texts_limit", data={**raw["data"], "texts_limit": 20})


def test_later_folders_and_test_sets_are_looked_at_first(raw: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of(raw)
    later = recipe.stages[-1]
    write_recipe(recipe.stage_dir(later.name), dump_settings(later, seed=7))
    refuses(f"{later.name} was made by a recipe with another seed", run_recipe, recipe)
    assert not recipe.stage_dir(recipe.stages[0].name).exists()
    read, load = [], test_data_module.load_pair_test_set
    monkeypatch.setattr(test_data_module, "load_pair_test_set", lambda *given: read.append(given) or load(*given))
    stages = recipe_of(raw).stages
    check_test_sets([*stages, stages[1].model_copy(update={"evaluation": None, "name": "unjudged"})])
    assert len(read) == 1


def test_several_gpus_without_a_launcher_are_one(
    raw: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def two_gpus(settings: TrainingArguments) -> torch.device:
        settings._n_gpu = 2
        return torch.device("cpu")

    monkeypatch.setattr(TrainingArguments, "_setup_devices", property(two_gpus))
    settings = training_arguments(recipe_of(raw).stages[0], 0, tmp_path)
    assert settings.n_gpu == 1
    assert settings.train_batch_size == settings.per_device_train_batch_size
    assert "one of 2 GPUs is used; start with `accelerate launch -m xcompat`" in capsys.readouterr().out


def test_a_finished_run_needs_its_data_no_more(raw: dict[str, Any], pairs_folder: str, tmp_path: Path) -> None:
    for name in ("train", "test"):
        shutil.copytree(pairs_folder, tmp_path / name)
    data = {**raw["data"], "pairs": {"path": str(tmp_path / "train")}, "test": {"path": str(tmp_path / "test")}}
    changes: dict[str, Any] = {"data": data, "stages": raw["stages"][:1]}
    run_recipe(recipe_of(raw, **changes))
    shutil.rmtree(tmp_path / "train")
    run_recipe(recipe_of(raw, **changes, evaluation={"resamples": 200}))
    shutil.rmtree(tmp_path / "test")
    run_recipe(recipe_of(raw, **changes, evaluation={"resamples": 200}))
    refuses(r"data\.test\.path: .*test does not exist", run_recipe, recipe_of(raw, **changes))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("data.texts", [{"path": "TMP/txets/*.txt.gz"}]),
        ("data.texts", [{"path": "TMP/texts/{000..001}.txt.gz"}]),
        ("data.pairs", {"path": "photos/trian"}),
        ("data.images", {"path": "photos/train", "classes": "photos/clases.txt"}),
        ("data.test_subset", {"classes": "photos/clases.txt"}),
        ("old", "photos/trian"),
        ("side_info", "~/no/such/model"),
        ("new_side_info", "photos/train"),
        ("old", "photos/rows_alone"),
        ("projection", "photos/trian"),
    ],
)
def test_wrong_paths_stop(key: str, value: Any, raw: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "photos" / "train" / "cat").mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(tmp_path / "photos" / "train" / "cat" / "0.png")
    (tmp_path / "photos" / "classes.txt").write_text("cat\n")
    (tmp_path / "photos" / "rows_alone").mkdir()
    np.save(tmp_path / "photos" / "rows_alone" / "image_embeds.npy", np.ones((1, 8)))
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "000.txt.gz").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("xcompat.training.run.train_stage", lambda *_: pytest.fail("trained"))
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: pytest.fail("asked the Hub"))
    value = json.loads(json.dumps(value).replace("TMP", str(tmp_path)))
    last = raw["stages"][1]
    if key.startswith("data."):
        beside = {"queries": {"path": "photos/train"}} if key == "data.test_subset" else {}
        last["data"] = {**beside, key.removeprefix("data."): value}
        if key == "data.images":
            last |= {"method": "bct", "projection": None, "options": {}, "data": last["data"] | {"pairs": None}}
    elif key in ("side_info", "new_side_info"):
        last |= {"method": "fct", "projection": None, "options": {}, "data": {}, key: value}
    else:
        last[key] = value
    before = set(tmp_path.rglob("*"))
    for check in (run_recipe, embed_recipe):  # a dry run lists them: tests/test_recipe.py
        line = refuses(MISTYPED.get(str(value), "did you mean|there is no 001.txt.gz in"), check, recipe_of(raw))
        assert f"pair: {key}" in line
    assert set(tmp_path.rglob("*")) == before


MISTYPED = {
    "~/no/such/model": "there is no no in ",
    "photos/train": r"photos/train contains no model \(config.json is missing\)",
    "photos/rows_alone": "image_embeds.npy has no image_ids.txt beside it",
}


AT: dict[str, dict[str, Any]] = {
    name: {"path": name} for name in ("cats", "dogs", "stray", "asked.csv", "answers.csv", "captions.csv", "shard.tar")
}
JUDGED = {"queries": AT["asked.csv"], "passages": AT["answers.csv"], "qrels": "qrels.txt"}
TEMPLATES = {"images": AT["shard.tar"], "members": "members.txt", "pairs": "pairs.txt"}
SHOT = {"images": {**AT["cats"], "captions": False, "labels": True}, "classes": "classes.txt"}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"queries": AT["cats"], "gallery": AT["dogs"]}, "data.queries: no query has another image of its class in the gallery"),
        ({"queries": AT["cats"], "gallery": AT["stray"]}, r"data.gallery: .*z.png has no label; move it into a folder"),
        ({"queries": AT["cats"], "test_subset": {"classes": ["dog"]}}, "data.queries: class 'dog' is not among the 1 classes"),
        ({"judged_texts": JUDGED}, "data.judged_texts: no query has a judgement: judgements have query ids like 'q7'"),
        ({"templates": TEMPLATES}, "data.templates: members.txt names image 'two', which shard.tar lacks"),
        ({"test": AT["asked.csv"]}, "data.test: .*image_column"),
        ({"test": AT["captions.csv"], "zero_shot": SHOT}, "data.zero_shot: .*do not fit: 'dog' of 2 classes has no image"),
    ],
    ids=["no match", "a stray image", "no such class", "other judgements", "images in shards", "no images", "more classes"],
)
def test_every_test_set_is_read_before_the_first_stage_is_trained(
    data: dict[str, Any], message: str, raw: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in ("cats/cat/0.png", "cats/cat/1.png", "dogs/dog/2.png", "stray/cat/3.png", "stray/z.png"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(tmp_path / file)
    with tarfile.open(tmp_path / "shard.tar", "w") as shard:
        shard.add(tmp_path / "cats" / "cat" / "0.png", "one.png")
    written = {
        "classes.txt": "cat\ndog\n",
        "captions.csv": "image,caption\ncats/cat/0.png,a cat\n",
        "asked.csv": "id,text\nq0,who sleeps\n",
        "answers.csv": "id,text\np0,the cat\n",
        "qrels.txt": "q7 0 p0 1\n",
        "members.txt": "one 0 0\ntwo 1 1\n",
        "pairs.txt": "0 1 1\n0 1 0\n",
    }
    for name, text in written.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("xcompat.training.run.train_stage", lambda *_: pytest.fail("trained"))

    raw["data"].pop("test")
    raw["evaluation"] = {"resamples": 100, "examples": 0}  # templates have none, and here no gallery
    raw["stages"][1]["data"] = data
    for check in (run_recipe, embed_recipe):
        refuses(f"pair: {message}", check, recipe_of(raw))
    assert not (tmp_path / "run").exists() and not (tmp_path / "cache").exists()


def test_a_finished_folder_that_was_damaged(raw: dict[str, Any], tmp_path: Path) -> None:
    recipe = recipe_of(raw, stages=[{"name": "ridge", "method": "ridge"}])
    run_recipe(recipe)
    for name in ("done.json", "recipe.yaml", "evaluated.json"):
        file = tmp_path / "run" / name
        whole = file.read_bytes()
        for content in ("[]", '{"model": 1}', '{"seconds": "x", "model": [], "inputs": {}, "seed": {}}', "{", "7", "\0"):
            file.write_text(content)
            if name == "evaluated.json":
                assert not StageRun(recipe, recipe.stages[0]).is_finished, "it is judged anew"
                continue
            assert "delete" in refuses("recipe|done.json", run_recipe, recipe)
        file.write_bytes(whole)
    assert StageRun(recipe, recipe.stages[0]).is_finished
    report = tmp_path / "run" / "report" / "report.json"
    before = json.loads(report.read_text())["cases"]
    shutil.rmtree(report.parent)
    run_recipe(recipe)
    assert json.loads(report.read_text())["cases"] == before, "what was deleted is made again"
    weights = tmp_path / "run" / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\7")
    refuses("have changed since training; restore them, or delete .* to train again", run_recipe, recipe)


@pytest.mark.parametrize("compared", mostly_nightly([["phi"], []], bool))
def test_a_retrained_stage_is_not_mixed_with_its_results(raw: dict[str, Any], tmp_path: Path, compared: list[str]) -> None:
    raw["stages"][1]["evaluation"]["compare_with"] = compared
    run_recipe(recipe_of(raw))
    shutil.rmtree(tmp_path / "run" / "phi")
    raw["stages"][0]["options"] = {"noise_std": 0.3}
    refuses("pair was made from a phi that has since been trained again; delete .*pair", run_recipe, recipe_of(raw))
    old_report = load_report(tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "pair")
    run_recipe(recipe_of(raw))
    assert load_report(tmp_path / "run").cases != old_report.cases, "judged again"


def test_a_deleted_map_of_galleries_is_solved_again(raw: dict[str, Any], folder_of: dict[str, str], tmp_path: Path) -> None:
    ridge = {"method": "ridge", "options": {"direction": "old_to_new"}}
    second = {"name": "second", "old": raw["new"], "new": folder_of["siglip"]}
    recipe = recipe_of(raw, stages=[{"name": "first", **ridge}, {**second, **ridge}])
    run_recipe(recipe)
    assert [hop.name for hop in StageRun(recipe, recipe.stages[1])._hops] == ["first"]
    evaluated = (tmp_path / "run" / "evaluated.json").read_bytes()
    shutil.rmtree(tmp_path / "run" / "first")
    assert not StageRun(recipe, recipe.stages[1]).is_finished
    run_recipe(recipe)
    assert StageRun(recipe, recipe.stages[1]).is_finished
    assert (tmp_path / "run" / "evaluated.json").read_bytes() == evaluated, "the same map, so the same report"


@pytest.mark.parametrize(
    ("role", "other", "message"),
    [("old", "siglip", "is compatible with .*old.*not with .*siglip"), ("new", "blip", "cannot be compared")],
)
def test_foreign_phi_is_refused(role: str, other: str, message: str, raw: dict[str, Any], folder_of: dict[str, str]) -> None:
    raw["stages"][1][role] = folder_of[other]
    refuses(message, run_recipe, recipe_of(raw))


class _Killed(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 5:
            raise RuntimeError("killed")


def run_until_killed(raw: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("xcompat.training.trainer.DivergenceCallback", _Killed)
        with pytest.raises(RuntimeError, match="killed"):
            run_recipe(recipe_of(raw))


@pytest.mark.parametrize(
    ("method", "streaming"),
    mostly_nightly_rows([("phi", False), ("pair", False), ("pair", True)], lambda _, streaming: streaming),
)
def test_killed_runs(method: str, streaming: bool, raw: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw["evaluation"] = None
    raw["stages"][1].pop("evaluation")
    if streaming:
        raw["stages"][1]["data"] |= {"pairs": {**raw["data"]["pairs"], "streaming": True}, "shuffle_buffer": 8}
    run_recipe(recipe_of(raw))
    whole = weights(tmp_path / "run" / method / "model")
    shutil.move(tmp_path / "run", tmp_path / "whole")
    if method == "pair":
        (tmp_path / "run").mkdir()
        shutil.copytree(tmp_path / "whole" / "phi", tmp_path / "run" / "phi")
    run_until_killed(raw, monkeypatch)
    checkpoints = tmp_path / "run" / method / "checkpoints"
    assert last_complete_checkpoint(checkpoints).name == "checkpoint-4"
    (checkpoints / "checkpoint-6").mkdir()  # cut off while it was being written
    (checkpoints / "checkpoint-6" / "trainer_state.json").write_text('{"half')
    run_recipe(recipe_of(raw))
    for name, value in weights(tmp_path / "run" / method / "model").items():
        assert torch.equal(value, whole[name]), name
    curves = [logged_losses(tmp_path / folder / method) for folder in ("run", "whole")]
    assert [point.step for point in curves[0]] == [1, 2, 3, 4, 5, 6] and curves[0] == curves[1], "one curve"
    costs = [cost_of(tmp_path / folder / method) for folder in ("run", "whole")]
    assert all(costs) and costs[0][:4] == costs[1][:4], "parameters, samples and tokens"


def high_water(size: int) -> int:
    """Hold memory for a moment; return the process's peak after it."""
    with mmap.mmap(-1, size) as held:
        held.write(bytes(size))
    return _status()["VmHWM"]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux forgets the peak of a process")
def test_the_memory_of_a_stage_is_not_that_of_an_earlier_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    earlier = high_water(2**28)
    peak = PeakMemory(torch.device("cpu"))
    assert peak.is_own and peak.bytes() < earlier - 2**27
    held = peak.bytes()
    high_water(2**27)
    assert peak.bytes() > held + 2**26, "its own peak is kept"
    (tmp_path / "ignored").touch()
    for place in ("no/such", "ignored"):  # where there is no such file, and where writing to it changes nothing
        monkeypatch.setattr("xcompat.training.cost._FORGET", tmp_path / place)
        earlier = high_water(2**28)
        peak = PeakMemory(torch.device("cpu"))
        assert not peak.is_own and peak.bytes() >= earlier, place
        solving = SolvingCost(tmp_path / "cost.json")
        solving.write(torch.nn.Linear(2, 3))
        cost = cost_of(tmp_path)
        assert cost is not None and cost.parameters == 9 and cost.peak_memory >= earlier and cost.own_memory is None


def test_an_epoch_that_accumulation_does_not_divide_counts_its_samples(raw: dict[str, Any], tmp_path: Path) -> None:
    training = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "num_train_epochs": 2, "max_steps": -1}
    raw["stages"] = [{**raw["stages"][0], "data": {"embeddings_of": "images"}}]
    run_recipe(recipe_of(raw, training=raw["training"] | training, evaluation=None))
    cost = cost_of(tmp_path / "run")
    assert cost is not None and cost.samples == 2 * 24, "each epoch has a step of 16 and one of 8"


def test_the_time_of_a_stopped_training_counts(raw: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw["evaluation"], raw["stages"] = None, raw["stages"][:1]
    run_until_killed(raw, monkeypatch)
    state = last_complete_checkpoint(tmp_path / "run" / "checkpoints") / "trainer_state.json"
    history = json.loads(state.read_text())
    last = next(entry for entry in reversed(history["log_history"]) if "seconds_of_training" in entry)
    last["seconds_of_training"] = 1000.0
    state.write_text(json.dumps(history))
    later = shutil.copytree(state.parent, state.parent.with_name("checkpoint-99"))
    (later / state.name).write_text(state.read_text().replace("1000.0", "5000.0"))  # damaged: it is not what is continued from
    (state.parent / CHECKSUMS).unlink()  # it is another file now
    run_recipe(recipe_of(raw))
    assert 1000 < json.loads((tmp_path / "run" / "done.json").read_text())["seconds"] < 2000


def test_long_curves_are_thinned_and_damaged_records_refused(tmp_path: Path) -> None:
    entries = [{"step": step, "epoch": step / 10, "loss": 1 / step, "learning_rate": 0.1} for step in range(1, 2502)]
    (tmp_path / LOG).write_text(json.dumps([*entries, {"step": 2501, "train_runtime": 3.0}]))
    points = logged_losses(tmp_path)
    assert len(points) == 834 and points[-1] == (2501, 250.1, 1 / 2501, 0.1)
    assert {now.step - before.step for before, now in pairwise(points)} == {3}
    (tmp_path / LOG).write_text('[{"loss": 1.0, "step": "soon"}]')
    refuses("is damaged .*; delete it to continue without a curve", logged_losses, tmp_path)
    assert logged_losses(tmp_path / "solved") == [] and cost_of(tmp_path) is None
    (tmp_path / "cost.json").write_text('{"samples": "many"}')
    refuses("is damaged .*; delete it to continue without costs", cost_of, tmp_path)


@pytest.mark.parametrize("saved_by", ["steps", "epoch"])
def test_nan_keeps_last_checkpoint(raw: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved_by: str) -> None:
    raw["stages"] = raw["stages"][:1]
    if saved_by == "epoch":
        by_epoch = {"save_strategy": "epoch", "logging_steps": 1000, "max_steps": -1, "num_train_epochs": 9}
        raw["training"] = {name: value for name, value in raw["training"].items() if name != "save_steps"} | by_epoch
    forward = METHODS["projection"].forward
    steps = []

    def bad_at_the_fifth(self: Any, **columns: Any) -> Any:
        assert columns["return_loss"] is True, "a batch that lacks a column is refused by its name"
        output = forward(self, **columns)
        steps.append(1)
        if len(steps) == 5:
            output.loss = output.loss * float("nan")
        return output

    monkeypatch.setattr(METHODS["projection"], "forward", bad_at_the_fifth)
    with pytest.raises(TrainingDivergedError, match=r"is nan at step \d+; the last good checkpoint is kept") as stopped:
        run_recipe(recipe_of(raw))
    last = last_complete_checkpoint(tmp_path / "run" / "checkpoints")
    if saved_by == "steps":
        assert "at step 5;" in str(stopped.value) and last.name == "checkpoint-4"
    assert last is None or int(last.name.removeprefix("checkpoint-")) < 5, "none of the steps after it was saved"
    assert not (tmp_path / "run" / "model").exists() and not (tmp_path / "run" / "done.json").exists()


def test_no_old_encoder_in_the_pair_stage(raw: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    names: dict[str, list[str]] = {}
    original = train_stage_module.train

    def look_around(model: Any, data: Any, settings: Any, seed: int, folder: Path) -> Any:
        gc.collect()
        names[settings.name] = sorted(thing.name for thing in gc.get_objects() if isinstance(thing, Encoder))
        return original(model, data, settings, seed, folder)

    monkeypatch.setattr(train_stage_module, "train", look_around)
    gc.collect()
    others = {id(thing) for thing in gc.get_objects() if isinstance(thing, Encoder)}
    assert not others, "an earlier test left encoders behind"
    run_recipe(recipe_of(raw))
    assert names == {"phi": [], "pair": [raw["new"]]}


@pytest.mark.parametrize(
    "method",
    mostly_nightly(
        sorted(name for name, model in METHODS.items() if "labels" not in model.columns),
        ("xbt", "ridge").__contains__,
    ),
)
def test_every_method_runs_as_a_recipe(method: str, raw: dict[str, Any], tmp_path: Path) -> None:
    stage: dict[str, Any] = {"name": "it", "method": method}
    stages = [raw["stages"][0], stage]
    if METHODS[method].starts_from_projection:
        stage["projection"] = "stage:phi"
    if method == "direct":
        stage["options"] = {"adapters": ADAPTERS}
    if method == "mini_vec2vec":
        stage["options"] = {"least_agreement": -1.0}  # random spaces do not match
    if method == "simclr":
        stage["data"] = {"augmentation": {"min_scale": 0.7}}
    run_recipe(recipe_of(raw, stages=stages))
    assert (tmp_path / "run" / "report" / "report.json").exists() == METHODS[method].compares_with_old
    log = tmp_path / "run" / "it" / "checkpoints"
    assert log.exists() != METHODS[method].is_solved, "closed forms are solved, not trained"
    cost = cost_of(tmp_path / "run" / "it")
    assert cost is not None and cost.samples > 0 and cost.device_hours > 0 and cost.peak_memory > 2**20
    if METHODS[method].is_solved:
        caches = [EmbeddingCache(file.parent) for file in (tmp_path / "cache").rglob("cache.json")]
        assert cost.samples == max(map(len, caches)), "each text that is learned from, once"
        assert cost.trained_parameters == cost.parameters > 0 and cost.tokens == 0
    else:
        assert cost.samples == 6 * 8, "steps of whole batches"


def test_from_scratch_writes_a_plain_model(raw: dict[str, Any], tmp_path: Path) -> None:
    size = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = {
        "model_type": "clip",
        "projection_dim": 8,
        "text_config": {**size, "max_position_embeddings": 16},
        "vision_config": {**size, "image_size": 32, "patch_size": 8},
    }
    stages = [{"name": "scratch", "method": "independent"}]
    run_recipe(recipe_of(raw, old=None, new={"model": model, "vocab_size": 300}, stages=stages))
    loaded = CLIPModel.from_pretrained(tmp_path / "run" / "model")
    assert loaded.config.text_config.eos_token_id == AutoTokenizer.from_pretrained(tmp_path / "run" / "model").eos_token_id


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"training": {"per_device_train_batch_size": 64}}, "24 training samples do not fill one batch of 64"),
        ({"data": {"pairs": {"streaming": True}}, "training": {"max_steps": -1}}, "streaming pairs have no length"),
        ({"data": {"one_per_id": True}, "training": {"per_device_train_batch_size": 64}}, "24 training samples do not fill"),
        ({"training": {"lr_scheduler_kwargs": {"num_cycles": 2}}}, r"\(lr_scheduler_type, lr_scheduler_kwargs, .*'num_cycles'"),
        ({"training": {"optim": "sgd", "optim_args": "momentum=0,nesterov=true"}}, r"\(optim, optim_args\): .*Nesterov momentum"),
        ({"training": {"torch_compile_mode": "fastest"}}, r"torch_compile_mode\): .*fastest"),
        ({"training": {"torch_compile_backend": "mine"}}, r"torch_compile_mode\): .*MINE"),
        ({"training": {"lr_scheduler_kwargs": "power=2"}}, r"\(lr_scheduler_type, .*: 'power=2' is not a mapping of keys"),
        ({**PHI, "new": None}, "later: .*method projection needs a new model; set new"),
        ({**PHI, "new": {"model": {"model_type": "clip"}}}, "later: .*projection maps embeddings and does not train an encoder"),
        ({**PHI, "old": None}, "later: .*method projection needs an old model; set old"),
        ({"projection": None}, "later: .*method xbt starts from a pretrained φ; set projection"),
        ({**PHI, "method": "independent", "data": {"pairs": None}}, "later: .*needs images with captions; set data.pairs"),
    ],
)
def test_mistakes_of_a_later_stage_stop_before_an_earlier_one_is_trained(
    changes: dict[str, Any], message: str, raw: dict[str, Any], pairs_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("xcompat.training.run.train_stage", lambda *_: pytest.fail("trained"))
    if changes.get("data", {}).get("pairs"):
        changes["data"]["pairs"]["path"] = pairs_folder
    phi, pair = raw["stages"]
    refuses(message, run_recipe, recipe_of(raw, stages=[phi, pair | changes | {"name": "later"}]))


def test_what_can_be_trained_with_passes_the_trial(raw: dict[str, Any], tmp_path: Path) -> None:
    long = {"lr_scheduler_type": "polynomial", "warmup_steps": 1000, "max_steps": -1, "num_train_epochs": 5000}
    for training in (long, {"torch_compile_backend": "Eager"}, {"torch_compile_backend": "no"}):
        settings = recipe_of(raw, training=raw["training"] | training).stages[1]
        check_services(settings, training_arguments(settings, 0, tmp_path))


def test_embeddings_are_read_unless_an_image_was_mended(raw: dict[str, Any], tmp_path: Path, pairs_folder: str) -> None:
    embed_recipe(recipe_of(raw))
    before = sorted(path.name for path in (tmp_path / "cache").iterdir())
    assert [name.split("-")[0] for name in before] == ["captions", "captions", "images", "images", "texts", "texts"]
    StageRun(recipe_of(raw), recipe_of(raw).stages[0]).train_unless_done()
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == before
    folder = Path(shutil.copytree(pairs_folder, tmp_path / "images"))
    good = (folder / "5.png").read_bytes()
    (folder / "5.png").write_bytes(b"no image")
    embedder = load_embedder(raw["new"])
    assert cached_images(embedder, load_pairs(str(folder)), tmp_path / "cache", 0.1).readable().sum() == 23
    (folder / "5.png").write_bytes(good)
    assert cached_images(embedder, load_pairs(str(folder)), tmp_path / "cache", 0.1).readable().all()


def test_zero_shot_classification_from_prompts(raw: dict[str, Any], pairs_folder: str, tmp_path: Path) -> None:
    files = [Path(pairs_folder) / f"{row}.png" for row in range(8)]
    features = Features({"image": datasets.Image(), "id": Value("string"), "label": Value("int64")})
    rows = {"image": list(map(str, files)), "id": list(map(str, files)), "label": [0] * 4 + [1] * 4}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(tmp_path / "saved")
    (tmp_path / "classes.txt").write_text("cat\ndog\n")
    raw["data"]["zero_shot"] = {
        "images": {"path": str(tmp_path / "saved"), "captions": False, "label_column": "label"},
        "classes": str(tmp_path / "classes.txt"),
        "templates": ["a photo of a {}", "a {}"],
    }
    run_recipe(recipe_of(raw))
    cases = json.loads((tmp_path / "run" / "report" / "report.json").read_text())["cases"]
    measured = {(case["query"], case["gallery"]): case for case in cases if "zero_shot@1" in case["metrics"]}
    assert {("old", "old"), ("new", "old"), ("new", "new"), ("independent", "independent")} <= set(measured)
    for case in measured.values():
        assert case["n_gallery"] == 2 and case["n_queries"] == 8 and 0 <= case["metrics"]["zero_shot@1"] <= 1
    (tmp_path / "more.txt").write_text("cat\ndog\nhorse\n")
    limited = raw["data"]["zero_shot"]["images"] | {"limit": 6}
    raw["data"]["zero_shot"] = {
        "pets": raw["data"]["zero_shot"],
        "farm": {"images": limited, "classes": str(tmp_path / "more.txt")},
    }
    run_recipe(recipe_of(raw))
    report = load_report(tmp_path / "run")
    several = {(case.query, case.gallery, metric): case for case in report.cases for metric in case.metrics if "zero" in metric}
    for (query, gallery), case in measured.items():  # training is kept, and the same set has the same result under a name
        assert several[query, gallery, "zero_shot:pets@1"].metrics["zero_shot:pets@1"] == case["metrics"]["zero_shot@1"]
        farm = several[query, gallery, "zero_shot:farm@1"]
        assert (farm.n_queries, farm.n_gallery) == (6, 3)
    assert [metrics for _, metrics, _ in report.tables()][2:] == [["zero_shot:pets@1"], ["zero_shot:farm@1"]]
    assert {"zero_shot:pets@1", "zero_shot:farm@1"} <= {each.metric for each in report.criterion.differences}
    compared = compare("study", [EvaluatedMethod("xbt", "xbt", {0: report}, 0, False, [1.0])], n_resamples=100)
    columns = [column for table in tables(compared) for column in table.columns]
    assert {"Zero-shot top-1 (pets)\non old", "Zero-shot top-1 (farm)\non own"} <= set(columns)
