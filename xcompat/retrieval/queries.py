"""Search queries: a single text or image, or a source of many."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from xcompat.core.arrays import read_lines
from xcompat.core.errors import XcompatError
from xcompat.core.fingerprint import Fingerprint
from xcompat.core.lazy import datasets as hf
from xcompat.core.paths import is_file
from xcompat.core.progress import advance_bar, console, progress_bar
from xcompat.data import BadSamples
from xcompat.data.image_files import IMAGE_SUFFIXES
from xcompat.data.images import UnusableSampleError, open_image
from xcompat.data.schema import ID, IMAGE, TEXT
from xcompat.data.sources import has_suffix
from xcompat.embeddings.embed import notice_truncated
from xcompat.embeddings.provider import ServedMap
from xcompat.retrieval.originals import Images, Originals, Texts, load_originals

if TYPE_CHECKING:
    from torch import Tensor

    from xcompat.encoders.processor import Processor
    from xcompat.models.base import CompatModel
    from xcompat.models.embedder import Embedder

Source: TypeAlias = "Embedder | ServedMap | CompatModel | Fingerprint"
"""Model that embeds queries; for embedded queries, a map or fingerprint."""


class QueryBlock(NamedTuple):
    """A block of embedded queries.

    Args:
        ids: each query's id in its source, or the typed query.
        texts: each query's text; None for images and embeddings.
        embeds_QD: (Q, D) in the model's own space.
    """

    ids: list[str]
    texts: list[str | None]
    embeds_QD: Tensor | NDArray[np.float32]


class Queries(Protocol):
    """Ordered queries."""

    def __len__(self) -> int:
        """Return their number, including unreadable ones."""

    def embed_in_blocks(self, embedder: Any) -> Iterator[QueryBlock]:  # noqa: ANN401 - see Source
        """Embed the queries in the model's own space, in blocks; print and skip unreadable images."""

    def re_embed(self, old: Embedder, places: Sequence[int]) -> Tensor | NDArray[np.float32]:
        """Embed rows from the last block with another model, in its galleries' space."""


class TypedQuery:
    """A single typed query.

    Args:
        query: a text, or an image path.

    Raises:
        XcompatError: it is empty.
    """

    def __init__(self, query: str) -> None:
        if not query.strip():
            raise XcompatError("the query is empty; enter a text or the path of an image")
        self.query = query

    def __len__(self) -> int:
        return 1

    def embed_in_blocks(self, embedder: Embedder | ServedMap) -> Iterator[QueryBlock]:
        """Yield the embedded query."""
        yield QueryBlock([self.query], [None if is_file(self.query) else self.query], query_embeddings(embedder, self.query))

    def re_embed(self, old: Embedder, places: Sequence[int]) -> Tensor:
        """Embed the query with another model."""
        return old.embed(_query_batch(old.processor.for_queries(), self.query))


class SourceQueries:
    """All texts or images in a source.

    Args:
        originals: the texts or images.
    """

    def __init__(self, originals: Originals) -> None:
        self.originals, self._block = originals, np.empty(0, np.int64)

    def __len__(self) -> int:
        return len(self.originals.ids)

    def embed_in_blocks(self, embedder: Embedder | ServedMap) -> Iterator[QueryBlock]:
        """Embed all queries, block by block."""
        rows = np.arange(len(self))
        for block, embeds_QD in (
            self._embed_by_service(embedder) if isinstance(embedder, ServedMap) else self._embed_own(embedder, rows)
        ):
            self._block = block
            texts = self.originals.dataset.select_columns([TEXT])[block][TEXT] if isinstance(self.originals, Texts) else None
            yield QueryBlock([self.originals.ids[row] for row in block.tolist()], texts or [None] * len(block), embeds_QD)

    def one_by_one(self) -> list[str]:
        """Return each text, or each image's path.

        Raises:
            XcompatError: the images are in an archive or a table.
        """
        if isinstance(self.originals, Texts):
            return list(self.originals.dataset[TEXT])
        paths = [image.get("path") for image in self.originals.dataset.cast_column(IMAGE, hf.Image(decode=False))[IMAGE]]
        if not all(path and is_file(path) for path in paths):
            raise XcompatError("images in an archive or a table cannot be searched one at a time; choose a folder of images")
        return paths

    def re_embed(self, old: Embedder, places: Sequence[int]) -> NDArray[np.float32]:
        """Embed rows from the last block with another model."""
        asking = replace(old, processor=old.processor.for_queries())
        return np.concatenate([embeds for _, embeds in self.originals.embed(asking, self._block[list(places)])])

    def _embed_own(self, embedder: Embedder, rows: NDArray[np.int64]) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]]:
        self.originals.require(embedder)
        asking = replace(embedder, processor=embedder.processor.for_queries(), space="own")
        before = asking.processor.count_truncated
        bad = BadSamples(self.originals.max_bad_share, len(rows), what="queries", raised_by="")
        yield from self.originals.embed(asking, rows, bad)
        notice_truncated(embedder, asking.processor.count_truncated - before, len(rows))

    def _embed_by_service(self, service: ServedMap) -> Iterator[tuple[NDArray[np.int64], Tensor]]:
        if not isinstance(self.originals, Texts):
            raise XcompatError(f"{service.provider.name} embeds texts, but the queries are {self.originals.kind}; give texts")
        size = service.provider.batch
        for start in range(0, len(self), size):
            block = np.arange(start, min(start + size, len(self)))
            yield block, service.embed(self.originals.dataset.select_columns([TEXT])[block][TEXT])


def load_queries(source: str) -> SourceQueries:
    """Read a source with many queries.

    Args:
        source: a ``.txt`` file with a text or image path per line, decided by its first line, or a source for
            :func:`~xcompat.retrieval.originals.load_originals`.

    Raises:
        XcompatError: the source does not exist or contains no queries.
    """
    if has_suffix(source, (".txt",)) and is_file(source):
        lines = [line for line in read_lines(Path(source)) if line.strip()]
        if lines and has_suffix(lines[0], IMAGE_SUFFIXES):
            return SourceQueries(
                Images(hf.Dataset.from_dict({IMAGE: [{"path": line, "bytes": None} for line in lines], ID: lines}))
            )
    return SourceQueries(load_originals(source))


def embed_with_progress(queries: Queries, embedder: Source) -> Iterator[QueryBlock]:
    """Embed queries block by block, with a progress bar if there are several."""
    if len(queries) == 1:
        yield from queries.embed_in_blocks(embedder)
        return
    with progress_bar() as bar:
        task = bar.add_task("searching", total=len(queries), unit="queries")
        for asked in queries.embed_in_blocks(embedder):
            yield asked
            advance_bar(bar, task, len(asked.ids))


def query_embeddings(embedder: Embedder | ServedMap, query: str) -> Tensor:
    """Embed a text, or the image at a path, in the model's own space: (1, D)."""
    if isinstance(embedder, ServedMap):
        return embedder.embed([Path(query) if is_file(query) else query])
    processor = embedder.processor.for_queries()
    before = processor.count_truncated
    embeds_1D = embedder.embed(_query_batch(processor, query), "own")
    if processor.count_truncated > before:
        longest = processor.max_length
        console.print(f"[yellow]![/] query truncated to {longest} tokens")
    return embeds_1D


def _query_batch(processor: Processor, query: str) -> dict[str, Tensor]:
    if not is_file(query):
        if not processor.max_length:
            raise XcompatError(f"the model embeds images only, and no file {query[:80]!r} exists; give the path of an image")
        return processor.texts([query])
    try:
        return {"pixel_values": processor.images([open_image(query)])}
    except UnusableSampleError as error:
        raise XcompatError(f"file {query} is not a readable image ({error}); use an image or a text") from None
