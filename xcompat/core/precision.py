"""Precision of frozen models, and of products of float32 matrices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal

import torch

Autocast = torch.dtype | Literal["auto"] | None
"""Half precision for computing, None for the dtype of the weights, or ``auto`` for the default of the device."""
_default: ContextVar[Autocast] = ContextVar("default", default="auto")


@contextmanager
def default_autocast(autocast: Autocast) -> Iterator[None]:
    """Choose the meaning of ``auto`` in the block.

    Args:
        autocast: half precision or None for every device, or ``auto`` for :func:`resolve_autocast`'s choice.
    """
    token = _default.set(autocast)
    try:
        yield
    finally:
        _default.reset(token)


def resolve_autocast(autocast: Autocast, weight: torch.Tensor) -> torch.dtype | None:
    """Return the half precision for a frozen model: bfloat16 for float32 weights on a CUDA device that computes in it.

    Args:
        autocast: a precision, or ``auto``.
        weight: any of the model's parameters.

    Returns:
        The dtype for ``torch.autocast``, or None for none.

    Example:
        >>> resolve_autocast("auto", torch.ones(1)), resolve_autocast(torch.float16, torch.ones(1))
        (None, torch.float16)
    """
    chosen = _default.get() if autocast == "auto" else autocast
    if not isinstance(chosen, str):
        return chosen
    has_bfloat16 = weight.device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if has_bfloat16 and weight.dtype == torch.float32 else None


@contextmanager
def ieee_products() -> Iterator[None]:
    """Compute float32 products in full precision inside the block."""
    with _products("ieee", torch.backends.cuda.matmul, torch.backends.mkldnn.matmul):  # type: ignore[attr-defined]
        yield


@contextmanager
def tf32_products() -> Iterator[None]:
    """Compute float32 products of CUDA devices in TF32 inside the block. Other devices compute as before."""
    with _products("tf32", torch.backends.cuda.matmul):
        yield


@contextmanager
def _products(precision: str, *settings: Any) -> Iterator[None]:  # noqa: ANN401 - torch has no type for them
    before = [setting.fp32_precision for setting in settings]
    for setting in settings:
        setting.fp32_precision = precision
    try:
        yield
    finally:
        for setting, previous in zip(settings, before, strict=True):
            setting.fp32_precision = previous
