"""Request for ``xcompat map``, checked by file names before any model code is imported."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from xcompat.core.checksums import file_record
from xcompat.core.errors import MissingPathError, XcompatError
from xcompat.core.files import files_below
from xcompat.core.ownership import read_marker, require_replaceable
from xcompat.core.paths import is_misspelt, nearest_path
from xcompat.data.sources import files_digest, local_files
from xcompat.encoders import is_loadable, require_model, require_xcompat_model
from xcompat.mapping.folds import Direction, Searched
from xcompat.mapping.sides import holds_embeddings, require_side, side_files
from xcompat.stores.places import READ_AS_IT_IS, Place, Reading, StoreAddress, is_gallery, is_index, require_reading
from xcompat.vectors.checks import BAD_SHARE
from xcompat.vectors.codecs import MemoryParts, require_codec

MADE_BY = "map"
Activation = Literal["relu", "gelu"]
ENOUGH = 20_000
"""Default size of a random sample: more than twice the dimensions of usual models, and about what a fold learns from."""
SUFFIXES = (".npz", ".safetensors")
"""Suffixes of other tools' adapter files."""


@dataclass(frozen=True)
class TextInput:
    """Texts or images to embed, and the service instead of a new model, if any.

    Args:
        path: texts as in :func:`xcompat.data.load_text_items`, or images as in :func:`xcompat.data.load_pairs`.
        embed_with: ``module:function`` of the service; None for a model.
        requests_per_minute: as in :class:`~xcompat.embeddings.provider.Provider`.
        price: per million tokens, as in :class:`~xcompat.embeddings.provider.Provider`.
        are_images: whether ``path`` contains images.

    Raises:
        XcompatError: the rate or price is not above 0, there is no service, or a service would embed images.
    """

    path: Path
    embed_with: str | None = None
    requests_per_minute: float | None = None
    price: float | None = None
    are_images: bool = False

    def __post_init__(self) -> None:
        if self.are_images and self.embed_with is not None:
            raise XcompatError("--embed-with embeds texts; use --texts in place of --images, or remove --embed-with")
        for option, value in (("requests-per-minute", self.requests_per_minute), ("price-per-million-tokens", self.price)):
            if value is not None and not value > 0:
                raise XcompatError(f"--{option} is {value:g}; it must be above 0")
            if value is not None and self.embed_with is None:
                raise XcompatError(f"--{option} needs a service; set its function with --embed-with, or remove --{option}")

    def service_named(self, name: Path) -> dict[str, str] | None:
        """Describe the service and its model for a report; return None without a service."""
        return {"name": str(name), "service": self.embed_with} if self.embed_with is not None else None


@dataclass(frozen=True)
class InitialMap:
    """Source of an existing map.

    Args:
        name: Hub name or folder of a checkpoint, or an adapter file.
        activation: activation of a network in an adapter file that does not record it.
    """

    name: str
    activation: Activation | None = None


@dataclass(frozen=True)
class MapRequest:
    """Inputs and settings of a map, and its output folder.

    Args:
        old: old embeddings (see :func:`~xcompat.mapping.paired.load_paired`); with ``texts``, optionally the old model.
        new: new embeddings of the same items; with ``texts``, the new model or a service's model name.
        out: output folder for ``model`` and ``report.json``.
        old_model: the gallery's model, or its name there; None for the name of ``old``.
        new_model: model of the queries; None if queries are embeddings.
        searched: classes that users will search.
        seed: random seed for the folds.
        overwrite: whether to replace anything at ``out``.
        memory_codec: codec of a memory, as in :meth:`ClassMemoryContents.build_memory`.
        remember_items: whether to remember all given items.
        texts: texts for sides that are models; embeddings are cached beside ``out``.
        start: existing map to try.
        max_bad_share: largest share of unusable rows per side.
        allow_worse: whether to write a map that is not surely at or above old queries.
        gallery: gallery or vectors to compare with the pairs, or None.
        reading: file with the ids of ``old``, and column names.
        direction: ``new_to_old`` to map queries, ``old_to_new`` to map the gallery, e.g. for a migration.
        sample: items of ``texts`` to embed, drawn at random; 0 for all; None for :data:`ENOUGH` of an index, gallery or database.
        memory: parts of a memory that the map can have.
    """

    old: Place
    new: Path
    out: Path
    old_model: str | None = None
    new_model: str | None = None
    searched: Searched = "unknown"
    seed: int = 0
    overwrite: bool = False
    memory_codec: str | None = None
    remember_items: bool = False
    texts: TextInput | None = None
    start: InitialMap | None = None
    max_bad_share: float = BAD_SHARE
    allow_worse: bool = False
    gallery: Path | None = None
    reading: Reading = READ_AS_IT_IS
    direction: Direction = "new_to_old"
    sample: int | None = None
    memory: MemoryParts = "full"

    @property
    def n_sampled(self) -> int | None:
        """Number of items to embed, or None for all: a memory of all items needs all."""
        if self.sample is not None or self.remember_items:
            return self.sample or None
        is_whole = isinstance(self.old, StoreAddress) or is_gallery(self.old) or is_index(self.old)
        return ENOUGH if is_whole and self.texts is not None else None

    @cached_property
    def existing_inputs(self) -> list[Path]:
        """Existing input paths, which must not be overwritten."""
        paths = (self.old, self.new, *([Path(self.start.name)] if self.start is not None else []))
        return [path for path in paths if isinstance(path, Path) and path.exists()]

    @property
    def _sides(self) -> tuple[Place, ...]:
        """Sides with embeddings or models; a service makes the new side."""
        is_service = self.texts is not None and self.texts.embed_with is not None
        return (self.old,) if is_service else (self.old, self.new)

    @property
    def models(self) -> list[str]:
        """Names of the models to load: the named models, and sides without embeddings."""
        named = (self.old_model if self.old_model is not None and is_loadable(self.old_model) else None, self.new_model)
        return [*(str(side) for side in self._sides if not holds_embeddings(side)), *(name for name in named if name is not None)]

    @cached_property
    def inputs(self) -> dict[str, str]:
        """Option -> value, or digest of its files, for all options that change the map."""
        texts, start = self.texts, self.start
        given = {
            "old": (holds_embeddings(self.old) and _digest(side_files(self.old))) or str(self.old),
            "new": _digest(side_files(self.new)) if holds_embeddings(self.new) else str(self.new),
            "old-model": self.old_model if self.old_model is not None else self.old.stem,
            "new-model": self.new_model,
            "searched-classes": self.searched,
            "seed": self.seed,
            "memory-codec": self.memory_codec,
            "remember-items": self.remember_items or None,
            "sample": self.n_sampled,
            "memory": self.memory if self.memory != "full" else None,
            "direction": self.direction if self.direction != "new_to_old" else None,
            "ids": _digest([self.reading.ids]) if self.reading.ids is not None else None,
            "labels": files_digest(str(self.reading.labels)) if self.reading.labels is not None else None,
            "id-column": self.reading.columns.id,
            "vector-name": self.reading.columns.vector,
            "texts": _digest(_files(texts.path)) if texts is not None and not texts.are_images else None,
            "images": files_digest(str(texts.path)) if texts is not None and texts.are_images else None,
            "embed-with": texts.embed_with if texts is not None else None,
            "start-from": (_digest(_files(Path(start.name))) or start.name) if start is not None else None,
            "activation": start.activation if start is not None else None,
        }
        return {option: str(value) for option, value in given.items() if value is not None}

    def require(self) -> None:
        """Raise if inputs are unreadable, or ``out`` contains foreign files or another map.

        Raises:
            XcompatError: something is missing or in the way.
        """
        require_codec(self.memory_codec)
        self._require_options()
        self._require_paths()
        require_replaceable(self.out, MADE_BY, self.overwrite, self.existing_inputs)
        self._require_sides()
        self._require_columns()
        made = read_marker(self.out)
        if self.overwrite or made is None:
            return
        if others := [f"--{name}" for name in self.inputs | made.about if self.inputs.get(name) != made.about.get(name)]:
            raise XcompatError(
                f"{self.out} contains a map made with a different {', '.join(others)}; choose another folder with --out, or "
                "replace it with --overwrite"
            )

    def _require_paths(self) -> None:
        """Raise if a path does not exist, before models are loaded or fetched from the Hub."""
        if self.gallery is not None and not self.gallery.exists():
            raise MissingPathError(f"--gallery {self.gallery} does not exist; choose a gallery or embeddings")
        if self.texts is None:
            return
        local_files(str(self.texts.path))
        for path in (self.texts.path, *self._sides):
            if isinstance(path, Path) and not path.exists() and is_misspelt(str(path)):
                raise MissingPathError(f"{path} does not exist; {nearest_path(path)}")

    def _require_options(self) -> None:
        """Raise if options exclude each other."""
        if self.direction == "old_to_new":
            for option, value in (("remember-items", self.remember_items), ("start-from", self.start)):
                if value:
                    raise XcompatError(f"--{option} works with maps of queries; remove it, or remove --direction old_to_new")
        if self.memory != "full":
            options = {"remember-items": self.remember_items, "memory-codec": self.memory_codec, "start-from": self.start}
            if given := [option for option, value in options.items() if value]:
                raise XcompatError(f"--{given[0]} does not work with --memory {self.memory}; remove one of them")
        for option, name, side in (("old", self.old_model, self.old), ("new", self.new_model, self.new)):
            if name is not None and self.texts is not None and side in self._sides and not holds_embeddings(side):
                raise XcompatError(f"--{option}-model {name}: --{option} is already a model; remove --{option}-model")
        if self.sample is not None and self.texts is None:
            raise XcompatError("--sample draws items to embed; add --texts or --images, or remove --sample")
        if self.sample and self.remember_items:
            raise XcompatError("--remember-items needs all items; remove --sample")

    def _require_sides(self) -> None:
        """Raise if a side contains neither embeddings nor, with texts, a model, or a service would embed a stored side."""
        if len(self._sides) == 1 and holds_embeddings(self.new):
            raise XcompatError(
                f"--embed-with embeds the texts as --new, but {self.new} already contains embeddings; remove --embed-with, or "
                "set --new to the name of the service's model"
            )
        for side in self._sides:
            if self.texts is None or holds_embeddings(side):
                require_side(side)
        for name in self.models:
            require_model(name)
        if self.start is not None and not require_start(self.start):
            require_xcompat_model(self.start.name)

    def _require_columns(self) -> None:
        """Raise if no side has a chosen column, or the files with ids or labels do not exist."""
        if self.reading.labels is not None:
            local_files(str(self.reading.labels))
        require_reading([side for side in (self.old, self.new) if holds_embeddings(side)], self.reading)


def make_text_input(
    texts: str | None, images: str | None, embed_with: str | None, requests_per_minute: float | None, price: float | None
) -> TextInput | None:
    """Return the texts or images to embed, if any.

    Raises:
        XcompatError: there are both, service options without texts, or a local path does not exist.
    """
    about_service = (embed_with, requests_per_minute, price)
    if texts is not None and images is not None:
        raise XcompatError("--texts and --images cannot be combined; remove one of them")
    if texts is not None or images is not None:
        path = texts if texts is not None else images
        assert path is not None
        local_files(path)  # a Path drops ./
        return TextInput(Path(path), *about_service, are_images=images is not None)
    if any(each is not None for each in about_service):
        raise XcompatError("--embed-with and its options need texts; add --texts, or remove these options")
    return None


def make_initial_map(name: str | None, activation: Activation | None) -> InitialMap | None:
    """Return the existing map, if any.

    Raises:
        XcompatError: there is an activation, but no map.
    """
    if name is not None:
        return InitialMap(name, activation)
    if activation is not None:
        raise XcompatError("--activation needs an adapter file; set --start-from to the file, or remove --activation")
    return None


def _files(path: Path) -> Iterable[Path]:
    return files_below(path) if path.is_dir() else [path] if path.is_file() else []


def _digest(files: Iterable[Path]) -> str:
    records = [file_record(file).xxh3 for file in files]
    return hashlib.sha256(" ".join(records).encode()).hexdigest() if records else ""


def require_start(start: InitialMap) -> bool:
    """Return whether an existing map is another tool's file, not a checkpoint.

    Raises:
        XcompatError: it is neither, or a checkpoint has an activation.
    """
    path = Path(start.name)
    if path.suffix in SUFFIXES or path.is_file():
        if path.suffix not in SUFFIXES or not path.is_file():
            raise XcompatError(
                f"{path} is not a {' or '.join(SUFFIXES)} file; use such a file, or the folder or name of a checkpoint"
            )
        return True
    if start.activation is not None:
        raise XcompatError(f"{start.name} is a checkpoint with its own activation; remove --activation")
    return False
