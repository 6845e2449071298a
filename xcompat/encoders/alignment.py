"""Weights where results do not depend on the file they came from."""

from __future__ import annotations

import torch
from torch import nn

ALIGNMENT = 64
"""Bytes: what torch aligns its own memory to."""


@torch.no_grad()
def own_memory(module: nn.Module) -> None:
    """Move weights out of the file they were mapped from, in place.

    In a mapped safetensors file a weight lies at any multiple of 8 bytes, and MKL computes a product in another order when
    an operand is not aligned: two files with the same weights, bit for bit, gave embeddings that differ in their last bits.

    Args:
        module: on any device; only what lies unaligned on the CPU is copied.
    """
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.device.type == "cpu" and tensor.data_ptr() % ALIGNMENT:
            tensor.data = tensor.data.clone()
