"""How surely `xcompat gallery doctor` finds planted vectors of another origin, and what else it takes for such: real photos.

    python benchmarks/studies/doctor.py

Needs ../shared/data/tiny-imagenet and ../shared/models. A gallery of MobileNet V1 x0.25 gets 0 to 50 % vectors of three other
origins in equal parts, under its own name: another model (x0.5, cut to as many dimensions), other photos (its own vectors under
wrong ids), and a sibling (the same weights with noise). Prints Markdown.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import datasets as hf
import faiss
import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console

from xcompat.data import iterate_images
from xcompat.models.embedder import Embedder, load_embedder
from xcompat.retrieval import Gallery
from xcompat.retrieval.doctor import Finding, examine
from xcompat.retrieval.originals import Images, load_images
from xcompat.retrieval.preprocessing import own_preparation

SHARED = Path("../shared")
OWN, OTHER = (str(SHARED / "models" / name) for name in ("mobilenet_v1_0.25_128", "mobilenet_v1_0.5_160"))
PHOTOS = SHARED / "data/tiny-imagenet/val-0000.tar.gz"
ITEMS, SAMPLE, TRIALS = 400, 400, 1
SHARES = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
ORIGINS = ("another model", "other photos", "a sibling")
STORED = ("as it is", "scalar quantiser (SQ8)", "in bfloat16", "bicubic, not bilinear")
NOISE = 0.02  # of the sibling's weights, relative to their size


def embedded(embedder: Embedder, photos: hf.Dataset, filtering: str | None = None) -> NDArray[np.float32]:
    """Embed photos, resized with another filter if one is given."""
    parts = []
    for _, images in iterate_images(photos, 64, prepare=list):
        prepare = (
            embedder.processor.images
            if filtering is None
            else replace(own_preparation(embedder.processor, images), filter=filtering)
        )
        parts.append(embedder.embed({"pixel_values": prepare(images)}).numpy())
    return np.concatenate(parts)


def sibling_of(embedder: Embedder) -> Embedder:
    """Return the model with a little noise on its weights, as after a short training."""
    model = copy.deepcopy(embedder.model)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data += NOISE * parameter.data.std(correction=0) * torch.randn(parameter.shape, generator=generator)
    return replace(embedder, model=model)


def planted(
    own: NDArray[np.float32], others: dict[str, NDArray[np.float32]], share: float, seed: int
) -> tuple[NDArray[np.float32], dict[str, NDArray[np.int64]]]:
    """Return stored vectors, a share of which is of other origins, and the rows of each."""
    rows = np.random.default_rng(seed).permutation(len(own))[: round(share * len(own))]
    vectors, parts = own.copy(), dict(zip(others, np.array_split(rows, len(others)), strict=True))
    for name, part in parts.items():
        vectors[part] = others[name][part]
    return vectors, parts


def gallery_of(folder: Path, stored: str, vectors: NDArray[np.float32], ids: list[str], embedder: Embedder) -> Gallery:
    """Make a gallery, around a quantised index if asked to."""
    if "SQ8" not in stored:
        gallery = Gallery.create(folder / "gallery", embedder)
        gallery.add(vectors, ids)
        gallery.commit()
        return gallery
    index = faiss.index_factory(vectors.shape[1], "SQ8", faiss.METRIC_INNER_PRODUCT)
    index.train(vectors)
    index.add(vectors)
    faiss.write_index(index, str(folder / "own.faiss"))
    return Gallery.from_faiss(folder / "gallery", folder / "own.faiss", ids, embedder)


def trial(
    stored: str,
    share: float,
    seed: int,
    own: NDArray[np.float32],
    others: dict[str, NDArray[np.float32]],
    photos: hf.Dataset,
    embedder: Embedder,
) -> tuple[Finding, dict[str, list[bool]], list[bool]]:
    """Return the doctor's finding, and for planted and other vectors in its sample whether it named them."""
    ids = photos["id"][:]
    vectors, parts = planted(own, others, share, seed)
    with tempfile.TemporaryDirectory() as folder:
        (finding,) = examine(gallery_of(Path(folder), stored, vectors, ids, embedder), Images(photos), embedder, SAMPLE)
    drawn = np.sort(
        np.random.default_rng(0).choice(np.arange(len(ids)), min(SAMPLE, len(ids)), replace=False)
    )  # as examine draws
    named, rows = set(finding.foreign), set(drawn.tolist())
    found = {name: [ids[row] in named for row in part.tolist() if row in rows] for name, part in parts.items()}
    foreign = {row for part in parts.values() for row in part.tolist()}
    return finding, found, [ids[row] in named for row in sorted(rows - foreign)]


def table_of(
    photos: hf.Dataset,
    embedder: Embedder,
    others: dict[str, NDArray[np.float32]],
    trials: int,
    shares: tuple[float, ...] = SHARES,
) -> Iterator[list[str]]:
    """Yield the rows of the table."""
    own = {name: embedded(embedder, photos) for name in STORED[:2]}
    own[STORED[2]] = embedded(replace(embedder, autocast=torch.bfloat16), photos)
    own[STORED[3]] = embedded(embedder, photos, "bicubic")
    for stored, vectors in own.items():
        for share in shares if stored == STORED[0] else (shares[0], shares[-3]):
            outcomes = [trial(stored, share, seed, vectors, others, photos, embedder) for seed in range(trials)]
            cells = [stored, f"{share:.0%}"]
            for name in others:
                hits = [hit for _, found, _ in outcomes for hit in found[name]]
                cells.append(f"{sum(hits)}/{len(hits)}")
            alarms = [alarm for *_, false in outcomes for alarm in false]
            cells.append(f"{sum(alarms)}/{len(alarms)}")
            findings = [finding for finding, *_ in outcomes]
            held = sum(finding.interval[0] <= share <= finding.interval[1] for finding in findings)
            low, high = np.mean([finding.interval for finding in findings], axis=0)
            cells.append(
                f"{np.mean([finding.share for finding in findings]):.1%} ({low:.1%} to {high:.1%}), covered {held}/{trials}"
            )
            cells.append("; ".join(sorted({way for finding in findings for way in finding.made if way})))
            yield cells


def main() -> None:
    """Measure every share and way of storing, and print the table."""
    photos = load_images(PHOTOS).select(range(ITEMS))
    embedder = load_embedder(OWN)
    own, sibling = embedded(embedder, photos), embedded(sibling_of(embedder), photos)
    cut = embedded(load_embedder(OTHER), photos)[:, : embedder.dim]
    cut /= np.linalg.norm(cut, axis=1, keepdims=True)
    others = dict(zip(ORIGINS, (cut, np.roll(own, 7, axis=0), sibling), strict=True))
    console = Console(soft_wrap=True, markup=False, highlight=False)
    for name, vectors in others.items():
        low, middle, high = np.quantile((vectors * own).sum(axis=1), (0.0, 0.5, 1.0))
        console.print(f"- {name}: cosine to the model's own {low:.2f} to {high:.2f}, median {middle:.2f}")
    columns = [
        "stored",
        "planted",
        *(f"found: {name}" for name in others),
        "false alarms",
        "estimated share (95 %)",
        "preparation",
    ]
    console.print(f"\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for cells in table_of(photos, embedder, others, TRIALS):
        console.print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
