"""How scores of two versions should be merged, and what to embed anew first: a gallery of real photos from 0 to 100 % backfilled.

    python benchmarks/studies/mixed_gallery.py

Needs ../shared/data/tiny-imagenet and ../shared/models. An old gallery (MobileNet V1 x0.25) is mapped to a newer model (x0.5) by
FCT and by FastFill, and then embedded anew bit by bit, in five seeds of the maps and of who searches. Prints Markdown, writes
runs/mixed_gallery/curve.png, and keeps embeddings and what maps made of them beside it.
"""

from __future__ import annotations

import importlib.metadata
import platform
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
from backfill_orders import MAPS, Floats, MapKind, Mapped, Photos, mapped, simple_orders, squared_distance, usefulness
from numpy.typing import NDArray
from rich.console import Console

from xcompat.data import LabelledSource, load_labelled
from xcompat.evaluation import paired_bootstrap
from xcompat.models.embedder import load_embedder
from xcompat.report.plots import figure_png
from xcompat.retrieval.searching import SAMPLE, Candidates, Merge, merge_candidates
from xcompat.training.caches import cached_images

SHARED = Path("../shared")
OUT = Path("runs/mixed_gallery")
OLD, NEW = (str(SHARED / "models" / name) for name in ("mobilenet_v1_0.25_128", "mobilenet_v1_0.5_160"))
TRAIN, TEST = (str(SHARED / "data/tiny-imagenet" / name) for name in ("train-0000.tar.gz", "val-0000.tar.gz"))
IMAGES, QUERIES, SEEDS = 5000, 1000, 5
SHARES = np.linspace(0, 1, 11)
SHUFFLED = 3
"""Random orders per seed; other orders are compared with their mean."""
MERGES: tuple[Merge, ...] = ("raw", "standardised")
MERGED: Merge = "standardised"
"""How galleries merge, in which orders are compared."""
METRICS = ("CMC@1", "CMC@5", "mAP@R")
BEST = {"largest true error": "needs the new embeddings", "most useful for these queries": "needs the queries and their classes"}

console = Console(soft_wrap=True, markup=False, highlight=False)


class Scored(NamedTuple):
    """The queries' scores against one version of all items, and the rows of the items with the best first: (Q, N)."""

    scores_QN: Floats
    ranked_QN: NDArray[np.int64]


class Scene(NamedTuple):
    """The queries and the stored items of one seed.

    Args:
        asked_Q: rows of the queries.
        stored_N: rows of the gallery.
        right_QN: whether an item is of the query's class.
    """

    asked_Q: NDArray[np.int64]
    stored_N: NDArray[np.int64]
    right_QN: NDArray[np.bool_]

    def quality(self, versions: tuple[Scored, Scored], anew_N: NDArray[np.bool_], merge: Merge) -> NDArray[np.float64]:
        """Return the metrics of each query on a partly backfilled gallery, merged by the library: (3, Q) as ``METRICS``.

        Args:
            versions: mapped embeddings, and new ones.
            anew_N: which are embedded anew.
            merge: one of ``MERGES``.
        """
        sizes_Q = self.right_QN.sum(1)
        k = int(sizes_Q.max())
        found = []
        for version, (scores_QN, ranked_QN) in enumerate(versions):
            there_N = anew_N == bool(version)
            if there_N.any():
                there = np.flatnonzero(there_N)
                sample = there[np.unique(np.linspace(0, len(there) - 1, min(SAMPLE, len(there))).astype(np.int64))]
                rows_Qk = _first(ranked_QN, there_N, k)
                best_Qk = np.take_along_axis(scores_QN, rows_Qk, 1)
                found.append(Candidates(best_Qk, np.full_like(rows_Qk, version), rows_Qk, scores_QN[:, sample]))
        right_Qk = np.take_along_axis(self.right_QN, merge_candidates(found, k, merge)[2], 1)
        places_k = np.arange(1, k + 1)
        precise_Qk = np.cumsum(right_Qk, 1) / places_k * right_Qk * (places_k <= sizes_Q[:, None])
        return np.stack([right_Qk[:, 0], right_Qk[:, :5].any(1), precise_Qk.sum(1) / sizes_Q])

    def curve(self, versions: tuple[Scored, Scored], order_N: Floats, merge: Merge) -> NDArray[np.float64]:
        """Return :meth:`quality` at every share, (S, 3, Q); items with the largest numbers are embedded anew first."""
        ranked = np.argsort(-order_N, kind="stable")
        places_N = np.argsort(ranked)
        return np.stack([self.quality(versions, places_N < round(share * len(ranked)), merge) for share in SHARES])


Curves = dict[tuple[str, str, str], list[NDArray[np.float64]]]
"""Map, order and merge -> a curve (S, 3, Q) of each seed."""


def _first(ranked_QN: NDArray[np.int64], there_N: NDArray[np.bool_], k: int) -> NDArray[np.int64]:
    """Return the first rows of each query's ranking that are in the gallery, at most k."""
    looked_at = ranked_QN.shape[1] // 4  # where nearly all have them
    there_QN = there_N[ranked_QN[:, :looked_at]]
    if there_QN.sum(1).min() < k:
        there_QN = there_N[ranked_QN]
    ranked_QN = ranked_QN[:, : there_QN.shape[1]]
    first_QN = there_QN & (np.cumsum(there_QN, axis=1, dtype=np.int32) <= k)
    return ranked_QN[first_QN].reshape(len(ranked_QN), -1)


def scored(queries_QD: Floats, stored_ND: Floats) -> Scored:
    """Search all items of one version."""
    scores_QN = queries_QD @ stored_ND.T
    return Scored(scores_QN, np.argsort(-scores_QN, axis=1))


def photos(path: str) -> Photos:
    """Embed labelled images with both models, or open the cached embeddings."""
    images = load_labelled(LabelledSource(path=path, limit=IMAGES))
    old_Nd, new_ND = (cached_images(load_embedder(model), images.dataset, OUT / "cache")[:] for model in (OLD, NEW))
    labels_N = np.unique(images.class_names(), return_inverse=True)[1]
    unit = [embeds / np.linalg.norm(embeds, axis=1, keepdims=True) for embeds in (old_Nd, new_ND)]
    return Photos(unit[0].astype(np.float32), unit[1].astype(np.float32), labels_N)


def drawn(test: Photos, seed: int) -> Scene:
    """Draw the queries."""
    shuffled = np.random.default_rng(seed).permutation(len(test.labels_N))
    asked_Q, stored_N = shuffled[:QUERIES], np.sort(shuffled[QUERIES:])
    return Scene(asked_Q, stored_N, test.labels_N[asked_Q][:, None] == test.labels_N[stored_N])


def measure_seed(scene: Scene, kind: MapKind, found: Mapped, learned: Photos, test: Photos, seed: int, curves: Curves) -> None:
    """Measure every order and merge of one map."""
    stored = test.rows(scene.stored_N)
    asked_QD = test.new_ND[scene.asked_Q]
    versions = scored(asked_QD, found.stored_ND), scored(asked_QD, stored.new_ND)
    orders = simple_orders(stored, found, learned) if kind == "fct" else {"largest σ": found.log_variance_N}
    useful_N = usefulness(versions[0].scores_QN, versions[1].scores_QN, scene.right_QN, int(scene.right_QN.sum(1).max()))
    orders |= dict(zip(BEST, (squared_distance(found.stored_ND, stored.new_ND), useful_N), strict=True))
    generator = np.random.default_rng(seed)
    shuffled = [generator.random(len(scene.stored_N), dtype=np.float32) for _ in range(SHUFFLED)]
    for merge in MERGES if kind == "fct" else (MERGED,):
        random = np.mean([scene.curve(versions, order_N, merge) for order_N in shuffled], axis=0)
        curves.setdefault((kind, "random", merge), []).append(random)
    for name, order_N in orders.items():
        curves.setdefault((kind, name, MERGED), []).append(scene.curve(versions, order_N, MERGED))


def main() -> None:
    """Measure every seed, map, order and way of merging, and print tables."""
    started = time.monotonic()
    learned, test = photos(TRAIN), photos(TEST)
    curves: Curves = {}
    asked, floors = [], []
    for seed in range(SEEDS):
        scene = drawn(test, seed)
        asked.append(scene.asked_Q)
        old = scored(test.old_Nd[scene.asked_Q], test.old_Nd[scene.stored_N])
        floors.append(scene.quality((old, old), np.zeros(len(scene.stored_N), bool), "raw"))
        for kind in MAPS:
            whole = mapped(kind, learned, test.old_Nd, seed, OUT / "maps")
            found = Mapped(whole.stored_ND[scene.stored_N], whole.log_variance_N[scene.stored_N], whole.learned_ND)
            measure_seed(scene, kind, found, learned, test, seed, curves)
            console.print(f"seed {seed}, {kind}: {time.monotonic() - started:.0f} s")
    show_merges(curves, np.array(floors))
    show_orders(curves, asked)
    draw(curves, np.array(floors))
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "numpy", "scikit-learn"))
    console.print(
        f"\n{SEEDS} seeds, {(time.monotonic() - started) / 60:.0f} minutes; Python {platform.python_version()}, {versions}"
    )


def area(curve: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the area under the curve of each metric and query: (3, Q)."""
    return np.asarray(np.trapezoid(curve, SHARES, axis=0))


def gain(mine: list[NDArray[np.float64]], other: list[NDArray[np.float64]], metric: int, asked: list[NDArray[np.int64]]) -> str:
    """Return the difference of two areas in points, with its interval; a photo that asks in several seeds is drawn as one."""
    a, b = (np.concatenate([area(curve)[metric] for curve in curves]) for curves in (mine, other))
    difference = paired_bootstrap(a, b, clusters_Q=np.concatenate(asked).tolist())
    low, high = 100 * difference.low, 100 * difference.high
    return f"{100 * difference.mean:+.2f} ({low:.2f} to {high:.2f})"


def show_merges(curves: Curves, floors: NDArray[np.float64]) -> None:
    """Print the results of each way of merging, in random order."""
    old = " / ".join(f"{100 * value:.1f}" for value in floors.mean((0, 2)))
    console.print(
        f"\nold/old: {old} ({' / '.join(METRICS)})\n\nCMC@1 / mAP@R by the share that is embedded anew, in random order\n"
    )
    console.print(f"| merge | {' | '.join(f'{share:.0%}' for share in SHARES)} | area |\n|---|{'---:|' * (len(SHARES) + 1)}")
    for merge in MERGES:
        mean = np.mean([curve.mean(-1) for curve in curves["fct", "random", merge]], axis=0)[:, [0, 2]]
        points = [*mean, np.trapezoid(mean, SHARES, axis=0)]
        console.print(f"| {merge} | {' | '.join(' / '.join(f'{100 * value:.1f}' for value in point) for point in points)} |")


def show_orders(curves: Curves, asked: list[NDArray[np.int64]]) -> None:
    """Print the areas of all orders as differences from random order, over all seeds and seed by seed."""
    seeds = [[rows] for rows in asked]
    merged, raw = curves["fct", "random", MERGED], curves["fct", "random", "raw"]
    beside = ", ".join(f"{name} {gain(merged, raw, i, asked)}" for i, name in enumerate(METRICS))
    console.print(f"\nstandardised - raw, random order: {beside}")
    console.print(f"\nArea under the curve: points beside random order, with 95 % intervals over queries of {SEEDS} seeds\n")
    console.print(f"| map | order | {' | '.join(METRICS)} |\n|---|---|{'---:|' * len(METRICS)}")
    for (kind, order, merge), mine in curves.items():
        other = curves[kind, "random", merge]
        if merge == MERGED:
            whole = [f"{100 * np.mean([area(curve)[i] for curve in mine]):.1f}" for i in range(len(METRICS))]
            cells = whole if order == "random" else [gain(mine, other, i, asked) for i in range(len(METRICS))]
            console.print(f"| {kind} | {order}{' (the area)' * (order == 'random')} | {' | '.join(cells)} |")
    console.print(f"\nSeed by seed: CMC@1\n\n| map | order | {' | '.join(map(str, range(SEEDS)))} |")
    console.print(f"|---|---|{'---:|' * SEEDS}")
    for (kind, order, merge), mine in curves.items():
        if merge == MERGED and order != "random" and order not in BEST:
            other = curves[kind, "random", merge]
            cells = [gain([a], [b], 0, rows) for a, b, rows in zip(mine, other, seeds, strict=True)]
            console.print(f"| {kind} | {order} | {' | '.join(cells)} |")


def draw(curves: Curves, floors: NDArray[np.float64]) -> None:
    """Draw CMC@1 by the share that is embedded anew."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.4), layout="constrained")
    axes = figure.add_subplot()
    axes.axhline(100 * floors[:, 0].mean(), linestyle="--", color="#7a828e", label="old queries, old gallery")
    for (kind, order, merge), mine in curves.items():
        if kind == "fct":
            line = 100 * np.mean([curve[:, 0].mean(-1) for curve in mine], axis=0)
            style = "-" if order == "random" else "--" if order in BEST else ":"
            axes.plot(100 * SHARES, line, style, marker="o", markersize=3, label=f"{order}, {merge}")
    axes.set_xlabel("embedded anew, %")
    axes.set_ylabel("CMC@1, %")
    axes.legend(fontsize=7)
    (OUT / "curve.png").write_bytes(figure_png(figure))


if __name__ == "__main__":
    main()
