"""A model that goes to workers as its name, and is loaded there once."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch

from xcompat.core.distributed import device
from xcompat.core.errors import FingerprintMismatchError
from xcompat.core.fingerprint import Fingerprint
from xcompat.encoders import EncoderSource
from xcompat.models.base import CompatModel
from xcompat.models.embedder import Embedder, load_checkpoint, load_embedder
from xcompat.retrieval.versions import upgraded_version


@dataclass(frozen=True)
class NamedModel:
    """A model that pickles as its name and what it makes.

    Args:
        source: every machine must find the same files, or the same repository of the Hub, under its name.
        made: what it makes; a machine that finds another model under the name refuses.
        maps: whether it maps stored vectors; else it embeds.
        autocast: half precision to embed in; None for the precision of the weights.
    """

    source: EncoderSource
    made: Fingerprint
    maps: bool
    autocast: torch.dtype | None = None

    @classmethod
    def of(cls, name: str, loaded: CompatModel | Embedder) -> Self:
        """Describe to workers a model that was loaded by a name, in the role in which it is given."""
        autocast = loaded.autocast if isinstance(loaded, Embedder) else None
        return cls(anywhere(EncoderSource(name=name)), makes(loaded)[0], not isinstance(loaded, Embedder), autocast)

    def load(self) -> CompatModel | Embedder:
        """Load the model on this process's device, the first time.

        Raises:
            XcompatError: there is none under the name.
            FingerprintMismatchError: there is another.
        """
        model = loaded_by_name(self.source, self.maps, str(device()), self.autocast)
        if (found := makes(model)[0]) != self.made:
            raise FingerprintMismatchError(
                f"{self.source.name} makes {found} here, and {self.made} where this began; give every machine the same files"
            )
        return model


def anywhere(source: EncoderSource) -> EncoderSource:
    """Return a source that means the same in whichever folder a worker runs."""
    if Path(source.name).exists():
        return source.model_copy(update={"name": str(Path(source.name).resolve())})
    return source


def makes(model: CompatModel | Embedder) -> tuple[Fingerprint, int]:
    """Return what a model makes of what it is given in its role, and the dimension."""
    if isinstance(model, Embedder):
        return model.version, model.dim
    version = upgraded_version(model)
    return version.fingerprint, version.dim


def loaded_by_name(
    source: EncoderSource, maps: bool, place: str = "cpu", autocast: torch.dtype | None = None
) -> CompatModel | Embedder:
    """Load a model for one of both roles, once in a process."""
    return _loaded(source.model_dump_json(), maps, place, autocast)


@functools.lru_cache(maxsize=1)  # a GPU's copy takes the place of that by which the model became known
def _loaded(source: str, maps: bool, place: str, autocast: torch.dtype | None) -> CompatModel | Embedder:
    found = EncoderSource.model_validate_json(source)
    if maps:
        return torch.nn.Module.to(load_checkpoint(found), place)
    return load_embedder(found, place, autocast)
