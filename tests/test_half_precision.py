"""Training in fp16 on a CPU, with the gradient scaler that a GPU has."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from transformers import TrainerControl, TrainerState, TrainingArguments

from xcompat.core.errors import TrainingDivergedError
from xcompat.methods import METHODS
from xcompat.training.callbacks import DivergenceCallback
from xcompat.training.checkpoints import last_complete_checkpoint
from xcompat.training.recipe import parse_recipe
from xcompat.training.record import LOG
from xcompat.training.run import run_recipe


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
