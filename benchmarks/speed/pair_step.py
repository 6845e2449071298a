"""Time of a step of XBT's pair stage: this project's training against a hand-written loop with the same model, data and autocast.

    python benchmarks/speed/pair_step.py [--rounds 9]

A small CLIP with LoRA and prompts in bfloat16, batches of 32 from memory: whatever a step costs beside the model's own
computation is a larger share of it than it would be of a large model's. Both sides clip gradients and use the same AdamW.
The time is taken from one forward to the next, the first steps left out. Many short rounds: what the two sides differ by is less
than what a shared machine's speed changes by within a minute.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from measuring import Row, interleaved, main, timed
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from xcompat import Fingerprint, XbtModel
from xcompat.core.progress import console as progress
from xcompat.core.progress import silence_libraries
from xcompat.encoders.scratch import ScratchSource, encoder_from_scratch
from xcompat.models import CompatModel, describe_old
from xcompat.training.optimiser import OptimiserFactory
from xcompat.training.stage_recipe import StageRecipe
from xcompat.training.trainer import train
from xcompat.training.training_sets import Data

BATCH, STEPS, WARM, PAIRS = 32, 15, 4, 512
RATE = 1e-4
TOWER = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 4}
CLIP = {
    "model_type": "clip",
    "projection_dim": 128,
    "text_config": TOWER | {"max_position_embeddings": 16},
    "vision_config": TOWER | {"image_size": 64, "patch_size": 8},
}
SHORT_ROUNDS = 9
ALLOWED = 1.08


class Pairs(Dataset[dict[str, Tensor]]):
    """Rows of columns in memory.

    Args:
        columns: of equal length.
    """

    def __init__(self, columns: dict[str, Tensor]) -> None:
        self.columns = columns

    def __len__(self) -> int:
        """Return the number of pairs."""
        return PAIRS

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        """Return one pair."""
        return {name: column[row] for name, column in self.columns.items()}


def build() -> tuple[XbtModel, Pairs]:
    """Return the model and its data."""
    texts = [f"image {number} of {PAIRS}" for number in range(PAIRS)]
    encoder = encoder_from_scratch(ScratchSource(model=CLIP, vocab_size=512), texts)
    adapters = {"lora": {"rank": 16, "dropout": 0.1, "targets": ["q_proj", "v_proj"]}, "prompts": 10}
    torch.manual_seed(0)
    model = XbtModel.from_encoder(encoder, old=describe_old(Fingerprint.from_string("old"), dim=64), adapters=adapters)
    return model, Pairs({"pixel_values": torch.randn(PAIRS, 3, 64, 64), **model.processor.texts(texts)})


def by_hand(model: CompatModel, dataset: Any) -> None:  # noqa: ANN401 - any with rows
    """Train with a plain hand-written loop."""
    model.train()
    optimiser = OptimiserFactory()(
        model,
        optimiser=torch.optim.AdamW,
        decayed="matrices",
        lr=RATE,
        prompt_lr_factor=100.0,
        encoder_lr_factor=1.0,
        weight_decay=0.0,
    )
    loader = cycle(DataLoader(dataset, BATCH, shuffle=True, drop_last=True, collate_fn=default_collate))
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for _ in range(STEPS):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**next(loader)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimiser.step()
        optimiser.zero_grad()


def by_recipe(model: CompatModel, dataset: Any) -> None:  # noqa: ANN401 - any with rows
    """Train as a recipe does."""
    settings = {"per_device_train_batch_size": BATCH, "max_steps": STEPS, "learning_rate": RATE, "bf16": True}
    part = StageRecipe(method="xbt", training=settings | {"lr_scheduler_type": "constant"})
    with tempfile.TemporaryDirectory() as folder:
        train(model, Data(dataset, default_collate), part, 0, Path(folder))


def step_time(side: Callable[[CompatModel, Any], None]) -> float:
    """Return mean seconds from one forward to the next."""
    model, dataset = build()
    begun: list[float] = []
    embed_images = model.embed_images

    def embed_and_note(pixel_values: Tensor) -> Tensor:
        begun.append(time.perf_counter())
        return embed_images(pixel_values)

    model.embed_images = embed_and_note  # type: ignore[method-assign]  # it begins a forward, however the model is wrapped
    side(model, dataset)
    return (begun[-1] - begun[WARM]) / (len(begun) - 1 - WARM)


def measure(rounds: int = SHORT_ROUNDS) -> list[Row]:
    """Measure both sides in turn."""
    progress.quiet = True
    silence_libraries()
    took = interleaved({"ours": lambda: step_time(by_recipe), "theirs": lambda: step_time(by_hand)}, rounds)
    return [timed(f"step of the pair stage, {BATCH} pairs", "a hand-written loop", f"<= {ALLOWED}", took["ours"], took["theirs"])]


if __name__ == "__main__":
    main(measure)
