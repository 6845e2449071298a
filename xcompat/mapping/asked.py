"""What ``xcompat map`` is asked for, checked by the names of files alone, before anything that embeds or maps is imported."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from xcompat.core.checksums import file_record
from xcompat.core.errors import XcompatError
from xcompat.core.files import files_below
from xcompat.core.ownership import read_marker, require_replaceable
from xcompat.core.progress import notice
from xcompat.encoders import is_loadable, require_model, require_own
from xcompat.mapping.folds import Searched
from xcompat.mapping.sides import holds_embeddings, require_side, side_files
from xcompat.vectors import BAD_SHARE, require_codec

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
        requests_per_minute: as :class:`~xcompat.embeddings.provider.Provider` takes it.
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


@dataclass(frozen=True)
class Asked:
    """What a map is made of, and where it is written.

    Args:
        old: the old model's embeddings (see :func:`~xcompat.mapping.paired.load_paired`); with texts, perhaps the old model.
        new: the new model's embeddings of the same items; with texts, the new model, or the name of that of a service.
        out: gets ``model`` and ``report.json``.
        old_model: the gallery's model, or the gallery's name for it; the name of ``old`` if None.
        new_model: the model that embeds the queries; None if only embeddings are known, and queries come as embeddings.
        searched: what is known of the classes that will be searched.
        seed: of the folds.
        overwrite: whether anything at ``out`` may be replaced.
        memory_codec: how entries of a memory are kept, as in :meth:`RememberedClasses.memory`.
        remember_items: whether queries lean towards the old embeddings of all given items that they resemble.
        texts: what a side that is a model embeds; its embeddings are cached beside ``out``.
        start: a map that exists already, tried like those that are solved.
        max_bad_share: the share of each side's rows that may have no usable embedding.
        allow_worse: whether to write the best candidate even if it is not surely at or above old queries.
        gallery: what queries will search, a gallery or its vectors, to compare the pairs with; None if it is not available.
    """

    old: Path
    new: Path
    out: Path
    old_model: str | None = None
    new_model: str | None = None
    searched: Searched = "unknown"
    seed: int = 0
    overwrite: bool = False
    memory_codec: str | None = None
    remember_items: bool = False
    texts: Texts | None = None
    start: Start | None = None
    max_bad_share: float = BAD_SHARE
    allow_worse: bool = False
    gallery: Path | None = None

    @cached_property
    def read(self) -> list[Path]:
        """What is read, and must not be written to; the rest are names of models."""
        paths = (self.old, self.new, *([Path(self.start.name)] if self.start is not None else []))
        return [path for path in paths if path.exists()]

    @cached_property
    def inputs(self) -> dict[str, str]:
        """Option -> its value, or the digest of the files that it names, of all that make another map if they differ."""
        texts, start = self.texts, self.start
        given = {
            "old": _digest(side_files(self.old)) if holds_embeddings(self.old) else str(self.old),
            "new": _digest(side_files(self.new)) if holds_embeddings(self.new) else str(self.new),
            "old-model": self.old_model if self.old_model is not None else self.old.stem,
            "new-model": self.new_model,
            "searched-classes": self.searched,
            "seed": self.seed,
            "memory-codec": self.memory_codec,
            "remember-items": self.remember_items or None,
            "texts": _digest(_files(texts.path)) if texts is not None else None,
            "embed-with": texts.embed_with if texts is not None else None,
            "start-from": (_digest(_files(Path(start.name))) or start.name) if start is not None else None,
            "activation": start.activation if start is not None else None,
        }
        return {option: str(value) for option, value in given.items() if value is not None}

    def require(self) -> None:
        """Refuse what cannot be read, files of others at ``out``, and a map of other inputs there.

        Raises:
            XcompatError: naming what is missing or in the way.
        """
        require_codec(self.memory_codec)
        require_replaceable(self.out, MADE_BY, self.overwrite, self.read)
        require_sides(self.old, self.new, self.texts, self.start, self.old_model, self.new_model)
        made = read_marker(self.out)
        if self.overwrite or made is None:
            return
        if not made.about:  # as an earlier version wrote it
            notice(f"{self.out} holds a map that does not say what it was made of: it is replaced")
        elif others := [f"--{name}" for name in self.inputs | made.about if self.inputs.get(name) != made.about.get(name)]:
            raise XcompatError(
                f"{self.out} holds a map that was made with other {', '.join(others)}; name another folder with --out, or "
                "replace it with --overwrite"
            )


def texts_of(path: Path | None, embed_with: str | None, requests_per_minute: float | None, price: float | None) -> Texts | None:
    """Return the texts to embed, if any.

    Raises:
        XcompatError: something is said of a service, and no texts are named.
    """
    about_service = (embed_with, requests_per_minute, price)
    if path is not None:
        return Texts(path, *about_service)
    if any(each is not None for each in about_service):
        raise XcompatError("--embed-with and its options embed texts: name them with --texts, or leave the options out")
    return None


def start_of(name: str | None, activation: Activation | None) -> Start | None:
    """Return the map that exists already, if any.

    Raises:
        XcompatError: an activation is given, and no map.
    """
    if name is not None:
        return Start(name, activation)
    if activation is not None:
        raise XcompatError("--activation says what a file under --start-from computes; name one, or leave it out")
    return None


def _files(path: Path) -> Iterable[Path]:
    """Return a file, or the files below a folder; none of what is neither."""
    return files_below(path) if path.is_dir() else [path] if path.is_file() else []


def _digest(files: Iterable[Path]) -> str:
    """Return a digest of the contents of some files; nothing without any."""
    records = [file_record(file).xxh3 for file in files]
    return hashlib.sha256(" ".join(records).encode()).hexdigest() if records else ""


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
        XcompatError: naming what is missing, or a side that is both stored and to be embedded by a service.
    """
    is_service = texts is not None and texts.embed_with is not None
    if is_service and holds_embeddings(new):
        raise XcompatError(
            f"--embed-with embeds the texts as --new, and {new} holds embeddings already: leave --embed-with out, or name the "
            "service's model as --new"
        )
    for side in (old,) if is_service else (old, new):
        if texts is None or holds_embeddings(side):
            require_side(side)
        else:
            require_model(str(side))
    for name in (old_model if old_model is not None and is_loadable(old_model) else None, new_model):
        if name is not None:
            require_model(name)
    if start is not None and not require_start(start):
        require_own(start.name)
