"""Memory alignment of weights."""

from __future__ import annotations

import torch
from torch import nn

ALIGNMENT = 64
"""Alignment of torch's memory in bytes."""


@torch.no_grad()
def copy_unaligned(module: nn.Module) -> None:
    """Copy unaligned CPU weights out of their memory-mapped file, in place.

    MKL multiplies unaligned operands in another order, so embeddings from two files with equal weights would differ in their last
    bits.

    Args:
        module: module on any device.
    """
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.device.type == "cpu" and tensor.data_ptr() % ALIGNMENT:
            tensor.data = tensor.data.clone()
