"""Memory alignment of weights, so that embeddings do not depend on the layout of the weights' file."""

from __future__ import annotations

import torch
from torch import nn

ALIGNMENT = 64
"""Bytes: what torch aligns its own memory to."""


@torch.no_grad()
def own_memory(module: nn.Module) -> None:
    """Copy unaligned weights out of their memory-mapped file, in place.

    In a mapped safetensors file a weight starts at any multiple of 8 bytes, and MKL computes products of unaligned operands in
    another order: two files with bitwise equal weights gave embeddings that differ in their last bits.

    Args:
        module: on any device; only unaligned weights on the CPU are copied.
    """
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.device.type == "cpu" and tensor.data_ptr() % ALIGNMENT:
            tensor.data = tensor.data.clone()
