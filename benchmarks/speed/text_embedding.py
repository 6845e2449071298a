"""Text embedding, CLIP B/32's text tower on a CPU: shared prefixes against padding and sentence-transformers.

    python benchmarks/speed/text_embedding.py [--captions FILE] [--texts 768] [--rounds 5]

Random weights (speed does not depend on them), CLIP's own byte-pair vocabulary, which open_clip ships, and captions of COCO of 6
to 20 tokens. Ours tokenises, sorts, embeds and writes the cache to disk; it computes what captions share at their beginnings
once, so that its time for a text falls as there are more of them. The padded side embeds one batch only: its time for a text
depends neither on the text nor on how many there are. Peers: `pip install sentence-transformers`.
"""

from __future__ import annotations

import gzip
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from measuring import ROUNDS, Row, main, medians, not_installed, timed
from open_clip.tokenizer import SimpleTokenizer
from transformers import CLIPConfig, CLIPImageProcessorPil, CLIPProcessor, CLIPTokenizer

from xcompat.embeddings.embed import embed_texts
from xcompat.encoders.transformers_encoder import build_transformers_encoder, make_processor
from xcompat.models.embedder import Embedder

CAPTIONS = Path(__file__).resolve().parents[3] / "shared" / "data" / "captions" / "coco_val2017.txt.gz"
PADDED_BATCH, CHECKED = 256, 64


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


def read_captions(file: Path, count: int, embedder: Embedder) -> list[str]:
    """Read the first captions of 6 to 20 tokens."""
    with gzip.open(file, "rt", encoding="utf-8") as handle:
        lines = handle.read().splitlines()[: 4 * count]
    kept = [line for line, ids in zip(lines, embedder.processor.tokenize(lines), strict=True) if 6 <= len(ids) <= 20]
    return kept[:count]


def padded(embedder: Embedder, texts: list[str]) -> np.ndarray:
    """Embed one batch as most code does: in the order given, every text padded to 77."""
    tokens = embedder.processor.tokenizer(texts, padding="max_length", truncation=True, max_length=77, return_tensors="pt")
    return embedder.embed(dict(tokens)).numpy()


def ours(embedder: Embedder, texts: list[str]) -> np.ndarray:
    """Embed into a cache on disk, and read it."""
    with tempfile.TemporaryDirectory() as folder:
        return embed_texts(embedder, texts, Path(folder) / "cache", "benchmark")[:]


def sentence_transformer(embedder: Embedder) -> Callable[[list[str]], np.ndarray] | None:
    """Return the encode of sentence-transformers for the same model, with its own settings; None where it is not installed."""
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError:
        return None
    with tempfile.TemporaryDirectory() as folder:
        embedder.model.model.save_pretrained(folder)
        CLIPProcessor(CLIPImageProcessorPil(), embedder.processor.tokenizer).save_pretrained(folder)
        model = SentenceTransformer(folder, device="cpu")
    return lambda texts: model.encode(texts, normalize_embeddings=True, show_progress_bar=False)


def measure(captions: Path = CAPTIONS, texts: int = 768, rounds: int = ROUNDS) -> list[Row]:
    """Measure text embedding on a CPU."""
    embedder = clip_b32()
    given = read_captions(captions, texts, embedder)
    first, encode = given[:PADDED_BATCH], sentence_transformer(embedder)
    mine = ours(embedder, given)  # stored as float16
    np.testing.assert_allclose(padded(embedder, first[:CHECKED]), mine[:CHECKED], atol=1e-4)
    sides: dict[str, Callable[[], object]] = {
        "ours": lambda: ours(embedder, given),
        "padded": lambda: padded(embedder, first),
    }
    if encode is not None:
        np.testing.assert_allclose(encode(given[:CHECKED]), mine[:CHECKED], atol=1e-4)
        sides["encode"] = lambda: encode(given)
    took = medians(sides, rounds)
    tokens = statistics.mean(map(len, embedder.processor.tokenize(given)))
    what = f"{len(given):,} captions of {tokens:.1f} tokens into a cache, CLIP B/32"
    peer = "sentence-transformers' encode"
    all_padded, note = took["padded"] * len(given) / len(first), f"theirs of one batch of {len(first)}, multiplied"
    return [
        timed(what, "transformers, padded to 77", ">= 8", took["ours"], all_padded, note),
        timed(what, peer, ">= 1.5", took["ours"], took["encode"])
        if encode is not None
        else not_installed(what, peer, ">= 1.5", "sentence-transformers"),
    ]


if __name__ == "__main__":
    main(measure)
