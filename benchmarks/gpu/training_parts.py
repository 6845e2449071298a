"""φ from embeddings on the disk, and the pair stage, as a recipe trains them; by itself, the pair stage alone, for a launcher.

accelerate launch --config_file accelerate_configs/fsdp2.yaml --num_processes 1 benchmarks/gpu/training_parts.py OUT.json
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import typer
from setting import FULL, OLD_DIM, SMALL, Figure, Size, build_encoder, operations, peak_since, photos_on_disk, wait_for
from torch.nn import functional as F
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from xcompat import Fingerprint, ProjectionConfig, ProjectionModel, XbtModel
from xcompat.core.distributed import device as device_here
from xcompat.core.distributed import is_main_process
from xcompat.core.files import read_json, write_json
from xcompat.core.progress import silence_libraries
from xcompat.core.threads import usable_cores
from xcompat.data import PairSource
from xcompat.embeddings.cache import CacheInfo, EmbeddingCache
from xcompat.models import CompatModel, describe_old
from xcompat.training.cost import CostCallback
from xcompat.training.sections import DataSettings
from xcompat.training.stage_recipe import StageRecipe
from xcompat.training.trainer import StageTrainer, training_arguments
from xcompat.training.training_sets import Data, embedding_data, pair_data

CONFIGS = Path(__file__).resolve().parents[2] / "accelerate_configs"
TEXTS, PAIRS = (67e6, 1.55), (4e6, 2.84)
"""How many the paper has, and its hours on eight A100 (XBT Table 7)."""
GRACE = 30.0
"""Seconds for a launcher to stop its processes, as many as torchrun gives them."""
MINUTES, LEAST_SHARE = 15, 0.4
SHARD_ROWS, MOST_WORKERS, PREFETCHED = 500_000, 8, 3
DISK, DISK_SHARE = Path("runs/bench"), 4  # temporary folders may lie in memory; of what is free a quarter is taken at most
ALIKE = {"bf16": True, "save_strategy": "no", "lr_scheduler_type": "constant", "learning_rate": 1e-4, "weight_decay": 0.01}


class Clock(TrainerCallback):
    """Time the steps of a training after some, and end it when that took long enough.

    Args:
        warm: steps that are not timed.
        seconds: how long steps are timed at least.
        device: whose work is waited for, once at the beginning and once at the end.
    """

    def __init__(self, warm: int, seconds: float, device: torch.device) -> None:
        self.warm, self.seconds, self.device = warm, seconds, device
        self.steps, self.begun, self.took = 0, 0.0, 0.0

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:  # noqa: ANN401
        """Begin to time, or end the training."""
        self.steps += 1
        if self.steps == self.warm:
            wait_for(self.device)
            if self.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            self.begun = time.perf_counter()
        elif self.steps > self.warm and time.perf_counter() - self.begun >= self.seconds:
            wait_for(self.device)
            self.took = time.perf_counter() - self.begun
            control.should_training_stop = True

    @property
    def rate(self) -> float:
        """Return steps a second."""
        return (self.steps - self.warm) / self.took


def workers(batch_bytes: int) -> int:
    """Return how many processes of a dataloader find room in shared memory for the batches that they make ahead."""
    room = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0  # where torch puts batches
    return max(0, min(MOST_WORKERS, usable_cores() - 1, int(room / (PREFETCHED * max(batch_bytes, 1)))))


def trained(model: CompatModel, data: Data, method: str, training: dict[str, Any], mini_batch: int | None, clock: Clock) -> Clock:
    """Train as a recipe's stage does, until the clock ends it."""
    part = StageRecipe(method=method, mini_batch_size=mini_batch, training=ALIKE | training)
    return train_steps(model, data, part, clock)


def train_steps(model: CompatModel, data: Data, part: StageRecipe, clock: Clock) -> Clock:
    """Train a stage until the clock ends it."""
    with tempfile.TemporaryDirectory() as folder:
        cost = CostCallback(Path(folder) / "cost.json")
        arguments = training_arguments(part, 0, Path(folder) / "checkpoints")
        trainer = StageTrainer(model, arguments, data, part, [clock], cost)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return clock


def counted(model: CompatModel, data: Data, method: str, batch: int, mini_batch: int | None, device: torch.device) -> int:
    """Count the operations of one step."""
    once = {"per_device_train_batch_size": batch, "max_steps": 1}
    return operations(lambda: trained(model, data, method, once, mini_batch, Clock(2, 0, device)))


# ---------------------------------------------------------------------------------------------------------------------- φ


def write_cache(folder: Path, rows: int, dim: int, device: torch.device) -> EmbeddingCache:
    """Write random embeddings as ``xcompat embed`` lays them out."""
    folder.mkdir()
    for shard, start in enumerate(range(0, rows, SHARD_ROWS)):
        embeds_ND = F.normalize(torch.randn(min(SHARD_ROWS, rows - start), dim, device=device), dim=-1)
        np.save(folder / f"shard-{shard:05d}.npy", embeds_ND.half().cpu().numpy())
    made = Fingerprint.from_string(folder.name)
    write_json(folder / "cache.json", asdict(CacheInfo(made.digest, made.name, "random", "texts", rows, dim, SHARD_ROWS)))
    return EmbeddingCache(folder)


def let_go(folder: Path) -> None:
    """Write files to the disk, and ask the system to keep nothing of them in memory, so that training reads the disk."""
    for file in folder.rglob("*.npy"):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def projection(size: Size, device: torch.device) -> Iterator[Figure]:
    """Train φ from caches on the disk, its logits in float32, as in the paper's recipe, and in TF32."""
    dim, batch = size.clip["projection_dim"], size.projected
    DISK.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=DISK) as name:
        folder = Path(name)
        room = shutil.disk_usage(folder).free // DISK_SHARE // (2 * (dim + OLD_DIM))  # of two bytes each
        rows = max(min(size.cached, room), 2 * batch)
        caches = [write_cache(folder / side, rows, each, device) for side, each in (("new", dim), ("old", OLD_DIM))]
        data = embedding_data(*caches, {})
        old = describe_old(Fingerprint.from_string("old"), dim=OLD_DIM)
        model = ProjectionModel(ProjectionConfig(old=old, embedding_dim=dim))
        step_flops = counted(model, data, "projection", batch, None, device)
        processes = workers(batch * 4 * (dim + OLD_DIM)) if size is FULL else 0
        given = {"per_device_train_batch_size": batch, "dataloader_num_workers": processes, "max_steps": 10**6}
        for precision in ("ieee", "tf32"):
            let_go(folder)
            given["tf32"] = None if precision == "tf32" else False  # None: TF32 on a card that has it
            clock = trained(model, data, "projection", given, None, Clock(size.warm, size.seconds, device))
            rate, (texts, hours) = clock.rate * batch, TEXTS
            minutes = texts / rate / 60
            note = (
                f"{texts / 1e6:.0f} M texts in {minutes:,.1f} minutes at this rate, which is of {rows:,} texts on the disk "
                f"({sum(cache.shape[1] for cache in caches) * 2 * rows / 2**30:.1f} GiB), {processes} dataloader workers; "
                f"paper {hours} h on 8 A100"
            )
            asked = f"{texts / 1e6:.0f} M texts in < {MINUTES} minutes" if precision == "ieee" else ""
            met = minutes < MINUTES if asked else None
            what = f"φ from a cache, batches of {batch:,}, logits in {'float32' if precision == 'ieee' else 'TF32'}"
            yield Figure(what, rate, clock.rate * step_flops, peak_since(device), asked, met, note)


# ------------------------------------------------------------------------------------------------------------- pair stage


def pair_model(size: Size) -> XbtModel:
    """Build the new model with LoRA, prompts and φ, as in the paper's recipe."""
    adapters = {"lora": {"rank": 16, "alpha": 16, "dropout": 0.1, "targets": ["q_proj", "v_proj"]}, "prompts": 10}
    old = describe_old(Fingerprint.from_string("old"), dim=OLD_DIM)
    return XbtModel.from_encoder(build_encoder(size), old=old, adapters=adapters)


def pair_rate(size: Size, device: torch.device, folder: Path, count: bool) -> dict[str, Any]:
    """Train the pair stage on JPEG files with captions, read by the workers of a dataloader.

    Args:
        size: of everything.
        device: where.
        folder: for the photos.
        count: whether operations are counted, for which a step is run twice more.

    Returns:
        ``rate`` in pairs a second, ``memory``, ``workers``, and where counted ``step``, the operations of a step, and ``plain``,
        those that it would take if every pair were embedded once.
    """
    model, (height, width) = pair_model(size), size.edges
    pairs = photos_on_disk(folder, 64 * size.pairs, captions=True)
    source = PairSource(path=str(folder / "photos.tar"))
    settings = DataSettings(pairs=source, augmentation={"min_scale": 0.5, "horizontal_flip": 0.5})
    data = pair_data(settings, pairs, model.processor, 0, None, model.views)
    found: dict[str, Any] = {}
    if count:
        found["step"] = counted(model, data, "xbt", size.pairs, size.mini_batch, device)
        found["plain"] = counted(model, data, "xbt", size.mini_batch, None, device) / size.mini_batch * size.pairs
    processes = workers(size.pairs * 3 * height * width * 4) if size is FULL else 0
    given = {"per_device_train_batch_size": size.pairs, "dataloader_num_workers": processes, "max_steps": 10**6}
    clock = trained(model, data, "xbt", given, size.mini_batch, Clock(size.warm, size.seconds, device))
    return found | {"rate": clock.rate * size.pairs, "memory": peak_since(device), "workers": processes}


def pair_stage(size: Size, device: torch.device, peak: Figure) -> Figure:
    """Train steps of the pair stage, the batch in parts, against the matrix product."""
    with tempfile.TemporaryDirectory() as folder:
        found = pair_rate(size, device, Path(folder), count=True)
    assert peak.flops is not None
    steps, (pairs, hours) = found["rate"] / size.pairs, PAIRS
    share, useful = (steps * found[name] / peak.flops for name in ("step", "plain"))
    note = (
        f"{useful:.0%} without what embedding each pair twice takes; from JPEG files, {found['workers']} dataloader workers; "
        f"{pairs / 1e6:.0f} M pairs in {pairs / found['rate'] / 3600:.2f} h at this rate, paper {hours} h on 8 A100"
    )
    what = f"pair stage, {size.pairs:,} pairs in parts of {size.mini_batch}"
    asked = f">= {LEAST_SHARE:.0%} of the product"
    return Figure(what, found["rate"], steps * found["step"], found["memory"], asked, share >= LEAST_SHARE, note)


def launch_command(size: Size, device: torch.device, out: Path) -> list[str]:
    """Return what starts the pair stage under FSDP2 in one process; on a CPU, which accelerate does not shard on, without."""
    config = CONFIGS / ("fsdp2.yaml" if device.type == "cuda" else "cpu.yaml")
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config), "--num_processes", "1"]
    return [*launcher, __file__, str(out), *(["--tiny"] if size is SMALL else [])]


def run_within(command: list[str], seconds: float) -> subprocess.CompletedProcess[str] | None:
    """Run a launcher; return None if it takes too long. Then it is asked to end, as only it can stop the processes it started."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            output = process.communicate(timeout=max(seconds, 1))
        except subprocess.TimeoutExpired:
            process.terminate()
            try:
                process.communicate(timeout=GRACE)
            except subprocess.TimeoutExpired:
                process.kill()
            return None
    return subprocess.CompletedProcess(command, process.returncode, *output)


def sharded(size: Size, device: torch.device, plain: Figure | None, seconds: float) -> Figure:
    """Train steps of the pair stage under FSDP2, in a process of its own, against the same without.

    Args:
        size: of everything.
        device: where.
        plain: what the pair stage reached without; None where it failed.
        seconds: after which the process is stopped.
    """
    what = f"pair stage, {size.pairs:,} pairs in parts of {size.mini_batch}, FSDP2 on one GPU"
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "pair_stage.json"
        done = run_within(launch_command(size, device, out), seconds)
        if done is None:
            return Figure(what, note=f"not run to its end: it was stopped after {seconds:.0f} s")
        if done.returncode or not out.exists():
            said = [line for line in done.stderr.splitlines() if "Error" in line] or done.stderr.splitlines() or ["no word"]
            return Figure(what, note=f"FAILED: {said[0].strip()}")
        found = read_json(out)
    note = f"{found['how']}, {found['workers']} dataloader workers"
    if plain is not None and plain.rate:
        note = f"{found['rate'] / plain.rate:.0%} of the rate without; {note}"
    return Figure(what, found["rate"], None, found["memory"], note=note)


def main(out: Path, tiny: bool = False) -> None:
    """Train steps of the pair stage as the launcher says, and write what they reached."""
    silence_libraries()
    with tempfile.TemporaryDirectory() as folder:
        found = pair_rate(SMALL if tiny else FULL, device_here(), Path(folder), count=False)
    how = "FSDP2" if os.environ.get("ACCELERATE_USE_FSDP") == "true" else "no GPU, so without FSDP2"
    if is_main_process():
        write_json(out, found | {"how": how})


if __name__ == "__main__":
    typer.run(main)
