"""Precision of frozen models, and of products of float32 matrices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal

import torch

Autocast = torch.dtype | Literal["auto"] | None
"""Half precision for computing, None for the dtype of the weights, or ``auto`` for the default of the device."""
_BACKENDS: Any = torch.backends
"""Has ``fp32_precision`` in several places, of which torch's types know some."""
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
    with kept_products():
        _set_products("ieee")
        _BACKENDS.mkldnn.matmul.fp32_precision = "ieee"
        yield


@contextmanager
def cuda_products(tf32: bool) -> Iterator[None]:
    """Compute float32 products of CUDA devices in TF32, or products and convolutions in full precision, inside the block.

    Other devices compute as before.
    """
    with kept_products():
        _set_products("tf32" if tf32 else "ieee")
        if not tf32:
            _set_convolutions("ieee")
        yield


@contextmanager
def kept_products() -> Iterator[None]:
    """Restore the precision of float32 products and convolutions after a block that calls a library which sets it."""
    everywhere, products, convolutions = (
        each.fp32_precision for each in (_BACKENDS, _BACKENDS.cuda.matmul, _BACKENDS.cudnn.conv)
    )
    on_cpu, older = _BACKENDS.mkldnn.matmul.fp32_precision, _older_setting()
    try:
        yield
    finally:
        if older is not None:
            torch.set_float32_matmul_precision(older)
        _BACKENDS.fp32_precision = everywhere
        _set_convolutions(convolutions)
        _set_products(products, older)
        _BACKENDS.mkldnn.matmul.fp32_precision = on_cpu


def _set_products(precision: str, older: str | None = None) -> None:
    """Set the older flag too: if the two differ, torch raises where the older one is read, e.g. in its compiler."""
    if older is None:
        _BACKENDS.cuda.matmul.allow_tf32 = precision == "tf32"
    _BACKENDS.cuda.matmul.fp32_precision = precision


def _set_convolutions(precision: str) -> None:
    _BACKENDS.cudnn.allow_tf32 = precision == "tf32"
    _BACKENDS.cudnn.conv.fp32_precision = precision


def _older_setting() -> str | None:
    """Return the older setting; None if it differs from the newer ones, where torch raises."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None
