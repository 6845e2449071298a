"""Cost of a stage: parameters, samples, tokens, memory and device hours."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from accelerate.utils import find_batch_size
from pydantic import TypeAdapter
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from xcompat.core.distributed import is_main_process, sum_over_ranks, world_size
from xcompat.core.files import read_json, write_json
from xcompat.report.content import Cost
from xcompat.training.checkpoints import STATE, last_complete_checkpoint
from xcompat.training.record import explain_damage

FILE = "cost.json"
_COST = TypeAdapter(Cost)
SAMPLES, TOKENS, SECONDS = "samples_seen", "tokens_seen", "seconds_of_training"
MEMORY, OWN = "peak_memory", "peak_memory_is_of_training"
"""Keys in the log history."""
_IDS, _MASK = "input_ids", "attention_mask"
_STATUS, _FORGET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_LEFT = 1.05  # the kernel counts pages in batches


class PeakMemory:
    """Peak memory since its creation: PyTorch's on CUDA, else the process's.

    Only Linux can reset a process's peak; elsewhere :attr:`is_own` is false.

    Args:
        device: training device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        self.is_own = device.type == "cuda" or _forget_peak()

    def bytes(self) -> int:
        """Return the peak in bytes."""
        if self.device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self.device))
        if self.is_own:
            return _status()["VmHWM"]
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _forget_peak() -> bool:
    """Reset the peak; return whether it worked."""
    try:
        _FORGET.write_text("5")
        now = _status()
        return now["VmHWM"] <= _LEFT * now["VmRSS"]
    except (OSError, KeyError):  # not Linux, or a kernel that keeps the peak
        return False


def _status() -> dict[str, int]:
    """Return the kernel's memory statistics, in bytes."""
    lines = (line.split() for line in _STATUS.read_text(encoding="utf-8").splitlines())
    return {words[0].rstrip(":"): 1024 * int(words[1]) for words in lines if words[-1:] == ["kB"]}


class CostCallback(TrainerCallback):
    """Cost of a training, written to a file.

    Log entries, and so checkpoints, have the sums so far. Peak memory is the first process's.

    Args:
        file: JSON file.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self._begun, self._before = 0.0, dict[str, float]()
        self._samples, self._tokens = 0, torch.zeros((), dtype=torch.int64)
        self._peak: PeakMemory | None = None

    def count(self, inputs: dict[str, Tensor]) -> None:
        """Count samples and unpadded tokens without waiting for the device."""
        self._samples += find_batch_size(inputs) or 0
        for name, ids in inputs.items():
            if name.endswith(_IDS):
                mask = inputs.get(name.removesuffix(_IDS) + _MASK)
                here = mask.sum(dtype=torch.int64) if mask is not None else torch.tensor(ids.numel())
                self._tokens = self._tokens.to(here.device) + here

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Start the clock with the checkpoint's sums."""
        self._before = _last_sums(state.log_history)
        if self._before:  # older checkpoints have steps instead of samples
            self._before = {SAMPLES: state.global_step * _per_step(args), **self._before}
        self._peak = PeakMemory(args.device)
        self._begun = time.perf_counter()

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Add the sums to the last log entry."""
        seen = torch.stack([torch.tensor(self._samples, device=args.device), self._tokens.to(args.device)])
        samples, tokens = sum_over_ranks(seen).tolist()
        before, peak = self._before, self._peak
        assert peak is not None, "training has begun"
        was_own = bool(before.get(OWN, args.device.type == "cuda")) if before else True
        state.log_history[-1] |= {
            SAMPLES: before.get(SAMPLES, 0) + samples,
            TOKENS: before.get(TOKENS, 0) + tokens,
            SECONDS: round(before.get(SECONDS, 0.0) + time.perf_counter() - self._begun, 3),
            MEMORY: max(before.get(MEMORY, 0), peak.bytes()),
            OWN: peak.is_own and was_own,
        }

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: torch.nn.Module | None = None,
        **_: object,
    ) -> None:
        """Write the file."""
        sums = _last_sums(state.log_history)
        if model is None or not sums or not is_main_process():
            return
        parameters = list(model.parameters())
        cost = Cost(
            trained_parameters=sum(each.numel() for each in parameters if each.requires_grad),
            parameters=sum(each.numel() for each in parameters),
            samples=int(sums[SAMPLES]),
            tokens=int(sums[TOKENS]),
            peak_memory=int(sums[MEMORY]),
            device=torch.cuda.get_device_name() if args.device.type == "cuda" else args.device.type,
            devices=args.world_size,
            device_hours=sums[SECONDS] * args.world_size / 3600,
            memory_is_own=bool(sums[OWN]),
        )
        write_json(self.file, cost._asdict())


def _per_step(args: TrainingArguments) -> int:
    return args.train_batch_size * args.world_size * args.gradient_accumulation_steps


def _last_sums(log_history: list[dict[str, float]]) -> dict[str, float]:
    """Return the last logged sums, or an empty dictionary."""
    return next((entry for entry in reversed(log_history) if SECONDS in entry), {})


def seconds_before(checkpoints: Path) -> float:
    """Return the training time before a resume, in seconds.

    Args:
        checkpoints: the Trainer's output folder.
    """
    checkpoint = last_complete_checkpoint(checkpoints)
    return float(_last_sums(read_json(checkpoint / STATE)["log_history"]).get(SECONDS, 0.0)) if checkpoint is not None else 0.0


class SolvingCost:
    """Cost of a stage solved in closed form.

    Args:
        file: JSON file.
    """

    def __init__(self, file: Path) -> None:
        self.file, self.samples = file, 0
        self._begun, self._peak = time.perf_counter(), PeakMemory(torch.device("cpu"))  # solvers run in float64 on the CPU

    def count_rows(self, batches: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches and count their rows."""
        for new_BD, old_Bd in batches:
            self.samples += len(new_BD)
            yield new_BD, old_Bd

    def write(self, model: torch.nn.Module) -> None:
        """Write the file on the first process; every process counts as a device.

        Args:
            model: the solved model.
        """
        solved = sum(each.numel() for each in model.parameters())
        seconds = time.perf_counter() - self._begun
        cost = Cost(
            trained_parameters=solved,
            parameters=solved,
            samples=self.samples,
            tokens=0,
            peak_memory=self._peak.bytes(),
            device="cpu",
            devices=world_size(),
            device_hours=seconds * world_size() / 3600,
            memory_is_own=self._peak.is_own,
        )
        if is_main_process():
            write_json(self.file, cost._asdict())


def cost_of(folder: Path) -> Cost | None:
    """Return the cost of a stage; None if the stage recorded none.

    Args:
        folder: stage folder.

    Raises:
        XcompatError: the file is damaged.
    """
    file = folder / FILE
    if not file.exists():
        return None
    with explain_damage(file, "costs"):
        return _COST.validate_python(read_json(file))
