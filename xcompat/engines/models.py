"""Models for workers, loaded by name."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch

from xcompat.core.distributed import device
from xcompat.core.errors import FingerprintMismatchError
from xcompat.core.fingerprint import Fingerprint
from xcompat.core.precision import Autocast
from xcompat.encoders import EncoderSource
from xcompat.models.base import CompatModel
from xcompat.models.embedder import Embedder, load_checkpoint, load_embedder
from xcompat.retrieval.versions import upgraded_version


@dataclass(frozen=True)
class NamedModel:
    """Model that pickles as its name.

    Args:
        source: the model, with the same files or Hub repository on every machine.
        made: expected fingerprint.
        maps: whether it maps stored vectors, else it embeds.
        autocast: half precision for embedding, None for the precision of the weights.
    """

    source: EncoderSource
    made: Fingerprint
    maps: bool
    autocast: torch.dtype | None = None

    @classmethod
    def from_loaded(cls, name: str, loaded: CompatModel | Embedder) -> Self:
        """Describe a loaded model for workers."""
        autocast = loaded.autocast if isinstance(loaded, Embedder) else None
        return cls(
            with_absolute_path(EncoderSource(name=name)), describe_output(loaded)[0], not isinstance(loaded, Embedder), autocast
        )

    def load(self) -> CompatModel | Embedder:
        """Load the model on this process's device, or return the loaded model.

        Raises:
            XcompatError: the model does not exist.
            FingerprintMismatchError: this machine has another model under the name.
        """
        model = loaded_by_name(self.source, self.maps, str(device()), self.autocast)
        if (found := describe_output(model)[0]) != self.made:
            raise FingerprintMismatchError(
                f"{self.source.name} is {found} on this worker, expected {self.made}; copy the same files to every machine"
            )
        return model


def with_absolute_path(source: EncoderSource) -> EncoderSource:
    """Return a source for use in any working directory."""
    if Path(source.name).exists():
        return source.model_copy(update={"name": str(Path(source.name).resolve())})
    return source


def describe_output(model: CompatModel | Embedder) -> tuple[Fingerprint, int]:
    """Return the fingerprint and dimension of a model's output."""
    if isinstance(model, Embedder):
        return model.version, model.dim
    version = upgraded_version(model)
    return version.fingerprint, version.dim


def loaded_by_name(source: EncoderSource, maps: bool, place: str = "cpu", autocast: Autocast = "auto") -> CompatModel | Embedder:
    """Load a model once per process, to map or to embed."""
    return _load(source.model_dump_json(), maps, place, autocast)


@functools.lru_cache(maxsize=1)  # the GPU copy replaces the CPU copy
def _load(source: str, maps: bool, place: str, autocast: Autocast) -> CompatModel | Embedder:
    found = EncoderSource.model_validate_json(source)
    if maps:
        return torch.nn.Module.to(load_checkpoint(found), place)
    return load_embedder(found, place, autocast)
