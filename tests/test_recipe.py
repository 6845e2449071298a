"""Recipes: inheritance, overrides, errors that name the nearest key, and dry runs that check data, dimensions and options."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any, get_type_hints
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import webdataset as wds
import yaml
from conftest import Run, recipe_of, refuses, write_embeds

from xcompat.core.errors import XcompatError
from xcompat.data.cache import cache_folder
from xcompat.encoders import EncoderSource
from xcompat.encoders.dimensions import read_embedding_dim, scratch_dim
from xcompat.encoders.scratch import ScratchSource, encoder_from_scratch
from xcompat.encoders.standins import save_stand_in, small_scratch
from xcompat.methods import METHODS
from xcompat.models import CompatModel
from xcompat.models.embedder import load_embedder
from xcompat.training import stage
from xcompat.training.compare import dry_run_comparison
from xcompat.training.data_checks import check_data
from xcompat.training.dry_run import dry_run_recipe
from xcompat.training.input_checks import find_missing_paths
from xcompat.training.preflight import load_checked
from xcompat.training.recipe import Recipe, load_recipe
from xcompat.training.stage_recipe import StageRecipe, usual_options
from xcompat.training.values import check_options

pytestmark = pytest.mark.usefixtures("undrawn")
GOOD = """
name: demo
old: old/model
new: {name: new/model, revision: v1}
data:
  pairs: {path: pairs}
  texts: [{path: texts.txt}]
  test: {path: test}
training: {learning_rate: 1e-4, max_steps: 5}
stages:
  - name: phi
    method: projection
    options: {noise_std: 0.1}
  - name: pair
    method: xbt
    projection: stage:phi
    training: {learning_rate: 2e-3}
    data: {augmentation: {min_scale: 0.7}}
    evaluation: {compare_with: [phi]}
"""


def load(tmp_path: Path, text: str, *overrides: str) -> Recipe:
    file = tmp_path / "demo.yaml"
    file.write_text(text, encoding="utf-8")
    return load_recipe(file, overrides)


def test_stages_inherit_key_by_key(tmp_path: Path) -> None:
    recipe = load(tmp_path, GOOD)
    phi, pair = recipe.stages
    assert phi.old.name == pair.old.name == "old/model" and pair.new.revision == "v1"
    assert phi.training == {"learning_rate": 1e-4, "max_steps": 5}, "1e-4 is a number"
    assert pair.training == {"learning_rate": 2e-3, "max_steps": 5}
    assert phi.data.augmentation is None and pair.data.augmentation.min_scale == 0.7
    assert pair.data.pairs.path == "pairs"
    assert recipe.resolve("stage:phi") == "runs/demo/phi/model" and recipe.resolve("openai/clip") == "openai/clip"
    anchored = GOOD.replace("training: {learning_rate: 1e-4", "training: &usual {learning_rate: 1e-4")
    anchored = anchored.replace("training: {learning_rate: 2e-3}", "training: {<<: *usual, learning_rate: 2e-3}")
    assert load(tmp_path, anchored) == recipe
    single = load(tmp_path, "method: independent\nnew: {model: {model_type: clip}}\n")
    assert (single.name, single.stages[0].name, single.stage_dir("independent")) == ("demo", "independent", Path("runs/demo"))


def test_overrides(tmp_path: Path) -> None:
    changed = ("training.max_steps=7", "stages.1.training.learning_rate=1e-5", "seed=3", "stages.phi.options.noise_std=0.5")
    recipe = load(tmp_path, GOOD, *changed, "stages.pair.options.train_projection=all")
    assert recipe.stages[0].training["max_steps"] == recipe.stages[1].training["max_steps"] == 7
    assert recipe.stages[1].training["learning_rate"] == 1e-5
    assert recipe.seed == 3 and recipe.stages[1].options == {"train_projection": "all"}
    assert recipe.stages[0].options["noise_std"] == 0.5
    text = GOOD.replace("old: old/model", "old: {name: old/model}").replace("stage:phi", "stage:phi\n    old: stage:phi")
    assert [stage.old.name for stage in load(tmp_path, text, "old.name=other/model").stages] == ["other/model", "stage:phi"]
    text = GOOD.replace("projection: stage:phi\n", "projection: stage:phi\n    options: {adapters: null}\n")
    recipe = load(tmp_path, text, "stages.pair.options.adapters.lora.rank=8")
    assert recipe.stages[1].options == {"adapters": {"lora": {"rank": 8}}}, "below nothing a section begins"
    bare = "method: independent\nnew: {model: {model_type: clip}}\ntraining:\n"
    assert load(tmp_path, bare, "training.max_steps=7").stages[0].training["max_steps"] == 7


def called(name: str) -> list[str]:
    return [f"stages.0.name={name}", f"stages.1.projection=stage:{name}", f"stages.1.evaluation.compare_with=[{name}]"]


def shots(templates: str) -> str:
    return f"data.zero_shot={{images: {{path: x, label_column: folder}}, classes: names.txt, templates: {templates}}}"


@pytest.mark.parametrize("name", ["新しい 地図", "v1.5-große", "a" * 100, "..a"])
def test_stages_and_prompts_may_hold_any_text(tmp_path: Path, name: str) -> None:
    recipe = load(tmp_path, GOOD, f"stages.1.name={name}", shots("['{{a}} {}']"))
    assert recipe.stage_dir(recipe.stages[1].name) == Path("runs/demo") / name
    (shot,) = recipe.stages[0].data.zero_shot_sets().values()
    assert [prompt.format("cat") for prompt in shot.prompts()] == ["{a} cat"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["training.output_dir=x"], "unknown key 'training.output_dir'"),
        (["stages.0.method=bct", "stages.0.options={classes: [cat]}"], "unknown key 'options.classes' for method bct"),
        (["stages.1.projection=stage:fi"], "refers to 'fi', which is not an earlier stage .earlier: phi"),
        (
            ["stages.0.name=slerp", "stages.1.evaluation={slerp: 0.5, compare_with: [slerp]}"],
            "results as .slerp.; rename the stage",
        ),
        (called("old"), "stage 'pair': evaluation.compare_with names old, a name reserved in reports; rename the stage"),
        (["stages.0.method=fct", "stages.0.options={}"], "compare_with names phi, which maps galleries, .*; remove it"),
        (["stages.1.name=phi"], "two stages are called 'phi'"),
        (["stages.7.name=x"], "unknown stage 7; stages are numbered from 0 to 1, and named phi, pair"),
        (["stages.0.method.x=1"], "stages.0.method.x: stages.0.method is not a mapping; set"),
        (["stages.0=x"], "stages.0: stages is not a mapping; set stages as a whole"),
        (["options.noise_std=1"], "stage 0 .phi. sets options.noise_std itself: override stages.phi.options.noise_std"),
        (["stages.1.old=own/model", "old={name: x}", "old.name=y"], "stage 1 .pair. sets old itself: override stages.pair.old"),
        *(([f"data={value}"], "the value is not valid YAML") for value in ("{", "1" * 5000, "[" * 1000, "&a [*a]")),
        (["training.num_train_epochs=0", "training.max_steps=-1"], "num_train_epochs: 0 trains nothing; set more than 0"),
        (["training.log_level=loud"], "training.log_level: Input should be '.*', .* or '.*found 'loud'"),
        (["training.warmup_steps='3'"], "training.warmup_steps: Input should be a finite number, without quotes .found '3'"),
        (["stages.1.options={adapters: {lora: 4}}"], "options.adapters.lora: .*LoraSettings.*found 4"),
        (["stages.0.options.noise_std=high"], "options.noise_std: .*valid number.*found 'high'"),
        (["stages.1.method=unibct", "stages.1.options={refresh_at: [10, 20]}"], "options.refresh_at: .* less than 1 .found 10"),
        (["stages.0.name=report"], "the stage name 'report' is reserved for the run's report"),
        (["seed=4294967290", "stages.0.seed_offset=6"], "stage 'phi': seed 4294967290 and seed_offset 6 add up to 4294967296"),
        (["stages.0.name=../evil/x"], "stages.0.name: '../evil/x' cannot be a folder name; remove slashes"),
        (['stages.0.name="a\\nb"'], "stages.0.name: 'a.*b' cannot be"),
        ([f"stages.0.name={'地' * 80}"], "stages.0.name: .* is longer than 100 characters or 200 bytes"),
        ([shots("[]")], "data.zero_shot.templates: templates is empty; add a prompt"),
        ([shots("['100% {} {']")], "'100% {} {' must contain {} once, .*; double other braces: {{ and }}"),
        ([shots("['{:d}']")], "'{:d}' must contain {} once"),
        (["stages=null"], "stages must be a list"),
    ],
)
def test_a_mistake_is_named_in_one_line(tmp_path: Path, overrides: list[str], message: str) -> None:
    """A change of method may also make other settings of the recipe mistakes, each in its own line."""
    with pytest.raises(XcompatError, match=message) as raised:
        load(tmp_path, GOOD, *overrides)
    lines = str(raised.value).splitlines()
    assert len([line for line in lines if re.search(message, line)]) == 1
    assert len({*lines}) == len(lines) and (len(lines) == 1 or all(line.startswith(str(tmp_path)) for line in lines))


MISTAKEN = """
old: ./old
seeds: [1, -1]
training: {learing_rate: 1e-3, max_steps: 0, per_device_train_batch_size: 0}
data: {pairs: {path: ./pairs, shards: 2}, test: {path: ./test}}
stages:
  - {method: xtb, name: first}
  - {method: xbt, new: {model: {model_type: clip}, size: 3}, options: {adapters: {prompts: -1}, tau: 2}}
evaluation: {ks: [1, 0]}
"""


def test_every_mistake_is_named_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of keys and values with the paths of the rest, once for what stages inherit, and before anything large is imported."""
    monkeypatch.chdir(tmp_path)
    Path("demo.yaml").write_text(MISTAKEN, encoding="utf-8")
    with pytest.raises(XcompatError) as raised:
        load_checked("demo.yaml", [])
    lines = [line.removeprefix("demo.yaml: ") for line in str(raised.value).splitlines()]
    assert lines[:10] == [
        "seeds.1: Input should be greater than or equal to 0",
        "stages.0.method: unknown method 'xtb'; did you mean 'xbt'?",
        "unknown key 'data.pairs.shards'; known: camera_column, caption_column, captions, format, id_column, "
        "image_column, label_column, labels, limit, max_bad_share, name, path, revision, split, streaming",
        "training: unknown key 'training.learing_rate'; did you mean 'learning_rate'?",
        "training: training.per_device_train_batch_size: Input should be greater than or equal to 1 (found 0)",
        "training: training.max_steps: 0 trains nothing; set 1 or more, or remove it for num_train_epochs",
        "evaluation.ks.1: Input should be greater than or equal to 1",
        "unknown key 'stages.1.new.size'; known: image_size, mean, model, std, stem, vocab_size",
        "stages.1.options: options.adapters.prompts: Input should be greater than or equal to 0 (found -1)",
        "stages.1.options: unknown key 'options.tau' for method xbt; known: adapters, logit_scale, train_encoder, "
        "train_projection",
    ]
    missing = [line.split(": ")[:2] for line in lines[10:] if " does not exist" in line]
    assert missing == [["first", key] for key in ("old", "data.pairs.path", "data.test.path")] and len(lines) == 13


def test_every_setting_that_does_not_fit_is_named_at_once(tmp_path: Path) -> None:
    given = "memory_codec=SQ8", "stages.pair.mini_batch_size=5", "data.views=2", "prompt_lr_factor=7"
    with pytest.raises(XcompatError) as raised:
        load(
            tmp_path, f"independent: stage:nowhere\n{GOOD}", *given, *(f"stages.{name}.independent=a" for name in ("phi", "pair"))
        )
    assert [line.split(": ", 1)[1] for line in str(raised.value).splitlines()] == [
        "stages.0: memory_codec needs a memory; set memory: classes or pairs, or remove memory_codec",
        "stages.1: mini_batch_size 5 does not divide training.per_device_train_batch_size 8; choose a divisor",
        "stage 'phi': prompt_lr_factor has no effect: options.adapters has no prompts; remove it",
        "stage 'phi': data.views has no effect: method projection does not learn a map of images; remove it",
        "independent: no stage uses 'stage:nowhere', as each sets its own independent; remove it",
    ]


def test_whole_numbers_may_be_written_with_an_exponent() -> None:
    stage = StageRecipe(method="fct", training={"max_steps": 1e2, "learning_rate": 1.0}, options={"mixer_width": 64.0})
    assert (stage.training["max_steps"], stage.options["mixer_width"]) == (100, 64)
    assert {type(stage.training["max_steps"]), type(stage.options["mixer_width"])} == {int}
    assert type(stage.training["learning_rate"]) is float


CHECKED_BY_THE_MODEL = {
    *("dim", "extra_dim", "triplet_weight", "propagation", "strength", "rank", "hidden", "neighbours", "mixer_width"),
    *("clusters", "runs", "rounds", "sample", "crops", "crop_size", "crop_scale"),
    *("threshold", "steepness"),
}
"""Numbers that a method refuses itself, for whoever makes it without a recipe too."""


@pytest.mark.parametrize("method", METHODS)
def test_every_number_that_a_method_takes_has_a_range(method: str) -> None:
    hints = get_type_hints(METHODS[method].config_class, localns={"torch": torch}, include_extras=True)
    numbers = [name for name in usual_options(method) if re.search(r"\b(int|float)\b", str(hints[name]))]
    assert numbers, "logit_scale at least"
    for name in set(numbers) - CHECKED_BY_THE_MODEL:
        wrong = [-7] if "list" in str(hints[name]) else -7
        for is_quick in (True, False) if name != "logit_scale" else (False,):
            with pytest.raises(ValueError, match=rf"options.{name}: Input should be greater than .*found -7"):
                check_options(method, {name: wrong}, {name}, is_quick)
    check_options(method, usual_options(method), usual_options(method))


def laughs(levels: int, item: str) -> str:
    """Return a recipe whose aliases stand for 10^levels values."""
    lines = ["a0: &a0 {x: y}", *(f"a{n}: &a{n} {item.format(', '.join([f'*a{n - 1}'] * 10))}" for n in range(1, levels))]
    return "\n".join([*lines, f"options: *a{levels - 1}"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (laughs(9, "[{}]"), "more than 100,000 values"),
        (laughs(9, "{{<<: [{}]}}"), "more than 100,000 values"),
        ("\n".join(["a0: &a0 {x: y}", *(f"a{n}: &a{n} [*a{n - 1}]" for n in range(1, 1000))]), "64 levels"),
        ("\n".join(" " * n + f"k{n}:" for n in range(1000)) + " 1", "64 levels"),
        ("options: &a [*a]", "contains itself"),
        ("seed: " + "1" * 5000, "an unreadable integer"),
        ("seed: 0x" + "f" * 5000, "an integer of more than 64 bits"),
        ("name: " + "1" * 100_000 + "x\nmethod: [", "not valid YAML"),
        ("name: 2026-13-01", "month must be in 1..12"),
        ("# " + "x" * 2**20, "more than the limit of 1,048,576"),
        ("just words", "must contain keys and values"),
        ("!!python/object:os.system {}", "not valid YAML"),
    ],
    ids=lambda value: value[:20],
)
def test_what_is_no_recipe_or_beyond_limits_is_one_line(text: str, message: str, tmp_path: Path) -> None:
    assert len(refuses(message, load, tmp_path, text)) < 600


DATA = {"texts": [{"path": "some/texts"}], "test": {"path": "some/pairs"}}
RAW: dict[str, Any] = {"method": "ridge", "old": "some/old", "new": "some/new", "data": DATA}


def recipe_on_stand_ins(tmp_path: Path, **changes: Any) -> Recipe:
    places: dict[str, Any] = {"output_dir": str(tmp_path / "run"), "cache_dir": str(tmp_path / "cache")}
    return recipe_of(RAW, **places | changes)


def test_every_missing_path_is_listed_and_the_rest_is_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shot = {"images": {"path": "x.tar", "label_column": "cls", "captions": False}, "classes": "c.txt"}
    data = {"texts": [{"path": "texts.txt"}, {"path": "more.txt"}], "test": {"path": "some/pairs"}, "zero_shot": shot}
    missing = dry_run_recipe(recipe_on_stand_ins(tmp_path, old="./no/such/model", data=data))
    wanted = ["old", "data.texts.0.path", "data.texts.1.path", "data.zero_shot.images.path", "data.zero_shot.classes"]
    assert [line.split(": ")[1] for line in missing] == wanted
    printed = capsys.readouterr().out
    assert all(line in printed for line in missing)
    assert "demo runs from end to end on stand-ins; before training, provide the 5 paths listed above" in printed
    options, data = {"adapters": {"lora": {"targets": ["c_fc"]}}}, {"pairs": {"path": "some/pairs"}}
    recipe = recipe_on_stand_ins(tmp_path, method="direct", old="./no/such/model", options=options, data=data)
    refuses("match no linear layer", dry_run_recipe, recipe)
    judged = {"queries": {"path": "queries.jsonl"}, "passages": {"path": "passages.jsonl"}, "qrels": "qrels.tsv"}
    assert (
        len(dry_run_recipe(recipe_on_stand_ins(tmp_path, data={"texts": [{"path": "some/texts"}], "judged_texts": judged}))) == 3
    )
    templates = {"images": {"path": "faces.tar"}, "members": "members.txt", "pairs": "pairs.txt"}
    settings = StageRecipe.model_validate({"data": {"templates": templates}}, context={"quick": True})
    check_data(settings)
    assert len(find_missing_paths(settings)[1]) == 3


def test_stages_share_frozen_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    loaded = Mock(side_effect=load_embedder)
    monkeypatch.setattr(stage, "load_embedder", loaded)
    data = {"texts": [{"path": "texts.txt"}], "test": {"path": "some/pairs"}}
    stages = [{"name": name, "method": name} for name in ("ridge", "procrustes")]
    missing = dry_run_recipe(recipe_on_stand_ins(tmp_path, data=data, stages=stages))
    assert len(missing) == 1 and missing[0].startswith("ridge: data.texts.0.path: texts.txt does not exist")
    assert "(also in 1 more stages)" in capsys.readouterr().out
    assert sorted(Path(call.args[0].name).name for call in loaded.mock_calls) == ["some--new", "some--old"], "each once"


@pytest.mark.parametrize("verb", ["train", "compare"])
def test_exit_codes_of_missing_data(verb: str, tmp_path: Path, run_xcompat: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Missing data leave 0: the recipe is right. Whatever is wrong in it, or in data that are there, gives 2."""
    monkeypatch.chdir(tmp_path)
    recipe = tmp_path / "demo.yaml"
    recipe.write_text(yaml.safe_dump(RAW | {"data": {"texts": [{"path": "texts.txt"}], "test": {"path": "some/pairs"}}}))
    code, out, error = run_xcompat(verb, recipe, "--dry-run")
    assert code == 0 and "ridge: data.texts.0.path: texts.txt does not exist" in out, error
    assert "before training, provide the path listed above" in out
    (tmp_path / "texts.txt").write_text("a dog\n")
    code, _, error = run_xcompat(verb, recipe, "data.texts.0.text_column=body", "--dry-run")
    assert code == 2 and error.startswith("xcompat: ridge: data.texts.0: texts.txt is plain text"), error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["demo.yaml", "texts.txt"], "nothing is written"
    refuses("has no stage to compare", dry_run_comparison, recipe_on_stand_ins(tmp_path, evaluation=None))


@pytest.fixture
def forms(tmp_path: Path, pairs_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write the same images with names and classes as a folder, a Parquet file and shards, and texts in several files."""
    monkeypatch.chdir(tmp_path)
    table = {"picture": [], "title": [], "kind": []}
    folder = Path(shutil.copytree(pairs_folder, tmp_path / "folder"))
    with wds.TarWriter(str(tmp_path / "shard.tar")) as shard:
        for row in range(8):
            image = (folder / f"{row}.png").read_bytes()
            shard.write({"__key__": str(row), "png": image, "json": {"title": f"thing {row}"}, "cls": row % 2})
            for key, value in zip(table, (image, f"thing {row}", f"kind {row % 2}"), strict=True):
                table[key].append(value)
    (folder / "captions.csv").unlink()
    lines = ["image,title,kind", *(f"{row}.png,thing {row},kind {row % 2}" for row in range(8))]
    (folder / "metadata.csv").write_text("\n".join(lines) + "\n")
    pq.write_table(pa.table(table), tmp_path / "table.parquet")
    texts = [{"id": str(row), "body": f"text {row}", "ask": f"ask {row}"} for row in range(8)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(each) + "\n" for each in texts))
    (tmp_path / "qrels.txt").write_text("".join(f"{row} 0 {row} 1\n" for row in range(8)))


RIGHT: dict[str, dict[str, Any]] = {
    "folder": {"path": "folder", "caption_column": "title", "label_column": "kind"},
    "parquet": {"path": "table.parquet", "caption_column": "title", "label_column": "kind", "image_column": "picture"},
    "shards": {"path": "shard.tar", "caption_column": "json.title", "label_column": "cls"},
}


def check_columns(data: dict[str, Any]) -> None:
    described = StageRecipe.model_validate({"data": data}, context={"quick": True}).data
    check_data(StageRecipe.model_construct(name="it", data=described))


@pytest.mark.usefixtures("forms")
@pytest.mark.parametrize("form", RIGHT)
@pytest.mark.parametrize("key", ["pairs", "test", "remembered", "images", "queries", "gallery", "zero_shot"])
def test_a_column_that_does_not_exist_is_refused(form: str, key: str) -> None:
    column = "label_column" if key in ("images", "queries", "gallery", "zero_shot") else "caption_column"
    right = RIGHT[form] | ({"captions": False} if key == "zero_shot" else {})
    if column == "caption_column":
        right.pop("label_column")
    Path("classes.txt").write_text("kind 0\nkind 1\n")

    def check(source: dict[str, Any]) -> None:
        named = {"images": source, "classes": "classes.txt"} if key == "zero_shot" else source
        check_columns({"texts": [], key: named} | ({"queries": right} if key == "gallery" else {}))

    check(right)
    refuses(rf"it: data\.{key}: .*(nowhere|no sample)", check, right | {column: "nowhere"})


def texts(column: str, path: str = "texts.jsonl") -> dict[str, str]:
    return {"path": path, "text_column": column}


ASK, BODY = {"path": "texts.jsonl", "query_column": "ask"}, {"passages": texts("body"), "qrels": "qrels.txt"}


@pytest.mark.usefixtures("forms")
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ({"texts": [texts("body")]}, {"texts": [texts("nowhere")]}),
        ({"texts": [texts("title", "table.parquet")]}, {"texts": [texts("nowhere", "table.parquet")]}),
        ({"text_pairs": {**ASK, "passage_column": "body"}}, {"text_pairs": {**ASK, "passage_column": "nowhere"}}),
        ({"judged_texts": {"queries": texts("ask"), **BODY}}, {"judged_texts": {"queries": texts("asked"), **BODY}}),
    ],
)
def test_missing_columns_of_texts_are_refused(right: dict[str, Any], wrong: dict[str, Any]) -> None:
    check_columns(right)
    refuses(r"it: data\.\w+(\.0)?: .*column", check_columns, wrong)


@pytest.mark.usefixtures("forms")
def test_a_dry_run_checks_columns_and_leaves_no_cache(tmp_path: Path) -> None:
    before = sorted(cache_folder().iterdir())
    data: dict[str, Any] = {"texts": [texts("body")], "test": {"path": "folder", "caption_column": "title"}}
    assert dry_run_recipe(recipe_on_stand_ins(tmp_path, data=data)) == []
    data["test"]["caption_column"] = "caption"
    refuses(r"ridge: data\.test: .* has no column 'caption'", dry_run_recipe, recipe_on_stand_ins(tmp_path, data=data))
    assert sorted(cache_folder().iterdir()) == before


KNOWN_DIMS = {
    "openai/clip-vit-base-patch32": 512,
    "openai/clip-vit-large-patch14": 768,
    "hf-hub:laion/CLIP-ViT-H-14-laion2B-s32B-b79K": 1024,
    "timm/resnet50.a1_in1k": 2048,
    "nobody/knows-this": None,
    "./nowhere": None,
}


def test_dimensions_are_read_without_weights(folder_of: dict[str, str], image_folder_of: dict[str, str], tmp_path: Path) -> None:
    assert {name: read_embedding_dim(EncoderSource(name=name)) for name in KNOWN_DIMS} == KNOWN_DIMS
    text = save_stand_in(tmp_path / "text", "sentence-transformers", 24)
    for folder, dim in [*((each, 16) for each in (folder_of | image_folder_of).values()), (text, 24)]:
        copy = Path(shutil.copytree(folder, tmp_path / f"copy-{Path(folder).name}"))
        for weights in copy.rglob("*.safetensors"):
            weights.unlink()
        assert read_embedding_dim(EncoderSource(name=str(copy))) == dim, folder
    assert scratch_dim(ScratchSource(model={"model_type": "resnet", "depths": [3, 4, 6, 3]}, image_size=64)) == 2048
    vgg = {"model_type": "timm_wrapper", "architecture": "vgg13_bn"}
    for model in ({"model_type": "alexnet"}, {"model_type": "resnet"}, vgg):
        encoder, _ = encoder_from_scratch(small_scratch(ScratchSource(model=model, image_size=224), 16))
        assert sum(weights.numel() for weights in encoder.parameters()) < 50_000, model


def classes_of(**changes: Any) -> dict[str, Any]:
    data = {"images": {"path": "some/images"}, "queries": {"path": "some/queries"}}
    return {"data": data, "new": {"name": "some/new", "model_type": "resnet"}, **changes}


def test_options_fit_real_dimensions_not_those_of_stand_ins(tmp_path: Path) -> None:
    old = save_stand_in(tmp_path / "old", "resnet", 256)
    new = save_stand_in(tmp_path / "new", "resnet", 512)
    for weights in (*Path(old).glob("*.safetensors"), *Path(new).glob("*.safetensors")):
        weights.unlink()
    fits = classes_of(method="mixbct", old=old, new=new, options={"dim": 256})
    assert dry_run_recipe(recipe_on_stand_ins(tmp_path, **fits)) == []
    refuses("256", dry_run_recipe, recipe_on_stand_ins(tmp_path, **{**fits, "options": {"dim": 128}}))
    folder = write_embeds(tmp_path / "stored", map(str, range(20)), image=np.eye(48, dtype=np.float32)[:20])
    changes = classes_of(method="bct", old=str(folder), options={"dim": 40}, evaluation=None)
    refuses("48", dry_run_recipe, recipe_on_stand_ins(tmp_path, **changes))
    assert dry_run_recipe(recipe_on_stand_ins(tmp_path, **{**changes, "options": {"dim": 48}})) == []
    changes |= {"method": "mixbct", "old": {"name": "some/old", "model_type": "resnet"}, "options": {"dim": 256}}
    assert dry_run_recipe(recipe_on_stand_ins(tmp_path, **changes)) == []
    changes = classes_of(memory="classes", memory_codec="PQ64", method="ridge", old="some/old", new="some/new")
    assert dry_run_recipe(recipe_on_stand_ins(tmp_path, **changes)) == []


def test_searches_are_short_but_still_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for method, solve, options, solved, wrong in (
        ("lambda_orthogonality", "solve", {"strength": 2.0}, {"strength": 0.0}, {"strength": -1.0}),
        ("mini_vec2vec", "fit", {"rounds": 1}, {"runs": 2, "rounds": 1, "clusters": 20}, {"runs": 0}),
    ):

        def stop(model: CompatModel, _: object, solved: dict[str, float] = solved) -> None:
            raise RuntimeError(str({name: getattr(model.config, name) for name in solved}))

        monkeypatch.setattr(METHODS[method], solve, stop)
        with pytest.raises(RuntimeError, match=f"^{solved}$"):
            dry_run_recipe(recipe_on_stand_ins(tmp_path, method=method, options=options))
        refuses(next(iter(wrong)), dry_run_recipe, recipe_on_stand_ins(tmp_path, method=method, options=wrong))
