"""Text embedding, CLIP B/32's text tower on a CPU: length-sorted trimmed batches against padding to 77.

    python benchmarks/text_embedding.py [--captions FILE] [--texts 2048] [--rounds 5]

Random weights (speed does not depend on them) and CLIP's own byte-pair vocabulary, which open_clip ships. Both sides embed
captions of 6 to 20 tokens in interleaved rounds; their median rates are compared, and so are the embeddings. The padded side
embeds the first batch only, as its time for a text depends neither on the text nor on how many there are.
"""

from __future__ import annotations

import argparse
import gzip
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from open_clip.tokenizer import SimpleTokenizer
from rich.console import Console
from rich.table import Table
from transformers import CLIPConfig, CLIPImageProcessorPil, CLIPTokenizer

from xcompat.embedding import TOKENS_PER_BATCH, embed_texts, length_sorted_batches
from xcompat.encoders.packed import packed_linears
from xcompat.encoders.transformers_encoder import build_transformers_encoder, make_processor
from xcompat.models.embedder import Embedder
from xcompat.training.provenance import provenance

CAPTIONS = Path(__file__).resolve().parents[2] / "shared" / "data" / "captions" / "coco_val2017.txt.gz"
PADDED_BATCH = 256


def clip_b32() -> Embedder:
    """Build CLIP B/32 with random weights and CLIP's vocabulary."""
    shipped = SimpleTokenizer()
    merges = sorted(shipped.bpe_ranks, key=shipped.bpe_ranks.get)
    start, end = "<start_of_text>", "<end_of_text>"  # as open_clip spells them
    special = {"bos_token": start, "eos_token": end, "pad_token": end, "unk_token": end}
    tokenizer = CLIPTokenizer(vocab=shipped.encoder, merges=merges, model_max_length=77, **special)
    config = CLIPConfig(text_config={"eos_token_id": 49407, "bos_token_id": 49406, "pad_token_id": 49407}, projection_dim=512)
    torch.manual_seed(0)
    encoder = build_transformers_encoder(
        {"library": "transformers", "name": "clip-b32", "revision": None, "config": config.to_dict()}
    )
    processor = make_processor(CLIPImageProcessorPil(), tokenizer, config)
    encoder = encoder.requires_grad_(False).eval()
    return Embedder(encoder, processor, encoder.fingerprint(processor), 512)


def captions(file: Path, count: int, embedder: Embedder) -> list[str]:
    """Read the first captions of 6 to 20 tokens."""
    with gzip.open(file, "rt", encoding="utf-8") as handle:
        lines = handle.read().splitlines()[: 4 * count]
    kept = [line for line, ids in zip(lines, embedder.processor.tokenize(lines), strict=True) if 6 <= len(ids) <= 20]
    return kept[:count]


def padded(embedder: Embedder, texts: list[str]) -> np.ndarray:
    """Embed one batch as most code does: in the order given, every text padded to 77."""
    tokens = embedder.processor.tokenizer(texts, padding="max_length", truncation=True, max_length=77, return_tensors="pt")
    return embedder.embed(dict(tokens)).numpy()


def trimmed(embedder: Embedder, texts: list[str]) -> np.ndarray:
    """Embed as the cache does, without writing it: for comparing the values before they are stored as float16."""
    ids = embedder.processor.tokenize(texts)
    embeds = np.empty((len(texts), embedder.dim), np.float32)
    with packed_linears(embedder.model):
        for rows in length_sorted_batches([len(tokens) for tokens in ids], TOKENS_PER_BATCH):
            embeds[rows] = embedder.embed(embedder.processor.pad([ids[row] for row in rows])).numpy()
    return embeds


def cached(embedder: Embedder, texts: list[str]) -> None:
    """Embed into a cache on disk."""
    with tempfile.TemporaryDirectory() as folder:
        embed_texts(embedder, texts, Path(folder) / "cache", "benchmark")


def rate(embed: Callable[[Embedder, list[str]], object], embedder: Embedder, texts: list[str]) -> float:
    """Return texts per second of one call."""
    started = time.perf_counter()
    embed(embedder, texts)
    return len(texts) / (time.perf_counter() - started)


def main() -> None:
    """Run and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--captions", type=Path, default=CAPTIONS)
    parser.add_argument("--texts", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    embedder = clip_b32()
    texts = captions(arguments.captions, arguments.texts, embedder)
    sides = {"padded to 77, batches of 256": (padded, texts[:PADDED_BATCH]), "xcompat embedding cache": (cached, texts)}
    difference = np.abs(padded(embedder, texts[:PADDED_BATCH]) - trimmed(embedder, texts[:PADDED_BATCH])).max()
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(arguments.rounds):
        for name, (embed, given) in sides.items():
            rates[name].append(rate(embed, embedder, given))
    medians = {name: statistics.median(values) for name, values in rates.items()}
    tokens = statistics.mean(map(len, embedder.processor.tokenize(texts)))
    title = f"captions of 6-20 tokens, {tokens:.1f} on average; medians of {arguments.rounds} interleaved rounds"
    table = Table("", "texts/s", "ratio", title=title)
    slowest = min(medians.values())
    for name, median in medians.items():
        table.add_row(name, f"{median:,.0f}", f"{median / slowest:.1f}x")
    console = Console()
    console.print(table)
    console.print(f"largest difference of an embedding's component: {difference:.1e} (allowed 1e-5)")
    about = provenance()
    machine, versions = about["machine"], about["versions"]
    libraries = f"torch {versions['torch']}, transformers {versions['transformers']}"
    console.print(f"{machine['device']}, {machine['threads']} threads, {libraries}")


if __name__ == "__main__":
    main()
