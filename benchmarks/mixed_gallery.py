"""How scores of two versions should be merged, and what to embed anew first: a gallery of real photos from 0 to 100 % backfilled.

    python benchmarks/mixed_gallery.py

Needs ../shared/data/tiny-imagenet and ../shared/models. An old gallery (MobileNet V1 x0.25) is mapped to a newer model (x0.5)
by FCT, and then embedded anew bit by bit. Prints Markdown and writes runs/mixed_gallery/curve.png.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from transformers import AutoModel

from xcompat.data import LabelledImages, LabelledSource, load_labelled
from xcompat.evaluation import paired_bootstrap
from xcompat.models import CompatModel
from xcompat.models.embedder import Embedder, load_embedder
from xcompat.report.plots import figure_png
from xcompat.retrieval import Gallery
from xcompat.retrieval.backfilling import popularity
from xcompat.training.caches import cached_images
from xcompat.training.recipe import parse_recipe
from xcompat.training.run import run_recipe

SHARED = Path("../shared")
OUT = Path("runs/mixed_gallery")
OLD, NEW = (str(SHARED / "models" / name) for name in ("mobilenet_v1_0.25_128", "mobilenet_v1_0.5_160"))
TRAIN, TEST = (str(SHARED / "data/tiny-imagenet" / name) for name in ("train-0000.tar.gz", "val-0000.tar.gz"))
TRAINED_ON, IMAGES, QUERIES = 5000, 5000, 1000
SHARES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
MERGES = ("raw", "standardised", "rank")
ORDERS = ("random", "found most often first")
SEED = 0


def train_map() -> CompatModel:
    """Train FCT from old to new embeddings of training images; a finished run is reused."""
    raw = {
        "output_dir": str(OUT / "fct"),
        "cache_dir": str(OUT / "cache"),
        "method": "fct",
        "old": OLD,
        "new": NEW,
        "data": {"images": {"path": TRAIN, "limit": TRAINED_ON}},
        "training": {"max_steps": 300, "learning_rate": 1e-3, "per_device_train_batch_size": 512, "save_strategy": "no"},
        "evaluation": None,
    }
    run_recipe(parse_recipe(raw, "fct", "benchmarks/mixed_gallery.py"))
    return AutoModel.from_pretrained(OUT / "fct" / "model").for_inference()


def embeddings(embedder: Embedder, images: LabelledImages) -> NDArray[np.float32]:
    """Embed the test images, or open what was embedded before."""
    return cached_images(embedder, images.dataset, OUT / "cache")[:]


def quality(
    gallery: Gallery,
    queries_QD: NDArray[np.float32],
    asking: Any,  # noqa: ANN401 - whatever a gallery is asked with
    labels: dict[str, str],
    wanted: list[str],
    merge: str,
) -> NDArray[np.float64]:
    """Return for each query whether the first hit is of its class, and its average precision over the first R hits: (2, Q)."""
    sizes = {name: sum(label == name for label in labels.values()) for name in set(wanted)}
    hits = gallery.search(queries_QD, asking, top_k=max(sizes.values()), merge=merge)
    values = []
    for found, label in zip(hits, wanted, strict=True):
        right = np.array([labels[hit.id] == label for hit in found[: sizes[label]]])
        precision = (np.cumsum(right) / np.arange(1, len(right) + 1) * right).sum() / sizes[label]
        values.append((float(right[0]), float(precision)))
    return np.array(values).T


def main() -> None:
    """Measure every share, order and way of merging, and print the curves."""
    model = train_map()
    images = load_labelled(LabelledSource(path=TEST, limit=IMAGES))
    old, new = load_embedder(OLD), load_embedder(NEW)
    old_ND, new_ND = embeddings(old, images), embeddings(new, images)
    ids, names = list(images.dataset["id"]), images.class_names()
    shuffled = np.random.default_rng(SEED).permutation(len(ids))
    asked, stored = shuffled[:QUERIES], np.sort(shuffled[QUERIES:])
    labels = {ids[row]: names[row] for row in stored}
    shutil.rmtree(OUT / "gallery", ignore_errors=True)
    gallery = Gallery.create(OUT / "gallery", old)
    gallery.add(old_ND[stored], [ids[row] for row in stored])
    gallery.commit()
    floor = quality(gallery, old_ND[asked], old, labels, [names[row] for row in asked], "raw")
    gallery.upgrade(model)
    upgraded = gallery.generation
    popular = popularity(gallery, [ids[row] for row in stored])
    orders = {"random": np.random.default_rng(SEED).permutation(len(stored)), ORDERS[1]: np.argsort(-popular, kind="stable")}
    curves: dict[tuple[str, str], list[NDArray[np.float64]]] = {}
    wanted = [names[row] for row in asked]
    for name, order in orders.items():
        for share in SHARES:
            gallery.rollback(upgraded)
            rows = stored[order[: round(share * len(stored))]]
            if len(rows):
                gallery.add(new_ND[rows], [ids[row] for row in rows], version=new, replace=True)
                gallery.commit()
            for merge in MERGES:
                found = quality(gallery, new_ND[asked], model, labels, wanted, merge)
                curves.setdefault((name, merge), []).append(found)
    show(curves, floor)


def show(curves: dict[tuple[str, str], list[NDArray[np.float64]]], floor: NDArray[np.float64]) -> None:
    """Print the curves as a table with the differences that matter, and draw those of CMC@1."""
    from matplotlib.figure import Figure

    console = Console(soft_wrap=True, markup=False, highlight=False)

    def cells(values: NDArray[np.float64]) -> str:
        return " / ".join(f"{100 * value:.1f}" for value in values.mean(axis=1))

    def gain(mine: NDArray[np.float64], other: NDArray[np.float64]) -> str:
        difference = paired_bootstrap(mine[0], other[0])
        return f"{100 * difference.mean:+.1f} ({100 * difference.low:.1f} to {100 * difference.high:.1f})"

    shares = " | ".join(f"{share:.0%}" for share in SHARES)
    console.print(f"\nold/old: {cells(floor)}; CMC@1 / mAP@R by the share that is embedded anew\n")
    console.print(f"| order | merge | {shares} |\n|---|---|{'---:|' * len(SHARES)}")
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.add_subplot()
    axes.axhline(100 * floor[0].mean(), linestyle="--", color="#7a828e", label="old queries, old gallery")
    for (order, merge), values in curves.items():
        console.print(f"| {order} | {merge} | {' | '.join(map(cells, values))} |")
        style = "-" if order == ORDERS[0] else ":"
        line = [100 * each[0].mean() for each in values]
        axes.plot([100 * share for share in SHARES], line, style, marker="o", label=f"{merge}, {order}")
    console.print(f"\nDifferences of CMC@1 with 95 % intervals over queries\n\n| | {shares} |\n|---|{'---:|' * len(SHARES)}")
    pairs = {
        "standardised - raw, random": ((ORDERS[0], "standardised"), (ORDERS[0], "raw")),
        "found most often first - random, standardised": ((ORDERS[1], "standardised"), (ORDERS[0], "standardised")),
        "found most often first - random, raw": ((ORDERS[1], "raw"), (ORDERS[0], "raw")),
    }
    for name, (mine, other) in pairs.items():
        console.print(f"| {name} | {' | '.join(map(gain, curves[mine], curves[other]))} |")
    axes.set_xlabel("embedded anew, %")
    axes.set_ylabel("CMC@1, %")
    axes.legend(fontsize=8)
    (OUT / "curve.png").write_bytes(figure_png(figure))


if __name__ == "__main__":
    main()
