"""Faster matrix products on a CPU while weights do not change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

ROWS = 512
"""Number of input rows that oneDNN optimises the weight layout for; other numbers are as exact, and a little slower."""


@contextmanager
def packed_linears(module: nn.Module) -> Iterator[None]:
    """Compute every float32 ``nn.Linear`` on a CPU with weights packed once for oneDNN.

    PyTorch uses MKL for float32 products, which packs the weights anew in every call and is slow on processors of other makers:
    170-205 GFLOP/s on two cores of an AMD EPYC where oneDNN reaches 226. Inside the block the weights are held twice. Results
    differ from ``nn.Linear`` by rounding only. On other devices, and with a PyTorch without these private operators, the block
    changes nothing.

    Args:
        module: frozen; the block ignores changes of its weights.

    Example:
        >>> linear, inputs = nn.Linear(8, 4), torch.ones(2, 8)
        >>> with torch.inference_mode(), packed_linears(linear):
        ...     packed = linear(inputs)
        >>> torch.allclose(packed, linear(inputs))
        True
    """
    linears = [child for child in module.modules() if type(child) is nn.Linear and _packs(child.weight)]
    try:
        for linear in linears:
            weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), ROWS)
            vars(linear)["forward"] = partial(_packed_linear, weight=weight, bias=linear.bias)  # shadows the method of the class
        yield
    finally:
        for linear in linears:
            vars(linear).pop("forward", None)


def _packs(weight: Tensor) -> bool:
    on_cpu = weight.device.type == "cpu" and weight.dtype == torch.float32 and torch.backends.mkldnn.is_available()
    return on_cpu and all(hasattr(torch.ops.mkldnn, name) for name in ("_reorder_linear_weight", "_linear_pointwise"))


def _packed_linear(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(inputs, weight, bias, "none", [], "")
