"""What a chosen map needs of its training set: how many images, how right their classes, and what clusters do instead.

    python benchmarks/studies/memory_data.py

Needs ../shared/data/tiny-imagenet and ../shared/models. A map is chosen as `xcompat map` does from so many training images of
each class, and asked validation images: of all classes, which the map was all shown, and of classes of which it was shown none.
A second table has few images in all, as draws of few of each class and of few classes. Prints Markdown.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from confidence import NEW, OLD, TEST, TRAIN
from numpy.typing import NDArray
from rich.console import Console
from sklearn.cluster import MiniBatchKMeans

from xcompat.data import LabelledSource, load_labelled
from xcompat.evaluation import PairedDifference, paired_bootstrap, ranking_per_query
from xcompat.mapping import Choice, PairedEmbeddings, choose, fit
from xcompat.mapping.candidates import CandidateParts
from xcompat.models.embedder import load_embedder
from xcompat.models.old_knowledge import samples_of_classes
from xcompat.report.wording import gain_with_interval
from xcompat.training.caches import cached_images

OUT = Path("runs/memory_data")
CLASSES, ASKED, IMAGES = 200, 25, 50
"""Number of classes, of validation images per class, and of training images per class unless stated otherwise."""
FEW = ((5, 20), (20, 20), (5, 50), (10, 50), (4, 100), (5, 100), (7, 100), (10, 100))
"""Numbers of images of each class, and of classes."""
console = Console(soft_wrap=True, markup=False, highlight=False)


def photos(path: str) -> PairedEmbeddings:
    """Embed images with both models, or open the cached embeddings."""
    images = load_labelled(LabelledSource(path=path))
    new, old = (cached_images(load_embedder(model), images.dataset, OUT / "cache")[:] for model in (NEW, OLD))
    new_ND, old_Nd = (rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (new, old))
    return PairedEmbeddings(new_ND, old_Nd, images.labels())


def first_of_each(pairs: PairedEmbeddings, count: int, classes: range) -> PairedEmbeddings:
    """Keep the first items of some classes."""
    assert pairs.labels_N is not None
    rows_C = samples_of_classes(pairs.labels_N, CLASSES)
    return pairs.take(np.sort(np.concatenate([rows_C[label][:count] for label in classes])))


def wrong(pairs: PairedEmbeddings, share: float) -> NDArray[np.int64]:
    """Give a share of the items the class of another item."""
    assert pairs.labels_N is not None
    labels_N = pairs.labels_N.copy()
    moved_M = np.random.default_rng(0).permutation(len(labels_N))[: round(share * len(labels_N))]
    labels_N[moved_M] = labels_N[np.roll(moved_M, 1)]
    return labels_N


def clustered(pairs: PairedEmbeddings, count: int) -> NDArray[np.int64]:
    """Return clusters of the new model's embeddings, to be used as classes."""
    found_N = MiniBatchKMeans(count, batch_size=4096, n_init=3, random_state=0).fit_predict(np.asarray(pairs.new_ND))
    return np.unique(found_N, return_inverse=True)[1]


def asked(train: PairedEmbeddings, test: PairedEmbeddings) -> tuple[Choice, list[PairedDifference]]:
    """Choose and solve a map, and return the choice and the gain of test queries at CMC@1 and mAP."""
    choice = choose(train)
    model = fit(choice.chosen.candidate, CandidateParts(train))
    with torch.inference_mode():
        view_Qd = model.to_space(torch.from_numpy(np.asarray(test.new_ND, np.float32))).numpy()
    old_Qd, labels_Q, rows_Q = np.asarray(test.old_Nd), test.labels_N, np.arange(len(test))
    assert labels_Q is not None
    new, old = (ranking_per_query(each, old_Qd, labels_Q, labels_Q, rows_Q, rows_Q) for each in (view_Qd, old_Qd))
    first = paired_bootstrap(new.first_hit_ranks_Q < 1, old.first_hit_ranks_Q < 1)
    return choice, [first, paired_bootstrap(new.average_precision_Q, old.average_precision_Q)]


def cell(gain: PairedDifference) -> str:
    """Format a gain in points with its interval."""
    return gain_with_interval(gain.mean, gain.low, gain.high)


TrainingSet = tuple[str, int, Callable[[PairedEmbeddings], NDArray[np.int64]] | None]
"""What it is called, how many images of each class it has, and what their classes are said to be."""


def training_sets() -> Iterator[TrainingSet]:
    """Yield the training sets."""
    for count in (5, 10, 20, IMAGES, 100, 250):
        yield f"{count} images per class", count, None
    for share in (0.1, 0.2, 0.4):
        yield f"{IMAGES}, {share:.0%} wrong labels", IMAGES, partial(wrong, share=share)
    for clusters in (50, 200, 800):
        yield f"{IMAGES}, {clusters} clusters, no labels", IMAGES, partial(clustered, count=clusters)


def main() -> None:
    """Print both tables."""
    started = time.monotonic()
    train, test = photos(TRAIN), photos(TEST)
    print_many(train, test)
    print_few(train, test)
    console.print(f"\n{(time.monotonic() - started) / 60:.0f} minutes")


def print_many(train: PairedEmbeddings, test: PairedEmbeddings) -> None:
    """Measure every training set and print a row of each."""
    heads = ["all classes known: CMC@1", "mAP", "none known: CMC@1", "mAP"]
    console.print(f"| training set | {' | '.join(heads)} | chosen, none known |\n|---|{'---:|' * len(heads)}---|")
    every, first, second = range(CLASSES), range(CLASSES // 2), range(CLASSES // 2, CLASSES)
    for name, count, relabel in training_sets():
        cells, taken = [], ""
        for learned, searched in ((every, every), (first, second)):
            some = first_of_each(train, count, learned)
            some = replace(some, labels_N=relabel(some)) if relabel is not None else some
            choice, gains = asked(some, first_of_each(test, ASKED, searched))
            cells, taken = [*cells, *map(cell, gains)], str(choice.chosen.candidate)
        console.print(f"| {name} | {' | '.join(cells)} | {taken} |")


def print_few(train: PairedEmbeddings, test: PairedEmbeddings) -> None:
    """Measure every number of images and of classes, on the classes of which none is known, and print a row of each."""
    heads = ["smallest validation gain", "new classes: CMC@1", "mAP"]
    console.print(f"\n| images of each | classes | images | {' | '.join(heads)} | chosen |\n|{'---:|' * (3 + len(heads))}---|")
    for count, classes in FEW:
        choice, gains = asked(
            first_of_each(train, count, range(classes)), first_of_each(test, ASKED, range(CLASSES // 2, CLASSES))
        )
        cells = [cell(gain) for gain in (choice.chosen.least, *gains)]
        console.print(f"| {count} | {classes} | {count * classes} | {' | '.join(cells)} | {choice.chosen.candidate} |")


if __name__ == "__main__":
    main()
