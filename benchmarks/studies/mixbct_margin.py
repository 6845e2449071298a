"""Why MixBCT with ArcFace ends at chance between new and old: one classifier for both, by its margin, scale and dimensions.

    OMP_NUM_THREADS=1 python benchmarks/studies/mixbct_margin.py [--dim 128] [--epochs 10] [--seeds 3] [--image-size 64]

Needs ../shared/data/tiny-imagenet and ../shared/models. The heads of both models are trained on the pooled features of frozen
MobileNets (V1 x0.25, then x0.5), so that a variant takes a quarter of a minute: the old one on 100 classes, the new one on all
200, 100 images of each. Heads and what is credible are the library's; the batch norm and SGD at 0.1 with a linear schedule are
the paper's.
Prints Markdown: means over seeds of CMC@1, and the cosine between the new and the old centre of a training class.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import typer
from confidence import TEST, TRAIN
from numpy.typing import NDArray
from rich.console import Console
from torch import nn
from torch.nn import functional as F

from xcompat.data import LabelledSource, load_labelled
from xcompat.encoders import EncoderSource
from xcompat.evaluation import cmc
from xcompat.losses import ClassificationHead
from xcompat.models.credible import credible_mask
from xcompat.models.embedder import load_embedder
from xcompat.models.old_knowledge import class_means
from xcompat.training.caches import cached_images

OUT = Path("runs/mixbct_margin")
OLD, NEW = (f"../shared/models/mobilenet_v1_{name}" for name in ("0.25_128", "0.5_160"))
CLASSES, KNOWN, IMAGES, BATCH, SHARE = 200, 100, 100, 64, 0.3
console = Console(soft_wrap=True, markup=False, highlight=False)


class Variant(NamedTuple):
    """How the new head is trained; MixBCT's own settings of ArcFace unless stated."""

    head: Any = "arcface"
    scale: float | None = None
    margin: float | None = None
    batch_norm: bool = False
    sgd: bool = False


VARIANTS = {
    "normalised softmax, scale 20": Variant("normalized_softmax"),
    "normalised softmax, scale 64": Variant("normalized_softmax", 64),
    "ArcFace, scale 64, margin .5": Variant(),
    "the same with a batch norm": Variant(batch_norm=True),
    "the same with SGD": Variant(sgd=True),
    "the same with both": Variant(batch_norm=True, sgd=True),
    "ArcFace, scale 20, margin .5": Variant(scale=20),
    "ArcFace, scale 64, margin .2": Variant(margin=0.2),
    "ArcFace, scale 20, margin .2": Variant(scale=20, margin=0.2),
    "CosFace, scale 64, margin .35": Variant("cosface"),
    "CosFace, scale 20, margin .35": Variant("cosface", 20),
}


class Photos(NamedTuple):
    """Features of training and of test photos, (N, D) each."""

    train_ND: torch.Tensor
    test_ND: torch.Tensor


def features(model: str, image_size: int | None) -> tuple[Photos, NDArray[np.int64], NDArray[np.int64]]:
    """Embed photos, or open the cached embeddings; return the classes of training and test photos too."""
    embedder, found, labels = load_embedder(EncoderSource(name=model, image_size=image_size)), [], []
    for path, each in ((TRAIN, IMAGES), (TEST, 25)):
        images = load_labelled(LabelledSource(path=path))
        embeds_ND, labels_N = cached_images(embedder, images.dataset, OUT / "cache"), images.labels()
        kept = np.sort(np.concatenate([np.flatnonzero(labels_N == label)[:each] for label in range(CLASSES)]))
        found.append(torch.from_numpy(np.asarray(embeds_ND[kept], np.float32)))
        labels.append(labels_N[kept])
    return Photos(*found), labels[0], labels[1]


def batches(rows_N: NDArray[np.int64], epochs: int, seed: int) -> Iterator[torch.Tensor]:
    """Yield the rows of each batch."""
    for epoch in range(epochs):
        shuffled_N = np.random.default_rng((seed, epoch)).permutation(rows_N)
        for start in range(0, len(shuffled_N) - BATCH + 1, BATCH):
            yield torch.from_numpy(shuffled_N[start : start + BATCH])


def mixed(embeds_BD: torch.Tensor, old_BD: torch.Tensor, credible_B: torch.Tensor) -> torch.Tensor:
    """Replace some new embeddings by credible old ones (MixBCT Algorithm 1)."""
    draw_B = torch.rand(len(embeds_BD)).masked_fill(~credible_B, -1)
    chosen = draw_B.topk(int(SHARE * len(embeds_BD))).indices
    mixed_B = torch.zeros_like(credible_B)
    mixed_B[chosen] = credible_B[chosen]
    return torch.where(mixed_B[:, None], old_BD, F.normalize(embeds_BD, dim=-1))


def trained(
    photos: Photos, labels_N: NDArray[np.int64], dim: int, variant: Variant, epochs: int, seed: int, old_ND: torch.Tensor | None
) -> Photos:
    """Train a head, against old embeddings if there are any, and return what it makes of all photos."""
    torch.manual_seed(seed)
    width = photos.train_ND.shape[1]
    # the old model's is linear, so that it is the weaker one, as in the recipes of trained backbones
    body = nn.Linear(width, dim) if old_ND is None else nn.Sequential(nn.Linear(width, 512), nn.ReLU(), nn.Linear(512, dim))
    norm = nn.BatchNorm1d(dim) if variant.batch_norm else nn.Identity()
    if isinstance(norm, nn.BatchNorm1d):
        norm.weight.requires_grad_(False)  # as options.batch_norm
    classes = KNOWN if old_ND is None else CLASSES
    head = ClassificationHead(dim, classes, variant.head, scale=variant.scale, margin=variant.margin)
    network, labels = nn.Sequential(body, norm, head), torch.from_numpy(labels_N)
    mean_D, spread_D = photos.train_ND.mean(0), photos.train_ND.std(0) + 1e-6
    credible_N = None if old_ND is None else torch.from_numpy(credible_mask(old_ND.numpy(), labels_N))
    rows_N = np.flatnonzero(labels_N < classes)
    if variant.sgd:
        optimiser: torch.optim.Optimizer = torch.optim.SGD(network.parameters(), 0.1, momentum=0.9, weight_decay=5e-4)
    else:
        optimiser = torch.optim.AdamW(network.parameters(), 1e-2, weight_decay=5e-4)
    steps = epochs * (len(rows_N) // BATCH)
    decay = (lambda step: 1 - step / steps) if variant.sgd else (lambda step: (1 + np.cos(np.pi * step / steps)) / 2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: min(1.0, (step + 1) / 50) * decay(step))
    for rows in batches(rows_N, epochs, seed):
        embeds_BD = norm(body((photos.train_ND[rows] - mean_D) / spread_D))
        if old_ND is not None and credible_N is not None:
            embeds_BD = mixed(embeds_BD, old_ND[rows], credible_N[rows])
        optimiser.zero_grad()
        head(embeds_BD, labels[rows]).backward()
        optimiser.step()
        schedule.step()
    network.eval()
    with torch.inference_mode():
        return Photos(*(F.normalize(norm(body((each - mean_D) / spread_D)), dim=-1).clone() for each in photos))


def centres(embeds_ND: torch.Tensor, labels_N: NDArray[np.int64]) -> torch.Tensor:
    """Return the direction of each class's mean."""
    return F.normalize(torch.from_numpy(class_means(embeds_ND.numpy(), labels_N, CLASSES)), dim=-1)


def main(dim: int = 128, epochs: int = 10, seeds: int = 3, image_size: int | None = None) -> None:
    """Print a table of the variants; smaller images make the old model weaker."""
    (old_photos, labels_N, asked_N), (new_photos, _, _) = features(OLD, image_size), features(NEW, image_size)
    ids = np.arange(len(asked_N))
    rows: dict[str, list[tuple[float, float, float]]] = {}
    floors = []
    for seed in range(seeds):
        old = trained(old_photos, labels_N, dim, Variant("softmax"), epochs, seed, None)
        gallery = old.test_ND.numpy()
        floors.append(100 * cmc(gallery, gallery, asked_N, asked_N, ids, ids, ks=(1,))[1])
        for name, variant in VARIANTS.items():
            new = trained(new_photos, labels_N, dim, variant, epochs, seed, old.train_ND)
            queries = new.test_ND.numpy()
            found = (100 * cmc(queries, side, asked_N, asked_N, ids, ids, ks=(1,))[1] for side in (gallery, queries))
            between = float((centres(new.train_ND, labels_N) * centres(old.train_ND, labels_N)).sum(-1).mean())
            rows.setdefault(name, []).append((*found, between))  # type: ignore[arg-type]  # two and one are three
    console.print(f"{dim} dimensions, {seeds} seeds, old/old {np.mean(floors):.1f}\n")
    console.print("| classifier | new/old | new/new | cosine of centres |\n|---|---:|---:|---:|")
    for name, each in rows.items():
        crossed, own, between = np.mean(each, axis=0)
        console.print(f"| {name} | {crossed:.1f} ± {np.std(each, axis=0)[0]:.1f} | {own:.1f} | {between:.2f} |")


if __name__ == "__main__":
    typer.run(main)
