"""A GPU that is not there: tensors on the CPU that say they are on it, and refuse what tensors on a GPU refuse."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

GPU = torch.device("cuda", 0)
PROPERTIES: dict[Any, Any] = {Tensor.device.__get__: GPU, Tensor.is_cuda.__get__: True}
TAKE_BOTH = {Tensor.__getitem__, Tensor.__setitem__, Tensor.copy_, Tensor.to}  # indices may be on the CPU


class OnGpu(Tensor):
    """A tensor on the GPU. Results of operations with it are such tensors too."""


class PretendedGpu(TorchFunctionMode):
    """Context in which ``device=GPU`` and ``to(GPU)`` make tensors that refuse NumPy and tensors on the CPU.

    ``copied`` has the shapes of the tensors that left the GPU.
    """

    def __init__(self) -> None:
        super().__init__()
        self.copied: list[torch.Size] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named, is_there = dict(kwargs or {}), bool(args) and isinstance(args[0], OnGpu)
        if is_there and func in PROPERTIES:
            return PROPERTIES[func]
        comes = GPU in [each for each in (*args, named.get("device")) if isinstance(each, torch.device)]
        args = tuple("cpu" if isinstance(each, torch.device) else each for each in args)
        named |= {"device": "cpu"} if named.get("device") is not None else {}
        if is_there and not comes and (func in (Tensor.cpu, Tensor.numpy) or (func is Tensor.to and "cpu" in args[1:])):
            if func is Tensor.numpy and not named.pop("force", False):
                raise TypeError("can't convert cuda:0 device type tensor to numpy")
            self.copied.append(args[0].shape)
            return func(args[0].as_subclass(Tensor), *args[1:], **named)
        if not comes and func not in TAKE_BOTH:
            tensors = [each for each in tree_leaves((args, named)) if isinstance(each, Tensor) and each.ndim]
            if len({isinstance(each, OnGpu) for each in tensors}) > 1:
                raise RuntimeError(f"{func} expects all tensors on the same device, but found cuda:0 and cpu")
        found = func(*args, **named)
        return found.as_subclass(OnGpu) if comes and isinstance(found, Tensor) else found
