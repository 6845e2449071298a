"""Embedding of data sets into caches, arrays and batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL.Image import Image
from torch import Tensor

from xcompat.core.distributed import pin_for
from xcompat.core.lazy import datasets
from xcompat.core.progress import Waiting, notice
from xcompat.core.threads import cores, keep_freed_memory, map_in_threads, share_of_cores
from xcompat.data import BadSamples, View, iterate_images
from xcompat.data.schema import ID, IMAGE, PIXEL_VALUES
from xcompat.embeddings.cache import FULL, CacheInfo, EmbeddingCache
from xcompat.embeddings.cache_writer import Batches, fill_cache, select_rows
from xcompat.encoders.base import Encoder
from xcompat.encoders.onednn import packed_linears
from xcompat.encoders.prefixes import length_sorted_batches, prefix_batches, shared_prefixes
from xcompat.encoders.processor import Processor
from xcompat.models.embedder import Embedder
from xcompat.models.frozen import FrozenModel

TOKENS_PER_BATCH = 512  # on a CPU, so that activations fit into its caches
MANY_TOKENS = 65536  # on a GPU
PIXELS_PER_BATCH = 16 * 224 * 224  # on a CPU, so that activations fit into its caches
IMAGES_PER_BATCH = 64
IMAGES_AT_ONCE = 512  # images given as values, which are held in memory twice
__all__ = [
    "Contents",
    "EmbeddedContents",
    "EmbeddingCache",
    "cache_name",
    "decoding_options",
    "embed_blocks",
    "embed_contents",
    "embed_images",
    "embed_in_memory",
    "embed_rows",
    "embed_texts",
    "images_per_batch",
    "notice_truncated",
]


def embed_texts(
    embedder: Embedder,
    texts: Sequence[str],
    path: str | Path,
    data_digest: str,
    *,
    shard_rows: int = 65536,
    tokens_per_batch: int | None = None,
) -> EmbeddingCache:
    """Embed texts into a cache, sorted inside each shard so that batches share prefixes or need little padding.

    Args:
        embedder: the frozen model.
        texts: any sequence that returns lists of strings for slices (a list, or a column of a ``datasets.Dataset``).
        path: cache folder. A finished cache is opened, an unfinished cache continued, and damaged shards are re-embedded.
        data_digest: identifies the texts and their order.
        shard_rows: texts per shard.
        tokens_per_batch: batch size in tokens, including padding. Shared prefixes count once.

    Returns:
        The cache.
    """

    def embed_shards(shards: Sequence[Sequence[int]], waiting: Waiting) -> Iterator[Batches]:
        return embed_blocks(embedder, (select_rows(texts, rows) for rows in shards), waiting, tokens_per_batch)

    before = embedder.processor.count_truncated
    cache = _embed(embedder, "texts", len(texts), Path(path), data_digest, shard_rows, embed_shards, BadSamples())
    notice_truncated(embedder, embedder.processor.count_truncated - before, len(texts))
    return cache


def embed_blocks(
    embedder: Embedder, blocks: Iterable[Sequence[str]], waiting: Waiting, tokens_per_batch: int | None = None
) -> Iterator[Batches]:
    """Embed texts block by block, sorted inside each block so that batches share prefixes or need little padding.

    Args:
        embedder: the frozen model.
        blocks: the texts of each block.
        waiting: counts the seconds the model waits for texts.
        tokens_per_batch: as in :func:`embed_texts`.

    Yields:
        The batches of each block with the positions of their texts. Consume them before the next block.
    """
    sharing = _find_prefix_encoder(embedder)

    def prepare(texts: Sequence[str]) -> list[tuple[NDArray[np.int64], dict[str, Tensor]]]:
        return list(_text_batches(embedder, texts, tokens_per_batch, sharing is not None))

    # a GPU embeds a block while the next is tokenised; on a CPU, tokenising would take the model's cores
    prepared = map(prepare, blocks) if embedder.device.type == "cpu" else map_in_threads(prepare, blocks, threads=1)
    with nullcontext() if sharing is None else shared_prefixes(sharing), _pack_weights(embedder):
        for batches in waiting.track(prepared):
            yield ((rows, embedder.embed(batch)) for rows, batch in batches)


def embed_in_memory(embedder: Embedder, texts: Sequence[str]) -> NDArray[np.float32]:
    """Embed texts in batches of similar lengths, without a cache.

    Args:
        embedder: the frozen model.
        texts: N strings.

    Returns:
        (N, d), L2-normalised.
    """
    before, embeds_Nd = embedder.processor.count_truncated, np.empty((len(texts), embedder.dim), dtype=np.float32)
    for rows_B, batch in _text_batches(embedder, texts):
        embeds_Nd[rows_B] = embedder.embed(batch).numpy(force=True)
    notice_truncated(embedder, embedder.processor.count_truncated - before, len(texts))
    return embeds_Nd


def _text_batches(
    embedder: Embedder, texts: Sequence[str], tokens_per_batch: int | None = None, by_prefix: bool = False
) -> Iterator[tuple[NDArray[np.int64], dict[str, Tensor]]]:
    processor = embedder.processor
    budget = tokens_per_batch or (TOKENS_PER_BATCH if embedder.device.type == "cpu" else MANY_TOKENS)
    token_ids = processor.tokenize(texts) if len(texts) else []  # tokenizers reject an empty list
    padded = processor.max_length if processor.pad_to_max_length else 0
    by_length = length_sorted_batches([max(len(ids), padded) for ids in token_ids], budget)
    for rows_B in prefix_batches(token_ids, budget) if by_prefix else by_length:
        yield rows_B, _pin_batch(processor.pad([token_ids[row] for row in rows_B]), embedder.device)


def notice_truncated(embedder: Embedder, truncated: int, total: int, fix: str = "") -> None:
    """Print the number of truncated texts and the fix, if any text was truncated."""
    if truncated:
        limit = f"the {embedder.processor.max_length} tokens of {embedder.name}"
        notice(f"{truncated} of {total} texts were truncated to {limit}{fix}")


def embed_images(
    embedder: FrozenModel,
    dataset: datasets.Dataset,
    path: str | Path,
    data_digest: str,
    *,
    shard_rows: int = 4096,
    max_bad_share: float = 0.01,
    view: View | None = None,
) -> EmbeddingCache:
    """Embed images into a cache. An unreadable image becomes a row of NaN, with a message that names it.

    Args:
        embedder: the frozen model.
        dataset: a data set from :func:`xcompat.data.load_pairs`.
        path: cache folder. A finished cache is opened, an unfinished cache continued, and damaged shards are re-embedded.
        data_digest: identifies the images and their order.
        shard_rows: images per shard.
        max_bad_share: maximum share of unreadable images.
        view: augmented view to embed, which ``data_digest`` must cover. None for plain images.

    Returns:
        The cache.
    """
    if view is None and (rows_Nd := embedder.lookup(dataset[ID])) is not None:

        def copy_shards(shards: Sequence[Sequence[int]], waiting: Waiting) -> Iterator[Batches]:
            for rows in shards:
                yield iter([(np.arange(len(rows)), torch.from_numpy(rows_Nd[np.asarray(rows)]))])

        return _embed(embedder, "images", len(rows_Nd), Path(path), data_digest, shard_rows, copy_shards, BadSamples())
    bad = BadSamples(max_bad_share, len(dataset))
    model = embedder.require_model("contains embeddings but no model")

    def embed_shards(shards: Sequence[Sequence[int]], waiting: Waiting) -> Iterator[Batches]:
        rows, size = [row for shard in shards for row in shard], images_per_batch(model.processor, model.device)
        batches = embed_rows(model, dataset, rows, size, bad=bad, waiting=waiting, view=view)  # one decoding stream for all
        with _pack_weights(model):
            yield from _cut_by_shard(batches, shards)

    return _embed(embedder, "images", len(dataset), Path(path), data_digest, shard_rows, embed_shards, bad)


def embed_rows(
    embedder: Embedder,
    dataset: datasets.Dataset,
    rows: Sequence[int],
    batch_size: int,
    *,
    bad: BadSamples | None = None,
    waiting: Waiting | None = None,
    prepare: Callable[[list[Image]], Tensor] | None = None,
    view: View | None = None,
) -> Batches:
    """Embed images. A GPU computes while the next images are decoded, a CPU decodes between batches.

    Args:
        embedder: the frozen model.
        dataset: a data set from :func:`xcompat.data.load_pairs`.
        rows: the rows to embed, in this order.
        batch_size: images per batch.
        bad: counts unreadable images, which are skipped.
        waiting: counts the seconds the model waits for images.
        prepare: preprocessing from images to pixels. None to use the model's own.
        view: augmented view to embed. None for plain images.

    Yields:
        Row numbers, and their embeddings (B, d) on the model's device. A GPU may still be computing them.
    """
    processor = embedder.processor
    usual = prepare or processor.images
    draw = None if view is None else view.build_draw(processor)

    def prepare_images(images: list[Any]) -> dict[str, Tensor]:
        pixels = usual(images) if draw is None else processor.to_pixels(torch.stack(images))
        return _pin_batch({PIXEL_VALUES: pixels}, embedder.device)

    if embedder.device.type == "cpu":
        keep_freed_memory()
    batches = iterate_images(
        dataset, batch_size, rows=rows, bad=bad, draw=draw, prepare=prepare_images, **decoding_options(embedder.device)
    )
    for kept, batch in (waiting or Waiting()).track(batches):
        yield kept, embedder.embed(batch)


class Contents(NamedTuple):
    """Texts or images to embed together, locally or on a worker.

    Args:
        values: texts, or images as a data set stores them: bytes, paths or both.
        names: names of images in messages. None for texts.
    """

    values: list[Any]
    names: list[str] | None = None


class EmbeddedContents(NamedTuple):
    """Embeddings of contents.

    Args:
        embeds_ND: (N, d) float32, L2-normalised, NaN for unreadable images.
        unread: names of unreadable images, with the reasons.
        truncated: number of truncated texts.
    """

    embeds_ND: NDArray[np.float32]
    unread: dict[str, str]
    truncated: int = 0


def embed_contents(embedder: Embedder, contents: Contents) -> EmbeddedContents:
    """Embed contents. The same contents give the same bits everywhere."""
    embeds_ND = np.full((len(contents.values), embedder.dim), np.nan, np.float32)
    if contents.names is not None:
        bad = BadSamples(max_share=1, total=len(contents.values), quiet=True)
        for rows_B, embeds_BD in _embedded_images(embedder, contents, bad):
            embeds_ND[rows_B] = embeds_BD.numpy(force=True)
        return EmbeddedContents(embeds_ND, bad.reasons)
    before, blocks = embedder.processor.count_truncated, [contents.values] if contents.values else []
    for batches in embed_blocks(embedder, blocks, Waiting()):
        for rows_B, embeds_BD in batches:
            embeds_ND[rows_B] = embeds_BD.numpy(force=True)
    return EmbeddedContents(embeds_ND, {}, embedder.processor.count_truncated - before)


def _embedded_images(embedder: Embedder, images: Contents, bad: BadSamples) -> Batches:
    """Embed images in the batches of a single data set, in steps small enough for Arrow arrays."""
    import pyarrow as pa

    size = images_per_batch(embedder.processor, embedder.device)
    step = size * max(1, IMAGES_AT_ONCE // size)
    for start in range(0, len(images.values), step):
        table = {IMAGE: images.values[start : start + step], ID: (images.names or [])[start : start + step]}
        rows = datasets.Dataset(pa.table(table))
        for rows_B, embeds_BD in embed_rows(embedder, rows, range(len(rows)), size, bad=bad):
            yield rows_B + start, embeds_BD


def images_per_batch(processor: Processor, device: torch.device) -> int:
    """Return the fastest batch size for a model's images. On a CPU, larger images need smaller batches.

    Args:
        processor: has the model's image size.
        device: device of the model.
    """
    processor.require_images()
    height, width = processor.image_size
    return min(max(PIXELS_PER_BATCH // (height * width), 1), IMAGES_PER_BATCH) if device.type == "cpu" else IMAGES_PER_BATCH


def decoding_options(device: torch.device) -> dict[str, Any]:
    """Return the arguments of :func:`~xcompat.data.iterate_images` for a device: threads, and whether to decode ahead."""
    if device.type == "cpu":
        return {"threads": cores(device), "ahead": False}
    return {"threads": share_of_cores(), "ahead": True}


def cache_name(kind: str, embedder: FrozenModel, data_digest: str) -> str:
    """Return the folder name of a cache, different for each model, precision and data.

    Args:
        kind: kind of items, e.g. ``images``.
        embedder: the frozen model.
        data_digest: identifies the items and their order.
    """
    name = f"{kind}-{embedder.fingerprint.digest[:16]}-{data_digest[:16]}"
    return name if embedder.precision == FULL else f"{name}-{embedder.precision}"


def _pin_batch(batch: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Pin a batch for a GPU, so that copies run asynchronously."""
    return {name: pin_for(tensor, device) for name, tensor in batch.items()}


def _cut_by_shard(batches: Batches, shards: Sequence[Sequence[int]]) -> Iterator[Batches]:
    """Distribute batches of ascending rows to shards, with places in the shards' rows. Cut batches that span two shards."""
    ahead = next(batches, None)

    def batches_of(rows_N: NDArray[np.int64]) -> Batches:
        nonlocal ahead
        while ahead is not None and ahead[0][0] <= rows_N[-1]:
            rows_B, embeds_BD = ahead
            count = int(np.searchsorted(rows_B, rows_N[-1], side="right"))
            yield np.searchsorted(rows_N, rows_B[:count]), embeds_BD[:count]
            ahead = (rows_B[count:], embeds_BD[count:]) if count < len(rows_B) else next(batches, None)

    yield from map(batches_of, map(np.asarray, shards))


def _embed(
    embedder: FrozenModel,
    kind: str,
    rows: int,
    path: Path,
    data_digest: str,
    shard_rows: int,
    embed_shards: Callable[[Sequence[Sequence[int]], Waiting], Iterator[Batches]],
    bad: BadSamples,
) -> EmbeddingCache:
    model = embedder.fingerprint.digest, embedder.name
    info = CacheInfo(*model, data_digest, kind, rows, embedder.dim, shard_rows, precision=embedder.precision)
    return fill_cache(info, path, embed_shards, bad)


def _pack_weights(embedder: Embedder) -> AbstractContextManager[None]:
    """Pack the weights of a float32 model on a CPU (:func:`packed_linears`). Autocast computes in another precision."""
    return nullcontext() if embedder.autocast is not None else packed_linears(embedder.model)


def _find_prefix_encoder(embedder: Embedder) -> Encoder | None:
    """Return the encoder if it shares prefixes, which pays off only on a CPU."""
    encoder = embedder.model.text_encoder
    return encoder if encoder is not None and encoder.shares_prefixes and embedder.device.type == "cpu" else None
