"""Why MixBCT with ArcFace ends at chance between new and old: one classifier for both, by its margin, scale and dimensions.

    OMP_NUM_THREADS=1 python benchmarks/studies/mixbct_margin.py [--dim 128] [--epochs 10] [--seeds 3] [--image-size 64] [--grid]

Needs ../shared/data/tiny-imagenet and ../shared/models. The heads of both models are trained on the pooled features of frozen
MobileNets (V1 x0.25, then x0.5), so that a variant takes a quarter of a minute: the old one on half of the classes, the new one
on all, 100 images of each. Heads and what is credible are the library's; the batch norm and SGD at 0.1 with a linear schedule
are the paper's.
Prints Markdown: means over seeds of CMC@1, and the cosine between the new and the old centre of a training class; with --grid
two classifiers for few and many classes and dimensions.
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
CLASSES, IMAGES, BATCH, SHARE = 200, 100, 64, 0.3
GRID = {"classes": (50, 100, 200), "dimensions": (16, 64, 128, 512)}
console = Console(soft_wrap=True, markup=False, highlight=False)


class Variant(NamedTuple):
    """How the new head is trained; MixBCT's own settings of ArcFace unless stated."""

    head: Any = "arcface"
    scale: float | None = None
    margin: float | None = None
    batch_norm: bool = False
    sgd: bool = False
    linear: bool = False
    centred: bool = False


VARIANTS = {
    "normalised softmax, scale 20": Variant("normalized_softmax"),
    "normalised softmax, scale 64": Variant("normalized_softmax", 64),
    "ArcFace, scale 64, margin .5": Variant(),
    "+ batch norm": Variant(batch_norm=True),
    "+ linear schedule": Variant(linear=True),
    "+ SGD, linear schedule": Variant(sgd=True, linear=True),
    "+ SGD, cosine schedule": Variant(sgd=True),
    "+ batch norm, SGD, linear schedule": Variant(batch_norm=True, sgd=True, linear=True),
    "+ centred old embeddings": Variant(centred=True),
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


def features(model: str, image_size: int | None, classes: int) -> tuple[Photos, NDArray[np.int64], NDArray[np.int64]]:
    """Embed photos of the first classes, or open the cached embeddings; return the labels of training and test photos too."""
    embedder, found, labels = load_embedder(EncoderSource(name=model, image_size=image_size)), [], []
    for path, each in ((TRAIN, IMAGES), (TEST, 25)):
        images = load_labelled(LabelledSource(path=path))
        embeds_ND, labels_N = cached_images(embedder, images.dataset, OUT / "cache"), images.labels()
        kept = np.sort(np.concatenate([np.flatnonzero(labels_N == label)[:each] for label in range(classes)]))
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


def centred(old: Photos) -> Photos:
    """Move embeddings by the mean of the training photos', and give them unit length again."""
    return Photos(*(F.normalize(each - old.train_ND.mean(0), dim=-1) for each in old))


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
    every = int(labels_N.max()) + 1
    classes = every // 2 if old_ND is None else every
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
    decay = (lambda step: 1 - step / steps) if variant.linear else (lambda step: (1 + np.cos(np.pi * step / steps)) / 2)
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
    return F.normalize(torch.from_numpy(class_means(embeds_ND.numpy(), labels_N, int(labels_N.max()) + 1)), dim=-1)


class Found(NamedTuple):
    """What one seed found: old/old, and of each variant new/old, new/new and the cosine of the centres."""

    floor: float
    rows: dict[str, tuple[float, float, float]]


def run(variants: dict[str, Variant], classes: int, dim: int, epochs: int, seed: int, image_size: int | None) -> Found:
    """Train an old model, then a new one by each variant."""
    (old_photos, labels_N, asked_N), (new_photos, _, _) = (features(name, image_size, classes) for name in (OLD, NEW))
    ids = np.arange(len(asked_N))

    def found(queries_ND: torch.Tensor, gallery_ND: torch.Tensor) -> float:
        return 100 * cmc(queries_ND.numpy(), gallery_ND.numpy(), asked_N, asked_N, ids, ids, ks=(1,))[1]

    plain = trained(old_photos, labels_N, dim, Variant("softmax"), epochs, seed, None)
    rows = {}
    for name, variant in variants.items():
        old = centred(plain) if variant.centred else plain
        new = trained(new_photos, labels_N, dim, variant, epochs, seed, old.train_ND)
        between = float((centres(new.train_ND, labels_N) * centres(old.train_ND, labels_N)).sum(-1).mean())
        rows[name] = found(new.test_ND, old.test_ND), found(new.test_ND, new.test_ND), between
    return Found(found(plain.test_ND, plain.test_ND), rows)


def main(dim: int = 128, epochs: int = 10, seeds: int = 3, image_size: int | None = None, grid: bool = False) -> None:
    """Print a table of the variants, or of two of them for many sizes; smaller images make the old model weaker."""
    if grid:
        names = ("ArcFace, scale 64, margin .5", "ArcFace, scale 20, margin .2")
        few = {name: VARIANTS[name] for name in names}
        console.print(f"{seeds} seeds, new/old\n\n| classes | dimensions | old/old | {' | '.join(few)} |")
        console.print("|---:|---:|---:|" + "---:|" * len(few))
        for classes in GRID["classes"]:
            for each in GRID["dimensions"]:
                found = [run(few, classes, each, epochs, seed, image_size) for seed in range(seeds)]
                cells = (
                    f"{np.mean(values):.1f} ± {np.std(values):.1f}" for values in ([f.rows[n][0] for f in found] for n in few)
                )
                console.print(f"| {classes} | {each} | {np.mean([f.floor for f in found]):.1f} | {' | '.join(cells)} |")
        return
    found = [run(VARIANTS, CLASSES, dim, epochs, seed, image_size) for seed in range(seeds)]
    console.print(f"{dim} dimensions, {seeds} seeds, old/old {np.mean([each.floor for each in found]):.1f}\n")
    console.print("| classifier | new/old | new/new | cosine of centres |\n|---|---:|---:|---:|")
    for name in VARIANTS:
        rows = np.array([each.rows[name] for each in found])
        crossed, own, between = rows.mean(axis=0)
        console.print(f"| {name} | {crossed:.1f} ± {rows.std(axis=0)[0]:.1f} | {own:.1f} | {between:.2f} |")


if __name__ == "__main__":
    typer.run(main)
