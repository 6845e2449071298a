"""Memory of XBT's pair stage over the batch size: whole batches against mini-batches of 64, with and without checkpointing.

    python benchmarks/speed/pair_memory.py [--most 1024]

A CLIP of two towers of 4 layers, 128 wide, on images of 32 pixels, with LoRA and prompts. Counted are the bytes that autograd
holds for backward, at their most: every storage once, without weights and the batch itself. Of a checkpointed block that is its
input; what backward computes again inside one block is not counted. Gradients are compared with those of the whole batch.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from accelerate import Accelerator
from measuring import Row, main
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from xcompat import Fingerprint, XbtModel
from xcompat.encoders.scratch import ScratchSource, encoder_from_scratch
from xcompat.models import describe_old
from xcompat.training.cached_gradients import backward_in_mini_batches

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


class Held:
    """A tensor that a graph holds."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Meter:
    """Counts the bytes that graphs hold.

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
        """Subtract a tensor that was released."""
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


def compared(model: XbtModel, batch: dict[str, Tensor], what: str) -> Row:
    """Measure one batch, whole and in parts; the gradients are the same."""
    outside = [*model.parameters(), *model.buffers(), *batch.values()]
    whole, parts = Meter(outside), Meter(outside)
    with whole.running():
        model(**batch).loss.backward()
    wanted = gradient(model)
    with parts.running():
        backward_in_mini_batches(Accelerator(cpu=True), model, batch, MINI_BATCH)
    difference = float((gradient(model) - wanted).abs().max() / wanted.abs().max())
    assert difference < ALLOWED_DIFFERENCE, difference
    size = len(batch["pixel_values"])
    held = f"{parts.peak / 1e6:,.1f} MB, {whole.peak / 1e6:,.1f} MB; gradients differ by {difference:.0e}"
    bound = f"<= {ALLOWED_SHARE}" if size == max(BATCHES) else ""
    return Row(f"{what}, {size:,} pairs in parts of {MINI_BATCH}", "the whole batch", parts.peak / whole.peak, bound, held)


def measure(most: int = max(BATCHES)) -> list[Row]:
    """Measure every batch size up to the most."""
    model, largest = build()
    rows = []
    for what in ("memory of the pair stage", "the same with checkpointing"):
        if what != "memory of the pair stage":
            model.activation_checkpointing_enable()
        for size in (size for size in BATCHES if size <= most):
            rows.append(compared(model, {name: column[:size].clone() for name, column in largest.items()}, what))
    return rows


if __name__ == "__main__":
    main(measure)
