"""What a training cost: parameters, samples and tokens, memory, and hours of the device."""

from __future__ import annotations

import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from xcompat.distributed import is_main_process, sum_over_ranks
from xcompat.files import read_json, write_json
from xcompat.report.content import Cost
from xcompat.training.record import damage_told

FILE = "cost.json"
_COST = TypeAdapter(Cost)
TOKENS, SECONDS, MEMORY = "tokens_seen", "seconds_of_training", "peak_memory"
"""Keys of what is logged."""
_IDS, _MASK = "input_ids", "attention_mask"


class CostCallback(TrainerCallback):
    """Count what a training takes, and leave it in a file.

    Each line that the Trainer logs holds the sums so far, and every checkpoint holds what was logged before it: a training that
    was stopped continues to count. The peak of memory is the first process's.

    Args:
        file: where it goes.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self._begun, self._before = 0.0, dict[str, float]()
        self._tokens = torch.zeros((), dtype=torch.int64)

    def count(self, inputs: dict[str, Tensor]) -> None:
        """Count the tokens of a batch, without padding and without waiting for the device."""
        for name, ids in inputs.items():
            if name.endswith(_IDS):
                mask = inputs.get(name.removesuffix(_IDS) + _MASK)
                here = mask.sum() if mask is not None else torch.tensor(ids.numel())
                self._tokens = self._tokens.to(here.device) + here

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:  # noqa: ANN401
        """Start the clock, from where a checkpoint ends."""
        if args.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self._before = _last(state)
        self._begun = time.perf_counter()

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:  # noqa: ANN401
        """Add the sums so far to what was logged."""
        before, tokens = self._before, int(sum_over_ranks(self._tokens.to(args.device)))
        state.log_history[-1] |= {
            TOKENS: before.get(TOKENS, 0) + tokens,
            SECONDS: round(before.get(SECONDS, 0.0) + time.perf_counter() - self._begun, 3),
            MEMORY: max(before.get(MEMORY, 0), peak_memory(args.device)),
        }

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: torch.nn.Module | None = None,
        **_: Any,  # noqa: ANN401
    ) -> None:
        """Write the file."""
        sums = _last(state)
        if model is None or not sums or not is_main_process():
            return
        parameters = list(model.parameters())
        per_step = args.train_batch_size * args.world_size * args.gradient_accumulation_steps
        cost = Cost(
            trained_parameters=sum(each.numel() for each in parameters if each.requires_grad),
            parameters=sum(each.numel() for each in parameters),
            samples=state.global_step * per_step,
            tokens=int(sums[TOKENS]),
            peak_memory=int(sums[MEMORY]),
            device=torch.cuda.get_device_name() if args.device.type == "cuda" else args.device.type,
            devices=args.world_size,
            device_hours=sums[SECONDS] * args.world_size / 3600,
        )
        write_json(self.file, cost._asdict())


def _last(state: TrainerState) -> dict[str, float]:
    """Return the sums that were logged last; none before the first line."""
    return next((entry for entry in reversed(state.log_history) if SECONDS in entry), {})


def peak_memory(device: torch.device) -> int:
    """Return the most bytes that this process held: on a CUDA device what PyTorch allocated there, else the whole process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def cost_of(folder: Path) -> Cost | None:
    """Return what training a stage cost; None if it was solved, or trained by a version that did not count.

    Args:
        folder: the stage's.

    Raises:
        XcompatError: the file was damaged.
    """
    file = folder / FILE
    if not file.exists():
        return None
    with damage_told(file, "costs"):
        return _COST.validate_python(read_json(file))
