"""What ``xcompat map`` is asked for, checked by the names of files alone, before anything that embeds or maps is imported."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from xcompat.encoders import require_model, require_own
from xcompat.errors import XcompatError
from xcompat.mapping.sides import holds_embeddings, require_side
from xcompat.ownership import require_replaceable

MADE_BY = "map"
Activation = Literal["relu", "gelu"]
SUFFIXES = (".npz", ".safetensors")
"""Of adapters of other tools."""


@dataclass(frozen=True)
class Texts:
    """Texts to embed, and the service that embeds them in the place of a new model, if any.

    Args:
        path: as :func:`xcompat.data.load_items_of_text` takes it.
        embed_with: ``module:function`` of the service; None for a model.
        requests_per_minute: as :class:`~xcompat.embedding_provider.Provider` takes it.
        price: of a million tokens, likewise.

    Raises:
        XcompatError: a rate or a price cannot be one.
    """

    path: Path
    embed_with: str | None = None
    requests_per_minute: float | None = None
    price: float | None = None

    def __post_init__(self) -> None:
        """Refuse what is not above zero."""
        for option, value in (("requests-per-minute", self.requests_per_minute), ("price-per-million-tokens", self.price)):
            if value is not None and not value > 0:
                raise XcompatError(f"--{option} is {value:g}; it is above 0")
            if value is not None and self.embed_with is None:
                raise XcompatError(f"--{option} is about a service: name its function with --embed-with, or leave it out")

    def service_named(self, name: Path) -> dict[str, str] | None:
        """Describe the service, whose model has a name, for a report; None for a model."""
        return {"name": str(name), "service": self.embed_with} if self.embed_with is not None else None


@dataclass(frozen=True)
class Start:
    """Where a map that exists already comes from.

    Args:
        name: of a checkpoint on the Hub, its folder, or an adapter's file.
        activation: of a network in an adapter's file, where that does not say.
    """

    name: str
    activation: Activation | None = None


def require_start(start: Start) -> bool:
    """Return whether a map that exists already is a file of another tool; else it is a checkpoint.

    Raises:
        XcompatError: it is neither, or a checkpoint is given an activation.
    """
    path = Path(start.name)
    if path.suffix in SUFFIXES or path.is_file():
        if path.suffix not in SUFFIXES or not path.is_file():
            raise XcompatError(f"{path} is no file of {' or '.join(SUFFIXES)}; name one, or a checkpoint by folder or name")
        return True
    if start.activation is not None:
        raise XcompatError(f"{start.name} is a checkpoint, which says itself what it computes; leave --activation out")
    return False


def is_loaded(old_model: str) -> bool:
    """Return whether ``--old-model`` names a model that can be loaded, and not the gallery's name for one.

    Example:
        >>> is_loaded("openai/clip-vit-base-patch32"), is_loaded("clip-b32")
        (True, False)
    """
    return "/" in old_model or Path(old_model).exists()


def require_out(out: Path, overwrite: bool, old: Path, new: Path, start: Start | None) -> list[Path]:
    """Refuse a folder with files of others; return what is read, and must not be written to.

    Args:
        out: the folder.
        overwrite: whether anything in it may be replaced.
        old: the old side.
        new: the new side.
        start: a map that exists already.
    """
    read = [path for path in (old, new, Path(start.name) if start is not None else old) if path.exists()]  # else names of models
    require_replaceable(out, MADE_BY, overwrite, read)
    return read


def require_sides(
    old: Path, new: Path, texts: Texts | None, start: Start | None, old_model: str | None, new_model: str | None
) -> None:
    """Refuse folders and files that hold neither embeddings nor, where texts are given, a model.

    Args:
        old: the old side.
        new: the new side; with a service only the name of its model.
        texts: what a side that is a model embeds.
        start: a map that exists already.
        old_model: the gallery's model beside stored embeddings, or the gallery's name for it.
        new_model: the model of the queries beside stored embeddings.

    Raises:
        XcompatError: naming what is missing.
    """
    is_service = texts is not None and texts.embed_with is not None
    for side in (old,) if is_service else (old, new):
        if texts is None or holds_embeddings(side):
            require_side(side)
        else:
            require_model(str(side))
    for name in (old_model if old_model is not None and is_loaded(old_model) else None, new_model):
        if name is not None:
            require_model(name)
    if start is not None and not require_start(start):
        require_own(start.name)
