"""A bare matrix product, and the embedding of texts and images, on one GPU."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path

import faiss
import numpy as np
import torch
from faiss_index import Side, agreement, compare_sides
from setting import (
    DISTINCT,
    OLD_DIM,
    ROUNDS,
    TOKENS,
    WORDS,
    Figure,
    Size,
    build_encoder,
    measured,
    peak_since,
    photos_on_disk,
    seconds_of,
)

from xcompat import Fingerprint
from xcompat.data.schema import ID
from xcompat.embeddings.embed import MANY_TOKENS, embed_images, embed_texts, images_per_batch
from xcompat.encoders.prefixes import length_sorted_batches
from xcompat.evaluation.labelled import Items, LabelledPairs
from xcompat.evaluation.ranking import rank
from xcompat.models.embedder import Embedder
from xcompat.retrieval import Gallery
from xcompat.retrieval.originals import Images
from xcompat.retrieval.reranking import Reranker

PRODUCTS = 64  # matrix products a run: a card needs some time to reach its clock
LEAST_SHARE = 0.85
PHOTO_ROUNDS = 3
HITS, QUERIES, SEARCHES = 20, 16, 4096
PER_CLASS = 50


def product(size: Size, device: torch.device) -> Figure:
    """Measure a bare matrix product, the most that the card can reach."""
    a, b = (torch.randn(size.product, size.product, device=device, dtype=torch.bfloat16) for _ in range(2))
    what = f"matrix product, {size.product:,} x {size.product:,}, bfloat16"
    return measured(what, lambda: [a @ b for _ in range(PRODUCTS)], PRODUCTS * size.product, device)


def embedder_of(size: Size, device: torch.device) -> Embedder:
    """Build the model."""
    encoder, processor = build_encoder(size)
    encoder = encoder.requires_grad_(False).eval().to(device)
    return Embedder(encoder, processor, Fingerprint.from_string("l14"), encoder.embedding_dim, autocast=torch.bfloat16)


def tokens(embedder: Embedder, size: Size, device: torch.device) -> Figure:
    """Embed captions, sorted by length and trimmed, in batches of as many tokens as a cache takes."""
    lengths = np.random.default_rng(0).integers(*TOKENS, size.texts, endpoint=True).tolist()
    batches = [
        {"input_ids": torch.randint(3, 200, (len(rows), max(lengths[row] for row in rows)), device=device)}
        for rows in length_sorted_batches(lengths, MANY_TOKENS)
    ]
    return measured("text embedding, from tokens", lambda: [embedder.embed(batch) for batch in batches], size.texts, device)


def strings(embedder: Embedder, size: Size, device: torch.device) -> Figure:
    """Embed captions into a cache as for a corpus, with tokenising and writing."""
    generator = np.random.default_rng(0)
    lengths = generator.integers(*TOKENS, size.texts, endpoint=True) - 2
    captions = [" ".join(generator.choice(WORDS, length)) for length in lengths]
    with tempfile.TemporaryDirectory() as folder:
        caches = (Path(folder) / f"cache-{number}" for number in range(ROUNDS + 2))
        shard_rows = size.texts // 8  # several: one is tokenised while another is embedded
        embed = partial(embed_texts, embedder, captions, data_digest="captions", shard_rows=shard_rows)
        return measured("text embedding, from strings", lambda: embed(next(caches)), size.texts, device)


def images(embedder: Embedder, device: torch.device) -> Figure:
    """Embed images that are on the card already, in batches of as many as a cache takes."""
    batch = images_per_batch(embedder.processor, device)
    pixels = {"pixel_values": torch.randn(batch, 3, *embedder.processor.image_size, device=device)}
    what = f"image embedding, from tensors, {batch} at a time"
    return measured(what, lambda: [embedder.embed(pixels) for _ in range(8)], 8 * batch, device)


def photos(embedder: Embedder, forward: Figure, size: Size, device: torch.device) -> Figure:
    """Embed JPEG files into a cache, decoded by as many threads as there are cores, against the forward alone."""
    with tempfile.TemporaryDirectory() as folder:
        dataset, numbers = photos_on_disk(Path(folder), size.photos, captions=False), count()

        def run() -> None:
            embed_images(embedder, dataset, Path(folder) / f"cache-{next(numbers)}", "photos")

        run()
        rate = size.photos / seconds_of(run, device, PHOTO_ROUNDS)
        peak = peak_since(device)
    assert forward.rate is not None and forward.flops is not None
    share = rate / forward.rate
    return Figure(
        "image embedding, from JPEG files",
        rate,
        forward.flops * share,
        peak,
        f">= {LEAST_SHARE:.0%} of the forward's rate",
        share >= LEAST_SHARE,
        f"{share:.0%} of the rate of tensors; {size.photos:,} photos of 500 by 375 pixels, read, decoded and written to a cache",
    )


def reranking(embedder: Embedder, size: Size, device: torch.device) -> Figure:
    """Re-rank the first hits of single queries: read and embed their JPEG files, without a cache."""
    old, generator = Fingerprint.from_string("old"), np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        items = photos_on_disk(Path(folder), min(size.photos, DISTINCT), captions=False)
        hits = min(HITS, len(items))
        queries_QD, stored_ND = (generator.standard_normal((rows, OLD_DIM), np.float32) for rows in (QUERIES, len(items)))
        new_QE = generator.standard_normal((QUERIES, embedder.dim), np.float32)
        with Gallery.create(Path(folder) / "gallery", old, OLD_DIM) as gallery:
            gallery.add(stored_ND, items[ID][:])
            gallery.commit()
            found = gallery.search(queries_QD, old, hits)
            ranker = Reranker(embedder, Images(items), hits, keep=False)

            def run() -> None:
                for row, of_query in enumerate(found):
                    ranker.order(new_QE[row : row + 1], [of_query], gallery)

            run()
            rate = QUERIES / seconds_of(run, device, PHOTO_ROUNDS)
    what = f"re-ranking {hits} hits per query"
    note = f"queries a second, one by one: {1000 / rate:.1f} ms each, of which search is no part; {hits} photos read and embedded"
    return Figure(what, rate, None, peak_since(device), note=note)


def ranking(size: Size, device: torch.device) -> Figure:
    """Rank all items for as many queries by exact scores, as evaluations do."""
    embeds_ND = torch.randn(size.ranked, OLD_DIM, device=device)
    items = Items(embeds_ND, np.arange(size.ranked) % (size.ranked // PER_CLASS), np.arange(size.ranked))
    pairs = LabelledPairs(items, items)
    rate = size.ranked / seconds_of(lambda: rank(pairs), device, PHOTO_ROUNDS)
    what, flops = f"ranking {size.ranked:,} x {size.ranked:,}", 2.0 * rate * size.ranked * OLD_DIM
    return Figure(what, rate, flops, peak_since(device), note="queries a second, by products in float64")


def faiss_sides(size: Size, device: torch.device) -> Iterator[Figure]:
    """Build and search a faiss index on the CPU and on GPUs."""
    what = f"faiss {size.factory} of {size.indexed:,} x {OLD_DIM}"
    if device.type == "cuda" and not faiss.get_num_gpus():
        yield Figure(what, note="not run: faiss sees no GPU; install faiss-gpu and run this again")
        return
    sides: list[Side] = []
    for side in compare_sides(size.indexed, OLD_DIM, SEARCHES, size.factory, PHOTO_ROUNDS):
        sides.append(side)
        note = f"queries a second, {SEARCHES:,} at a time; built in {side.building:.2f} s"
        if len(sides) > 1:
            note += f"; {sides[0].searching / side.searching:.1f} times as fast as the CPU, {agreement(sides):.1%} of its results"
        yield Figure(f"{what}, {side.name}", SEARCHES / side.searching, note=note)


def images_compiled(embedder: Embedder, eager: Figure, device: torch.device) -> Figure:
    """Embed the same images with compiled code; its number of operations is taken to be the same."""
    batch = images_per_batch(embedder.processor, device)
    pixels_BCHW = torch.randn(batch, 3, *embedder.processor.image_size, device=device)
    compiled = torch.compile(embedder.model.embed_images)

    @torch.inference_mode()
    def run() -> None:
        with torch.autocast(device.type, embedder.autocast):
            for _ in range(8):
                compiled(pixels_BCHW)

    run()
    rate = 8 * batch / seconds_of(run, device)
    assert eager.rate is not None and eager.flops is not None
    return Figure(f"{eager.what}, compiled", rate, eager.flops / eager.rate * rate, peak_since(device))
