"""Training images per second with frozen models inside the training step (`old_embeddings: online`), by dataloader workers.

    python benchmarks/speed/online_workers.py [--steps 24] [--edge 128] [--batch 16] [--threads 1] [--rounds 5]

BT² trains a MobileNet V1 x0.25 with random weights. The old and the independent model, of the same size, embed the augmented view
of each image in the training step. Photos are JPEG files of 500 by 375 pixels.

The models use `--threads` cores, so that the workers have others. Two parts are measured alone: decoding by as many workers, and
training steps on a batch in memory. Without workers, the limit is one after the other. With workers, it is the slower of both.
"""

from __future__ import annotations

import io
import tempfile
import time
from functools import partial
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from measuring import ROUNDS, Row, interleaved, main
from PIL import Image
from torch.utils.data import Dataset
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from xcompat.core.progress import console as progress
from xcompat.core.progress import silence_libraries
from xcompat.core.threads import usable_cores
from xcompat.encoders.scratch import ScratchSource, encoder_from_scratch
from xcompat.methods.bt2 import Bt2Model
from xcompat.models import describe_old
from xcompat.models.embedder import Embedder
from xcompat.training.notebook import CompatTrainer

WORKERS = (0, 2, 8)
PHOTOS, SIZE, CLASSES = 64, (500, 375), ("cat", "dog", "fox", "owl")
AUGMENTATION = {"min_scale": 0.5, "horizontal_flip": 0.5}
LIMITS = ("decoding alone, then the models alone", "the slower of decoding alone and the models alone")


class Clock(TrainerCallback):
    """Seconds from the end of one step to the end of the last.

    Args:
        warm: steps before, during which workers start.
    """

    def __init__(self, warm: int) -> None:
        self.warm, self.begun, self.seconds = warm, 0.0, 0.0

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:  # noqa: ANN401
        """Read the clock."""
        if state.global_step == self.warm:
            self.begun = time.perf_counter()
        self.seconds = time.perf_counter() - self.begun


class Repeated(Dataset[dict[str, Any]]):
    """A single batch in memory, as often as it is read.

    Args:
        batch: of the collator.
        count: how often.
    """

    def __init__(self, batch: dict[str, Any], count: int) -> None:
        self.batch, self.count = batch, count

    def __len__(self) -> int:
        """Return how often it is read."""
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return the batch."""
        return dict(self.batch)


class Online:
    """A training with a frozen old and a frozen independent model in its step.

    Args:
        folder: for caches and checkpoints.
        edge: image size in pixels.
        batch: images in a batch.
        steps: timed steps.
    """

    def __init__(self, folder: Path, edge: int, batch: int, steps: int) -> None:
        self.folder, self.batch, self.steps = folder, batch, steps
        longest = steps + self.warm(max(WORKERS)) + 2 * max(WORKERS)  # workers read ahead of the last step
        self.photos = write_photos().select(np.arange(longest * batch) % PHOTOS)
        self.source = ScratchSource(model={"model_type": "mobilenet_v1", "depth_multiplier": 0.25}, image_size=edge)
        self.old, self.independent = (self.frozen(seed) for seed in (1, 2))

    @staticmethod
    def warm(workers: int) -> int:
        """Return how many steps use up the batches that workers make ahead."""
        return 2 * workers + 2

    def frozen(self, seed: int) -> Embedder:
        """Build a frozen model."""
        encoder, processor = encoder_from_scratch(self.source, seed=seed)
        encoder = encoder.requires_grad_(False).eval()
        return Embedder(encoder, processor, encoder.fingerprint(processor), encoder.embedding_dim)

    def trainer(self, workers: int, batch: int, callbacks: tuple[TrainerCallback, ...] = ()) -> CompatTrainer:
        """Build the new model and its training."""
        old = describe_old(self.old.fingerprint, dim=self.old.dim)
        model = Bt2Model.from_encoder(encoder_from_scratch(self.source), old=old, classes=list(CLASSES), dim=self.independent.dim)
        arguments = TrainingArguments(
            output_dir=str(self.folder / "checkpoints"),
            per_device_train_batch_size=batch,
            max_steps=self.warm(workers) + self.steps,
            dataloader_num_workers=workers,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        data = {"augmentation": AUGMENTATION, "old_embeddings": "online", "new_embeddings": "online"}
        models: dict[str, Any] = {"old": self.old, "independent": self.independent}
        trainer = CompatTrainer(
            model, arguments, self.photos, **models, cache_dir=self.folder / "cache", callbacks=callbacks, data=data
        )
        trainer.remove_callback(PrinterCallback)
        return trainer

    def rate(self, workers: int) -> float:
        """Return images a second of training."""
        clock = Clock(self.warm(workers))
        self.trainer(workers, self.batch, (clock,)).train()
        return self.steps * self.batch / clock.seconds

    def decoding_rate(self, workers: int) -> float:
        """Return images a second of reading, decoding and augmenting."""
        batches = iter(self.trainer(workers, self.batch).get_train_dataloader())
        list(islice(batches, self.warm(workers)))
        started = time.perf_counter()
        count = len(list(islice(batches, self.steps)))
        return count * self.batch / (time.perf_counter() - started)

    def model_rate(self) -> float:
        """Return images a second of training on a batch in memory."""
        ready = next(iter(self.trainer(0, self.batch).get_train_dataloader()))
        clock = Clock(self.warm(0))
        trainer = self.trainer(0, 1, (clock,))  # an item is a batch
        trainer.train_dataset, trainer.data_collator = Repeated(ready, self.warm(0) + self.steps), itemgetter(0)
        trainer.train()
        return self.steps * self.batch / clock.seconds


def write_photos() -> datasets.Dataset:
    """Return JPEG images with classes."""
    generator, rows = np.random.default_rng(0), []
    for number in range(PHOTOS):
        coarse = Image.fromarray(generator.integers(0, 255, (24, 32, 3), dtype=np.uint8))
        coarse.resize(SIZE, Image.Resampling.BICUBIC).save(buffer := io.BytesIO(), "JPEG", quality=85)
        rows.append({"image": {"bytes": buffer.getvalue(), "path": None}, "label": CLASSES[number % len(CLASSES)]})
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("string")})
    return datasets.Dataset.from_list(rows, features)


def measure(steps: int = 24, edge: int = 128, batch: int = 16, threads: int = 1, rounds: int = ROUNDS) -> list[Row]:
    """Measure each number of workers, and both parts alone."""
    progress.quiet = True
    silence_libraries()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with tempfile.TemporaryDirectory() as folder:
            online = Online(Path(folder), edge, batch, steps)
            sides = {f"trained, {workers}": partial(online.rate, workers) for workers in WORKERS}
            sides |= {f"decoded, {workers}": partial(online.decoding_rate, workers) for workers in WORKERS}
            rates = interleaved({**sides, "models": online.model_rate}, rounds)
    finally:
        torch.set_num_threads(before)
    return [row_of(workers, rates) for workers in WORKERS]


def row_of(workers: int, rates: dict[str, float]) -> Row:
    """Compare the rate of training with its limit."""
    trained, decoded, models = rates[f"trained, {workers}"], rates[f"decoded, {workers}"], rates["models"]
    limit = min(decoded, models) if workers else 1 / (1 / decoded + 1 / models)
    detail = f"{trained:.0f} images/s; decoding alone {decoded:.0f}, models alone {models:.0f}"
    what = f"training with frozen models in the step, {workers} workers, {usable_cores()} cores"
    return Row(what, LIMITS[bool(workers)], trained / limit, "", detail)


if __name__ == "__main__":
    main(measure)
