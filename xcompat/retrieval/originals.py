"""What the embeddings of a gallery are made of: pictures or texts, read and embedded alike."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias

import datasets as hf
import numpy as np
import torch
from numpy.typing import NDArray
from PIL.Image import Image
from pydantic import ValidationError

from xcompat.core.errors import XcompatError
from xcompat.core.progress import Waiting
from xcompat.data import BadSamples, PairSource, TextSource, holds_pictures, load_items_of_text, load_pairs
from xcompat.data.schema import CAPTION, ID, IMAGE, METADATA, TEXT, captions_of
from xcompat.embeddings.embed import Contents, embed_blocks, embed_rows, images_per_batch

if TYPE_CHECKING:
    from xcompat.core.fingerprint import Fingerprint
    from xcompat.models.embedder import Embedder
    from xcompat.retrieval.gallery import Gallery

UNREADABLE = 0.1
"""Share of pictures that may be unreadable: more than in training, as a gallery can be given them later, once they are mended."""
PICTURES_AT_ONCE, PICTURES_OF_A_GPU = 64, 1024  # that a process embeds before it waits for their copy to the CPU
TEXTS_AT_ONCE, TEXTS_OF_A_GPU = 512, 8192  # the more are sorted at once, the less padding
Parts: TypeAlias = Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]]
"""Row numbers, and the embeddings of these rows."""


class Originals(Protocol):
    """Pictures or texts, numbered from 0, each with an id."""

    kind: ClassVar[str]
    """What messages call them."""
    ids_are: ClassVar[str]
    """What messages say of their ids."""
    tell_apart: ClassVar[str]
    """What messages say to do where others have the same ids."""
    ids: Sequence[str]
    dataset: hf.Dataset
    max_bad_share: float
    """Which share of them may be unreadable."""

    def require(self, embedder: Embedder) -> None:
        """Refuse a model that does not embed these."""

    def require_same(self, gallery: Gallery) -> None:
        """Refuse a gallery that holds other parts of these under the same ids."""

    def metadata(self, rows: NDArray[np.int64]) -> list[dict[str, Any] | None]:
        """Return what a gallery keeps beside the embeddings of rows."""

    def contents(self, rows: NDArray[np.int64]) -> Contents:
        """Read rows, to be embedded by a worker."""

    def part(self, embedder: Embedder) -> int:
        """Return how many rows a process embeds before others get the results."""

    def embed(
        self, embedder: Embedder, rows: NDArray[np.int64], bad: BadSamples | None = None, waiting: Waiting | None = None
    ) -> Parts:
        """Embed rows, in parts of :meth:`part`, leaving out those that cannot be read.

        Args:
            embedder: the model.
            rows: the rows to embed, in this order.
            bad: counts what cannot be read.
            waiting: counts the seconds in which the model waits for data.
        """


class Pictures:
    """Pictures, whose first caption and whose further columns in a captions file become metadata.

    Args:
        dataset: from :func:`load_pictures`.
        max_bad_share: which share of them may be unreadable.
    """

    kind: ClassVar[str] = "pictures"
    ids_are: ClassVar[str] = "the paths below the folder that the gallery was built from"
    tell_apart: ClassVar[str] = "move these into a folder with a name of its own below the one that is named"

    def __init__(self, dataset: hf.Dataset, max_bad_share: float = UNREADABLE) -> None:
        self.dataset, self.ids, self.max_bad_share = dataset, dataset[ID][:], max_bad_share

    def require(self, embedder: Embedder) -> None:
        """See :meth:`Originals.require`."""
        if not any(embedder.processor.image_size):
            raise XcompatError(
                f"{embedder.name} embeds texts only, and these are pictures; take an image-text model such as CLIP"
            )

    def require_same(self, gallery: Gallery) -> None:
        """See :meth:`Originals.require_same`: pictures have no parts."""

    def metadata(self, rows: NDArray[np.int64]) -> list[dict[str, Any] | None]:
        """See :meth:`Originals.metadata`."""
        columns = [name for name in (CAPTION, METADATA) if name in self.dataset.column_names]
        held = self.dataset.select_columns(columns)[rows] if columns else {}
        nothing = [None] * len(rows)
        told = zip(held.get(CAPTION, nothing), held.get(METADATA, nothing), strict=True)
        return [_about(captions_of(captions), others) for captions, others in told]

    def contents(self, rows: NDArray[np.int64]) -> Contents:
        """See :meth:`Originals.contents`: as they are stored, which may be paths alone."""
        return Contents(self.dataset.select_columns([IMAGE])[rows][IMAGE], [self.ids[row] for row in rows.tolist()])

    def part(self, embedder: Embedder) -> int:
        """See :meth:`Originals.part`: whole batches."""
        size = images_per_batch(embedder.processor, embedder.device)
        return size * -(-(PICTURES_AT_ONCE if embedder.device.type == "cpu" else PICTURES_OF_A_GPU) // size)

    def embed(
        self,
        embedder: Embedder,
        rows: NDArray[np.int64],
        bad: BadSamples | None = None,
        waiting: Waiting | None = None,
        prepare: Callable[[list[Image]], torch.Tensor] | None = None,
    ) -> Parts:
        """See :meth:`Originals.embed`; ``prepare`` is as in :func:`~xcompat.embeddings.embed.embed_rows`."""
        size = images_per_batch(embedder.processor, embedder.device)
        embedded = embed_rows(embedder, self.dataset, rows.tolist(), size, bad=bad, waiting=waiting, prepare=prepare)
        while made := list(islice(embedded, self.part(embedder) // size)):
            yield np.concatenate([kept for kept, _ in made]), torch.cat([embeds for _, embeds in made]).numpy(force=True)


def _about(captions: list[str], others: str | None) -> dict[str, Any] | None:
    """Return the metadata of a picture, without what it lacks; None if it has none."""
    return ({CAPTION: captions[0]} if captions else {}) | (json.loads(others) if others is not None else {}) or None


class Texts:
    """Texts, whole or in passages.

    Args:
        dataset: from :func:`~xcompat.data.load_items_of_text`.
        cut: whether they are passages of documents, called ``DOCUMENT#0`` and so on.
    """

    kind: ClassVar[str] = "texts"
    ids_are: ClassVar[str] = "what --id-column, --words and --overlap made of the texts that the gallery was built from"
    tell_apart: ClassVar[str] = "give these ids of their own (--id-column), as rows without one are numbered"

    max_bad_share = 0.0  # texts that cannot be read are refused with their file

    def __init__(self, dataset: hf.Dataset, cut: bool = False) -> None:
        self.dataset, self.ids, self.cut = dataset, dataset[ID][:], cut

    def require(self, embedder: Embedder) -> None:
        """See :meth:`Originals.require`."""
        if not embedder.processor.max_length:
            raise XcompatError(f"{embedder.name} embeds pictures only, and these are texts; take a model with a text tower")

    def require_same(self, gallery: Gallery) -> None:
        """Refuse a gallery whose passages were cut otherwise: the same id would stand for another text.

        A build that was killed leaves one document in part. Where several are, or the gallery has passages that these documents
        have not, they were cut to another length.
        """
        counts = self._passages()
        others = [name for document, count in counts.items() for name in _others(document, count)]
        foreign = [name for name, version in zip(others, gallery.find(others), strict=True) if version is not None]
        foreign = sorted(set(foreign) - set(self.ids)) if foreign else []
        ends = [(f"{document}#0", f"{document}#{count - 1}") for document, count in counts.items() if count > 1]
        first, last = (gallery.find([pair[place] for pair in ends]) for place in range(2))
        partly = [ends[row][1] for row in range(len(ends)) if first[row] is not None and last[row] is None]
        if foreign or len(partly) > 1:
            named = f"it has {foreign[0]!r}, these have not" if foreign else f"these have {partly[0]!r}, it has not"
            raise XcompatError(
                f"{gallery.path} holds these texts cut otherwise ({named}): give --text-column, --words and --overlap as when it "
                "was built; to cut them anew, build another gallery"
            )

    def _passages(self) -> dict[str, int]:
        """Return the number of passages of each document, 0 for whole texts."""
        if not self.cut:
            return dict.fromkeys(self.ids, 0)
        parts = (name.rpartition("#") for name in self.ids)
        return {document: int(place) + 1 for document, _, place in parts}  # the last place stays

    def metadata(self, rows: NDArray[np.int64]) -> list[dict[str, Any] | None]:
        """See :meth:`Originals.metadata`."""
        found = self.dataset.select_columns([METADATA])[rows][METADATA]
        return [None if about is None else json.loads(about) for about in found]

    def contents(self, rows: NDArray[np.int64]) -> Contents:
        """See :meth:`Originals.contents`."""
        return Contents(self.dataset.select_columns([TEXT])[rows][TEXT])

    def part(self, embedder: Embedder) -> int:
        """See :meth:`Originals.part`."""
        return TEXTS_AT_ONCE if embedder.device.type == "cpu" else TEXTS_OF_A_GPU

    def embed(
        self, embedder: Embedder, rows: NDArray[np.int64], bad: BadSamples | None = None, waiting: Waiting | None = None
    ) -> Parts:
        """See :meth:`Originals.embed`; each part is sorted by length, or so that its texts share beginnings."""
        size, only_texts = self.part(embedder), self.dataset.select_columns([TEXT])
        parts = [rows[start : start + size] for start in range(0, len(rows), size)]
        embedded = embed_blocks(embedder, (only_texts[part][TEXT] for part in parts), waiting or Waiting())
        for part, batches in zip(parts, embedded, strict=True):
            places, embeds = zip(*batches, strict=True)
            yield part, torch.cat(embeds).numpy(force=True)[np.argsort(np.concatenate(places))]


def _others(document: str, count: int) -> tuple[str, ...]:
    """Return ids that a gallery has only if it holds other parts of a document: the passage after the last, or the whole."""
    return (f"{document}#{count}", document) if count else (f"{document}#0",)


def load_originals(
    path: str | Path,
    max_bad_share: float | None = None,
    metadata: bool | list[str] = True,
    **options: Any,  # noqa: ANN401 - see below
) -> Originals:
    """Read pictures or texts, whatever a path holds.

    Args:
        path: as in :class:`~xcompat.data.PairSource` or :class:`~xcompat.data.TextSource`.
        max_bad_share: which share of pictures may be unreadable; :data:`UNREADABLE` unless given.
        metadata: which further columns of a table are kept beside each item; True for all, False for none.
        options: fields of a text source; if there are any, the path holds texts.

    Returns:
        Pictures if there are any, else texts.

    Raises:
        XcompatError: there is neither, something is damaged, or an option does not fit.
    """
    if not options and holds_pictures(str(path)):
        share = UNREADABLE if max_bad_share is None else max_bad_share
        return Pictures(load_pictures(path, share, metadata), share)
    if max_bad_share is not None:
        raise XcompatError(f"--max-bad-share is of pictures, and {path} is read as texts; leave it out")
    try:
        source = TextSource(path=str(path), metadata=metadata, **{"keep_text": True, **options})
    except ValidationError as error:
        raise XcompatError(error.errors()[0]["msg"].removeprefix("Value error, ")) from None
    return Texts(load_items_of_text(source), cut=source.words is not None)


def together(parts: Sequence[Originals]) -> Originals:
    """Return pictures or texts of several sources as one; of those with the same id, the first.

    Args:
        parts: as :func:`load_originals` reads them.

    Raises:
        XcompatError: some are pictures, others texts.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    if len({part.kind for part in parts}) > 1:
        raise XcompatError(
            "--images and --texts name pictures and texts, and a gallery was built from one of them; leave the other out"
        )
    named = (CAPTION, IMAGE) if isinstance(first, Pictures) else (METADATA, TEXT)
    columns = [ID, *(name for name in named if any(name in part.dataset.column_names for part in parts))]
    tables = [part.dataset.select_columns([name for name in columns if name in part.dataset.column_names]) for part in parts]
    if len({str(table.features[CAPTION]) for table in tables if CAPTION in table.column_names}) > 1:  # one a picture, and several
        tables = [_with_lists(table) if CAPTION in table.column_names else table for table in tables]
    dataset = hf.concatenate_datasets(tables)
    rows = {name: row for row, name in reversed(list(enumerate(dataset[ID][:])))}
    dataset = dataset if len(rows) == len(dataset) else dataset.select(sorted(rows.values()))
    if isinstance(first, Pictures):
        return Pictures(dataset, first.max_bad_share)
    return Texts(dataset, any(isinstance(part, Texts) and part.cut for part in parts))


def _with_lists(table: hf.Dataset) -> hf.Dataset:
    return table.remove_columns(CAPTION).add_column(CAPTION, list(map(captions_of, table[CAPTION][:])))


def load_pictures(path: str | Path, max_bad_share: float = UNREADABLE, metadata: bool | list[str] = True) -> hf.Dataset:
    """Read pictures, with captions if the source has any.

    Args:
        path: as in :class:`~xcompat.data.PairSource`.
        max_bad_share: which share of shards, or of their samples, may be unreadable.
        metadata: which further columns of a captions file are kept; True for all.

    Returns:
        A data set with the columns ``image`` and ``id``, ``caption`` if there are captions, and ``metadata`` of a captions file.
    """
    try:
        dataset = load_pairs(PairSource(path=str(path), max_bad_share=max_bad_share), metadata=metadata)
    except XcompatError:  # perhaps there are no captions; any other fault is raised again here
        dataset = load_pairs(PairSource(path=str(path), captions=False, max_bad_share=max_bad_share), metadata=metadata)
    assert isinstance(dataset, hf.Dataset)
    return dataset


def origins_of(gallery: Gallery, originals: Originals, remedy: str = "") -> list[Fingerprint | None]:
    """Return the model that embedded each original; refuse originals none of which is in the gallery, and say what to do."""
    originals.require_same(gallery)
    origins = gallery.find(originals.ids)
    if all(origin is None for origin in origins):
        raise XcompatError(
            f"none of the {len(origins)} {originals.kind} is in {gallery.path}: ids are {originals.ids_are}, and the first one "
            f"here is {originals.ids[0]!r}{remedy}"
        )
    return origins
