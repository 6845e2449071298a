"""What a page shows: galleries with their pictures, the old and the new model, and the report of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL.Image import Image

from xcompat.core.errors import GenerationGoneError, XcompatError
from xcompat.core.paths import is_file
from xcompat.data.images import UnusableSampleError, open_image
from xcompat.data.schema import IMAGE, IMAGE_COLUMNS, TEXT
from xcompat.models.base import CompatModel
from xcompat.retrieval import Gallery, Hit
from xcompat.retrieval.originals import Originals, Pictures, load_originals, together
from xcompat.retrieval.reranking import Reranker
from xcompat.retrieval.side_by_side import find, searchable_state

if TYPE_CHECKING:
    from xcompat.models.embedder import Embedder
    from xcompat.training.test_items import Questions

OLD, NEW, RERANKED = "old query", "new query", "re-ranked"


@dataclass
class Side:
    """One model that asks.

    Args:
        label: :data:`OLD`, :data:`NEW` or :data:`RERANKED`.
        embedder: the model.
    """

    label: str
    embedder: Embedder

    @property
    def reads_texts(self) -> bool:
        """Whether it embeds texts."""
        return bool(self.embedder.processor.max_length)

    @property
    def reads_pictures(self) -> bool:
        """Whether it embeds pictures."""
        return any(self.embedder.processor.image_size)


@dataclass
class Source:
    """Pictures or texts that a gallery was built from.

    Args:
        path: a folder, or whatever else ``gallery build`` takes.
    """

    path: Path

    @cached_property
    def originals(self) -> Originals:
        """What it holds.

        Raises:
            XcompatError: it cannot be read.
        """
        return load_originals(self.path)

    @cached_property
    def _rows(self) -> dict[str, int]:
        originals = self.originals
        return {name: row for row, name in enumerate(originals.ids)} if isinstance(originals, Pictures) else {}

    def picture(self, item: str, named: Sequence[str]) -> Any:  # noqa: ANN401 - as data sets store images
        """Return where the picture of an item is, or what a data set holds of it; None if it has none.

        Args:
            item: its id.
            named: files that its metadata names.
        """
        if self.path.is_dir():
            inside = (self.path / name for name in (item, *named))
            return next((file for file in inside if is_file(str(file)) and _lies_in(file, self.path)), None)
        if item not in self._rows:
            return None
        return self.originals.dataset[self._rows[item]][IMAGE]


@dataclass
class Shelf:
    """A gallery, and what its items look like.

    Args:
        title: what the page calls it.
        path: its folder.
        sources: the pictures or texts it was built from, as far as they are known; an item is looked for in one after the other.
        show: gives the picture of an item by its id, where a run knows it; None to look for it in ``sources`` and metadata.
    """

    title: str
    path: Path
    sources: Sequence[Source] = ()
    show: Callable[[str], Image | None] | None = None
    _states: dict[str, Gallery] = field(default_factory=dict, repr=False)
    _generation: int = -1

    def gallery(self, side: Side | None = None) -> Gallery:
        """Return the newest state, or the newest that a side searches; opened again once another process has committed."""
        newest = Gallery.open(self.path)
        if newest.generation != self._generation:
            self._states, self._generation = {}, newest.generation
        states = self._states  # another thread may replace it
        label = "" if side is None else side.label
        if label not in states:
            states[label] = newest if side is None else searchable_state(self.path, side.embedder)
        return states[label]

    def search(
        self, side: Side, query: str | Image, top_k: int, where: Mapping[str, Any] | None, keep: bool = False
    ) -> list[Hit]:
        """Return what one side finds, even if a compaction deletes the state that is searched.

        Args:
            side: the model.
            query: a text, or a picture.
            top_k: most hits.
            where: filters.
            keep: whether new embeddings of a re-ranking are kept in the gallery's folder.
        """
        rerank = None
        if side.label == RERANKED:
            rerank = Reranker(side.embedder, self.originals if self.sources else None, keep=keep)
        try:
            return find(self.gallery(side), side.embedder, query, top_k, where, rerank)
        except GenerationGoneError:
            self._states = {}
            return find(self.gallery(side), side.embedder, query, top_k, where, rerank)

    @cached_property
    def originals(self) -> Originals:
        """What the gallery was built from.

        Raises:
            XcompatError: that is not known, or cannot be read.
        """
        if not self.sources:
            raise XcompatError("name what the gallery was built from with --images or --texts when you start the page")
        return together([source.originals for source in self.sources])

    def picture(self, item: str, metadata: Mapping[str, Any] | None) -> Image | None:
        """Return the picture of an item; None if it is not known or cannot be read."""
        try:
            found = self.show(item) if self.show is not None else self._file(item, metadata)
            return found if found is None or isinstance(found, Image) else open_image(found)
        except UnusableSampleError:
            return None

    def _file(self, item: str, metadata: Mapping[str, Any] | None) -> Any:  # noqa: ANN401 - as data sets store images
        """Return where the picture of an item is, or what a data set holds of it."""
        named = [metadata[key] for key in IMAGE_COLUMNS if metadata and isinstance(metadata.get(key), str)]
        there = (found for source in self.sources if (found := source.picture(item, named)) is not None)
        return next(there, None) or next((Path(name) for name in named if is_file(name)), None)

    def as_query(self, item: str) -> str | Image:
        """Return what an item is as a query: its picture, or its text.

        Raises:
            XcompatError: there is no such item, or neither is known.
        """
        gallery = self.gallery()
        if gallery.find([item]) == [None]:
            raise XcompatError(f"{self.title} has no item {item!r}; copy the id of a hit")
        about = gallery.metadata([item])[0]
        if (picture := self.picture(item, about)) is not None:
            return picture
        if text := (about or {}).get(TEXT):
            return str(text)
        raise XcompatError(f"neither picture nor text of {item!r} is known; name the folder of pictures with --images")


def _lies_in(file: Path, folder: Path) -> bool:
    """Return whether a file lies in a folder: ids may be chosen by strangers, and lead elsewhere."""
    return file.resolve().is_relative_to(folder.resolve())


@dataclass(frozen=True)
class Judged:
    """The queries of one direction of a run's test set, and how they did on the old gallery.

    Args:
        questions: what they are.
        rows_Q: int64 ``(Q,)`` their rows in the test set.
        old_Q: int ``(Q,)`` rank of the first match with the old query, -1 for queries left out.
        new_Q: the same with the new query.
    """

    questions: Questions
    rows_Q: NDArray[np.int64]
    old_Q: NDArray[Any]
    new_Q: NDArray[Any]


@dataclass
class Site:
    """All that a page shows.

    Args:
        title: what it is about.
        shelves: the galleries by title.
        sides: the models that ask: the old one, if there is one, and the new one.
        report: folder with the report of a run; None without one.
        judged: the queries of a run's test set, by direction.
        examples: texts to begin with.
        allow_changes: whether the page may upgrade, backfill and roll back.
    """

    title: str
    shelves: dict[str, Shelf]
    sides: list[Side]
    report: Path | None = None
    judged: dict[str, Judged] = field(default_factory=dict)
    examples: list[str] = field(default_factory=list)
    allow_changes: bool = False

    def shelf(self, title: str) -> Shelf:
        """Return a gallery by its title; the first one for an empty title.

        Raises:
            XcompatError: there is no such gallery.
        """
        if not title:
            return next(iter(self.shelves.values()))
        if title not in self.shelves:
            raise XcompatError("this page has no such gallery")
        return self.shelves[title]

    @property
    def knows_originals(self) -> bool:
        """Whether the pictures or texts of a gallery are known."""
        return any(shelf.sources for shelf in self.shelves.values())

    def asking(self, rerank: bool) -> list[Side]:
        """Return the models that answer a search; the new one a second time if it re-ranks."""
        return [*self.sides, Side(RERANKED, self.sides[-1].embedder)] if rerank else self.sides

    @property
    def reranks(self) -> bool:
        """Whether hits can be embedded again: a gallery may keep its texts, and a run knows its items by their pictures alone."""
        return any(shelf.sources or shelf.show is None for shelf in self.shelves.values())

    @property
    def maps_galleries(self) -> bool:
        """Whether the new model maps stored embeddings."""
        model = self.sides[-1].embedder.model
        return isinstance(model, CompatModel) and model.maps_galleries
