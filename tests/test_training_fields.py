"""Every field of ``TrainingArguments`` changes the training, or is refused by its name: none is accepted and ignored."""

from __future__ import annotations

from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor
from torch.utils.data import default_collate
from transformers import TrainingArguments

from xcompat.core.fingerprint import Fingerprint
from xcompat.methods.projection import ProjectionConfig, ProjectionModel
from xcompat.models.config import describe_old
from xcompat.training.stage_recipe import StageRecipe
from xcompat.training.trainer import StageTrainer, training_arguments
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
    "skip_memory_metrics": False,
    **dict.fromkeys(("run_name", "project", "hub_revision"), "other"),
    **dict.fromkeys(("torch_empty_cache_steps", "logging_steps", "save_steps", "dataloader_prefetch_factor"), 3),
    "ddp_bucket_cap_mb": 3,
    "fp16": False,  # cannot be on without a GPU
    "bf16_full_eval": True,  # frozen models embed in it
    "torch_compile_backend": "eager",
    "torch_compile_mode": "default",
    "activation_checkpointing_kwargs": {"use_reentrant": False},
    "gradient_checkpointing": True,  # the older name of the two above
    "gradient_checkpointing_kwargs": {"use_reentrant": False},
    "logging_strategy": "epoch",
    "log_level": "error",
    "log_level_replica": "error",
    "report_to": ["tensorboard"],
    "trackio_space_id": "user/space",
    "trackio_bucket_id": "user/bucket",
    "trackio_static_space_id": "user/static",
    "save_strategy": "epoch",
    "save_total_limit": 1,
    "hub_token": "hf_token",
    "hub_model_id": "user/name",
    "hub_strategy": "end",
    "full_determinism": False,  # switched on it holds for the whole process
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


@pytest.mark.parametrize("name", CHANGES_WEIGHTS)
def test_a_field_changes_what_is_learned(name: str, tmp_path: Path) -> None:
    value, beside = CHANGES_WEIGHTS[name]
    if repr(beside) not in USUAL:
        USUAL[repr(beside)] = weights(tmp_path, **beside)
    assert not torch.equal(USUAL[repr(beside)], weights(tmp_path, **beside, **{name: value}))


def test_the_same_fields_teach_the_same(tmp_path: Path) -> None:
    assert torch.equal(weights(tmp_path), weights(tmp_path))


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


@pytest.mark.parametrize(("name", "value"), [("lr_scheduler_type", "greedy"), ("save_strategy", "best")])
def test_what_follows_a_metric_is_refused(name: str, value: str) -> None:
    with pytest.raises(ValidationError, match=f"training.{name}: {value} needs a metric of the Trainer"):
        stage(**{name: value})
