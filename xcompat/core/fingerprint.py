"""Model identity, computed from the model's content and not from its name."""

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
    """Hash over a model's architecture, weights and preprocessing. Fingerprints with equal digests are equal.

    Args:
        digest: 64 hexadecimal digits (SHA-256).
        name: the model's display name, not part of the identity.

    Example:
        >>> Fingerprint.from_string("clip-b32") == Fingerprint.from_string("clip-b32")
        True
    """

    digest: str
    name: str = field(default="", compare=False)

    @classmethod
    def from_string(cls, name: str) -> Fingerprint:
        """Return a fingerprint for a model known only by its name. It never equals a fingerprint of weights.

        Args:
            name: any name. Equal names give equal fingerprints.
        """
        return cls(hashlib.sha256(f"name:{name}".encode()).hexdigest(), name)

    @property
    def is_name_only(self) -> bool:
        """Whether the fingerprint comes from the name alone. No loaded model has such a fingerprint."""
        return self == Fingerprint.from_string(self.name)

    @classmethod
    def from_module(
        cls, module: nn.Module, parts: Mapping[str, object], name: str = "", without: str | None = None
    ) -> Fingerprint:
        """Hash a module's parameters and persistent buffers, together with a description of the rest.

        Args:
            module: the model. Its ``state_dict`` is hashed tensor by tensor, sorted by name.
            parts: JSON-like description of architecture and preprocessing.
            name: the model's display name.
            without: name of a submodule to skip.
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
        """Return a value that changes with the weights, from a few numbers per tensor.

        It is valid within a process. Addresses reveal replaced tensors, and version counters reveal in-place writes. Samples
        reveal writes that the counter misses (``parameter.data += delta``, as adapters are merged).
        """
        import torch

        tensors = [tensor.detach() for tensor in (*module.parameters(), *module.buffers()) if tensor.numel()]
        samples = tuple(_samples(tensor).to("cpu", torch.float64).numpy().tobytes() for tensor in tensors)
        counts = (None if tensor.is_inference() else tensor._version for tensor in tensors)  # no counter in inference mode
        return tuple((tensor.data_ptr(), count) for tensor, count in zip(tensors, counts, strict=True)), samples

    def derive(self, what: str) -> Fingerprint:
        """Return the fingerprint for embeddings derived from this model's, e.g. its view of an old space.

        Args:
            what: name of the derivation.
        """
        return Fingerprint(hashlib.sha256(f"{self.digest}:{what}".encode()).hexdigest(), self.name)

    def require(self, other: Fingerprint, what: str) -> None:
        """Raise unless ``other`` is the same model.

        Args:
            other: the actual fingerprint.
            what: the file or object with ``other``, for the message.

        Raises:
            FingerprintMismatchError: names both.
        """
        if self != other:
            raise FingerprintMismatchError(
                f"{what} was made by {other}, not by {self}: embeddings of different models cannot be compared; use {other}, "
                "or re-embed"
            )

    def __str__(self) -> str:
        return f"{self.name or 'unnamed'}@{self.digest[:12]}"


def _samples(tensor: Tensor) -> Tensor:
    """Return sampled numbers of a tensor's storage without a copy."""
    size = tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset()
    return tensor.as_strided((min(SAMPLED, size),), (max(1, size // SAMPLED),))
