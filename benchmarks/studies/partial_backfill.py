"""What search finds while a gallery is re-embedded: every kind of model, from one new item to all of them.

    python benchmarks/studies/partial_backfill.py --seeds 5

Needs ../shared/data/tiny-imagenet and ../shared/models. Each seed trains the models of partial_backfill.yaml, puts 3,000 photos
into an old gallery (mapped first, for maps of galleries), and re-embeds them in random order. 2,000 other photos search it after
each step. Prints Markdown: CMC@1 on the untouched gallery, the change after each step with its 95 % interval, and the share of
new items among the first hits beside their share of the gallery. Exits with code 1 if a step is surely below the untouched one.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from xcompat.data import LabelledSource, load_labelled
from xcompat.evaluation import paired_bootstrap
from xcompat.models import CompatModel
from xcompat.models.embedder import Embedder, load_embedder
from xcompat.retrieval import Gallery
from xcompat.training.caches import cached_images
from xcompat.training.recipe import load_recipe
from xcompat.training.run import run_recipe

HERE = Path(__file__).parent
TINY = Path("../shared/data/tiny-imagenet")
ITEMS, QUERIES = 3000, 2000
STEPS = (1, 5, 20, 64, 150, 300, 750, 1500, 2250, 3000)
Floats = NDArray[np.float32]

console = Console(soft_wrap=True, markup=False, highlight=False)


class Photos(NamedTuple):
    """Labelled photos and where their embeddings are cached."""

    path: Path
    count: int

    def embed(self, embedder: Embedder, cache: Path) -> Floats:
        """Return (N, D) embeddings."""
        images = load_labelled(LabelledSource(path=str(self.path), limit=self.count))
        return np.array(cached_images(embedder, images.dataset, cache)[:])

    def labels(self) -> NDArray[np.str_]:
        """Return (N,) names of classes."""
        return np.array(load_labelled(LabelledSource(path=str(self.path), limit=self.count)).class_names())


class Curve(NamedTuple):
    """What one model finds after each step.

    Args:
        right_SQ: (S + 1, Q) whether the first hit is of the query's class; first on the untouched gallery.
        new_S: (S,) share of new items among the first hits, for queries whose first hit is right.
    """

    right_SQ: NDArray[np.bool_]
    new_S: NDArray[np.float64]


STORED, ASKED = Photos(TINY / "train-0002.tar.gz", ITEMS), Photos(TINY / "val-0000.tar.gz", QUERIES)


def measure(model: CompatModel, old: Embedder, stored: tuple[Floats, Floats], asked_QD: Floats, seed: int) -> Curve:
    """Re-embed a gallery step by step, and search it after each.

    Args:
        model: re-embeds.
        old: embedded the gallery.
        stored: old (N, d) and new (N, D) embeddings of the items.
        asked_QD: the queries, as the model embeds them.
        seed: of the order.
    """
    old_Nd, new_ND = stored
    names, order = [str(row) for row in range(len(old_Nd))], np.random.default_rng(seed).permutation(len(old_Nd))
    labels_N, labels_Q = STORED.labels(), ASKED.labels()
    with tempfile.TemporaryDirectory() as folder, Gallery.create(Path(folder) / "g", old) as gallery:
        gallery.add(old_Nd, names)
        gallery.commit()
        if model.maps_galleries:
            gallery.upgrade(model)
        right, new, done = [_search(gallery, model, asked_QD, labels_N, labels_Q)[0]], [], 0
        for step in STEPS:
            rows = order[done:step]
            gallery.add(new_ND[rows], [names[row] for row in rows.tolist()], version=model, replace=True)
            gallery.commit()
            done = step
            right_Q, rows_Q = _search(gallery, model, asked_QD, labels_N, labels_Q)
            right.append(right_Q)
            new.append(float(np.isin(rows_Q[right_Q], order[:done]).mean()))
    return Curve(np.array(right), np.array(new))


def _search(
    gallery: Gallery, model: CompatModel, asked_QD: Floats, labels_N: NDArray[np.str_], labels_Q: NDArray[np.str_]
) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Return whether the first hit of each query is of its class, and its row."""
    rows_Q = np.array([int(hits[0].id) for hits in gallery.search(asked_QD, model, top_k=1)])
    return labels_N[rows_Q] == labels_Q, rows_Q


def run_seed(seed: int, curves: dict[str, list[Curve]]) -> None:
    """Train the models of a seed, and measure each."""
    folder = Path(f"runs/partial_backfill/seed-{seed}")
    overrides = [f"seed={seed}", f"output_dir={folder}", "cache_dir=runs/partial_backfill/cache"]
    recipe = load_recipe(HERE / "partial_backfill.yaml", overrides)
    run_recipe(recipe)
    stages = recipe.stages
    old, new = (load_embedder(source) for source in (stages[0].old, stages[0].new))
    old_Nd = STORED.embed(old, recipe.cache_dir)
    for stage in stages:
        model = load_embedder(str(folder / stage.name / "model")).model
        assert isinstance(model, CompatModel)
        own = new if model.embeds_in_memory else Embedder.from_model(model, "own")  # a map embeds by its encoder
        new_ND, asked_QD = (photos.embed(own, recipe.cache_dir) for photos in (STORED, ASKED))
        curves.setdefault(stage.name, []).append(measure(model, old, (old_Nd, new_ND), asked_QD, seed))


def show(curves: dict[str, list[Curve]]) -> bool:
    """Print the tables; return whether no step is surely below the untouched gallery."""
    steps = [f"{step:,}" for step in STEPS]
    console.print(f"\n| model | untouched | {' | '.join(steps)} |\n|---|---:|{'---:|' * len(STEPS)}")
    sure = True
    for name, found in curves.items():
        right_SQ = np.concatenate([curve.right_SQ for curve in found], axis=1).astype(float)
        photos = np.tile(np.arange(QUERIES), len(found)).tolist()  # a photo that asks in several seeds is drawn as one
        cells = []
        for after_Q in right_SQ[1:]:
            change = paired_bootstrap(after_Q, right_SQ[0], clusters_Q=photos)
            sure &= change.high >= 0
            cells.append(f"{100 * change.mean:+.1f} ({100 * change.low:.1f} to {100 * change.high:.1f})")
        console.print(f"| {name} | {100 * right_SQ[0].mean():.1f} | {' | '.join(cells)} |")
    shares = [f"{100 * step / ITEMS:.3g}" for step in STEPS]
    console.print(f"\n| new items among right first hits, % | {' | '.join(steps)} |\n|---|{'---:|' * len(STEPS)}")
    console.print(f"| their share of the gallery | {' | '.join(shares)} |")
    for name, found in curves.items():
        mean_S = 100 * np.mean([curve.new_S for curve in found], axis=0)
        console.print(f"| {name} | {' | '.join(f'{share:.1f}' for share in mean_S)} |")
    return sure


def main() -> None:
    """Measure every seed and model, and print tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="Number of seeds.")
    started, curves, sure = time.monotonic(), dict[str, list[Curve]](), True
    seeds = parser.parse_args().seeds
    for seed in range(seeds):
        run_seed(seed, curves)
        console.print(f"\n{seed + 1} of {seeds} seeds, {(time.monotonic() - started) / 60:.0f} minutes")
        sure = show(curves)
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "numpy", "faiss-cpu"))
    console.print(
        f"\n{seeds} seeds, {(time.monotonic() - started) / 60:.0f} minutes; Python {platform.python_version()}, {versions}"
    )
    sys.exit(not sure)


if __name__ == "__main__":
    main()
