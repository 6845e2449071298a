"""Recipes: inheritance, overrides, and errors that name the nearest key."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_type_hints

import pytest
import torch

from xcompat.core.errors import XcompatError
from xcompat.methods import METHODS
from xcompat.training.preflight import load_checked
from xcompat.training.recipe import Recipe, load_recipe
from xcompat.training.stage_recipe import StageRecipe, usual_options
from xcompat.training.values import check_options

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


def test_one_stage_needs_no_list(tmp_path: Path) -> None:
    recipe = load(tmp_path, "method: independent\nnew: {model: {model_type: clip}}\n")
    assert recipe.name == "demo" and recipe.stages[0].name == "independent"
    assert recipe.stage_dir("independent") == Path("runs/demo")


def test_overrides(tmp_path: Path) -> None:
    recipe = load(
        tmp_path,
        GOOD,
        "training.max_steps=7",
        "stages.1.training.learning_rate=1e-5",
        "seed=3",
        "stages.pair.options.train_projection=all",
        "stages.phi.options.noise_std=0.5",
    )
    assert recipe.stages[0].training["max_steps"] == recipe.stages[1].training["max_steps"] == 7
    assert recipe.stages[1].training["learning_rate"] == 1e-5
    assert recipe.seed == 3 and recipe.stages[1].options == {"train_projection": "all"}
    assert recipe.stages[0].options["noise_std"] == 0.5


def called(name: str) -> list[str]:
    """Return overrides that call the stage so that another one is made from and compared with."""
    return [f"stages.0.name={name}", f"stages.1.projection=stage:{name}", f"stages.1.evaluation.compare_with=[{name}]"]


def test_an_override_of_a_model_leaves_stages_that_refer_to_others(tmp_path: Path) -> None:
    text = GOOD.replace("old: old/model", "old: {name: old/model}").replace("stage:phi", "stage:phi\n    old: stage:phi")
    phi, pair = load(tmp_path, text, "old.name=other/model").stages
    assert (phi.old.name, pair.old.name) == ("other/model", "stage:phi")


def shots(templates: str) -> str:
    """Return an override that classifies without training examples, from these prompts."""
    return f"data.zero_shot={{images: {{path: x, label_column: folder}}, classes: names.txt, templates: {templates}}}"


def test_a_template_may_hold_braces_written_twice(tmp_path: Path) -> None:
    (shot,) = load(tmp_path, GOOD, shots("['{{a}} {}']")).stages[0].data.zero_shot_sets().values()
    assert [prompt.format("cat") for prompt in shot.prompts()] == ["{a} cat"]


@pytest.mark.parametrize("name", ["新しい 地図", "v1.5-große", "a" * 100, "..a"])
def test_a_stage_may_be_called_in_any_language(tmp_path: Path, name: str) -> None:
    recipe = load(tmp_path, GOOD, f"stages.1.name={name}")
    assert recipe.stage_dir(recipe.stages[1].name) == Path("runs/demo") / name


def test_an_override_below_nothing_begins_a_section(tmp_path: Path) -> None:
    text = GOOD.replace("projection: stage:phi\n", "projection: stage:phi\n    options: {adapters: null}\n")
    recipe = load(tmp_path, text, "stages.pair.options.adapters.lora.rank=8")
    assert recipe.stages[1].options == {"adapters": {"lora": {"rank": 8}}}
    bare = "method: independent\nnew: {model: {model_type: clip}}\ntraining:\n"
    assert load(tmp_path, bare, "training.max_steps=7").stages[0].training["max_steps"] == 7


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["metod=xbt"], "unknown key 'stages.0.metod'; did you mean 'method'"),
        (["data.pairs.pth=x"], "unknown key 'stages.0.data.pairs.pth'; did you mean 'path'"),
        (["training.output_dir=x"], "unknown key 'training.output_dir'"),
        (["stages.0.options.noise_st=1"], "unknown key 'options.noise_st' for method projection; did you mean 'noise_std'"),
        (["stages.0.method=bct", "stages.0.options={classes: [cat]}"], "unknown key 'options.classes' for method bct"),
        (["stages.1.projection=stage:fi"], "refers to 'fi', which is not an earlier stage .earlier: phi"),
        (["stages.1.evaluation.compare_with=[nope]"], "refers to 'nope'"),
        (["stages.1.evaluation.slerp=1.5"], "evaluation.slerp: .*less than or equal to 1"),
        (
            ["stages.0.name=slerp", "stages.1.evaluation={slerp: 0.5, compare_with: [slerp]}"],
            "evaluation.slerp reports its results as .slerp.; rename the stage",
        ),
        (called("old"), "stage 'pair': evaluation.compare_with names old, a name reserved in reports; rename the stage"),
        (called("old+memory"), "evaluation.compare_with names old.memory, a name reserved"),
        (
            ["stages.0.method=fct", "stages.0.options={}"],
            "compare_with names phi, which maps galleries, so its queries do not search the old one; remove it",
        ),
        (["stages.0.method=procrustes", "stages.0.options={direction: old_to_new}"], "names phi, which maps galleries"),
        (["stages.1.name=phi"], "two stages are called 'phi'"),
        (["stages.7.name=x"], "unknown stage 7; stages are numbered from 0 to 1, and named phi, pair"),
        (["prompt_lr_factor=-1"], "prompt_lr_factor: .*greater than 0"),
        (["new=some/model", "new.model.depths=[1]"], "new.model.depths: new is not a mapping; set new as a whole"),
        (["stages.0.method.x=1"], "stages.0.method.x: stages.0.method is not a mapping; set"),
        (["training.max_steps=1", "training.max_steps.x.y=1"], "training.max_steps is not a mapping; set"),
        (["stages.0=x"], "stages.0: stages is not a mapping; set stages as a whole"),
        (["nonsense"], "invalid override 'nonsense'; write key=value"),
        (["new.nme=x"], "unknown key .*nme'"),
        (["options.noise_std=1"], "stage 0 .phi. sets options.noise_std itself: override stages.phi.options.noise_std"),
        (
            ["stages.0.data={texts: [{path: own.txt}]}", "data.texts.0.path=x"],
            "stage 0 .phi. sets data.texts itself: override stages.phi.data.texts.0.path",
        ),
        (["stages.1.old=own/model", "old={name: x}", "old.name=y"], "stage 1 .pair. sets old itself: override stages.pair.old"),
        (["data={"], "the value is not valid YAML"),
        (["training.max_steps=-5"], "training.max_steps: -5 trains nothing"),
        (
            ["training.num_train_epochs=0", "training.max_steps=-1"],
            "training.num_train_epochs: 0 trains nothing; set more than 0, or training.max_steps",
        ),
        (["training.log_level=loud"], "training.log_level: Input should be '.*', .* or '.*found 'loud'"),
        (["training.weight_decay=.inf"], "training.weight_decay: Input should be a finite number, without quotes .found inf"),
        (["training.warmup_steps='3'"], "training.warmup_steps: Input should be a finite number, without quotes .found '3'"),
        (["stages.1.options={adapters: {lora: 4}}"], "options.adapters.lora: .*LoraSettings.*found 4"),
        (["stages.0.options.noise_std=high"], "options.noise_std: .*valid number.*found 'high'"),
        (
            ["stages.1.method=mixbct", "stages.1.options={mixed_share: 30}"],
            "options.mixed_share: Input should be less than or equal to 1",
        ),
        (["stages.1.method=unibct", "stages.1.options={refresh_at: [10, 20]}"], "options.refresh_at: .* less than 1 .found 10"),
        (["stages.0.name=report"], "the stage name 'report' is reserved for the run's report"),
        (["seeds=[0, 4294967296]"], "seeds.1: Input should be less than 4294967296"),
        (["seed=4294967290", "stages.0.seed_offset=6"], "stage 'phi': seed 4294967290 and seed_offset 6 add up to 4294967296"),
        (["stages.0.name=../evil/x"], "stages.0.name: '../evil/x' cannot be a folder name; remove slashes"),
        (["stages.0.name=a\\b"], r"stages.0.name: 'a.*b' cannot be"),
        (["stages.0.name=.."], "stages.0.name: '..' cannot be"),
        (['stages.0.name="a\\nb"'], "stages.0.name: 'a.*b' cannot be"),
        ([f"stages.0.name={'a' * 101}"], "stages.0.name: 'aaaaaaaaaaaaaaaaaaaa'… is longer than 100 characters"),
        ([f"stages.0.name={'地' * 80}"], "stages.0.name: .* is longer than 100 characters or 200 bytes"),
        ([shots("[]")], "data.zero_shot.templates: templates is empty; add a prompt"),
        ([shots("['a {}', 'a {name}']")], "data.zero_shot.templates: 'a {name}' must contain {} once, for the class"),
        ([shots("['100% {} {']")], "'100% {} {' must contain {} once, .*; double other braces: {{ and }}"),
        ([shots("['{} and {}']")], "'{} and {}' must contain {} once"),
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
        "unknown key 'stages.0.data.pairs.shards'; known: camera_column, caption_column, captions, format, id_column, "
        "image_column, label_column, labels, limit, max_bad_share, name, path, revision, split, streaming",
        "stages.0.training: unknown key 'training.learing_rate'; did you mean 'learning_rate'?",
        "stages.0.training: training.per_device_train_batch_size: Input should be greater than or equal to 1 (found 0)",
        "stages.0.training: training.max_steps: 0 trains nothing; set 1 or more, or remove it for num_train_epochs",
        "stages.0.evaluation.ks.1: Input should be greater than or equal to 1",
        "unknown key 'stages.1.new.size'; known: image_size, mean, model, std, stem, vocab_size",
        "stages.1.options: options.adapters.prompts: Input should be greater than or equal to 0 (found -1)",
        "stages.1.options: unknown key 'options.tau' for method xbt; known: adapters, logit_scale, train_encoder, "
        "train_projection",
    ]
    assert [" does not exist" in line and line.split(": ")[:2] for line in lines[10:]] == [
        ["first", "old"],
        ["first", "data.pairs.path"],
        ["first", "data.test.path"],
    ]


def test_every_setting_that_does_not_fit_is_named_at_once(tmp_path: Path) -> None:
    given = "memory_codec=SQ8", "stages.pair.mini_batch_size=5", "data.views=2", "prompt_lr_factor=7"
    with pytest.raises(XcompatError) as raised:
        load(tmp_path, GOOD, *given)
    assert [line.split(": ", 1)[1] for line in str(raised.value).splitlines()] == [
        "stages.0: memory_codec needs a memory; set memory: classes or pairs, or remove memory_codec",
        "stages.1: mini_batch_size 5 does not divide training.per_device_train_batch_size 8; choose a divisor",
        "stage 'phi': prompt_lr_factor has no effect: options.adapters has no prompts; remove it",
        "stage 'phi': data.views has no effect: method projection does not learn a map of images; remove it",
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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "not valid YAML"),
        ("just words", "must contain keys and values"),
        ("!!python/object:os.system {}", "not valid YAML"),
    ],
)
def test_what_is_no_recipe_is_refused_and_nothing_is_executed(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(XcompatError, match=message):
        load(tmp_path, text)


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
        ("options: " + "[" * 1000 + "]" * 1000, "64 levels"),
        ("\n".join(" " * n + f"k{n}:" for n in range(1000)) + " 1", "64 levels"),
        ("options: &a [*a]", "contains itself"),
        ("seed: " + "1" * 5000, "an unreadable integer"),
        ("seed: 0x" + "f" * 5000, "an integer of more than 64 bits"),
        ("name: " + "1" * 100_000 + "x\nmethod: [", "not valid YAML"),
        ("name: 2026-13-01", "month must be in 1..12"),
        ("# " + "x" * 2**20, "more than the limit of 1,048,576"),
    ],
    ids=lambda value: value[:20],
)
def test_a_recipe_beyond_limits_is_one_line(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(XcompatError, match=message) as raised:
        load(tmp_path, text)
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 600


@pytest.mark.parametrize("value", ["1" * 5000, "[" * 1000, "&a [*a]"])
def test_an_override_beyond_limits_is_one_line(value: str, tmp_path: Path) -> None:
    with pytest.raises(XcompatError, match="the value is not valid YAML") as raised:
        load(tmp_path, GOOD, f"training.learning_rate={value}")
    assert "\n" not in str(raised.value)


def test_anchors_of_ordinary_recipes_are_followed(tmp_path: Path) -> None:
    anchored = GOOD.replace("training: {learning_rate: 1e-4", "training: &usual {learning_rate: 1e-4")
    anchored = anchored.replace("training: {learning_rate: 2e-3}", "training: {<<: *usual, learning_rate: 2e-3}")
    assert load(tmp_path, anchored) == load(tmp_path, GOOD)
