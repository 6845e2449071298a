"""Memory of XBT's pair stage over the batch size: whole batches against mini-batches of 64, with and without checkpointing.

    python benchmarks/pair_memory.py

A CLIP of two towers of 4 layers, 128 wide, on images of 32 pixels, with LoRA and prompts. Counted are the bytes that autograd
holds for backward, at their most: every storage once, without weights and the batch itself. Of a checkpointed block that is its
input; what backward computes again inside one block is not counted. Gradients are compared with those of the whole batch.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from accelerate import Accelerator
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from xcompat import Fingerprint, XbtModel
from xcompat.encoders.scratch import ScratchSource, encoder_from_scratch
from xcompat.models import describe_old
from xcompat.training.cached_gradients import backward_in_parts
from xcompat.training.provenance import provenance

BATCHES = (64, 128, 256, 512, 1024)
MINI_BATCH = 64
TOWER = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
CLIP = {
    "model_type": "clip",
    "projection_dim": 128,
    "text_config": TOWER | {"max_position_embeddings": 16},
    "vision_config": TOWER | {"image_size": 32, "patch_size": 8},
}
WORDS = ["red", "blue", "old", "new", "shoe", "dog", "house", "tree"]
ALLOWED_SHARE, ALLOWED_DIFFERENCE = 0.25, 1e-5


class Row(NamedTuple):
    """One line of the table: bytes that backward needs, and how far the gradients of mini-batches are from those of the whole."""

    batch: int
    checkpointed: bool
    whole: int
    parts: int
    difference: float


class Held:
    """A tensor that a graph holds."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Meter:
    """Counts what graphs hold.

    Args:
        outside: tensors that are there without any graph.
    """

    def __init__(self, outside: list[Tensor]) -> None:
        self.outside = {tensor.untyped_storage().data_ptr() for tensor in outside}
        self.holders: Counter[int] = Counter()
        self.now = self.peak = 0

    def pack(self, tensor: Tensor) -> Held:
        """Count a tensor that is kept for backward."""
        held, storage = Held(tensor.detach()), tensor.untyped_storage()
        place, size = storage.data_ptr(), storage.nbytes()
        if place not in self.outside:
            self.now += size if not self.holders[place] else 0
            self.holders[place] += 1
            self.peak = max(self.peak, self.now)
            weakref.finalize(held, self.free, place, size)
        return held

    def free(self, place: int, size: int) -> None:
        """Count it out again."""
        self.holders[place] -= 1
        self.now -= size if not self.holders[place] else 0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count inside the block."""
        with saved_tensors_hooks(self.pack, lambda held: held.tensor):
            yield


def build() -> tuple[XbtModel, dict[str, Tensor]]:
    """Return the model in training mode and its largest batch."""
    largest = max(BATCHES)
    texts = [" ".join(WORDS[(row >> 3 * place) % 8] for place in range(4)) for row in range(largest)]
    encoder = encoder_from_scratch(ScratchSource(model=CLIP, vocab_size=512), texts)
    adapters = {"lora": {"rank": 16, "dropout": 0.0, "targets": ["q_proj", "v_proj"]}, "prompts": 10}
    torch.manual_seed(0)
    old = describe_old(Fingerprint.from_string("old"), dim=64)
    model = XbtModel.from_encoder(encoder, old=old, adapters=adapters).train()
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.add_(0.02 * torch.randn_like(parameter))  # LoRA begins where half of its gradient is zero
    return model, {"pixel_values": torch.randn(largest, 3, 32, 32), **model.processor.texts(texts)}


def gradient(model: XbtModel) -> Tensor:
    """Return all gradients as one vector, and clear them."""
    found = torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])
    model.zero_grad()
    return found


def measure() -> list[Row]:
    """Measure every batch size, whole and in parts."""
    model, largest = build()
    accelerator, rows = Accelerator(cpu=True), []
    for checkpointed in (False, True):
        if checkpointed:
            model.activation_checkpointing_enable()
        for size in BATCHES:
            batch = {name: column[:size].clone() for name, column in largest.items()}
            outside = [*model.parameters(), *model.buffers(), *batch.values()]
            whole, parts = Meter(outside), Meter(outside)
            with whole.running():
                model(**batch).loss.backward()
            wanted = gradient(model)
            with parts.running():
                backward_in_parts(accelerator, model, batch, MINI_BATCH)
            difference = float((gradient(model) - wanted).abs().max() / wanted.abs().max())
            rows.append(Row(size, checkpointed, whole.peak, parts.peak, difference))
    return rows


def main() -> None:
    """Run and print the table."""
    rows = measure()
    title = f"MB held for backward, whole batch and mini-batches of {MINI_BATCH}"
    table = Table("batch", "checkpointing", "whole", "mini-batches", "share", "largest difference of a gradient", title=title)
    for row in rows:
        held = (f"{row.whole / 1e6:,.1f}", f"{row.parts / 1e6:,.1f}", f"{row.parts / row.whole:.1%}")
        table.add_row(f"{row.batch}", "yes" if row.checkpointed else "no", *held, f"{row.difference:.1e}")
    console = Console()
    console.print(table)
    console.print(f"allowed at {max(BATCHES)}: {ALLOWED_SHARE:.0%} without checkpointing; difference: {ALLOWED_DIFFERENCE:.0e}")
    about = provenance()
    console.print(f"{about['machine']['device']}, {about['machine']['threads']} threads, torch {about['versions']['torch']}")


if __name__ == "__main__":
    main()
