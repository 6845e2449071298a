"""Settings of a recipe that nothing would read are refused by their name, each of them; sections that nothing reads are told."""

from __future__ import annotations

from typing import Any

import pytest

from xcompat.core.errors import XcompatError
from xcompat.core.fingerprint import Fingerprint
from xcompat.methods import METHODS, IndependentModel
from xcompat.models import describe_old
from xcompat.training.recipe import parse_recipe
from xcompat.training.sections import DataSettings, EvaluationSettings
from xcompat.training.stage_recipe import StageRecipe
from xcompat.training.unused_settings import describe_unused_sections, find_unused_settings

PAIRS = {"pairs": {"path": "photos"}}
IMAGES = {"images": {"path": "photos"}}
STREAM = {"pairs": {"path": "photos", "streaming": True}}
MAP = {"method": "projection", "data": {"texts": [{"path": "texts.txt"}]}}
JUDGED = {"images": {"path": "photos"}, "queries": {"path": "asked"}}
TEMPLATES = {"templates": {"images": {"path": "faces"}, "members": "members.txt", "pairs": "pairs.txt"}}
WIDE = {"adapters": {"prompts": 2}}
ONE = {"classes": ["cat"]}
BCT, DIRECT, XBT = ({"method": name} for name in ("bct", "direct", "xbt"))
LABELLED, PAIRED, ALONE = BCT | {"data": IMAGES}, XBT | {"data": PAIRS}, {"method": "independent"}
RIDGE = {"method": "ridge", "data": IMAGES}
ZERO_SHOT = {"images": {"path": "photos"}, "classes": "classes.txt"}
SHOTS = XBT | {"data": {"test": {"path": "a"}, "zero_shot": ZERO_SHOT}}
EVALUATED: dict[str, Any] = {"ks": [1], "old_on_new": True, "fars": [0.1], "fpirs": [0.1], "compare_with": ["phi"]}
EVALUATED |= dict.fromkeys(("slerp", "fallback", "rerank_weight", "threshold"), 0.5)
EVALUATED |= {"rerank": 5, "tsne_pairs": 0, "resamples": 100, "chunk_size": 8, "examples": 1}
OFF, ON = {"save_strategy": "no", "logging_strategy": "epoch"}, {"push_to_hub": True, "dataloader_num_workers": 1}
TRAINED: dict[str, tuple[Any, tuple[dict[str, Any], dict[str, Any]], str]] = {
    "save_steps": (7, (OFF, {}), "training.save_strategy is no, not steps"),
    "logging_steps": (7, (OFF, {}), "training.logging_strategy is epoch, not steps"),
    "hub_model_id": ("user/model", ({}, ON), "nothing is pushed"),
    "hub_private_repo": (True, ({}, ON), "nothing is pushed"),
    "run_name": ("mine", ({}, {"report_to": ["tensorboard"]}), "training.report_to has no tracker"),
    "trackio_space_id": ("me/space", ({"report_to": "none"}, {"report_to": "trackio"}), "training.report_to has no tracker"),
    "warmup_steps": (7, ({"lr_scheduler_type": "constant"}, {}), "constant has no warm-up"),
    "lr_scheduler_kwargs": ({"a": 1}, ({"lr_scheduler_type": "constant"}, {"lr_scheduler_type": "cosine"}), "takes none"),
    "dataloader_persistent_workers": (True, ({}, ON), "there are no workers"),
    "activation_checkpointing_kwargs": ({"a": 1}, ({}, {"activation_checkpointing": True}), "nothing is recomputed"),
}

# for each setting a stage that would ignore it, with the reason, and one that reads it
CASES: dict[str, tuple[Any, dict[str, Any], str, dict[str, Any]]] = {
    "seed_offset": (1, {"method": "ridge"}, "is solved without a seed", {"method": "independent", "data": IMAGES}),
    "prompt_lr_factor": (10.0, {"method": "xbt"}, "options.adapters has no prompts", {"method": "xbt", "options": WIDE}),
    "encoder_lr_factor": (0.1, MAP, "trains a map, not an encoder", {"method": "independent", "data": PAIRS}),
    "independent": ("alone", {"method": "simclr", "data": IMAGES}, "does not learn from it, and no", BCT | {"data": JUDGED}),
    "weight_decay_on": ("all", {"method": "xbt"}, "weight_decay is 0", {"method": "xbt", "training": {"weight_decay": 0.1}}),
    "sync_batch_norm": (True, {"method": "ridge"}, "is solved, not trained", {"method": "simclr", "data": IMAGES}),
    "allow_worse": (True, MAP, "only recipes without a method use it", {"method": "map"}),
    "searched_classes": ("known", MAP, "there is no memory", {"method": "map"}),
    "projection": ("phi", {"method": "direct"}, "does not start from one", {"method": "xbt"}),
    "side_info": ("simclr", {"method": "bct"}, "does not read it", {"method": "fct"}),
    "new_side_info": ("simclr", {"method": "bct"}, "does not read it", {"method": "fct"}),
    "data.augmentation": ({"min_scale": 0.5}, MAP, "learns from embeddings", {"method": "direct", "data": PAIRS}),
    "data.views": (2, RIDGE, "data.augmentation changes nothing", {"method": "ridge", "data": IMAGES | {"augmentation": {}}}),
    "data.old_embeddings": (
        "online",
        PAIRED,
        "does not read old embeddings of labelled images or pairs",
        DIRECT | {"data": STREAM},
    ),
    "data.new_embeddings": (
        *("online", {"method": "l2", "data": IMAGES}, "does not read embeddings of an independent model"),
        {"method": "bt2", "data": IMAGES},
    ),
    "data.samples_per_class": (2, LABELLED, "has no triplet loss", ALONE | {"data": IMAGES, "options": {"head": "triplet"}}),
    "data.one_per_id": (True, {"method": "xbt", "data": STREAM}, "no pairs are drawn", {"method": "direct", "data": PAIRS}),
    "data.embeddings_of": ("images", {"method": "direct"}, "does not learn from embeddings", {"method": "ridge"}),
    "data.shuffle_buffer": (5, PAIRED, "no pairs are streamed", {"method": "xbt", "data": STREAM}),
    "data.texts_limit": (5, PAIRED, "the stage does not learn from texts", MAP),
    "data.subset": (ONE, PAIRED, "data.images is not set", LABELLED),
    "data.test_subset": (ONE, BCT, "data.queries is not set", BCT | {"data": {"queries": {"path": "a"}}}),
    "data.gallery": ({"path": "b"}, {}, "data.queries is not set", {"data": {"queries": {"path": "a"}}}),
    "data.zero_shot": (ZERO_SHOT, MAP, "it needs data.test, without data.queries", XBT | {"data": {"test": {"path": "a"}}}),
    "data.pairs": ({"path": "a"}, LABELLED, "learns from data.images", RIDGE | {"memory": "pairs"}),
    "data.text_pairs": ({"path": "a"}, RIDGE, "learns from data.images", {"method": "direct"}),
    "data.remembered": ({"path": "a"}, {"method": "map", "data": IMAGES}, "learns from data.images", {"method": "map"}),
    "data.test": ({"path": "a"}, {"method": "bct", "data": JUDGED}, "the stage is evaluated on data.queries", {"method": "xbt"}),
    "data.old_reads": ("captions", {"method": "xbt"}, "no labelled images", LABELLED),
}
for name in ("label_column", "camera_column", "labels"):
    for source in ("pairs", "test"):
        ignoring: dict[str, Any] = {"method": "xbt", "data": {source: {"path": "photos"}}}
        value = True if name == "labels" else "column"
        CASES[f"data.{source}.{name}"] = (value, ignoring, "classes and cameras of images with captions are not read", {})
for name, unread_of_texts in {"labels": True, "label_column": "x", "camera_column": "x", "captions": False}.items():
    ignoring = MAP | {"data": {"texts": [{"path": "photos", "caption_column": "said"}]}}
    CASES[f"data.texts.0.{name}"] = (unread_of_texts, ignoring, "only captions are read", {})
for source in ("images", "queries", "gallery"):
    for name in ("caption_column", "caption_file"):
        ignoring = {"method": "bct", "data": JUDGED | {source: {"path": "photos"}}}
        reading = {"data": {"old_reads": "captions", source: {"path": "photos"}}}
        CASES[f"data.{source}.{name}"] = ("x", ignoring, "data.old_reads is images", reading)
UNJUDGED = "data has no test set|data.templates has (pairs to verify|a gallery to identify in)"
for name, value in EVALUATED.items():
    CASES[f"evaluation.{name}"] = (value, {"method": "ridge"}, UNJUDGED, RIDGE | {"data": JUDGED})
CASES |= {
    "data.images.camera_column": ("x", LABELLED, "only test images need cameras", {}),
    "data.zero_shot.images.camera_column": ("x", SHOTS, "zero-shot classification ignores cameras", {}),
    "data.templates.images.label_column": ("x", BCT | {"data": TEMPLATES}, "the lists of templates name the subjects", {}),
    "new.vocab_size": (
        *(300, BCT | {"new": {"model": {"model_type": "resnet"}}}, "an image model reads no tokens"),
        ALONE | {"new": {"model": {"model_type": "clip"}}},
    ),
}
for name, (value, beside, why) in TRAINED.items():
    CASES[f"training.{name}"] = (value, {"method": "xbt", "training": beside[0]}, why, {"method": "xbt", "training": beside[1]})
READ_BY_ALL = {"name", "method", "old", "new", "options", "evaluation", "data", "training"}
"""Settings that every stage reads, or that its report does."""
REFUSED_ELSEWHERE = {"mini_batch_size", "memory", "memory_codec"}
"""Settings that the stage itself refuses by name where they cannot matter (tests/test_recipe.py)."""
SOURCES = {"texts", "images", "judged_texts", "templates", "queries"}
"""What is learned from or judged on: methods say what they learn from, and two that exclude each other are refused."""


def with_setting(stage: dict[str, Any], setting: str, value: object) -> dict[str, Any]:
    section, _, rest = setting.partition(".")
    if isinstance(listed := stage.get(section), list):
        return stage | {section: [with_setting(listed[0], rest.removeprefix("0."), value)]}
    return stage | {section: with_setting(stage.get(section, {}), rest, value) if rest else value}


def test_every_setting_is_sorted_out() -> None:
    outer = {name for name in CASES if "." not in name} | READ_BY_ALL | REFUSED_ELSEWHERE
    assert outer == set(StageRecipe.model_fields)
    named = {name.removeprefix("data.") for name in CASES if name.startswith("data.") and name.count(".") == 1}
    assert named | SOURCES == set(DataSettings.model_fields) and not named & SOURCES
    assert set(EVALUATED) == set(EvaluationSettings.model_fields)


@pytest.mark.parametrize("setting", CASES)
def test_a_setting_that_nothing_reads_is_refused(setting: str) -> None:
    value, ignoring, why, reading = CASES[setting]
    with pytest.raises(XcompatError, match=f"demo.yaml: stage .*: {setting} has no effect: .*({why}).*; remove it"):
        parse_recipe(shared_with_phi(with_setting(ignoring, setting, value)), "demo", "demo.yaml")
    assert setting not in find_unused_settings(StageRecipe(**ignoring))
    assert not reading or setting not in find_unused_settings(StageRecipe(**with_setting(reading, setting, value)))


def shared_with_phi(stage: dict[str, Any]) -> dict[str, Any]:
    compared = "compare_with" in (stage.get("evaluation") or {})
    return {"stages": [{"name": "phi", "method": "projection", "evaluation": None}, stage]} if compared else stage


def test_what_stages_share_must_matter_in_one_of_them() -> None:
    phi, pair = {"name": "phi", "method": "projection"}, {"name": "pair", "method": "direct"}
    shared = {"data": PAIRS | {"augmentation": {"min_scale": 0.5}, "embeddings_of": "images"}}
    assert len(parse_recipe(shared | {"stages": [phi, pair]}, "demo", "demo.yaml").stages) == 2
    with pytest.raises(XcompatError, match="stage 'phi': data.augmentation has no effect"):
        parse_recipe(shared | {"stages": [phi]}, "demo", "demo.yaml")


def test_views_are_of_maps_over_images() -> None:
    drawn = {"augmentation": {"min_scale": 0.5}, "views": 2}
    for stage in (RIDGE, {"method": "fct", "data": PAIRS | {"embeddings_of": "images"}}):
        with pytest.raises(XcompatError, match="learns from embeddings of plain images without data.views; remove it"):
            parse_recipe(with_setting(stage, "data.augmentation", {"min_scale": 0.5}), "demo", "demo.yaml")
        taken = parse_recipe(stage | {"data": stage["data"] | drawn}, "demo", "demo.yaml").stages[0]
        assert [view.number for view in taken.views(7)] == [0, 1] and taken.views(7)[0].seed == 7
    for ignoring in ({"method": "simclr", "data": IMAGES}, {"method": "ridge", "data": {}}, {"method": "map", "data": IMAGES}):
        with pytest.raises(XcompatError, match="data.views has no effect: method .* does not learn a map of images"):
            parse_recipe(with_setting(ignoring, "data.views", 2), "demo", "demo.yaml")


def test_sections_and_test_sets_that_nothing_reads_are_named() -> None:
    solved = StageRecipe(method="ridge", training={"max_steps": 3})
    trained = StageRecipe(method="direct", training={"max_steps": 3}, data={"texts": [{"path": "texts.txt"}]})
    assert describe_unused_sections([solved]) == ["ridge: training has no effect: method ridge is solved, not trained"]
    assert describe_unused_sections([trained]) == ["direct: data.texts has no effect: method direct does not learn from texts"]
    assert describe_unused_sections([solved, trained]) == describe_unused_sections([trained])
    chosen = StageRecipe(training={"max_steps": 3}, data=IMAGES)
    assert describe_unused_sections([chosen]) == ["map: training has no effect: method map is solved, not trained"]
    alone = StageRecipe(method="independent", old="some/model", data=JUDGED, evaluation={"ks": [1]})
    none = "method independent has no old model to compare with, and no report"
    assert describe_unused_sections([alone]) == [
        "independent: old has no effect: method independent is trained without an old model",
        f"independent: data.queries has no effect: {none}",
        f"independent: evaluation has no effect: {none}",
    ]
    assert not describe_unused_sections([alone, StageRecipe(method="bct", old="some/model", data=JUDGED, evaluation={"ks": [1]})])
    unjudged = parse_recipe({"method": "bct", "independent": "a", "data": JUDGED, "evaluation": None}, "demo", "demo.yaml")
    assert describe_unused_sections(unjudged.stages) == [
        f"bct: {name} has no effect: evaluation is null" for name in ("independent", "data.queries")
    ]
    learning = StageRecipe(method="ridge", data={"texts": [{"path": "a"}], "test": {"path": "b"}}, evaluation=None)
    assert not describe_unused_sections([learning]), "captions of the test set are left out of the texts"


def test_what_labelled_images_do_not_teach_is_refused() -> None:
    captions = "data.images: method (xbt|direct) learns from images with captions, not from cl"
    solved = "mini_batch_size: without a method, the map is solved, not trained; remove"
    for stage, message in (({"mini_batch_size": 4}, solved), (XBT, captions), (DIRECT, captions)):
        with pytest.raises(XcompatError, match=message):
            parse_recipe(stage | {"data": IMAGES}, "demo", "demo.yaml")


@pytest.mark.parametrize("method", [name for name, model in METHODS.items() if model.embeds_in_memory])
def test_a_map_has_no_adapters(folder_of: dict[str, str], method: str) -> None:
    refused = f"options.adapters: {METHODS[method].__name__} is a map of embeddings .*; remove adapters"
    with pytest.raises(XcompatError, match=refused):
        parse_recipe({"method": method, "options": WIDE}, "demo", "demo.yaml")
    with pytest.raises(XcompatError, match=refused):
        METHODS[method].from_encoder(folder_of["clip"], old=describe_old(Fingerprint.from_string("old"), dim=8), **WIDE)
    assert parse_recipe({"method": method, "options": {"adapters": None}}, "demo", "demo.yaml").stages[0].method == method


@pytest.mark.parametrize(
    ("name", "value"), [("dim", 8), ("metric", "l2"), ("head_scale", 20.0), ("mixup", 0.2), ("adapters", {"lora": {"rank": 2}})]
)
def test_a_model_of_captions_has_nothing_beside_its_encoder(folder_of: dict[str, str], name: str, value: object) -> None:
    recipe = {"method": "independent", "options": {name: value}}
    refused = f"options.{name} does not apply to training on captions or texts; remove it, or train on classes"
    for data in (PAIRS, {"text_pairs": {"path": "pairs.jsonl"}}):
        with pytest.raises(XcompatError, match=refused):
            parse_recipe(recipe | {"data": data}, "demo", "demo.yaml")
    with pytest.raises(XcompatError, match=refused):
        IndependentModel.from_encoder(folder_of["clip"], **{name: value})
    large, options = {"training": {"per_device_train_batch_size": 8}}, {"head": "cosface", name: value}
    on_classes = parse_recipe(recipe | {"data": IMAGES, "options": options} | large, "demo", "demo.yaml")
    assert on_classes.stages[0].options == options


def test_a_scale_is_refused_where_the_loss_has_none(folder_of: dict[str, str]) -> None:
    given = {"logit_scale": 20.0}
    reads = {"xbt": PAIRS, "direct": PAIRS, "independent": PAIRS, "projection": {}, "rbt": {}}
    for method in METHODS:
        if method not in reads:
            with pytest.raises(XcompatError, match="options.logit_scale: the loss of .* does not use it here; remove"):
                METHODS[method].refuse_unread(given, on_captions=False)
    with pytest.raises(XcompatError, match=r"options.logit_scale: the loss of BctModel .*"):
        parse_recipe({"method": "bct", "data": IMAGES, "options": given}, "demo", "demo.yaml")
    with pytest.raises(XcompatError, match=r"options.logit_scale: the loss of IndependentModel .*"):
        parse_recipe({"method": "independent", "data": IMAGES, "options": given}, "demo", "demo.yaml")
    for method, data in reads.items():
        assert parse_recipe({"method": method, "data": data, "options": given}, "demo", "demo.yaml").stages[0].options == given
    METHODS["fct"].refuse_unread(given | {"loss": "kl"}, on_captions=False)
    METHODS["bct"].refuse_unread({"logit_scale": 1 / 0.07}, on_captions=False)
    with pytest.raises(XcompatError, match=r"options.logit_scale: this encoder learns its own scale; remove logit_scale"):
        IndependentModel.from_encoder(folder_of["clip"], logit_scale=20.0)
    assert IndependentModel.from_encoder(folder_of["blip"], logit_scale=20.0).config.logit_scale == 20.0


def test_a_run_with_what_is_refused_by_now_still_opens() -> None:
    stage = {"method": "oca", "options": {"transform": "none", "random_start": True}, "data": JUDGED | {"test": {"path": "a"}}}
    with pytest.raises(XcompatError, match="stage 'oca': options.random_start: there is no matrix.*; remove random_start"):
        parse_recipe(stage, "demo", "demo.yaml")
    assert StageRecipe.model_validate(stage).options == stage["options"]
