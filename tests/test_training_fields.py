"""Settings of a training: every field matters or is refused, rates and optimisers of parameters, and fp16 on a CPU."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from pydantic import ValidationError
from torch import Tensor, nn
from torch.utils.data import default_collate
from transformers import Adafactor, TrainerControl, TrainerState, TrainingArguments
from transformers.training_args import OptimizerNames

from xcompat import XcompatError
from xcompat.core.errors import TrainingDivergedError
from xcompat.core.fingerprint import Fingerprint
from xcompat.methods import METHODS
from xcompat.methods.projection import ProjectionConfig, ProjectionModel
from xcompat.models.config import describe_old
from xcompat.training.callbacks import DivergenceCallback
from xcompat.training.checkpoints import last_complete_checkpoint
from xcompat.training.optimiser import OPTIMISERS, OptimiserFactory, check_optimiser, class_of, in_transformers, with_momentum
from xcompat.training.recipe import parse_recipe
from xcompat.training.record import LOG
from xcompat.training.run import run_recipe
from xcompat.training.stage_recipe import StageRecipe
from xcompat.training.trainer import StageTrainer, _optimiser, training_arguments
from xcompat.training.training_sets import Data
from xcompat.training.values import REFUSED

NAMED_BY_THE_RECIPE = {"output_dir", "seed", "data_seed"}
CHANGES_WEIGHTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "per_device_train_batch_size": (4, {}),
    "num_train_epochs": (2, {}),
    "max_steps": (3, {}),
    "learning_rate": (3e-4, {}),
    "lr_scheduler_type": ("constant", {}),
    "lr_scheduler_kwargs": ({"num_cycles": 2.0}, {"lr_scheduler_type": "cosine"}),
    "warmup_steps": (2, {}),
    "optim": ("sgd", {}),
    "optim_args": ("momentum=0.9,nesterov=true", {"optim": "sgd"}),
    "weight_decay": (0.5, {}),
    "adam_beta1": (0.5, {}),
    "adam_beta2": (0.5, {}),
    "adam_epsilon": (0.1, {}),
    "gradient_accumulation_steps": (2, {}),
    "max_grad_norm": (1e-3, {"optim": "sgd"}),
    "dataloader_drop_last": (False, {}),
    "bf16": (True, {}),
}
"""A value of each that must lead to other weights than the default does, and what must be set beside it."""
TOLD_TO_THE_TRAINER: dict[str, Any] = {
    **dict.fromkeys(("fp16_full_eval", "torch_compile", "activation_checkpointing", "logging_first_step"), True),
    **dict.fromkeys(("save_on_each_node", "enable_jit_checkpoint", "push_to_hub", "hub_private_repo", "hub_always_push"), True),
    **dict.fromkeys(("ignore_data_skip", "restore_callback_states_from_checkpoint", "use_cpu"), True),
    **dict.fromkeys(("dataloader_persistent_workers", "ddp_find_unused_parameters", "ddp_static_graph"), True),
    **dict.fromkeys(("tf32", "log_on_each_node", "dataloader_pin_memory", "dataloader_in_order", "ddp_broadcast_buffers"), False),
    **dict.fromkeys(("skip_memory_metrics", "fp16", "full_determinism"), False),  # two of them hold for the whole process
    **dict.fromkeys(("run_name", "project", "hub_revision"), "other"),
    **dict.fromkeys(
        ("torch_empty_cache_steps", "logging_steps", "save_steps", "dataloader_prefetch_factor", "ddp_bucket_cap_mb"), 3
    ),
    "bf16_full_eval": True,  # frozen models embed in it
    "torch_compile_backend": "eager",
    "torch_compile_mode": "default",
    "activation_checkpointing_kwargs": {"use_reentrant": False},
    "gradient_checkpointing": True,  # the older name of the two above
    "gradient_checkpointing_kwargs": {"use_reentrant": False},
    **dict.fromkeys(("logging_strategy", "save_strategy"), "epoch"),
    **dict.fromkeys(("log_level", "log_level_replica"), "error"),
    "report_to": ["tensorboard"],
    "trackio_space_id": "user/space",
    "trackio_bucket_id": "user/bucket",
    "trackio_static_space_id": "user/static",
    "save_total_limit": 1,
    "hub_token": "hf_token",
    "hub_model_id": "user/name",
    "hub_strategy": "end",
    "dataloader_num_workers": 1,
    "dataloader_multiprocessing_context": "spawn",
    "fsdp": "full_shard",
    "fsdp_config": {"min_num_params": 3},
    "debug": "underflow_overflow",  # becomes a list
}
"""What the stock Trainer does by itself, without a change of weights: it must hear of it."""
UNCOPIED = {"gradient_checkpointing", "gradient_checkpointing_kwargs", "fsdp", "fsdp_config", "debug"}
"""Fields that transformers rewrites when it reads them, which have a test of their own."""


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
"""Weights without a field, by what is set beside it."""


def test_every_field_is_honoured_or_refused() -> None:
    sorted_out = [NAMED_BY_THE_RECIPE, set(CHANGES_WEIGHTS), set(TOLD_TO_THE_TRAINER), set(REFUSED)]
    assert set.union(*sorted_out) == {field.name for field in fields(TrainingArguments)}
    assert sum(map(len, sorted_out)) == len(set.union(*sorted_out)), "none stands twice"
    for name, value in {"lr_scheduler_type": "greedy", "save_strategy": "best"}.items():
        with pytest.raises(ValidationError, match=f"training.{name}: {value} needs a metric of the Trainer"):
            stage(**{name: value})


@pytest.mark.parametrize("name", CHANGES_WEIGHTS)
def test_a_field_changes_what_is_learned(name: str, tmp_path: Path) -> None:
    value, beside = CHANGES_WEIGHTS[name]
    if repr(beside) not in USUAL:
        USUAL[repr(beside)] = weights(tmp_path, **beside)
        assert torch.equal(USUAL[repr(beside)], weights(tmp_path, **beside)), "the same fields teach the same"
    assert not torch.equal(USUAL[repr(beside)], weights(tmp_path, **beside, **{name: value}))


@pytest.mark.parametrize("name", sorted(set(TOLD_TO_THE_TRAINER) - UNCOPIED))
def test_a_field_reaches_the_trainer(name: str, tmp_path: Path) -> None:
    value = TOLD_TO_THE_TRAINER[name]
    given = {"dataloader_num_workers": 1} if name.startswith("dataloader_") else {}
    assert getattr(training_arguments(stage(**{**given, name: value}), 0, tmp_path), name) == value


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing")
def test_a_field_that_is_rewritten_reaches_the_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")  # transformers sets it for the whole process
    given = {name: TOLD_TO_THE_TRAINER[name] for name in UNCOPIED}
    told = training_arguments(stage(**given), 0, tmp_path)
    assert told.activation_checkpointing and told.activation_checkpointing_kwargs == {"use_reentrant": False}
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


class Wrapped(nn.Module):
    """A model inside a wrapper's attribute, as DDP and torch.compile put it there."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


def model() -> nn.Module:
    """Return a model with one parameter of every kind, frozen ones too."""
    layer = Wrapped(base_layer=nn.Linear(2, 2, bias=False), lora_A=nn.Linear(2, 1, bias=False))
    encoder = Wrapped(model=Wrapped(layer=layer, norm=nn.LayerNorm(2)))
    encoder.prompts = Wrapped()
    encoder.prompts.tokens = nn.Parameter(torch.zeros(3, 2))
    frozen = nn.Linear(2, 2).requires_grad_(False)
    return Wrapped(encoder=encoder, neck=nn.Linear(2, 2), autoencoder=Wrapped(encoder=nn.Linear(2, 2, bias=False)), old=frozen)


RATES = {"lr": 1.0, "prompt_lr_factor": 100, "encoder_lr_factor": 0.01, "weight_decay": 0.1}


@pytest.mark.parametrize("wrappers", [[], ["module"], ["_orig_mod"], ["module", "_orig_mod"]])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, Adafactor])
def test_every_kind_of_parameter_has_its_rate_and_decay(wrappers: list[str], kind: type[torch.optim.Optimizer]) -> None:
    trained = model()
    names = {id(parameter): name for name, parameter in trained.named_parameters()}
    for wrapper in reversed(wrappers):
        trained = Wrapped(**{wrapper: trained})
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
        ({"optim": "lamb"}, "unsupported optimiser 'lamb'"),
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
    with pytest.raises(XcompatError, match="simclr: training.adam_beta1: .* ignores it"):
        _optimiser(replace(arguments, adam_beta1=0.5), stage)
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


class HalfPrecision:
    """The scalers that accelerate was given, with the scale that each begins with."""

    def __init__(self) -> None:
        self.first_scale = 2.0**16
        self.made: list[torch.amp.GradScaler] = []

    def prepare(self, accelerator: Accelerator) -> None:
        """Give fp16 on a CPU what accelerate gives a GPU: autocast and a scaler."""
        self.made.append(torch.amp.GradScaler("cpu", init_scale=self.first_scale))
        accelerator.native_amp, accelerator.scaler = True, self.made[-1]


@pytest.fixture
def half(monkeypatch: pytest.MonkeyPatch) -> Iterator[HalfPrecision]:
    """Let accelerate train in fp16 on this CPU."""
    prepared, original = HalfPrecision(), Accelerator.__init__

    def init(self: Accelerator, *arguments: Any, **named: Any) -> None:
        original(self, *arguments, **named)
        assert self.mixed_precision == "fp16"
        prepared.prepare(self)

    monkeypatch.setattr(Accelerator, "__init__", init)
    yield prepared
    AcceleratorState._reset_state(reset_partial_state=False)


@pytest.fixture
def raw(folder_of: dict[str, str], old_folder: str, texts_file: str, tmp_path: Path) -> dict[str, Any]:
    training = {"fp16": True, "per_device_train_batch_size": 8, "learning_rate": 1e-3, "logging_steps": 1, "save_steps": 4}
    folders = {"output_dir": str(tmp_path / "run"), "cache_dir": str(tmp_path / "cache")}
    models = {"method": "projection", "old": old_folder, "new": folder_of["clip"]}
    return {**folders, **models, "data": {"texts": [{"path": texts_file}]}, "training": training, "evaluation": None}


def logged(folder: Path) -> list[dict[str, float]]:
    return [entry for entry in json.loads((folder / LOG).read_text()) if "loss" in entry]


def test_training_continues_after_steps_that_fp16_skips(raw: dict[str, Any], half: HalfPrecision, tmp_path: Path) -> None:
    half.first_scale = 2.0**40
    raw["training"]["max_steps"] = 40
    run_recipe(parse_recipe(raw, "half", "half.yaml"))
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
    raw: dict[str, Any], half: HalfPrecision, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: str, message: str
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
        run_recipe(parse_recipe(raw, "half", "half.yaml"))
    assert (last_complete_checkpoint(tmp_path / "run" / "checkpoints") is not None) == (bad == "gradient")


def test_scale_may_fall_and_grow_again(tmp_path: Path) -> None:
    class Optimiser:
        step_was_skipped = True
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)

    callback, state = DivergenceCallback(), TrainerState(max_steps=1000, save_steps=1000)
    arguments, optimiser = TrainingArguments(output_dir=str(tmp_path), use_cpu=True), Optimiser()
    for step in range(100):
        optimiser.scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** -(step % 8))
        callback.on_step_end(arguments, state, TrainerControl(), optimizer=optimiser)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_infinite_gradient_stops_only_if_it_reached_the_weights(value: float, tmp_path: Path) -> None:
    arguments, layer = TrainingArguments(output_dir=str(tmp_path), use_cpu=True), torch.nn.Linear(2, 2)
    logs = {"loss": 1.0, "grad_norm": value}
    state = TrainerState(log_history=[dict(logs)])
    DivergenceCallback().on_log(arguments, state, TrainerControl(), logs=logs, model=layer)
    assert state.log_history == [{"loss": 1.0}]
    torch.nn.init.constant_(layer.bias, value)
    with pytest.raises(TrainingDivergedError, match="has reached the weights at step 0"):
        DivergenceCallback().on_log(arguments, state, TrainerControl(), logs=logs, model=layer)
