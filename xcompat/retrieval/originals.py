"""Originals of embeddings: images or texts behind a single interface."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from PIL.Image import Image
from pydantic import ValidationError

from xcompat.core.distributed import gather_objects, rank, world_size
from xcompat.core.errors import XcompatError
from xcompat.core.lazy import datasets as hf
from xcompat.core.parallel import Executor
from xcompat.core.progress import Waiting
from xcompat.data import BadSamples, PairSource, TextSource, contains_images, load_pairs, load_text_items
from xcompat.data.images import stores_orientation
from xcompat.data.schema import CAPTION, ID, IMAGE, METADATA, TEXT, captions_of
from xcompat.embeddings.embed import Contents, embed_blocks, embed_contents, embed_rows, images_per_batch

if TYPE_CHECKING:
    from xcompat.core.fingerprint import Fingerprint
    from xcompat.models.embedder import Embedder
    from xcompat.retrieval.gallery import Gallery

UNREADABLE = 0.1
"""Largest share of unreadable images. Repaired images can be added later."""
IMAGES_AT_ONCE, IMAGES_OF_A_GPU = 64, 1024  # embedded before a copy to the CPU
TEXTS_AT_ONCE, TEXTS_OF_A_GPU = 512, 8192  # sorting more at once needs less padding
Parts: TypeAlias = Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]]
"""Row numbers, and their embeddings."""


class Originals(Protocol):
    """Images or texts with ids, numbered from 0."""

    kind: ClassVar[str]
    """Noun for messages."""
    ids_are: ClassVar[str]
    """Explanation of their ids, for messages."""
    tell_apart: ClassVar[str]
    """Fix for conflicting ids, for messages."""
    ids: Sequence[str]
    dataset: hf.Dataset
    max_bad_share: float
    """Largest share that may be unreadable."""

    def require(self, embedder: Embedder) -> None:
        """Raise if the model cannot embed these originals."""

    def require_same(self, gallery: Gallery) -> None:
        """Raise if the gallery has other parts of these originals under the same ids."""

    def metadata(self, rows: NDArray[np.int64]) -> list[dict[str, Any] | None]:
        """Return the rows' metadata to store in a gallery."""

    def contents(self, rows: NDArray[np.int64]) -> Contents:
        """Read rows, for a worker to embed."""

    def has_orientation(self, row: np.int64) -> bool:
        """Return whether a row is a photo with an EXIF orientation other than upright."""

    def part(self, embedder: Embedder) -> int:
        """Return the number of rows to embed before sharing results."""

    def embed(
        self, embedder: Embedder, rows: NDArray[np.int64], bad: BadSamples | None = None, waiting: Waiting | None = None
    ) -> Parts:
        """Embed rows, in parts of :meth:`part`, and skip unreadable rows.

        Args:
            embedder: the model.
            rows: the rows to embed, in this order.
            bad: counts unreadable rows.
            waiting: counts the seconds the model waits for data.
        """


class Images:
    """Images, with the first caption and further columns as metadata.

    Args:
        dataset: from :func:`load_images`.
        max_bad_share: largest unreadable share.
    """

    kind: ClassVar[str] = "images"
    ids_are: ClassVar[str] = "paths relative to the folder that the gallery was built from"
    tell_apart: ClassVar[str] = "move these images into a subfolder with a new name"

    def __init__(self, dataset: hf.Dataset, max_bad_share: float = UNREADABLE) -> None:
        self.dataset, self.ids, self.max_bad_share = dataset, dataset[ID][:], max_bad_share

    def require(self, embedder: Embedder) -> None:
        """Raise if the model embeds texts only."""
        if not any(embedder.processor.image_size):
            raise XcompatError(f"{embedder.name} embeds texts only, but these are images; choose a model like CLIP")

    def require_same(self, gallery: Gallery) -> None:
        """Do nothing: images have no parts."""

    def metadata(self, rows: NDArray[np.int64]) -> list[dict[str, Any] | None]:
        """Return the rows' caption and further columns."""
        columns = [name for name in (CAPTION, METADATA) if name in self.dataset.column_names]
        held = self.dataset.select_columns(columns)[rows] if columns else {}
        nothing = [None] * len(rows)
        told = zip(held.get(CAPTION, nothing), held.get(METADATA, nothing), strict=True)
        return [_other_metadata(captions_of(captions), others) for captions, others in told]

    def contents(self, rows: NDArray[np.int64]) -> Contents:
        """Return images as stored, possibly as paths only."""
        return Contents(self.dataset.select_columns([IMAGE])[rows][IMAGE], [self.ids[row] for row in rows.tolist()])

    def has_orientation(self, row: np.int64) -> bool:
        """Return whether a photo has an EXIF orientation other than upright."""
        return stores_orientation(self.dataset[int(row)][IMAGE])

    def part(self, embedder: Embedder) -> int:
        """Return the row count of whole batches."""
        size = images_per_batch(embedder.processor, embedder.device)
        return size * -(-(IMAGES_AT_ONCE if embedder.device.type == "cpu" else IMAGES_OF_A_GPU) // size)

    def embed(
        self,
        embedder: Embedder,
        rows: NDArray[np.int64],
        bad: BadSamples | None = None,
        waiting: Waiting | None = None,
        prepare: Callable[[list[Image]], torch.Tensor] | None = None,
    ) -> Parts:
        """Embed rows; ``prepare`` is as in :func:`~xcompat.embeddings.embed.embed_rows`."""
        size = images_per_batch(embedder.processor, embedder.device)
        embedded = embed_rows(embedder, self.dataset, rows.tolist(), size, bad=bad, waiting=waiting, prepare=prepare)
        while made := list(islice(embedded, self.part(embedder) // size)):
            yield np.concatenate([kept for kept, _ in made]), torch.cat([embeds for _, embeds in made]).numpy(force=True)


def _other_metadata(captions: list[str], others: str | None) -> dict[str, object] | None:
    return ({CAPTION: captions[0]} if captions else {}) | (json.loads(others) if others is not None else {}) or None


class Texts:
    """Texts, whole or in passages.

    Args:
        dataset: from :func:`~xcompat.data.load_text_items`.
        cut: whether they are passages ``DOCUMENT#0``, ``DOCUMENT#1`` and so on.
    """

    kind: ClassVar[str] = "texts"
    ids_are: ClassVar[str] = "set by --id-column, --words and --overlap when the gallery was built"
    tell_apart: ClassVar[str] = "give these texts unique ids (--id-column), because rows without an id are numbered"

    max_bad_share = 0.0  # loading raises for unreadable texts

    def __init__(self, dataset: hf.Dataset, cut: bool = False) -> None:
        self.dataset, self.ids, self.cut = dataset, dataset[ID][:], cut

    def require(self, embedder: Embedder) -> None:
        """Raise if the model embeds images only."""
        if not embedder.processor.max_length:
            raise XcompatError(f"{embedder.name} embeds images only, but these are texts; choose a model with a text tower")

    def require_same(self, gallery: Gallery) -> None:
        """Raise if the gallery's passages were cut differently.

        An interrupted build leaves one partial document. Several, or passages missing from these documents, show another
        length.
        """
        counts = self._passages()
        others = [name for document, count in counts.items() for name in _ids_if_cut_differently(document, count)]
        foreign = [name for name, version in zip(others, gallery.find(others), strict=True) if version is not None]
        foreign = sorted(set(foreign) - set(self.ids)) if foreign else []
        ends = [(f"{document}#0", f"{document}#{count - 1}") for document, count in counts.items() if count > 1]
        first, last = (gallery.find([pair[place] for pair in ends]) for place in range(2))
        partly = [ends[row][1] for row in range(len(ends)) if first[row] is not None and last[row] is None]
        if foreign or len(partly) > 1:
            named = f"only the gallery has {foreign[0]!r}" if foreign else f"the gallery lacks {partly[0]!r}"
            raise XcompatError(
                f"{gallery.path} holds these texts cut differently ({named}); use --text-column, --words and --overlap as when "
                "it was built, or build another gallery"
            )

    def _passages(self) -> dict[str, int]:
        """Return document -> number of passages; 0 for whole texts."""
        if not self.cut:
            return dict.fromkeys(self.ids, 0)
        parts = (name.rpartition("#") for name in self.ids)
        return {document: int(place) + 1 for document, _, place in parts}  # the last passage wins

    def metadata(self, rows: NDArray[np.int64]) -> list[dict[str, Any] | None]:
        """Return the rows' stored metadata."""
        found = self.dataset.select_columns([METADATA])[rows][METADATA]
        return [None if about is None else json.loads(about) for about in found]

    def contents(self, rows: NDArray[np.int64]) -> Contents:
        """Return the rows' texts."""
        return Contents(self.dataset.select_columns([TEXT])[rows][TEXT])

    def has_orientation(self, row: np.int64) -> bool:
        """Return False: texts have none."""
        return False

    def part(self, embedder: Embedder) -> int:
        """Return the number of texts to sort at once."""
        return TEXTS_AT_ONCE if embedder.device.type == "cpu" else TEXTS_OF_A_GPU

    def embed(
        self, embedder: Embedder, rows: NDArray[np.int64], bad: BadSamples | None = None, waiting: Waiting | None = None
    ) -> Parts:
        """Embed rows; each part is sorted by length, or by shared beginnings."""
        size, only_texts = self.part(embedder), self.dataset.select_columns([TEXT])
        parts = [rows[start : start + size] for start in range(0, len(rows), size)]
        embedded = embed_blocks(embedder, (only_texts[part][TEXT] for part in parts), waiting or Waiting())
        for part, batches in zip(parts, embedded, strict=True):
            places, embeds = zip(*batches, strict=True)
            yield part, torch.cat(embeds).numpy(force=True)[np.argsort(np.concatenate(places))]


def _ids_if_cut_differently(document: str, count: int) -> tuple[str, ...]:
    """Return ids that exist only if a document was cut differently."""
    return (f"{document}#{count}", document) if count else (f"{document}#0",)


class EmbeddedPart(NamedTuple):
    """Embeddings of some originals.

    Args:
        rows: (n,) their row numbers.
        embeds_ND: (n, d) float32.
        side_NS: (n, S) side-information; None without a model for it.
    """

    rows: NDArray[np.int64]
    embeds_ND: NDArray[np.float32]
    side_NS: NDArray[np.float32] | None


def embed_on_processes(
    embedder: Embedder,
    originals: Originals,
    rows: NDArray[np.int64],
    bad: BadSamples,
    waiting: Waiting,
    side_info: Embedder | None,
) -> Iterator[EmbeddedPart]:
    """Distribute parts over all processes; each yields all embeddings, in row order."""
    size = originals.part(embedder)
    parts = [rows[start : start + size] for start in range(0, len(rows), size)]
    mine = np.concatenate([rows[:0], *parts[rank() :: world_size()]])
    embedded = _with_sides(originals, originals.embed(embedder, mine, bad, waiting), side_info)
    nothing = EmbeddedPart(rows[:0], np.empty((0, embedder.dim), np.float32), None)
    while True:
        gathered = gather_objects(next(embedded, nothing), shared=True)
        bad.merge_processes()
        if not any(len(part.rows) for part in gathered):
            return
        yield from (part for part in gathered if len(part.rows))


def _with_sides(originals: Originals, parts: Parts, side_info: Embedder | None) -> Iterator[EmbeddedPart]:
    """Also embed the rows with the side-information model."""
    for kept, embeds in parts:
        if side_info is None:
            yield EmbeddedPart(kept, embeds, None)
            continue
        made = list(originals.embed(side_info, kept))
        places = np.argsort(np.concatenate([rows for rows, _ in made]))  # texts come back sorted by length
        order = np.empty_like(places)
        order[np.argsort(kept)] = places
        yield EmbeddedPart(kept, embeds, np.concatenate([sides for _, sides in made])[order])


def embed_on_workers(
    embedder: Embedder, originals: Originals, rows: NDArray[np.int64], bad: BadSamples, spread: Executor
) -> Iterator[EmbeddedPart]:
    """Let workers embed the parts, and yield the embeddings."""
    size = originals.part(embedder)
    parts = (rows[start : start + size] for start in range(0, len(rows), size))
    for part, made in spread(embed_contents, embedder, ((part, originals.contents(part)) for part in parts)):
        for name, reason in made.unread.items():
            bad.add(name, reason)
        embedder.processor.count_truncated += made.truncated  # counted in another process
        read = np.isfinite(made.embeds_ND[:, 0])
        if read.any():
            yield EmbeddedPart(part[read], made.embeds_ND[read], None)


def load_originals(
    path: str | Path | Sequence[str | Path],
    max_bad_share: float | None = None,
    metadata: bool | list[str] = True,
    **options: object,
) -> Originals:
    """Read images or texts from a path, or from several (:func:`merge_originals`).

    Args:
        path: as in :class:`~xcompat.data.PairSource` or :class:`~xcompat.data.TextSource`, or several of them.
        max_bad_share: largest share of unreadable images; by default :data:`UNREADABLE`.
        metadata: table columns to store with each item; True for all, False for none.
        options: text source fields; any of them selects texts.

    Returns:
        Images if there are any, else texts.

    Raises:
        XcompatError: the path has neither, a file is damaged, or an option does not apply.
    """
    if not isinstance(path, str | Path):
        return merge_originals([load_originals(each, max_bad_share, metadata, **options) for each in path])
    if not options and contains_images(str(path)):
        share = UNREADABLE if max_bad_share is None else max_bad_share
        return Images(load_images(path, share, metadata), share)
    if max_bad_share is not None:
        raise XcompatError(f"--max-bad-share works with images only, but {path} contains texts; remove --max-bad-share")
    try:
        source = TextSource(path=str(path), metadata=metadata, **{"keep_text": True, **options})
    except ValidationError as error:
        raise XcompatError(error.errors()[0]["msg"].removeprefix("Value error, ")) from None
    return Texts(load_text_items(source), cut=source.words is not None)


def merge_originals(parts: Sequence[Originals]) -> Originals:
    """Merge several sources into a single source. If ids repeat, the first source wins.

    Args:
        parts: results of :func:`load_originals`.

    Raises:
        XcompatError: some are images, others texts.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    if len({part.kind for part in parts}) > 1:
        raise XcompatError("a gallery contains either images or texts, but its sources contain both; remove one kind")
    named = (CAPTION, METADATA, IMAGE) if isinstance(first, Images) else (METADATA, TEXT)
    columns = [ID, *(name for name in named if any(name in part.dataset.column_names for part in parts))]
    tables = [part.dataset.select_columns([name for name in columns if name in part.dataset.column_names]) for part in parts]
    if len({str(table.features[CAPTION]) for table in tables if CAPTION in table.column_names}) > 1:  # single captions and lists
        tables = [_with_lists(table) if CAPTION in table.column_names else table for table in tables]
    dataset = hf.concatenate_datasets(tables)
    rows = {name: row for row, name in reversed(list(enumerate(dataset[ID][:])))}
    dataset = dataset if len(rows) == len(dataset) else dataset.select(sorted(rows.values()))
    if isinstance(first, Images):
        return Images(dataset, first.max_bad_share)
    return Texts(dataset, any(isinstance(part, Texts) and part.cut for part in parts))


def _with_lists(table: hf.Dataset) -> hf.Dataset:
    return table.remove_columns(CAPTION).add_column(CAPTION, list(map(captions_of, table[CAPTION][:])))


def load_images(path: str | Path, max_bad_share: float = UNREADABLE, metadata: bool | list[str] = True) -> hf.Dataset:
    """Read images, with captions if available.

    Args:
        path: as in :class:`~xcompat.data.PairSource`.
        max_bad_share: largest share of unreadable shards, or of their samples.
        metadata: further columns in a captions file; True to use all.

    Returns:
        A data set with the columns ``image`` and ``id``, optionally ``caption`` and ``metadata``.
    """
    try:
        dataset = load_pairs(PairSource(path=str(path), max_bad_share=max_bad_share), metadata=metadata)
    except XcompatError:  # captions may be missing; other errors repeat here
        dataset = load_pairs(PairSource(path=str(path), captions=False, max_bad_share=max_bad_share), metadata=metadata)
    assert isinstance(dataset, hf.Dataset)
    return dataset


def origins_of(gallery: Gallery, originals: Originals, remedy: str = "") -> list[Fingerprint | None]:
    """Return the model that embedded each original.

    Raises:
        XcompatError: no original is in the gallery, followed by ``remedy``.
    """
    originals.require_same(gallery)
    origins = gallery.find(originals.ids)
    if all(origin is None for origin in origins):
        raise XcompatError(
            f"none of the {len(origins)} {originals.kind} is in {gallery.path}: ids are {originals.ids_are}, and the first id "
            f"here is {originals.ids[0]!r}{remedy}"
        )
    return origins
