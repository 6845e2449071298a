"""What one GPU reaches in each part of XBT, and how long the paper's data would take on it.

    python benchmarks/gpu/throughput.py [--tiny]

Samples a second, TFLOP/s and their share of a bfloat16 matrix product measured in the same process, and the memory at its
highest: text embedding (from tokens on the card, and from strings into a cache), image embedding (from tensors, the same
compiled, and from JPEG files into a cache), φ in batches of 8,192 (its logits in float32, and in TF32 as with
`training.tf32: true`), and a step of the pair stage with 1,024 pairs, all of CLIP L/14's size with random weights, on which speed
does not depend.
Hours are those of 67 million texts and 4 million pairs, one epoch each (XBT §4.1), beside the paper's 1.55 and 2.84 on eight
A100 (its Table 7). With --tiny, and without a GPU, everything but compiling runs at toy size: that it runs is all that it shows
then. Not run on a GPU yet: none was at hand.
"""

from __future__ import annotations

import io
import statistics
import tarfile
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import typer
from accelerate import Accelerator
from PIL import Image
from rich.console import Console
from rich.table import Table
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from xcompat import Fingerprint, ProjectionConfig, ProjectionModel, XbtModel
from xcompat.data import PairSource, load_pairs
from xcompat.embedding import MANY_TOKENS, embed_images, embed_texts
from xcompat.encoders.base import Encoder
from xcompat.encoders.prefixes import length_sorted_batches
from xcompat.encoders.processor import Processor
from xcompat.encoders.scratch import ScratchSource, encoder_from_scratch
from xcompat.models import CompatModel, describe_old
from xcompat.models.embedder import Embedder
from xcompat.provenance import provenance
from xcompat.training.cached_gradients import backward_in_parts
from xcompat.training.optimiser import OptimiserFactory

TEXT = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
VISION = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
VISION |= {"image_size": 224, "patch_size": 14}
TOY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
TOKENS = (6, 20)  # of captions, begin and end among them
WORDS = ["a", "the", "two", "red", "blue", "old", "new", "shoe", "dog", "house", "tree", "photo", "of", "on", "in", "with"]
PRODUCTS, DISTINCT = 64, 256  # matrix products a run: a card needs some time to reach its clock; JPEG files that differ
OLD_DIM, ROUNDS = 512, 5
PAPER = {"texts": (67e6, 1.55), "pairs": (4e6, 2.84)}


class Size(NamedTuple):
    """The sizes of all measurements."""

    clip: dict[str, Any]
    texts: int
    images: int
    photos: int
    projected: int
    pairs: int
    mini_batch: int
    product: int


FULL = Size(
    {"model_type": "clip", "projection_dim": 768, "text_config": TEXT, "vision_config": VISION},
    65536, 256, 16384, 8192, 1024, 128, 8192,
)  # fmt: skip
SMALL = Size(
    {"model_type": "clip", "projection_dim": 16, "text_config": TOY, "vision_config": TOY | {"image_size": 32, "patch_size": 8}},
    64, 4, 8, 16, 8, 4, 64,
)  # fmt: skip


class Figure(NamedTuple):
    """One line: what ran, samples a second, floating-point operations a second, and bytes of memory at the highest."""

    what: str
    rate: float
    flops: float
    memory: int


def seconds_of(run: Callable[[], object], device: torch.device) -> float:
    """Return the median time of several runs, each from an idle device to an idle device."""
    wait = torch.cuda.synchronize if device.type == "cuda" else int
    seconds = []
    for _ in range(ROUNDS):
        wait()
        started = time.perf_counter()
        run()
        wait()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def measured(what: str, run: Callable[[], object], samples: int, device: torch.device) -> Figure:
    """Count the operations of one run, then take the median time of several."""
    run()
    with FlopCounterMode(display=False) as counter:
        run()
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    took = seconds_of(run, device)
    return Figure(what, samples / took, counter.get_total_flops() / took, torch.cuda.max_memory_allocated() if on_gpu else 0)


def product(size: int, device: torch.device) -> Figure:
    """Measure a bare matrix product, the most that the card can reach."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    what = f"matrix product, {size} x {size}, bfloat16"
    return measured(what, lambda: [a @ b for _ in range(PRODUCTS)], PRODUCTS * size, device)


def build_encoder(size: Size) -> tuple[Encoder, Processor]:
    """Build the encoder, with a tokenizer that makes one token of every word."""
    return encoder_from_scratch(ScratchSource(model=size.clip, vocab_size=512), [" ".join(WORDS)] * 8)


def embedder_of(size: Size, device: torch.device) -> Embedder:
    """Build the model."""
    encoder, processor = build_encoder(size)
    encoder = encoder.requires_grad_(False).eval().to(device)
    return Embedder(encoder, processor, Fingerprint.from_string("l14"), encoder.embedding_dim, autocast=torch.bfloat16)


def texts(embedder: Embedder, size: Size, device: torch.device) -> Figure:
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


def images(embedder: Embedder, size: Size, device: torch.device) -> Figure:
    """Embed images that are on the card already."""
    batch = {"pixel_values": torch.randn(size.images, 3, *embedder.processor.image_size, device=device)}
    return measured("image embedding, from tensors", lambda: embedder.embed(batch), size.images, device)


def images_compiled(embedder: Embedder, eager: Figure, size: Size, device: torch.device) -> Figure:
    """Embed the same images with compiled code; its number of operations is taken to be the same."""
    pixels_BCHW = torch.randn(size.images, 3, *embedder.processor.image_size, device=device)
    compiled = torch.compile(embedder.model.embed_images)

    @torch.inference_mode()
    def run() -> None:
        with torch.autocast(device.type, embedder.autocast):
            compiled(pixels_BCHW)

    run()
    torch.cuda.reset_peak_memory_stats()
    rate = size.images / seconds_of(run, device)
    return Figure(f"{eager.what}, compiled", rate, eager.flops / eager.rate * rate, torch.cuda.max_memory_allocated())


def jpeg(generator: np.random.Generator) -> bytes:
    """Draw a photo of the web's usual size."""
    coarse = Image.fromarray(generator.integers(0, 255, (24, 32, 3), dtype=np.uint8))
    coarse.resize((500, 375), Image.Resampling.BICUBIC).save(buffer := io.BytesIO(), "JPEG", quality=85)
    return buffer.getvalue()


def photos(embedder: Embedder, size: Size, device: torch.device) -> Figure:
    """Embed JPEG files into a cache."""
    generator = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(Path(folder) / "photos.tar", "w") as tar:
            files = [jpeg(generator) for _ in range(min(DISTINCT, size.photos))]
            for number in range(size.photos):
                content = files[number % len(files)]
                member = tarfile.TarInfo(f"{number:06d}.jpg")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
        dataset = load_pairs(PairSource(path=f"{folder}/photos.tar", captions=False))
        caches = (Path(folder) / f"cache-{number}" for number in range(ROUNDS + 2))
        what = "image embedding, from JPEG files"
        return measured(what, lambda: embed_images(embedder, dataset, next(caches), "photos"), size.photos, device)


def stepping(model: CompatModel, backward: Callable[[], object]) -> Callable[[], None]:
    """Return a step of training."""
    optimiser = OptimiserFactory()(
        model,
        optimiser=torch.optim.AdamW,
        decayed="matrices",
        lr=1e-4,
        prompt_lr_factor=100.0,
        encoder_lr_factor=1.0,
        weight_decay=0.01,
    )

    def step() -> None:
        backward()
        optimiser.step()
        optimiser.zero_grad()

    return step


def projection(dim: int, size: Size, device: torch.device, precision: str) -> Figure:
    """Train φ on embeddings that are on the card already, with float32 products in the given precision."""
    old = describe_old(Fingerprint.from_string("old"), dim=OLD_DIM)
    model = ProjectionModel(ProjectionConfig(old=old, embedding_dim=dim)).train().to(device)
    new, old_embeds = (F.normalize(torch.randn(size.projected, d, device=device), dim=-1) for d in (dim, OLD_DIM))

    def backward() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(new_embeds=new, old_embeds=old_embeds).loss
        loss.backward()

    settings = torch.backends.cuda.matmul
    before, settings.fp32_precision = settings.fp32_precision, precision
    try:
        what = f"φ, batches of {size.projected:,}, logits in {precision}"
        return measured(what, stepping(model, backward), size.projected, device)
    finally:
        settings.fp32_precision = before


def pairs(size: Size, device: torch.device) -> Figure:
    """Train a step of the pair stage with LoRA and prompts, the batch in parts."""
    adapters = {"lora": {"rank": 16, "dropout": 0.1, "targets": ["q_proj", "v_proj"]}, "prompts": 10}
    old = describe_old(Fingerprint.from_string("old"), dim=OLD_DIM)
    model = XbtModel.from_encoder(build_encoder(size), old=old, adapters=adapters)
    model.set_trainable()
    edge = model.processor.image_size
    model = model.train().to(device)
    batch = {
        "pixel_values": torch.randn(size.pairs, 3, *edge, device=device),
        "input_ids": torch.randint(3, 200, (size.pairs, TOKENS[1]), device=device),
    }
    accelerator = Accelerator(mixed_precision="bf16", cpu=device.type == "cpu")
    prepared = accelerator.prepare(model)
    backward = partial(backward_in_parts, accelerator, prepared, batch, size.mini_batch)
    what = f"pair stage, {size.pairs:,} pairs in parts of {size.mini_batch}, each embedded twice"
    return measured(what, stepping(model, backward), size.pairs, device)


def main(tiny: bool = False) -> None:
    """Run everything and print the table."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size = SMALL if tiny or device.type == "cpu" else FULL
    peak, embedder = product(size.product, device), embedder_of(size, device)
    tokens, spelled, eager, read = (part(embedder, size, device) for part in (texts, strings, images, photos))
    compiled = [images_compiled(embedder, eager, size, device)] if device.type == "cuda" else []
    dim = embedder.dim
    del embedder
    exact, rounded = (projection(dim, size, device, precision) for precision in ("ieee", "tf32"))
    stepped = pairs(size, device)
    table = Table("", "samples/s", "TFLOP/s", "of the product", "GiB", title="toy size" if size is SMALL else None)
    for figure in (peak, tokens, spelled, eager, *compiled, read, exact, rounded, stepped):
        share = f"{figure.flops / peak.flops:.0%}"
        table.add_row(figure.what, f"{figure.rate:,.0f}", f"{figure.flops / 1e12:,.2f}", share, f"{figure.memory / 2**30:.1f}")
    console = Console()
    console.print(table)
    about = provenance()
    console.print(
        f"{about['machine']['device']}, torch {about['versions']['torch']}, transformers {about['versions']['transformers']}"
    )
    console.print(f"JPEG files are embedded at {read.rate / eager.rate:.0%} of the rate of tensors")
    if size is FULL:
        for what, figure in (("texts", tokens), ("texts", spelled), ("texts", exact), ("texts", rounded), ("pairs", stepped)):
            count, hours = PAPER[what]
            console.print(
                f"{figure.what}: {count / figure.rate / 3600:.2f} h for {count / 1e6:.0f} M {what}; paper {hours} h on 8 A100"
            )


if __name__ == "__main__":
    typer.run(main)
