"""The identity of a model: what it computes, not its name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from xcompat.core.errors import FingerprintMismatchError

if TYPE_CHECKING:
    from torch import Tensor, nn

SAMPLED = 8


@dataclass(frozen=True)
class Fingerprint:
    """Hash of a model's architecture, weights and preprocessing; two are equal if their digests are.

    Args:
        digest: 64 hexadecimal digits (SHA-256).
        name: the name that people know the model by; not part of the identity.

    Example:
        >>> Fingerprint.from_string("clip-b32") == Fingerprint.from_string("clip-b32")
        True
    """

    digest: str
    name: str = field(default="", compare=False)

    @classmethod
    def from_string(cls, name: str) -> Fingerprint:
        """Make a fingerprint for embeddings whose model is known by name only; no model with weights has the same.

        Args:
            name: any name; equal names give equal fingerprints.
        """
        return cls(hashlib.sha256(f"name:{name}".encode()).hexdigest(), name)

    @property
    def is_of_name(self) -> bool:
        """Whether it was made of the name alone, so that no model that is loaded can have it."""
        return self == Fingerprint.from_string(self.name)

    @classmethod
    def from_module(cls, module: nn.Module, parts: Mapping[str, Any], name: str = "", without: str | None = None) -> Fingerprint:
        """Hash every parameter and persistent buffer of a module, and a description of the rest.

        Args:
            module: the model; its ``state_dict`` is hashed tensor by tensor, in order of name.
            parts: JSON-like description of architecture and preprocessing.
            name: the name that people know the model by.
            without: name of a submodule to leave out.
        """
        import torch

        digest = hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode())
        for key, tensor in sorted(module.state_dict().items()):
            if without is not None and key.startswith(f"{without}."):
                continue
            digest.update(f"{key}:{tuple(tensor.shape)}:{tensor.dtype};".encode())
            raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            digest.update(memoryview(raw.numpy()))
        return cls(digest.hexdigest(), name)

    @staticmethod
    def state(module: nn.Module) -> tuple[Any, ...]:
        """Return a value that changes whenever the weights do, by reading only a few numbers of each tensor.

        It is valid within a process: addresses reveal tensors that were replaced, version counters those written in place, and
        samples those written without the counter's notice (``parameter.data += delta``, as adapters are merged).
        """
        import torch

        tensors = [tensor.detach() for tensor in (*module.parameters(), *module.buffers()) if tensor.numel()]
        samples = tuple(_samples(tensor).to("cpu", torch.float64).numpy().tobytes() for tensor in tensors)
        counts = (None if tensor.is_inference() else tensor._version for tensor in tensors)  # no counter in inference mode
        return tuple((tensor.data_ptr(), count) for tensor, count in zip(tensors, counts, strict=True)), samples

    def derived(self, what: str) -> Fingerprint:
        """Return the fingerprint of other embeddings of the same model, such as its view of an old space.

        Args:
            what: how they are derived from the model's own embeddings.
        """
        return Fingerprint(hashlib.sha256(f"{self.digest}:{what}".encode()).hexdigest(), self.name)

    def require(self, other: Fingerprint, what: str) -> None:
        """Raise unless ``other`` is the same model.

        Args:
            other: the fingerprint found.
            what: the file or object that holds ``other``, for the message.

        Raises:
            FingerprintMismatchError: names both.
        """
        if self != other:
            raise FingerprintMismatchError(
                f"{what} was made by {other}, but {self} is asked for: embeddings of different models cannot be "
                "compared; use the model that made it, or embed again"
            )

    def __str__(self) -> str:
        """Return ``name@first 12 digits``."""
        return f"{self.name or 'unnamed'}@{self.digest[:12]}"


def _samples(tensor: Tensor) -> Tensor:
    """Return some numbers of a tensor's storage without copying it, whatever its memory format."""
    size = tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset()
    return tensor.as_strided((min(SAMPLED, size),), (max(1, size // SAMPLED),))
