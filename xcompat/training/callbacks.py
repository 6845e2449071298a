"""Trainer callbacks: progress bar, divergence check, Ctrl-C, log file."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress, TaskID
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from xcompat.core.distributed import is_distributed, mean_over_ranks, sum_over_ranks
from xcompat.core.errors import TrainingDivergedError
from xcompat.core.files import write_json
from xcompat.core.interrupts import Interrupts
from xcompat.core.progress import Waiting, console, describe_rate, literal, progress_bar

MOST_FALLS = 10
"""Training stops after this many falls of fp16's gradient scale, if it is below 1."""


class ProgressCallback(TrainerCallback):
    """Progress line: steps, samples per second, waiting time, loss.

    Args:
        description: name of the training.
    """

    def __init__(self, description: str) -> None:
        self.description = description
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._first_step = 0
        self._waiting = Waiting()

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Show the bar."""
        self._bar = progress_bar()
        self._bar.start()
        self._first_step = state.global_step
        self._task = self._bar.add_task(self.description, total=state.max_steps, completed=state.global_step)
        self._waiting.begin()

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Count waiting time."""
        self._waiting.end()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Exclude checkpoint time."""
        self._waiting.begin()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Advance the bar."""
        assert self._bar is not None and self._task is not None
        elapsed = self._bar.tasks[0].elapsed or 0.0
        per_step = args.train_batch_size * args.world_size * args.gradient_accumulation_steps
        rate = describe_rate((state.global_step - self._first_step) * per_step, elapsed, "samples")
        line = f"{self._loss(state)}{rate}, {self._waiting.share_of(elapsed)}"
        self._bar.update(self._task, completed=state.global_step, rate=line)
        self._waiting.begin()

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Remove the bar and print the losses."""
        self.close()
        losses = [float(entry["loss"]) for entry in state.log_history if "loss" in entry]
        if losses:
            line = f"{self.description}: {state.global_step:,} of {state.max_steps:,} steps, loss {losses[0]:.3f}"
            console.print(literal(f"  {line} at the start, {losses[-1]:.3f} at the end"), style="dim", soft_wrap=True)

    def close(self) -> None:
        """Remove the bar, also after an error."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    @staticmethod
    def _loss(state: TrainerState) -> str:
        last = next((entry["loss"] for entry in reversed(state.log_history) if "loss" in entry), None)
        return f"loss {float(last):.3f}, " if last is not None else ""


class EpochCallback(TrainerCallback):
    """Set the epoch of data set and sampler; with several processes, accelerate skips the data set and resumed epochs.

    Args:
        draws: data set and sampler; those without ``set_epoch`` are ignored.
    """

    def __init__(self, *draws: object) -> None:
        self.draws = draws

    def on_epoch_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Set the epoch, a fraction after a resume."""
        for draw in self.draws:
            if hasattr(draw, "set_epoch"):
                draw.set_epoch(int((state.epoch or 0.0) + 1e-6))


class DivergenceCallback(TrainerCallback):
    """Stop if loss or weights are not finite, or if fp16's gradient scale keeps falling.

    A single infinite gradient norm does not stop training, as fp16's scaler skips that step.
    """

    def __init__(self) -> None:
        self._falls = 0
        self._lowest_scale = math.inf

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        optimizer: Any = None,  # noqa: ANN401 - accelerate's wrapper of an optimiser
        **_: object,
    ) -> None:
        """Log the loss before checkpoints and at the end."""
        if state.global_step >= state.max_steps or (args.save_strategy == "steps" and state.global_step % state.save_steps == 0):
            control.should_log = True
        if getattr(optimizer, "step_was_skipped", False) and getattr(optimizer, "scaler", None) is not None:
            self._check_scale(float(optimizer.scaler.get_scale()), args, state)

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Log the loss before an epoch's checkpoint."""
        if args.save_strategy == "epoch":
            control.should_log = True

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        model: nn.Module | None = None,
        **_: object,
    ) -> None:
        """Raise if loss or weights are not finite."""
        loss, norm = (float((logs or {}).get(key, 0.0)) for key in ("loss", "grad_norm"))
        if not math.isfinite(loss):
            raise self._divergence_error(f"the loss is {loss}", args, state)
        if not math.isfinite(norm):
            if state.log_history:
                state.log_history[-1].pop("grad_norm", None)  # JSON has no infinity, and this step was skipped
            if model is not None and has_bad_weights(model):
                raise self._divergence_error(f"the gradient norm is {norm} and has reached the weights", args, state)

    def _check_scale(self, scale: float, args: TrainingArguments, state: TrainerState) -> None:
        self._falls = self._falls + 1 if scale < self._lowest_scale else 1
        self._lowest_scale = scale
        if self._falls >= MOST_FALLS and scale < 1:
            raise self._divergence_error(
                f"fp16 skipped {self._falls} steps and its gradient scale fell to {scale:g}", args, state
            )

    @staticmethod
    def _divergence_error(reason: str, args: TrainingArguments, state: TrainerState) -> TrainingDivergedError:
        return TrainingDivergedError(
            f"{reason} at step {state.global_step}; the last good checkpoint is kept in {args.output_dir}: check the data and "
            "start again to continue from it, or choose a lower training.learning_rate and another output_dir"
        )


def has_bad_weights(model: nn.Module) -> bool:
    """Return whether a weight is not finite in any process (collective call).

    Args:
        model: sharded or not.
    """
    local = (weight.to_local() if isinstance(weight, DTensor) else weight for weight in model.parameters())
    bad = float(any(not bool(weight.detach().isfinite().all()) for weight in local))
    return bool(sum_over_ranks(torch.tensor(bad, device=next(model.parameters()).device)) > 0)


class HistoryCallback(TrainerCallback):
    """Log history as a file; resumed trainings continue it.

    Args:
        file: JSON file.
    """

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Write the file."""
        if state.is_world_process_zero:
            write_json(self.file, state.log_history)


class InterruptCallback(TrainerCallback):
    """Finish the step, save a checkpoint and stop at Ctrl-C or SIGTERM; a second signal stops immediately."""

    def __init__(self) -> None:
        self.interrupted = False
        self._signals = Interrupts()

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Take over the signals."""
        self._signals.__enter__()

    def _is_stop_requested(self, args: TrainingArguments) -> bool:
        if not is_distributed():
            return self._signals.asked
        return bool(mean_over_ranks(torch.tensor(float(self._signals.asked), device=args.device)) > 0)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Save and stop after a signal, in all processes at the next logged step."""
        if is_distributed() and not control.should_log:
            return  # the exchange waits for the GPU, which logging does anyway
        self.interrupted = self._is_stop_requested(args)
        if self.interrupted:
            control.should_log = control.should_save = control.should_training_stop = True  # log: a resume needs the sums

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Restore the signal handlers."""
        self.release()
        self.interrupted = self._is_stop_requested(args)

    def release(self) -> None:
        """Restore the signal handlers, also after an error."""
        self._signals.__exit__()
