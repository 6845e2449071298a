"""Settings of recipes and trainings: each matters or is refused by name; rates and optimisers of parameters, and fp16."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import MISSING, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from conftest import raw_recipe, recipe_of, refuses
from pydantic import ValidationError
from torch import Tensor, nn
from torch.utils.data import default_collate
from transformers import Adafactor, TrainerControl, TrainerState, TrainingArguments
from transformers.training_args import OptimizerNames

from xcompat import Fingerprint, IndependentModel, XcompatError
from xcompat.core.errors import TrainingDivergedError
from xcompat.methods import METHODS
from xcompat.methods.projection import ProjectionConfig, ProjectionModel
from xcompat.models import describe_old
from xcompat.training.callbacks import DivergenceCallback
from xcompat.training.checkpoints import last_complete_checkpoint
from xcompat.training.optimiser import OPTIMISERS, OptimiserFactory, check_optimiser, class_of, in_transformers, with_momentum
from xcompat.training.record import LOG
from xcompat.training.run import run_recipe
from xcompat.training.sections import DataSettings, EvaluationSettings
from xcompat.training.stage_recipe import StageRecipe
from xcompat.training.trainer import StageTrainer, _optimiser, training_arguments
from xcompat.training.training_sets import Data
from xcompat.training.unused_settings import describe_unused_sections, find_unused_settings
from xcompat.training.values import REFUSED

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


def test_every_setting_and_field_is_sorted_out() -> None:
    outer = {name for name in CASES if "." not in name} | READ_BY_ALL | REFUSED_ELSEWHERE
    assert outer == set(StageRecipe.model_fields)
    named = {name.removeprefix("data.") for name in CASES if name.startswith("data.") and name.count(".") == 1}
    assert named | SOURCES == set(DataSettings.model_fields) and not named & SOURCES
    assert set(EVALUATED) == set(EvaluationSettings.model_fields)
    told = {field.name for field in fields(TrainingArguments)} - NAMED_BY_THE_RECIPE - set(CHANGES_WEIGHTS) - set(REFUSED)
    assert set(TOLD_TO_THE_TRAINER) < told and len(told) == 54, "transformers has other fields: what would a new one change?"
    for name, value in {"lr_scheduler_type": "greedy", "save_strategy": "best"}.items():
        with pytest.raises(ValidationError, match=f"training.{name}: {value} needs a metric of the Trainer"):
            stage(**{name: value})


@pytest.mark.parametrize("setting", CASES)
def test_a_setting_that_nothing_reads_is_refused(setting: str) -> None:
    value, ignoring, why, reading = CASES[setting]
    stage = with_setting(ignoring, setting, value)
    compared = "compare_with" in (stage.get("evaluation") or {})
    recipe = {"stages": [{"name": "phi", "method": "projection", "evaluation": None}, stage]} if compared else stage
    with pytest.raises(XcompatError, match=f"demo.yaml: stage .*: {setting} has no effect: .*({why}).*; remove it"):
        recipe_of(recipe)
    assert setting not in find_unused_settings(StageRecipe(**ignoring))
    assert not reading or setting not in find_unused_settings(StageRecipe(**with_setting(reading, setting, value)))


def test_settings_must_matter_in_new_recipes_not_in_old_runs() -> None:
    phi, pair = {"name": "phi", "method": "projection"}, {"name": "pair", "method": "direct"}
    shared = {"data": PAIRS | {"augmentation": {"min_scale": 0.5}, "embeddings_of": "images"}}
    assert len(recipe_of(shared | {"stages": [phi, pair]}).stages) == 2
    refuses("stage 'phi': data.augmentation has no effect", recipe_of, shared | {"stages": [phi]})
    captions = "data.images: method (xbt|direct) learns from images with captions, not from cl"
    solved = "mini_batch_size: without a method, the map is solved, not trained; remove"
    for stage, message in (({"mini_batch_size": 4}, solved), (XBT, captions), (DIRECT, captions)):
        refuses(message, recipe_of, stage | {"data": IMAGES})
    stage = {"method": "oca", "options": {"transform": "none", "random_start": True}, "data": JUDGED | {"test": {"path": "a"}}}
    with pytest.raises(XcompatError, match="stage 'oca': options.random_start: there is no matrix.*; remove random_start"):
        recipe_of(stage)
    assert StageRecipe.model_validate(stage).options == stage["options"]


def test_views_are_of_maps_over_images() -> None:
    drawn = {"augmentation": {"min_scale": 0.5}, "views": 2}
    for stage in (RIDGE, {"method": "fct", "data": PAIRS | {"embeddings_of": "images"}}):
        with pytest.raises(XcompatError, match="learns from embeddings of plain images without data.views; remove it"):
            recipe_of(with_setting(stage, "data.augmentation", {"min_scale": 0.5}))
        taken = recipe_of(stage | {"data": stage["data"] | drawn}).stages[0]
        assert [view.number for view in taken.views(7)] == [0, 1] and taken.views(7)[0].seed == 7
    for ignoring in ({"method": "simclr", "data": IMAGES}, {"method": "ridge", "data": {}}, {"method": "map", "data": IMAGES}):
        with pytest.raises(XcompatError, match="data.views has no effect: method .* does not learn a map of images"):
            recipe_of(with_setting(ignoring, "data.views", 2))


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
    unjudged = recipe_of({"method": "bct", "independent": "a", "data": JUDGED, "evaluation": None})
    assert describe_unused_sections(unjudged.stages) == [
        f"bct: {name} has no effect: evaluation is null" for name in ("independent", "data.queries")
    ]
    learning = StageRecipe(method="ridge", data={"texts": [{"path": "a"}], "test": {"path": "b"}}, evaluation=None)
    assert not describe_unused_sections([learning]), "captions of the test set are left out of the texts"


@pytest.mark.parametrize("method", [name for name, model in METHODS.items() if model.embeds_in_memory])
def test_a_map_has_no_adapters(folder_of: dict[str, str], method: str) -> None:
    refused = f"options.adapters: {METHODS[method].__name__} is a map of embeddings .*; remove adapters"
    refuses(refused, recipe_of, {"method": method, "options": WIDE})
    with pytest.raises(XcompatError, match=refused):
        METHODS[method].from_encoder(folder_of["clip"], old=describe_old(Fingerprint.from_string("old"), dim=8), **WIDE)
    assert recipe_of({"method": method, "options": {"adapters": None}}).stages[0].method == method


@pytest.mark.parametrize(
    ("name", "value"), [("dim", 8), ("metric", "l2"), ("head_scale", 20.0), ("mixup", 0.2), ("adapters", {"lora": {"rank": 2}})]
)
def test_a_model_of_captions_has_nothing_beside_its_encoder(folder_of: dict[str, str], name: str, value: object) -> None:
    recipe = {"method": "independent", "options": {name: value}}
    refused = f"options.{name} does not apply to training on captions or texts; remove it, or train on classes"
    for data in (PAIRS, {"text_pairs": {"path": "pairs.jsonl"}}):
        refuses(refused, recipe_of, recipe | {"data": data})
    refuses(refused, IndependentModel.from_encoder, folder_of["clip"], **{name: value})
    large, options = {"training": {"per_device_train_batch_size": 8}}, {"head": "cosface", name: value}
    on_classes = recipe_of(recipe | {"data": IMAGES, "options": options} | large)
    assert on_classes.stages[0].options == options


def test_a_scale_is_refused_where_the_loss_has_none(folder_of: dict[str, str]) -> None:
    given = {"logit_scale": 20.0}
    reads = {"xbt": PAIRS, "direct": PAIRS, "independent": PAIRS, "projection": {}, "rbt": {}}
    with pytest.raises(XcompatError, match=r"options.logit_scale: the loss of IndependentModel .*"):
        recipe_of({"method": "independent", "data": IMAGES, "options": given})
    for method, data in reads.items():
        assert recipe_of({"method": method, "data": data, "options": given}).stages[0].options == given
    METHODS["fct"].refuse_unread(given | {"loss": "kl"}, on_captions=False)
    METHODS["bct"].refuse_unread({"logit_scale": 1 / 0.07}, on_captions=False)
    with pytest.raises(XcompatError, match=r"options.logit_scale: this encoder learns its own scale; remove logit_scale"):
        IndependentModel.from_encoder(folder_of["clip"], logit_scale=20.0)
    assert IndependentModel.from_encoder(folder_of["blip"], logit_scale=20.0).config.logit_scale == 20.0


NAMED_BY_THE_RECIPE = {"output_dir", "seed", "data_seed"}
CHANGES_WEIGHTS: dict[str, Any] = {
    **dict.fromkeys(("num_train_epochs", "warmup_steps", "gradient_accumulation_steps"), 2),
    **dict.fromkeys(("weight_decay", "adam_beta1", "adam_beta2"), 0.5),
    "per_device_train_batch_size": 4,
    "max_steps": 3,
    "learning_rate": 3e-4,
    "lr_scheduler_type": "constant",
    "lr_scheduler_kwargs": {"num_cycles": 2.0},
    "optim": "sgd",
    "optim_args": "momentum=0.9,nesterov=true",
    "adam_epsilon": 0.1,
    "max_grad_norm": 1e-3,
    "dataloader_drop_last": False,
    "bf16": True,
}
"""A value of each that must lead to other weights than the default does."""
SGD = {"optim": "sgd"}
BESIDE = {"lr_scheduler_kwargs": {"lr_scheduler_type": "cosine"}, "optim_args": SGD, "max_grad_norm": SGD}
"""What must be set beside some of them."""
TOLD_TO_THE_TRAINER: dict[str, Any] = {
    **dict.fromkeys(("ddp_find_unused_parameters", "bf16_full_eval", "push_to_hub", "use_cpu"), True),
    **dict.fromkeys(("tf32", "fp16"), False),
    **dict.fromkeys(("save_total_limit", "logging_steps", "dataloader_num_workers"), 3),
    "trackio_static_space_id": "user/name",
    "report_to": ["tensorboard"],
    "save_strategy": "epoch",
    "torch_compile_backend": "eager",
}
"""Some of what the stock Trainer does by itself, with all whose default is another here: it must hear of it."""


def stage(**training: Any) -> StageRecipe:
    return StageRecipe(method="projection", training=training)


def weights(folder: Path, **training: Any) -> Tensor:
    torch.manual_seed(0)
    old = describe_old(Fingerprint.from_string("old"), dim=3)
    model = ProjectionModel(ProjectionConfig(old=old, embedding_dim=4, noise_std=0.0))
    generator = torch.Generator().manual_seed(0)
    new_ND, old_NE = torch.randn(18, 4, generator=generator), torch.randn(18, 3, generator=generator)
    rows = [{"new_embeds": new_D, "old_embeds": old_E} for new_D, old_E in zip(new_ND, old_NE, strict=True)]
    settings = stage(**{"num_train_epochs": 4, "learning_rate": 1e-2, "save_strategy": "no", **training})
    trainer = StageTrainer(model, training_arguments(settings, 0, folder), Data(rows, default_collate), settings)  # type: ignore[arg-type]
    trainer.train()
    return torch.cat([parameter.detach().flatten() for parameter in trainer.accelerator.unwrap_model(trainer.model).parameters()])


USUAL: dict[str, Tensor] = {}


@pytest.mark.parametrize("name", CHANGES_WEIGHTS)
def test_a_field_changes_what_is_learned(name: str, tmp_path: Path) -> None:
    beside = BESIDE.get(name, {})
    if repr(beside) not in USUAL:
        USUAL[repr(beside)] = weights(tmp_path, **beside)
        assert torch.equal(USUAL[repr(beside)], weights(tmp_path, **beside)), "the same fields teach the same"
    assert not torch.equal(USUAL[repr(beside)], weights(tmp_path, **beside, **{name: CHANGES_WEIGHTS[name]}))


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing")
def test_fields_reach_the_trainer_as_they_are_or_rewritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TOLD_TO_THE_TRAINER.items():
        assert getattr(training_arguments(stage(**{name: value}), 0, tmp_path), name) == value
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")  # transformers sets it for the whole process
    given = {"gradient_checkpointing": True, "fsdp": "full_shard", "fsdp_config": {"min_num_params": 3}}
    told = training_arguments(stage(**given, debug="underflow_overflow"), 0, tmp_path)
    assert told.activation_checkpointing
    assert told.fsdp and told.fsdp_config["min_num_params"] == 3
    assert [each.value for each in told.debug] == ["underflow_overflow"]
    plain = training_arguments(stage(), 0, tmp_path)
    assert not (plain.activation_checkpointing or plain.fsdp or plain.debug)


@pytest.mark.parametrize("name", REFUSED)
def test_a_field_that_would_change_nothing_is_refused(name: str) -> None:
    field = next(field for field in fields(TrainingArguments) if field.name == name)
    default = field.default if field.default is not MISSING else None
    for value in (True, 3, "words", {"a": 1}):
        if value == default:
            continue
        with pytest.raises(ValidationError, match=f"training.{name}"):
            stage(**{name: value})
    if field.default is not MISSING:
        stage(**{name: default})


def model() -> nn.Module:
    layer = nn.ModuleDict({"base_layer": nn.Linear(2, 2, bias=False), "lora_A": nn.Linear(2, 1, bias=False)})
    encoder = nn.ModuleDict({"model": nn.ModuleDict({"layer": layer, "norm": nn.LayerNorm(2)})})
    encoder.prompts = nn.Module()
    encoder.prompts.tokens = nn.Parameter(torch.zeros(3, 2))
    frozen = nn.Linear(2, 2).requires_grad_(False)
    other = nn.ModuleDict({"encoder": nn.Linear(2, 2, bias=False)})
    return nn.ModuleDict({"encoder": encoder, "neck": nn.Linear(2, 2), "autoencoder": other, "old": frozen})


RATES = {"lr": 1.0, "prompt_lr_factor": 100, "encoder_lr_factor": 0.01, "weight_decay": 0.1}


@pytest.mark.parametrize("wrappers", [[], ["module"], ["_orig_mod"], ["module", "_orig_mod"]])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, Adafactor])
def test_every_kind_of_parameter_has_its_rate_and_decay(wrappers: list[str], kind: type[torch.optim.Optimizer]) -> None:
    trained = model()
    names = {id(parameter): name for name, parameter in trained.named_parameters()}
    for wrapper in reversed(wrappers):
        trained = nn.ModuleDict({wrapper: trained})  # as DDP and torch.compile put it there
    options = {"relative_step": False} if kind is Adafactor else {}
    optimiser = OptimiserFactory()(trained, optimiser=kind, decayed="matrices", **RATES, **options)
    assert type(optimiser) is kind
    found = {
        names[id(parameter)]: (group["lr"], group["weight_decay"])
        for group in optimiser.param_groups
        for parameter in group["params"]
    }
    assert found == {
        "encoder.model.layer.base_layer.weight": (0.01, 0.1),
        "encoder.model.layer.lora_A.weight": (1.0, 0.1),
        "encoder.model.norm.weight": (0.01, 0.0),
        "encoder.model.norm.bias": (0.01, 0.0),
        "encoder.prompts.tokens": (100.0, 0.0),
        "neck.weight": (1.0, 0.1),
        "neck.bias": (1.0, 0.0),
        "autoencoder.encoder.weight": (1.0, 0.1),
    }
    optimiser = OptimiserFactory()(trained, optimiser=kind, decayed="all", **RATES, **options)
    assert {(group["lr"], group["weight_decay"]) for group in optimiser.param_groups} == {(0.01, 0.1), (1.0, 0.1), (100.0, 0.1)}


def test_momentum_is_the_papers_and_lars_needs_whole_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {in_transformers(name) for name in OPTIMISERS} <= {name.value for name in OptimizerNames}
    assert with_momentum("sgd", None) == with_momentum("lars", None) == "momentum=0.9"
    assert with_momentum("sgd", "nesterov=true") == "momentum=0.9,nesterov=true"
    assert with_momentum("sgd", "momentum=0") == "momentum=0"
    assert with_momentum("rmsprop", "alpha=0.5") == "alpha=0.5" and with_momentum("adamw_torch", None) is None
    for variable in ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"):
        monkeypatch.setenv(variable, "true")
        with pytest.raises(ValueError, match="lars needs the norm of each layer's weights"):
            class_of("lars", torch.optim.SGD)
        monkeypatch.delenv(variable)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"optim": "galore_adamw"}, "training.optim: unsupported optimiser 'galore_adamw'"),
        ({"optim": "sdg"}, "did you mean 'sgd'"),
        ({"optim": "lars"}, "lars only adapts the rates of decayed weights; set training.weight_decay"),
        ({"optim": "lars", "weight_decay": 1e-6, "optim_args": "trust_coeff=1"}, "lars has no option 'trust_coeff'"),
        ({"optim": "sgd", "adam_beta1": 0.8}, "training.adam_beta1: sgd ignores it"),
        ({"optim": "lion_8bit", "adam_epsilon": 0.1}, "training.adam_epsilon: lion_8bit ignores it"),
        ({"optim_args": "momentum=0.9"}, "adamw_torch has no option 'momentum'; it has none"),
        ({"optim": "sgd", "optim_args": "momemtum=0.9"}, "sgd has no option 'momemtum'; known: momentum, dampening, nesterov"),
        ({"optim": "sgd", "optim_args": "weight_decay=0.1"}, "set training.weight_decay"),
        ({"optim": "sgd", "optim_args": "momentum"}, "'momentum' has no value"),
        ({"optim": "sgd", "optim_args": "momentum=much"}, "momentum must be a number, true or false (found 'much')"),
    ],
)
def test_what_an_optimiser_would_not_read_is_refused(given: dict[str, str | float], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        check_optimiser(given)


def test_lars_is_that_of_simclr(tmp_path: Path) -> None:
    given = {"optim": "lars", "learning_rate": 0.3, "weight_decay": 0.1, "optim_args": "momentum=0.5", "use_cpu": True}
    trained, stage = model(), StageRecipe(method="simclr", training=given, encoder_lr_factor=0.01)
    kept = {name: parameter for name, parameter in trained.named_parameters() if parameter.requires_grad}
    weights = {name: parameter.detach().clone() for name, parameter in kept.items()}
    momenta = {name: torch.zeros_like(parameter) for name, parameter in weights.items()}
    arguments = training_arguments(stage, 0, tmp_path)
    built = _optimiser(arguments, stage)
    refuses("simclr: training.adam_beta1: .* ignores it", _optimiser, replace(arguments, adam_beta1=0.5), stage)
    optimiser = built.pop("optimiser")
    step = OptimiserFactory()(trained, optimiser=optimiser, **built)
    for number in range(2):
        for place, (name, parameter) in enumerate(kept.items()):
            parameter.grad = torch.sin(torch.arange(parameter.numel()) + place + number).view_as(parameter)
            gradient, rate = parameter.grad.clone(), 0.3
            if name.startswith("encoder.") and "lora_" not in name:
                rate *= 100 if "prompts" in name else 0.01
            if parameter.ndim > 1 and "prompts" not in name:
                whole = gradient.norm() + 0.1 * weights[name].norm()
                gradient = 0.001 * weights[name].norm() / whole * (gradient + 0.1 * weights[name])
            momenta[name] = 0.5 * momenta[name] + gradient
            weights[name] -= rate * momenta[name]
        step.step()
    for name, parameter in kept.items():
        assert torch.allclose(parameter, weights[name], atol=1e-6), name


@pytest.fixture
def half(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Let accelerate train in fp16 on this CPU, with autocast and a scaler as on a GPU."""
    prepared, original = SimpleNamespace(first_scale=2.0**16, made=[]), Accelerator.__init__

    def init(self: Accelerator, *arguments: Any, **named: Any) -> None:
        original(self, *arguments, **named)
        assert self.mixed_precision == "fp16"
        prepared.made.append(torch.amp.GradScaler("cpu", init_scale=prepared.first_scale))
        self.native_amp, self.scaler = True, prepared.made[-1]

    monkeypatch.setattr(Accelerator, "__init__", init)
    yield prepared
    AcceleratorState._reset_state(reset_partial_state=False)


@pytest.fixture
def raw(folder_of: dict[str, str], old_folder: str, texts_file: str, tmp_path: Path) -> dict[str, Any]:
    training = {"fp16": True, "per_device_train_batch_size": 8, "learning_rate": 1e-3, "logging_steps": 1, "save_steps": 4}
    raw = raw_recipe(tmp_path, old_folder, folder_of["clip"], "")
    return raw | {"method": "projection", "data": {"texts": [{"path": texts_file}]}, "training": training, "evaluation": None}


def logged(folder: Path) -> list[dict[str, float]]:
    return [entry for entry in json.loads((folder / LOG).read_text()) if "loss" in entry]


def test_training_continues_after_steps_that_fp16_skips(raw: dict[str, Any], half: SimpleNamespace, tmp_path: Path) -> None:
    half.first_scale = 2.0**40
    raw["training"]["max_steps"] = 40
    run_recipe(recipe_of(raw))
    assert half.made[0].get_scale() < half.first_scale, "no step was skipped: the test shows nothing"
    losses = [entry["loss"] for entry in logged(tmp_path / "run")]
    assert len(losses) == 40 and losses[-1] < losses[0]
    norms = [entry.get("grad_norm") for entry in logged(tmp_path / "run")]
    assert norms[0] is None and norms[-1] is not None, "a skipped step has no gradient norm"
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("bad", "message"), [("gradient", r"gradient scale fell to 0\.5 at step 17"), ("loss", "the loss is nan at step 1;")]
)
def test_fp16_stops_when_it_cannot_recover(
    raw: dict[str, Any], half: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: str, message: str
) -> None:
    forward = METHODS["projection"].forward

    def overflowing(self: Any, **columns: Any) -> Any:
        output = forward(self, **columns)
        if bad == "loss":
            output.loss = output.loss * float("nan")
        elif bad == "gradient":
            output.loss.register_hook(lambda gradient: gradient * float("inf"))
        return output

    monkeypatch.setattr(METHODS["projection"], "forward", overflowing)
    raw["training"]["max_steps"] = 60
    with pytest.raises(TrainingDivergedError, match=message):
        run_recipe(recipe_of(raw))
    assert (last_complete_checkpoint(tmp_path / "run" / "checkpoints") is not None) == (bad == "gradient")


def test_scales_may_recover_and_infinite_gradients_be_skipped(tmp_path: Path) -> None:
    optimiser, state = SimpleNamespace(step_was_skipped=True), TrainerState(max_steps=1000, save_steps=1000)
    callback, arguments = DivergenceCallback(), TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    for step in range(100):
        optimiser.scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** -(step % 8))
        callback.on_step_end(arguments, state, TrainerControl(), optimizer=optimiser)
    for value in (float("inf"), float("nan")):
        layer, logs = nn.Linear(2, 2), {"loss": 1.0, "grad_norm": value}
        state = TrainerState(log_history=[dict(logs)])
        DivergenceCallback().on_log(arguments, state, TrainerControl(), logs=logs, model=layer)
        assert state.log_history == [{"loss": 1.0}]
        nn.init.constant_(layer.bias, value)
        with pytest.raises(TrainingDivergedError, match="has reached the weights at step 0"):
            DivergenceCallback().on_log(arguments, state, TrainerControl(), logs=logs, model=layer)
