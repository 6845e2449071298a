"""Page content: galleries with their images, both models, and a run's report."""

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
from xcompat.retrieval.originals import Images, Originals, load_originals, merge_originals
from xcompat.retrieval.ranking_comparison import find, searchable_state
from xcompat.retrieval.reranking import Reranker

if TYPE_CHECKING:
    from xcompat.models.embedder import Embedder
    from xcompat.training.test_items import QuerySet

OLD, NEW, RERANKED = "old query", "new query", "re-ranked"


@dataclass
class Side:
    """Model that searches.

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
    def reads_images(self) -> bool:
        """Whether it embeds images."""
        return any(self.embedder.processor.image_size)


@dataclass
class Source:
    """Images or texts used to build a gallery.

    Args:
        path: a folder, or any other input of ``gallery build``.
    """

    path: Path

    @cached_property
    def originals(self) -> Originals:
        """Loaded images or texts.

        Raises:
            XcompatError: the source cannot be read.
        """
        return load_originals(self.path)

    @cached_property
    def _rows(self) -> dict[str, int]:
        originals = self.originals
        return {name: row for row, name in enumerate(originals.ids)} if isinstance(originals, Images) else {}

    def image(self, item: str, named: Sequence[str]) -> Any:  # noqa: ANN401 - as data sets store images
        """Return an item's image as a file or a data set value, or None.

        Args:
            item: its id.
            named: files in its metadata.
        """
        if self.path.is_dir():
            inside = (self.path / name for name in (item, *named))
            return next((file for file in inside if is_file(str(file)) and _lies_in(file, self.path)), None)
        if item not in self._rows:
            return None
        return self.originals.dataset[self._rows[item]][IMAGE]


@dataclass
class Shelf:
    """A gallery with its items' originals.

    Args:
        title: page title.
        path: its folder.
        sources: known images or texts it was built from, searched in order.
        show: returns an item's image by its id, for runs. None to use ``sources`` and metadata.
    """

    title: str
    path: Path
    sources: Sequence[Source] = ()
    show: Callable[[str], Image | None] | None = None
    _states: dict[str, Gallery] = field(default_factory=dict, repr=False)
    _generation: int = -1

    def gallery(self, side: Side | None = None) -> Gallery:
        """Return the newest state, or the newest state that a model can search. It follows other processes' commits."""
        newest = Gallery.open(self.path)
        if newest.generation != self._generation:
            self._states, self._generation = {}, newest.generation
        states = self._states  # another thread may replace it
        label = "" if side is None else side.label
        if label not in states:
            states[label] = newest if side is None else searchable_state(self.path, side.embedder)
        return states[label]

    def search(
        self, side: Side, query: str | Image, top_k: int, where: Mapping[str, object] | None, keep: bool = False
    ) -> list[Hit]:
        """Return a model's hits, even if a compaction deletes the searched state.

        Args:
            side: the model.
            query: a text or an image.
            top_k: maximum hits.
            where: filters.
            keep: whether to save a re-ranking's new embeddings in the gallery's folder.
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
        """The gallery items' originals.

        Raises:
            XcompatError: they are unknown or cannot be read.
        """
        if not self.sources:
            raise XcompatError("the gallery's originals are unknown; start the page with --images or --texts")
        return merge_originals([source.originals for source in self.sources])

    def image(self, item: str, metadata: Mapping[str, object] | None) -> Image | None:
        """Return an item's image, or None if it is unknown or unreadable."""
        try:
            found = self.show(item) if self.show is not None else self._file(item, metadata)
            return found if found is None or isinstance(found, Image) else open_image(found)
        except UnusableSampleError:
            return None

    def _file(self, item: str, metadata: Mapping[str, Any] | None) -> Any:  # noqa: ANN401 - as data sets store images
        named = [metadata[key] for key in IMAGE_COLUMNS if metadata and isinstance(metadata.get(key), str)]
        there = (found for source in self.sources if (found := source.image(item, named)) is not None)
        return next(there, None) or next((Path(name) for name in named if is_file(name)), None)

    def as_query(self, item: str) -> str | Image:
        """Return an item's image or text, to search with.

        Raises:
            XcompatError: there is no such item, or it has neither.
        """
        gallery = self.gallery()
        if gallery.find([item]) == [None]:
            raise XcompatError(f"{self.title} has no item {item!r}; copy the id of a hit")
        about = gallery.metadata([item])[0]
        if (image := self.image(item, about)) is not None:
            return image
        if text := (about or {}).get(TEXT):
            return str(text)
        raise XcompatError(f"{item!r} has no known image or text; set the folder of images with --images")


def _lies_in(file: Path, folder: Path) -> bool:
    """Return whether a file lies in a folder. Ids may come from strangers and lead elsewhere."""
    return file.resolve().is_relative_to(folder.resolve())


@dataclass(frozen=True)
class TestResults:
    """A direction's test queries, with their results on the old gallery.

    Args:
        questions: the queries.
        rows_Q: int64 ``(Q,)`` rows in the test set.
        old_Q: int ``(Q,)`` rank of the first match with the old query, -1 for skipped queries.
        new_Q: the same with the new query.
    """

    questions: QuerySet
    rows_Q: NDArray[np.int64]
    old_Q: NDArray[np.number]
    new_Q: NDArray[np.number]


@dataclass
class Site:
    """A page's content.

    Args:
        title: page title.
        shelves: the galleries by title.
        sides: the searching models: the old model, if any, and the new model.
        report: a run's report folder. None without a report.
        judged: test queries by direction.
        examples: suggested texts.
        allow_changes: whether the page may upgrade, backfill and roll back.
    """

    title: str
    shelves: dict[str, Shelf]
    sides: list[Side]
    report: Path | None = None
    judged: dict[str, TestResults] = field(default_factory=dict)
    examples: list[str] = field(default_factory=list)
    allow_changes: bool = False

    def shelf(self, title: str) -> Shelf:
        """Return a gallery by its title, or the first for an empty title.

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
        """Whether any gallery's originals are known."""
        return any(shelf.sources for shelf in self.shelves.values())

    def sides_for_search(self, rerank: bool) -> list[Side]:
        """Return the models for a search. With ``rerank`` the new model answers twice."""
        return [*self.sides, Side(RERANKED, self.sides[-1].embedder)] if rerank else self.sides

    @property
    def reranks(self) -> bool:
        """Return true if hits can be re-embedded. A gallery may store its texts, but a run has only images by id."""
        return any(shelf.sources or shelf.show is None for shelf in self.shelves.values())

    @property
    def maps_galleries(self) -> bool:
        """Whether the new model maps stored embeddings."""
        model = self.sides[-1].embedder.model
        return isinstance(model, CompatModel) and model.maps_galleries
